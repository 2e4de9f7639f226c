"""Ranks that want different keys of one checkpoint: unexpected is what none of them wants."""

import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.torch as rt


def stage(rank, fill):
    return {"model": {f"layer{rank}.weight": torch.full((3,), fill + rank), "embed": torch.full((2,), fill)}, "step": 7}


def each_its_own(rank, size, path):
    rt.save(stage(rank, 1.0), path)
    state = stage(rank, 0.0)
    report = rt.load(state, path)
    assert state["model"][f"layer{rank}.weight"].tolist() == [1.0 + rank] * 3 and state["model"]["embed"].tolist() == [1.0] * 2
    assert not report.differences
    report = rt.load(stage(rank, 0.0), path, strict=False)
    assert not report.differences
    # Only the first two of three stages come back: what the third had is unexpected, and said so on every rank.
    state = stage(rank, 0.0) if rank < 2 else {"step": 0}
    try:
        rt.load(state, path)
    except reshard.Mismatch as error:
        assert "layer2.weight" in str(error) and "layer0" not in str(error) and "layer1" not in str(error)
    else:
        raise AssertionError("a key that nobody wants was not unexpected")
    assert rank == 2 or state["model"]["embed"].tolist() == [0.0] * 2, "nothing is loaded before every difference is known"
    report = rt.load(state, path, strict=False)
    assert [d["key"] for d in report.differences] == (["model.layer2.weight"] if rank < 2 else [])
    # What is missing on one rank fails on all of them.
    state = stage(rank, 0.0)
    if rank == 1:
        state["model"]["none"] = torch.zeros(1)
    with pytest.raises(reshard.Mismatch, match="none"):
        rt.load(state, path)
    # A rank on its own has nobody to ask.
    with pytest.raises(reshard.Mismatch, match=f"layer{(rank + 1) % size}"):
        rt.load(stage(rank, 0.0), path, no_dist=True)
    dist.barrier()


def test_unexpected_is_what_no_rank_wants(ranks, path):
    ranks(3, each_its_own, path)
