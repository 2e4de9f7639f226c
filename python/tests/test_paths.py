"""Paths that are not UTF-8: given as bytes or as Python hands them on, named in an error, and never half used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as ours
from reshard import _paths

ODD = b"ck-\xff\xfe"


@pytest.fixture
def odd(tmp_path):
    """A checkpoint in a folder whose name is not UTF-8, as another program may have made it."""
    saved = tmp_path / "saved"
    rt.save({"w": torch.ones(2)}, saved)
    path = os.path.join(os.fsencode(tmp_path), ODD)
    os.rename(saved, path)
    return path


CALLS = {
    "open": lambda path, out: reshard.open(path),
    "verify": lambda path, out: reshard.verify(path),
    "digest": lambda path, out: reshard.digest(path),
    "diff": lambda path, out: reshard.diff(path, path),
    "stats": lambda path, out: reshard.stats(path, "w"),
    "latest": lambda path, out: reshard.latest(path),
    "steps": lambda path, out: reshard.steps(path),
    "convert from": lambda path, out: reshard.convert(path, out / "x.pt"),
    "convert to": lambda path, out: reshard.convert(out / "fine", path, to="dcp"),
    "relayout": lambda path, out: reshard.relayout(path, out / "x", mesh="2"),
    "merge": lambda path, out: reshard.merge([path, path], out / "x"),
    "edit": lambda path, out: reshard.edit(path, out / "x", drop=["w"]),
    "recover": lambda path, out: reshard.recover(path),
    "prune": lambda path, out: reshard.prune(path, keep_last=1),
    "rt.save": lambda path, out: rt.save({"w": torch.ones(1)}, path, overwrite=True),
    "rt.async_save": lambda path, out: rt.async_save({"w": torch.ones(1)}, path, overwrite=True).result(),
    "rt.load": lambda path, out: rt.load({"w": torch.ones(2)}, path),
    "rt.exists": lambda path, out: rt.exists(path),
    "manager": lambda path, out: rt.CheckpointManager(path),
    "writer": lambda path, out: rt.StorageWriter(path),
    "reader": lambda path, out: rt.StorageReader(path),
    "drop-in save": lambda path, out: ours.save({"w": torch.ones(1)}, checkpoint_id=path),
    "drop-in load": lambda path, out: ours.load({"w": torch.ones(2)}, checkpoint_id=path),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_is_not_utf8_is_named_on_every_road(name, odd, tmp_path):
    rt.save({"w": torch.ones(2)}, tmp_path / "fine")
    before = sorted(os.listdir(os.fsencode(tmp_path)))
    inside = sorted(os.listdir(odd))
    for path in (odd, os.fsdecode(odd), Path(os.fsdecode(odd))):
        with pytest.raises(reshard.InvalidInput, match=r"udcff.*is not valid UTF-8; rename it") as caught:
            CALLS[name](path, tmp_path)
        # A message that can be printed and logged.
        str(caught.value).encode()
    assert sorted(os.listdir(os.fsencode(tmp_path))) == before and sorted(os.listdir(odd)) == inside


def test_bytes_and_names_of_any_language_are_paths(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), "Prüfpunkt-検査".encode())
    rt.save({"w": torch.ones(2)}, path)
    assert reshard.verify(path) and rt.exists(os.fsdecode(path)) and reshard.open(path)["w"].numpy().sum() == 2
    link = tmp_path / "link"
    os.symlink(path, link)
    assert reshard.verify(link)
    assert _paths.path_text("s3://bucket/ü") == "s3://bucket/ü"


def test_the_command_names_it_too(odd):
    command = [sys.executable, "-m", "reshard", "verify", odd]
    environment = {**os.environ, "PYTHONPATH": str(Path(reshard.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, env=environment)
    said = done.stderr.decode()
    assert done.returncode == 2 and "is not valid UTF-8" in said and "hint: rename" in said and "Traceback" not in said, said


def test_files_with_odd_names_beside_a_checkpoint_do_no_harm(tmp_path):
    path = tmp_path / "ck"
    rt.save({"w": torch.ones(2)}, path)
    beside = os.path.join(os.fsencode(path), b"note-\xff")
    with open(beside, "wb") as file:
        file.write(b"x")
    assert reshard.verify(path) and reshard.digest(path)
    rt.save({"w": torch.zeros(2)}, path, overwrite=True)
    assert os.path.exists(beside) and reshard.open(path)["w"].numpy().sum() == 0
    reshard.convert(path, tmp_path / "other", to="dcp")
