"""The switch: `reshard.install()`, `reshard.uninstall()` and `reshard run`."""

import json
import logging
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE

import reshard
import reshard.torch.checkpoint as ours
from reshard._run import environment

PACKAGE = str(pathlib.Path(reshard.__file__).parents[1])


@pytest.fixture(autouse=True)
def restored():
    yield
    reshard.uninstall()


def saved_by_us(path):
    with reshard.open(path) as ck:
        return "reshard" in ck.writer


def test_install_replaces_and_uninstall_puts_back(tmp_path, caplog):
    originals = {name: getattr(dcp, name) for name in ("save", "load", "async_save", "FileSystemWriter")}
    assert reshard.installed() is None
    with caplog.at_level(logging.INFO, logger="reshard"):
        done = reshard.install()
    assert reshard.installed() is done and "save" in done.names and "torch.distributed.checkpoint" in done.modules
    assert "torch.distributed.checkpoint" in caplog.text and "save" in caplog.text
    assert dcp.save is ours.save and dcp.state_dict_saver.save is ours.save and dcp.FileSystemWriter is ours.FileSystemWriter
    dcp.save({"a": torch.arange(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert saved_by_us(tmp_path / "a")
    assert reshard.install() is done
    reshard.uninstall()
    assert all(getattr(dcp, name) is value for name, value in originals.items())
    assert dcp.state_dict_saver.save is originals["save"] and reshard.installed() is None
    dcp.save({"a": torch.arange(3)}, checkpoint_id=tmp_path / "b", **ALONE)
    assert not saved_by_us(tmp_path / "b")


def test_names_that_a_program_imported_before_are_replaced_too(monkeypatch):
    import types

    program = types.ModuleType("a_program")
    program.save_it, program.other = dcp.save, len
    monkeypatch.setitem(sys.modules, "a_program", program)
    done = reshard.install()
    assert program.save_it is ours.save and program.other is len and "a_program" in done.modules
    reshard.uninstall()
    assert program.save_it is dcp.save


def test_options_are_taken_and_two_choices_at_once_are_an_error():
    reshard.install(strict=True, cast="never")
    assert ours.options.strict and ours.options.cast == "never"
    with pytest.raises(reshard.InvalidInput, match="already"):
        reshard.install()
    reshard.uninstall()
    assert not ours.options.strict and ours.options.cast == "any"
    with pytest.raises(reshard.InvalidInput, match="takes no colour"):
        reshard.install(colour="red")
    with pytest.raises(reshard.InvalidInput, match="cast"):
        reshard.install(cast="sometimes")
    assert reshard.installed() is None


def test_another_switch_in_place_is_one_clear_error(monkeypatch):
    def save(state_dict, **rest):
        raise AssertionError

    save.__module__ = "another_library"
    monkeypatch.setattr(dcp, "save", save)
    with pytest.raises(reshard.InvalidInput, match="another_library.*two switches"):
        reshard.install()
    assert reshard.installed() is None and dcp.load is not ours.load and dcp.save is save


def test_torch_that_is_not_supported_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    with pytest.raises(reshard.InvalidInput, match="torch 2.4.1 is not supported"):
        reshard.install()
    monkeypatch.undo()

    def save(state_dict, *, checkpoint_id=None, teleport=True):
        raise AssertionError

    save.__module__ = "torch.distributed.checkpoint.state_dict_saver"
    monkeypatch.setattr(dcp, "save", save)
    with pytest.raises(reshard.InvalidInput, match="teleport"):
        reshard.install()
    assert dcp.load is not ours.load


def python(script, *, cwd, env, run=()):
    command = [sys.executable, "-m", "reshard", "run", *run, "--", sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=180)


def environ(**more):
    return {**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1", **more}


SCRIPT = """
import torch, torch.distributed.fsdp, torch.distributed.checkpoint as dcp, reshard
from torch.distributed.checkpoint import save
save({"a": torch.arange(3.0)}, checkpoint_id="here", no_dist=True)
state = {"a": torch.zeros(3)}
dcp.load(state, checkpoint_id="here", no_dist=True)
print(state["a"].tolist(), reshard.open("here").writer, reshard.installed().options["strict"])
"""


def test_run_switches_the_program_and_no_other(tmp_path):
    before = dict(os.environ)
    # A sitecustomize that was there before runs too.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.chained = True\n")
    env = environ(PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), PACKAGE]))
    found = python(SCRIPT + "import sys; print(sys.chained)", cwd=tmp_path, env=env, run=["--strict"])
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("[0.0, 1.0, 2.0] reshard") and found.stdout.split()[-2:] == ["True", "True"]
    assert os.environ == before and reshard.installed() is None


def test_run_leaves_programs_without_torch_alone_and_says_what_it_cannot_do(tmp_path):
    found = python("import sys; print('torch' in sys.modules, 'reshard' in sys.modules)", cwd=tmp_path, env=environ())
    assert found.stdout.split() == ["False", "False"], found.stderr
    failed = subprocess.run(
        [sys.executable, "-m", "reshard", "run", "--", "no-such-program"], env=environ(), capture_output=True, text=True
    )
    assert failed.returncode == 127 and "no-such-program" in failed.stderr
    failed = subprocess.run(
        [sys.executable, "-m", "reshard", "run", "--colour", "x"], env=environ(), capture_output=True, text=True
    )
    assert failed.returncode == 2 and "--colour" in failed.stderr


def test_only_the_child_has_the_environment():
    base = {"PYTHONPATH": "/somewhere", "A": "b"}
    made = environment({"strict": True}, base)
    assert made["PYTHONPATH"].split(os.pathsep)[1] == "/somewhere" and made["A"] == "b"
    assert json.loads(made["RESHARD_INSTALL"]) == {"strict": True} and base == {"PYTHONPATH": "/somewhere", "A": "b"}
    assert environment({}, made)["PYTHONPATH"] == made["PYTHONPATH"]


def test_nothing_is_patched_on_import(tmp_path):
    script = (
        "import torch.distributed.checkpoint as d; s = d.save\nimport reshard.torch, reshard.torch.checkpoint\nassert d.save is s"
    )
    assert subprocess.run([sys.executable, "-c", script], env=environ(), timeout=180).returncode == 0
