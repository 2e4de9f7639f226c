"""Tensors of classes of their own: those with memory are tensors, those that wrap other tensors are objects."""

import pytest
import torch
import torch.distributed as dist
from helpers import Scaled, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard
import reshard.torch as rt


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def scaled(fill):
    return Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3) * fill, torch.tensor(0.5 * fill))


def test_a_subclass_with_memory_is_a_tensor_like_any_other(path):
    rt.save({"x": torch.arange(3.0).as_subclass(Named)}, path)
    state = {"x": torch.zeros(3)}
    rt.load(state, path)
    assert same(state["x"], torch.arange(3.0))
    state = {"x": torch.zeros(3).as_subclass(Named)}
    rt.load(state, path)
    assert type(state["x"]) is Named and state["x"].tolist() == [0, 1, 2]


def test_a_wrapper_is_stored_as_an_object_and_unpickled_only_when_trusted(path):
    rt.save({"x": scaled(1), "y": torch.ones(2)}, path)
    with reshard.open(path) as ck:
        assert ck["y"].numpy().tolist() == [1, 1]
        with pytest.raises(reshard.UntrustedPickle, match="helpers.Scaled"):
            ck["x"]
    state = {"x": scaled(0), "y": torch.zeros(2)}
    with pytest.raises(reshard.UntrustedPickle, match="helpers.Scaled"):
        rt.load(state, path)
    assert state["y"].tolist() == [0, 0], "nothing is loaded before everything is known to be trusted"
    rt.load(state, path, allow_pickle=True)
    assert isinstance(state["x"], Scaled) and same(state["x"].whole, scaled(1).whole) and state["x"].scale.item() == 0.5
    # Or by declaring the class, as for torch.load.
    state = {"x": scaled(0), "y": torch.zeros(2)}
    with torch.serialization.safe_globals([Scaled]):
        rt.load(state, path)
    assert same(state["x"].whole, scaled(1).whole) and state["y"].tolist() == [1, 1]


def wrapped_shards(rank, size, path):
    mesh = init_device_mesh("cpu", (size,))
    tensor = DTensor.from_local(scaled(rank + 1), mesh, [Shard(0)], run_check=False)
    state = {"model": {"weight": tensor}}
    for call in (lambda: rt.save(state, path), lambda: rt.async_save(state, path)):
        try:
            call()
        except reshard.InvalidInput as error:
            assert "'model.weight'" in str(error) and "helpers.Scaled" in str(error) and "PerRank" in error.hint
            assert error.keys == ["model.weight"]
        else:
            raise AssertionError("a shard without memory was saved")
        dist.barrier()
    assert not rt.exists(path)
    rt.save({"weight": rt.PerRank(tensor.to_local())}, path)
    back = {"weight": rt.PerRank(scaled(0))}
    rt.load(back, path, allow_pickle=True)
    assert same(back["weight"].value.whole, scaled(rank + 1).whole)


def test_a_shard_that_is_a_wrapper_is_refused_by_name(ranks, path):
    ranks(2, wrapped_shards, path)
