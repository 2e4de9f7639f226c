"""The examples run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from state.models import fsdp2_averages

import reshard

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS_CPU_FSDP2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="FSDP2 on the CPU needs torch 2.6"
)


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_training(rank, size, folder, steps):
    return example("fsdp2_training").train(folder, steps)


def averages(rank, size):
    return fsdp2_averages()


@NEEDS_CPU_FSDP2
def test_training_resumes_on_another_number_of_ranks_as_if_never_stopped(ranks, tmp_path):
    straight = ranks(2, run_training, str(tmp_path / "straight"), 15)
    ranks(4, run_training, str(tmp_path / "resumed"), 10)
    resumed = ranks(3, run_training, str(tmp_path / "resumed"), 15)
    # Where gradients are summed, another number of ranks is another training.
    if ranks(2, averages)[0]:
        assert resumed[0] == pytest.approx(straight[0], rel=1e-5)
    assert [step for step, _ in reshard.steps(tmp_path / "resumed")] == [10, 15]

    export = example("hf_export").export
    path = reshard.latest(tmp_path / "resumed")
    files = export(path, str(tmp_path / "hf"), "training.model.", shard_size=6000)
    assert len(files) > 1
    with reshard.open(path) as ck, reshard.open(tmp_path / "hf") as exported:
        wanted = {
            k.removeprefix("training.model."): t.numpy() for k, t in ck.tensors().items() if k.startswith("training.model.")
        }
        assert set(exported.keys()) == set(wanted) and len(wanted) == 12
        for name, array in wanted.items():
            assert np.array_equal(exported[name].numpy(), array)
    assert sum(len(load_file(tmp_path / "hf" / file)) for file in files) == 12

    environment = {**os.environ, "RESHARD_EXAMPLE": path, "PYTHONPATH": str(EXAMPLES.parent)}
    run = subprocess.run([sys.executable, EXAMPLES / "inspect_checkpoint.py"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert "training.model.0.up.weight" in run.stdout and "'training.step': 15" in run.stdout
