"""Objects that only their own libraries can read: checked as far as can be, said exactly, never called damaged."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE

import reshard


class Foreign:
    """A class of a program that wrote a file."""

    def __init__(self):
        self.weights = torch.arange(1000.0)
        self.step = 7


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(30, 40)


def damaged(file, tensor):
    """The same file with one byte of a tensor's data changed."""
    bytes_ = bytearray(file.read_bytes())
    at = bytes_.index(tensor.detach().numpy().tobytes()[:64])
    bytes_[at + 20] ^= 1
    other = file.with_name("damaged.pt")
    other.write_bytes(bytes_)
    return other


ROOTS = {
    "an object": (Foreign, lambda it: it.weights),
    "a module": (Net, lambda it: it.layer.weight),
    "a list of them": (lambda: [Foreign(), 1], lambda it: it[0].weights),
    "a dict with one": (lambda: {"a": Foreign(), "w": torch.arange(500.0)}, lambda it: it["w"]),
    "one named value": (lambda: {"value": Foreign()}, lambda it: it["value"].weights),
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_file_of_a_foreign_object_is_verified(name, tmp_path):
    make, tensor = ROOTS[name]
    made, file = make(), tmp_path / "t.pt"
    torch.save(made, file)
    report = reshard.verify(file)
    assert report.sound and report.checked > 3 and report.bytes == file.stat().st_size, report
    assert (sum(report.opaque.values()) == 1 and "Foreign" in str(report.opaque)) or "Net" in str(report.opaque)
    assert "not decoded" in str(report)
    bad = reshard.verify(damaged(file, tensor(made)))
    assert not bad.sound and "CRC-32" in str(bad), bad
    file.write_bytes(file.read_bytes()[:-200])
    assert not reshard.verify(file).sound


def test_a_foreign_root_is_no_state_dict_to_anyone_else(tmp_path):
    file = tmp_path / "t.pt"
    torch.save(Foreign(), file)
    for call in (
        lambda: reshard.open(file),
        lambda: reshard.digest(file),
        lambda: reshard.convert(file, tmp_path / "d", to="dcp"),
    ):
        with pytest.raises(reshard.UntrustedPickle, match="Foreign"):
            call()
    assert not (tmp_path / "d").exists()
    torch.save({"value": Foreign()}, file)
    with reshard.open(file) as checkpoint:
        assert list(checkpoint.keys()) == ["value"]


def test_the_command_says_what_was_not_decoded(tmp_path):
    file, folder = tmp_path / "t.pt", tmp_path / "ck"
    torch.save(Foreign(), file)
    dcp.save({"a": Foreign(), "b": Foreign(), "w": torch.ones(3), "n": 1}, checkpoint_id=folder, **ALONE)
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(reshard.__file__).parent.parent)}

    def verify(path, *more):
        command = [sys.executable, "-m", "reshard", "verify", str(path), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "content of 1 opaque value (test_opaque.Foreign)" in verify(file)
    said = verify(folder)
    assert ": sound" in said and "content of 2 opaque values (test_opaque.Foreign)" in said, said
    assert json.loads(verify(folder, "--json"))["opaque"] == {"test_opaque.Foreign": 2}
    assert reshard.verify(folder).opaque == {"test_opaque.Foreign": 2}


KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a function": lambda: torch.nn.functional.relu,
    "a device": lambda: torch.device("cpu"),
    "a subclass": lambda: torch.nn.Parameter(torch.ones(2)),
    "a meta tensor": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_kinds_are_not_damage(kind, tmp_path):
    """In the middle of a file, and as all of it."""
    file = tmp_path / "t.pt"
    for content in ({"x": KINDS[kind](), "w": torch.ones(2)}, KINDS[kind]()):
        torch.save(content, file)
        assert reshard.verify(file).sound
