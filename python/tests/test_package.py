"""The package itself: what importing it costs, its exceptions, its annotations."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reshard

PYTHON = Path(__file__).resolve().parents[1]


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PYTHON).stdout


def test_importing_reshard_imports_neither_torch_nor_numpy():
    code = "import sys, reshard; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_importing_reshard_takes_less_than_20_ms():
    """Starts of an interpreter with the import, less those without: the best of each, as a start can be slower for any reason
    but faster for none. A busy machine is given more tries."""

    def start(code):
        begin = time.perf_counter()
        run_python(code)
        return time.perf_counter() - begin

    alone, importing = [], []
    for _ in range(40):
        alone.append(start("pass"))
        importing.append(start("import reshard"))
        if len(alone) >= 3 and min(importing) - min(alone) < 0.02:
            return
    raise AssertionError(f"{(min(importing) - min(alone)) * 1e3:.0f} ms in the best of {len(alone)} starts")


def test_only_reshard_torch_imports_torch():
    for file in (PYTHON / "reshard").glob("*.py"):
        lines = [line.split("#")[0] for line in file.read_text().splitlines()]
        assert not any(line.lstrip().startswith(("import torch", "from torch")) for line in lines), file


def test_exceptions_form_a_tree_that_handlers_know():
    assert issubclass(reshard.NotFound, FileNotFoundError)
    assert issubclass(reshard.NoSuchKey, (reshard.NotFound, KeyError))
    assert issubclass(reshard.AlreadyExists, FileExistsError)
    assert issubclass(reshard.StorageError, OSError)
    assert issubclass(reshard.Mismatch, ValueError)
    for name in reshard.__all__:
        value = getattr(reshard, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, reshard.ReshardError)


PUBLIC = [getattr(reshard, name) for name in reshard.__all__]


def test_names_come_when_they_are_asked_for_and_only_those_that_are_promised():
    names = run_python("import reshard; print(sorted(set(dir(reshard)) & set(reshard.__all__)) == sorted(reshard.__all__))")
    assert names.strip() == "True"
    assert run_python("from reshard import Mismatch, open, verify; print(open.__module__)").strip() == "reshard._checkpoint"
    with pytest.raises(AttributeError, match="no attribute 'opened_by_nobody'"):
        getattr(reshard, "opened_by_nobody")  # noqa: B009


@pytest.mark.parametrize("cls", [c for c in PUBLIC if isinstance(c, type) and issubclass(c, Exception)])
def test_exceptions_pickle_with_everything_they_know(cls):
    error = cls("what happened", keys=["a"], files=["f"], ranks=[1, 2], hint="do this")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls and str(copy) == "what happened"
    assert (copy.keys, copy.files, copy.ranks, copy.hint) == (["a"], ["f"], [1, 2], "do this")
    assert copy.__notes__ == ["hint: do this"]


def test_a_mismatch_pickles_with_its_differences():
    error = reshard.Mismatch("m", differences=[{"difference": "missing", "key": "a"}])
    assert pickle.loads(pickle.dumps(error)).differences == error.differences


def test_every_public_thing_is_documented():
    import reshard.torch as rt

    for module in (reshard, rt):
        for name in module.__all__:
            if not name.startswith("__"):
                assert getattr(module, name).__doc__, name


def test_annotations_and_the_stub_hold():
    """Of what needs no torch; `scripts/check-types` checks everything, torch's own sources included, which takes minutes."""
    pytest.importorskip("mypy")
    root = PYTHON.parent
    files = sorted(str(file) for file in (PYTHON / "reshard").glob("*.py"))
    config = ["--config-file", str(root / "pyproject.toml")]
    checked = subprocess.run([sys.executable, "-m", "mypy", *config, *files], capture_output=True, text=True, cwd=root)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    options = ["--mypy-config-file", str(root / "pyproject.toml"), "--allowlist", str(PYTHON / "stubtest-allowlist.txt")]
    environment = {**os.environ, "MYPYPATH": str(PYTHON), "PYTHONPATH": str(PYTHON)}
    command = [sys.executable, "-m", "mypy.stubtest", "reshard._reshard", *options]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "reshard", *arguments], capture_output=True, text=True, cwd=PYTHON)


def test_the_command_comes_with_the_package(tmp_path):
    version = command("--version")
    assert version.returncode == 0 and version.stdout.startswith(f"reshard {reshard.__version__}")
    ran = command("demo", "-o", str(tmp_path / "demo"))
    assert ran.returncode == 0, ran.stderr
    # What it ends with can be pasted.
    pasted = next(line for line in ran.stdout.splitlines() if " verify " in line)
    assert subprocess.run(pasted, shell=True, cwd=PYTHON, capture_output=True).returncode == 0
    assert command("inspect", str(tmp_path / "nothing")).returncode == 2
    assert "Usage: reshard" in command("--help").stdout
