"""Checkpoints of other programs, loaded into tensors: whole and in parts, with none of those programs imported."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

import reshard
import reshard.torch as rt

FOREIGN = Path(__file__).parents[2] / "crates/reshard/tests/foreign"
CASES = ["deepspeed-0.19/zero2_w3", "deepspeed-0.19/zero3_w4_bf16", "megatron-0.16/tp2_dp2", "ranks-torch-2.13/verl_w4"]


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_loaded_as_their_program_has_them(case):
    folder = FOREIGN / case / "checkpoint"
    expected = json.loads((FOREIGN / case / "expected.json").read_text())
    wanted = {key: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for key, entry in expected.items()}
    rt.load(wanted, str(folder), strict=False)
    for key, entry in expected.items():
        assert digest(wanted[key]) == entry["sha256"], key
    assert reshard.verify(str(folder)).sound
    assert not {"deepspeed", "megatron"} & set(sys.modules)


def test_a_part_of_a_partitioned_weight_is_loaded_by_itself():
    folder = str(FOREIGN / "deepspeed-0.19/zero3_w3_sub/checkpoint")
    whole = {"model": {"embedding.weight": torch.empty(11, 6)}}
    rt.load(whole, folder, strict=False)
    part = torch.empty(4, 2)
    rt.load({"model": {"embedding.weight": rt.ShardView(torch.float32, (11, 6), [((5, 3), part)])}}, folder, strict=False)
    assert torch.equal(part, whole["model"]["embedding.weight"][5:9, 3:5])
