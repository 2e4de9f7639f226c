"""Leaves that say themselves which chunks of a tensor they hold: by attributes, or by DCP's methods."""

import importlib.util

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import same
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import reshard
import reshard.torch as rt

WHOLE = torch.arange(48.0).reshape(6, 8)


def described(tensor, shape, begins, at, sizes):
    tensor.global_shape, tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = shape, begins, at, sizes
    return tensor


def rows(rank, size, fill=None):
    """Rows of the whole in turn, two ranks' worth of padding around them, not contiguous in the whole."""
    mine = list(range(rank, 6, size))
    local = torch.full((len(mine) + 2, 8), -1.0)
    if fill is None:
        local[1 : 1 + len(mine)] = WHOLE[mine]
    begins = tuple((row, 0) for row in mine)
    return described(local, (6, 8), begins, tuple((1 + i, 0) for i in range(len(mine))), ((1, 8),) * len(mine))


def merged_rows(rank, size, fill=None):
    """A part of a tensor of three dimensions, its first two in one."""
    half = 6 // size
    local = (
        WHOLE.reshape(6, 2, 4)[rank * half : (rank + 1) * half].reshape(half * 2, 4).clone()
        if fill is None
        else torch.zeros(half * 2, 4)
    )
    return described(local, (6, 2, 4), ((rank * half, 0, 0),), ((0, 0),), ((half, 2, 4),))


def attributes(rank, size, path):
    local = rows(rank, size)
    parameter = described(
        torch.nn.Parameter(local), local.global_shape, local.global_offsets, local.local_offsets, local.local_sizes
    )
    rt.save({"model": {"w": rows(rank, size), "m": merged_rows(rank, size)}, "n": parameter}, path)
    whole = {"model": {"w": torch.zeros(6, 8), "m": torch.zeros(6, 2, 4)}, "n": torch.zeros(6, 8)}
    rt.load(whole, path)
    assert same(whole["model"]["w"], WHOLE) and same(whole["model"]["m"], WHOLE.reshape(6, 2, 4)) and same(whole["n"], WHOLE)
    # Into another layout: every rank as if there were only half of them.
    other = {"model": {"w": rows(rank // 2, 1, 0.0), "m": merged_rows(rank // 2, 1, 0.0)}}
    rt.load(other, path)
    assert same(other["model"]["w"][1:-1], WHOLE) and other["model"]["w"][0].tolist() == [-1.0] * 8, "padding is left alone"
    assert same(other["model"]["m"], WHOLE.reshape(12, 4))
    own = {"model": {"w": rows(rank, size, 0.0), "m": merged_rows(rank, size, 0.0)}}
    rt.load(own, path)
    assert same(own["model"]["w"], rows(rank, size)) and same(own["model"]["m"], merged_rows(rank, size))
    meta = described(torch.empty(8, 8, device="meta"), (6, 8), ((0, 0),), ((1, 0),), ((6, 8),))
    state = {"model": {"w": meta, "m": torch.zeros(6, 2, 4)}}
    rt.load(state, path)
    assert same(state["model"]["w"][1:7], WHOLE) and state["model"]["w"].global_shape == (6, 8)


def test_a_tensor_whose_attributes_describe_shards_is_saved_and_loaded_as_those(ranks, path):
    ranks(2, attributes, path)


def with_pytorch(rank, size, path):
    """What PyTorch's own planners do with them, on both sides."""
    dcp.save({"w": rows(rank, size)}, checkpoint_id=f"{path}-theirs")
    own = {"w": rows(rank, size, 0.0)}
    rt.load(own, f"{path}-theirs")
    assert same(own["w"], rows(rank, size))
    rt.save({"w": rows(rank, size)}, f"{path}-ours")
    own = {"w": rows(rank, size, 0.0)}
    dcp.load(own, checkpoint_id=f"{path}-ours")
    assert same(own["w"], rows(rank, size))


@pytest.mark.skipif(importlib.util.find_spec("torch.distributed.checkpoint.protocol") is None, reason="needs torch 2.15 or later")
def test_pytorch_reads_and_writes_the_same(ranks, path):
    ranks(2, with_pytorch, path)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"global_offsets": ((0, 0), (1, 0))}, "2 global_offsets, 1 local_offsets"),
        ({"global_offsets": ((5, 0),)}, "reaches outside of the whole"),
        ({"global_offsets": ((-1, 0),)}, "reaches outside of the whole"),
        ({"local_offsets": ((7, 0),)}, "does not lie in a tensor of shape (4, 8)"),
        ({"local_offsets": ((0,),)}, "does not lie in a tensor of shape (4, 8)"),
        ({"local_sizes": ((2,),)}, "the whole has 2 dimensions"),
        ({"global_shape": (6,)}, "the whole has 1 dimensions"),
    ],
)
def test_attributes_that_contradict_each_other_are_an_error(path, changes, words):
    tensor = described(torch.zeros(4, 8), (6, 8), ((0, 0),), ((0, 0),), ((2, 8),))
    for name, value in changes.items():
        setattr(tensor, name, value)
    for call in (rt.save, rt.load):
        if call is rt.load:
            rt.save({"w": torch.zeros(6, 8)}, path)
        with pytest.raises(reshard.InvalidInput) as error:
            call({"w": tensor}, path)
        assert words in str(error.value) and error.value.keys == ["w"]


def test_a_tensor_with_some_of_the_names_is_a_tensor_like_any_other(path):
    tensor = torch.arange(3.0)
    tensor.global_shape = "something of the user's"
    rt.save({"w": tensor}, path)
    state = {"w": torch.zeros(3)}
    rt.load(state, path)
    assert same(state["w"], torch.arange(3.0))


class Table:
    """An object, not a tensor, that holds some rows of one."""

    def __init__(self, begin, local, whole=(6, 8)):
        self.begin, self.local, self.whole = begin, local, whole

    def _chunk(self):
        return ChunkStorageMetadata(torch.Size((self.begin, 0)), self.local.shape)

    def __create_write_items__(self, fqn, object):
        data = TensorWriteData(self._chunk(), TensorProperties(dtype=self.local.dtype), torch.Size(self.whole))
        return [WriteItem(MetadataIndex(fqn, torch.Size((self.begin, 0))), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self):
        return [self._chunk()]

    def __get_tensor_shard__(self, index):
        return self.local


def listed(rank, size, path):
    half = 6 // size
    part = slice(rank * half, (rank + 1) * half)
    rt.save({"model": {"table": Table(rank * half, WHOLE[part].clone())}}, path)
    whole = {"model": {"table": torch.zeros(6, 8)}}
    rt.load(whole, path)
    assert same(whole["model"]["table"], WHOLE)
    own = Table(rank * half, torch.zeros(half, 8))
    rt.load({"model": {"table": own}}, path)
    assert same(own.local, WHOLE[part])
    try:
        rt.load({"model": {"table": Table(5, torch.zeros(half, 8))}}, path)
    except reshard.InvalidInput as error:
        assert "lists its chunks inconsistently" in str(error) and "model.table" in str(error)
    else:
        raise AssertionError("a chunk outside of the whole was loaded")


def test_an_object_that_lists_its_chunks_is_saved_and_loaded_as_those(ranks, path):
    ranks(2, listed, path)
