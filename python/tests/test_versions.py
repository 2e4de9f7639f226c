"""What is written here is read by other releases of PyTorch, and what they write is read here.

`RESHARD_OTHER_PYTHONS` lists interpreters with other releases of torch, separated as in PATH; they need not have reshard. This
interpreter's own torch is always among them, as a process that does not know reshard.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import versions

import reshard.torch as rt

SCRIPT = Path(__file__).with_name("versions.py")
OTHERS = [name for name in os.environ.get("RESHARD_OTHER_PYTHONS", "").split(os.pathsep) if name]
SIZES = [1, 4]
# This torch's own reading and writing is tested at length elsewhere: one case of it is enough to know that the script works.
CASES = [(sys.executable, 4), *((python, size) for python in OTHERS for size in SIZES)]


def script(python, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run([python, SCRIPT, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "fine with torch" in run.stdout


def save_both_ways(rank, size, folder):
    rt.save(versions.state(size), f"{folder}/save-{size}")
    dcp.save(versions.state(size), storage_writer=rt.StorageWriter(f"{folder}/writer-{size}"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, _ranks):
    folder = tmp_path_factory.mktemp("versions")
    for size in SIZES:
        _ranks.run(size, save_both_ways, str(folder))
    return folder


def test_other_interpreters_are_known():
    if not OTHERS:
        pytest.skip("RESHARD_OTHER_PYTHONS lists no interpreters with other releases of torch: only this one's is tested")
    for python in OTHERS:
        version = subprocess.run(
            [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
        )
        assert version.stdout.strip() != torch.__version__


@pytest.mark.parametrize(("python", "size"), CASES)
@pytest.mark.parametrize("how", ["save", "writer"])
def test_torch_reads_what_is_written_here(saved, python, size, how):
    script(python, "check", saved / f"{how}-{size}", size)


def load_both_ways(rank, size, path):
    for load in (
        lambda found: rt.load(found, path),
        lambda found: dcp.load(found, storage_reader=rt.StorageReader(path)),
    ):
        found = versions.state(size, fill=False)
        load(found)
        versions.assert_equal(versions.state(size), found)


@pytest.mark.parametrize(("python", "size"), CASES)
def test_what_torch_writes_is_read_here(tmp_path, ranks, python, size):
    script(python, "write", tmp_path / "theirs", size)
    for layout in {1, 3, size}:
        ranks(layout, load_both_ways, str(tmp_path / "theirs"))
