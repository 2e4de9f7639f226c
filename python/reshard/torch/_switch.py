"""The switch: puts reshard under ``torch.distributed.checkpoint`` for programs that nobody wants to change.

Nothing is patched on import. What is replaced is replaced by identity, wherever a loaded module has it under a name, and put back
by :func:`uninstall`.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import sys
import threading
from types import ModuleType
from typing import Any

import torch

from .._errors import InvalidInput

_log = logging.getLogger("reshard")
_THEIRS = "torch.distributed.checkpoint"
_OURS = "reshard.torch.checkpoint"
#: The first release of torch whose calls the drop-in module knows.
_OLDEST = (2, 5)


@dataclasses.dataclass(frozen=True)
class Installed:
    """What :func:`install` put in place.

    Attributes:
        torch: the release of torch.
        names: the names of ``torch.distributed.checkpoint`` that are reshard's now.
        modules: the modules in which they were replaced.
        options: how they behave; see ``reshard.torch.checkpoint.Options``.
    """

    torch: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    options: dict[str, Any]


@dataclasses.dataclass
class _State:
    done: Installed | None = None
    #: (the module, the name in it, PyTorch's object)
    replaced: list[tuple[ModuleType, str, Any]] = dataclasses.field(default_factory=list)


_state = _State()
_lock = threading.RLock()


def install(**options: Any) -> Installed:
    """Puts reshard under ``torch.distributed.checkpoint``: programs that save and load through it use the engine from now on.

    Behaves as PyTorch does where a program can tell; the options choose otherwise (``strict``, ``cast``, ``allow_pickle``,
    ``overwrite``, ``verify``, ``checksums``, ``timeout``: see ``reshard.torch.checkpoint.Options``). Calling it again with the same
    options changes nothing.

    Returns:
        what was replaced, and where.
    """
    with _lock:
        version = _supported_torch()
        import reshard.torch.checkpoint as ours

        chosen = ours.Options(**_known(ours.Options, options))
        if _state.done is not None:
            if dataclasses.asdict(chosen) != _state.done.options:
                raise InvalidInput(
                    f"reshard is installed already with other options ({_text(_state.done.options)}); "
                    "call reshard.uninstall() first"
                )
            return _state.done
        pairs = _pairs()
        for field in dataclasses.fields(chosen):
            setattr(ours.options, field.name, getattr(chosen, field.name))
        _replace(pairs)
        names = tuple(dict.fromkeys(name for _, name, _ in pairs))
        modules = tuple(dict.fromkeys(module.__name__ for module, _, _ in _state.replaced))
        _state.done = Installed(version, names, modules, dataclasses.asdict(chosen))
        _log.info(
            "reshard is in place of %s (torch %s): %s; replaced in %s", _THEIRS, version, ", ".join(names), ", ".join(modules)
        )
        return _state.done


def uninstall() -> None:
    """Puts back what :func:`install` replaced; what was made in between stays as it is."""
    with _lock:
        if _state.done is None:
            return
        from reshard.torch.checkpoint import Options, options

        for module, name, theirs in _state.replaced:
            vars(module)[name] = theirs
        _state.replaced.clear()
        _state.done = None
        for field in dataclasses.fields(Options):
            setattr(options, field.name, getattr(Options(), field.name))
        _log.info("%s is PyTorch's own again", _THEIRS)


def installed() -> Installed | None:
    """What :func:`install` put in place; None while nothing is."""
    return _state.done


def _known(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(options.keys() - names)
    if unknown:
        raise InvalidInput(f"install takes no {', '.join(unknown)}; it takes {', '.join(sorted(names))}")
    return options


def _supported_torch() -> str:
    version = str(torch.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise InvalidInput(
            f"torch {version} is not supported: reshard.install() needs torch {needed} or later; nothing was replaced"
        )
    return version


def _pairs() -> list[tuple[Any, str, Any]]:
    """(PyTorch's object, its name, ours) of everything that differs."""
    import importlib

    import torch.distributed.checkpoint as theirs

    import reshard.torch.checkpoint as ours

    pairs: dict[int, tuple[Any, str, Any]] = {}
    names = ["", *(name for name in ("filesystem", "hf_storage", "optimizer", "state_dict", "format_utils"))]
    names += ["state_dict_saver", "state_dict_loader", "_consolidate_hf_safetensors"]
    for name in names:
        try:
            theirs_below = importlib.import_module(f"{_THEIRS}.{name}" if name else theirs.__name__)
        except ModuleNotFoundError:
            continue
        ours_below = importlib.import_module(f"{_OURS}.{name}" if name else ours.__name__)
        for public, mine in list(vars(ours_below).items()):
            original = vars(theirs_below).get(public)
            if public.startswith("_") or original is None or isinstance(mine, ModuleType) or original is mine:
                continue
            if not getattr(mine, "__module__", "").startswith(_OURS):
                continue
            _check(public, original, mine)
            pairs.setdefault(id(original), (original, public, mine))
    return list(pairs.values())


def _check(name: str, original: Any, mine: Any) -> None:
    """Refuses what is not PyTorch's own, and calls that this release does not know."""
    where = getattr(original, "__module__", "") or ""
    if not where.startswith("torch."):
        raise InvalidInput(
            f"{_THEIRS}.{name} is not PyTorch's own but {where}.{getattr(original, '__qualname__', name)}: something else is in its "
            "place already, and two switches at once cannot work; nothing was replaced"
        )
    if inspect.isfunction(original) and inspect.isfunction(mine):
        beyond = inspect.signature(original).parameters.keys() - inspect.signature(mine).parameters.keys()
        if beyond:
            raise InvalidInput(
                f"this release of torch is not supported: its {name} takes {', '.join(sorted(beyond))}, which this release of "
                "reshard does not know; nothing was replaced"
            )


def _replace(pairs: list[tuple[Any, str, Any]]) -> None:
    """In every loaded module: a program may have imported a name before."""
    by_id = {id(original): mine for original, _, mine in pairs}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or not isinstance(name, str) or name == "reshard" or name.startswith("reshard."):
            continue
        try:
            held = list(vars(module).items())
        except Exception:
            continue
        for public, value in held:
            mine = by_id.get(id(value))
            if mine is not None:
                _state.replaced.append((module, public, value))
                vars(module)[public] = mine


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
