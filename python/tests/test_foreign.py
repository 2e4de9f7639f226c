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
CASES = sorted(
    str(path.parent.relative_to(FOREIGN))
    for path in FOREIGN.glob("*/*/expected.json")
    if not path.parent.parent.name.startswith("ranks-torch-2.5")
)


def given(case: str) -> dict[str, str]:
    """What a case is opened with."""
    parameters = FOREIGN / case / "parameters.json"
    return {"parameter_map": str(parameters)} if parameters.exists() else {}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_loaded_as_their_program_has_them(case):
    folder = FOREIGN / case / "checkpoint"
    expected = json.loads((FOREIGN / case / "expected.json").read_text())
    wanted = {key: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for key, entry in expected.items()}
    rt.load(wanted, str(folder), strict=False, **given(case))
    for key, entry in expected.items():
        assert digest(wanted[key]) == entry["sha256"], key
    assert reshard.verify(str(folder), **given(case)).sound
    assert not {"deepspeed", "megatron", "lightning", "torchtitan", "torch_checkpointing", "nanotron"} & set(sys.modules)


@pytest.mark.parametrize("case", CASES)
def test_any_part_is_loaded_as_it_is_in_the_whole(case):
    """Boxes of three ranks by rows and two by columns, as another layout would want them."""
    folder = str(FOREIGN / case / "checkpoint")
    expected = json.loads((FOREIGN / case / "expected.json").read_text())
    with reshard.open(folder, **given(case)) as checkpoint:
        whole = {key: torch.from_numpy(checkpoint[key].numpy()) for key, e in expected.items() if e["dtype"] == "float32"}
    assert whole
    for rank in range(6):
        parts = {}
        for key, tensor in whole.items():
            if tensor.ndim == 0:
                continue
            region = [
                slice(*_cut(size, *part)) for size, part in zip(tensor.shape, [(rank // 2, 3), (rank % 2, 2)], strict=False)
            ]
            box = tensor[tuple(region)]
            offsets = tuple(part.start for part in region) + (0,) * (tensor.ndim - len(region))
            parts[key] = (box, offsets, torch.full(box.shape, 7.0))
        views = {key: rt.ShardView(torch.float32, tuple(whole[key].shape), [(o, t)]) for key, (_, o, t) in parts.items()}
        rt.load(views, folder, strict=False, **given(case))
        for key, (box, _, loaded) in parts.items():
            assert torch.equal(loaded, box), f"{case}: {key} on rank {rank}"


def _cut(size: int, part: int, parts: int) -> tuple[int, int]:
    length = -(-size // parts)
    return min(part * length, size), min((part + 1) * length, size)


def test_state_by_parameter_needs_a_map_where_it_lies_in_flat_buffers():
    folder = str(FOREIGN / "megatron-optimizer/dp_reshardable/checkpoint")
    wanted = {"optimizer.state.exp_avg.up.weight": torch.empty(10, 6)}
    with pytest.raises(reshard.InvalidInput, match="flat buffers") as raised:
        rt.load(wanted, folder)
    assert "parameter_map=FILE" in "".join(raised.value.__notes__) + str(raised.value)


def test_every_tool_takes_a_map_of_parameters(tmp_path):
    case = "megatron-optimizer/dp_reshardable"
    folder, key = str(FOREIGN / case / "checkpoint"), "optimizer.state.exp_avg.up.weight"
    assert reshard.stats(folder, key, **given(case)).elements == 60
    assert key in reshard.stats(folder, **given(case))
    assert key in reshard.health(folder, **given(case)).tensors
    assert key in reshard.digest(folder, **given(case))
    assert reshard.diff(folder, folder, **given(case)).same > 1
    out = str(tmp_path / "merged.safetensors")
    reshard.merge([folder, folder], out, include=["optimizer.state.*"], **given(case))
    with reshard.open(out) as merged, reshard.open(folder, **given(case)) as first:
        assert (merged[key].numpy() == first[key].numpy()).all()


def test_a_part_of_a_partitioned_weight_is_loaded_by_itself():
    folder = str(FOREIGN / "deepspeed-0.19/zero3_w3_sub/checkpoint")
    whole = {"model": {"embedding.weight": torch.empty(11, 6)}}
    rt.load(whole, folder, strict=False)
    part = torch.empty(4, 2)
    rt.load({"model": {"embedding.weight": rt.ShardView(torch.float32, (11, 6), [((5, 3), part)])}}, folder, strict=False)
    assert torch.equal(part, whole["model"]["embedding.weight"][5:9, 3:5])
