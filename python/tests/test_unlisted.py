"""A folder that may be entered and not listed, as an ordinary user has it."""

import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch

import reshard
import reshard.torch as rt

PACKAGE = str(pathlib.Path(reshard.__file__).parent.parent)
NOBODY = 65534
#: One that another user may run: that of an environment may lie in a folder of its owner's alone. The command needs no torch.
PYTHONS = [sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"]


def run(*arguments, python=None):
    """Runs the command without the rights of root, which may list everything."""
    python = python or next((one for one in PYTHONS if os.path.exists(one) and runs(one)), None)
    if python is None:
        pytest.skip("another user can run no interpreter here")
    how = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", **how)


@functools.cache
def runs(python):
    try:
        return run("--version", python=python).returncode == 0
    except PermissionError:
        return False


@pytest.fixture
def folder():
    # The folders of pytest are for its own user alone.
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        path = pathlib.Path(base) / "step-1"
        rt.save({"w": torch.ones(100), "n": 3}, path)
        for file in path.iterdir():
            file.chmod(0o644)
        path.chmod(0o755)
        assert run("ls", path).returncode == 0
        yield path
        path.chmod(0o755)


def test_what_is_known_by_name_is_read_and_what_is_not_known_is_said(folder):
    folder.chmod(0o311)
    done = run("inspect", folder)
    assert done.returncode == 0, done.stderr
    assert "could not be listed" in done.stdout + done.stderr, done
    assert "n" in run("ls", folder).stdout.split() and run("show", folder, "n").stdout.strip().endswith("3")
    verified = run("verify", folder)
    assert verified.returncode == 0 or "list" in verified.stderr + verified.stdout, verified
    assert "panicked" not in verified.stderr


def test_a_folder_that_may_not_be_entered_is_an_error_that_names_it(folder):
    folder.chmod(0o000)
    for verb in ("inspect", "ls", "verify", "digest"):
        done = run(verb, folder)
        assert done.returncode == 2 and str(folder) in done.stderr and "ermission denied" in done.stderr, (verb, done)


def test_steps_of_a_root_that_cannot_be_listed_are_not_none(folder):
    folder.parent.chmod(0o311)
    for verb in (["latest", folder.parent], ["prune", folder.parent, "--keep-last", "1", "--dry-run"]):
        done = run(*verb)
        assert done.returncode == 2 and "ermission denied" in done.stderr, (verb, done)
    folder.parent.chmod(0o755)
