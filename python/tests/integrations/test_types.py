"""The adapters' own annotations: complete, and in agreement with each other and with the package's. Trainers' sources are not followed."""

import pathlib
import subprocess
import sys

import pytest

import reshard

PACKAGE = pathlib.Path(reshard.__file__).parent


def test_adapters_are_typed_and_thin(tmp_path):
    pytest.importorskip("mypy")
    files = sorted(PACKAGE.glob("integrations/*.py"))
    for file in files:
        assert len(file.read_text().splitlines()) < 150, f"{file.name} is an adapter, and thin"
    strict = ["--strict", "--allow-subclassing-any", "--no-warn-unused-ignores", "--no-warn-return-any"]
    lenient = ["--follow-imports=skip", "--ignore-missing-imports", "--config-file=", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *strict, *lenient, *map(str, files)]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert checked.returncode == 0, checked.stdout + checked.stderr
