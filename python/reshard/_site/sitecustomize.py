"""Runs at the start of every Python process under ``reshard run``: waits for torch.distributed.checkpoint, then installs the switch.

Python runs one sitecustomize, the first that it finds. The one that would have run without this comes after it.
"""

import os
import sys


class _Waiting:
    """A finder that lets others find the module, and installs the switch once it has been imported."""

    def __init__(self, name, done):
        self._name = name
        self._done = done

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, done = spec.loader, self._done
        run = loader.exec_module

        def exec_module(module):
            loader.exec_module = run
            run(module)
            done()

        loader.exec_module = exec_module
        return spec


def _install():
    import json

    try:
        import reshard
    except ImportError:
        sys.path.append(os.environ["RESHARD_INSTALL_PACKAGE"])
        import reshard
    reshard.install(**json.loads(os.environ["RESHARD_INSTALL"]))


def _run_the_other():
    """The sitecustomize behind this one."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if "RESHARD_INSTALL" in os.environ:
    sys.meta_path.insert(0, _Waiting("torch.distributed.checkpoint", _install))
_run_the_other()
