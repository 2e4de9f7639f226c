"""Tensors that have no memory, or none that a pointer and a shape describe: an error that names the key, or the same tensor again."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as drop_in


def freed(part):
    """What FSDP leaves of a parameter that it has resharded; a part of it has an address that looks like one."""
    whole = torch.ones(1_000_000)
    part = part(whole)
    whole.untyped_storage().resize_(0)
    return part


def cut_short():
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(1000)
    return tensor


LOST = {
    "freed": lambda: freed(lambda whole: whole[:1000]),
    "part": lambda: freed(lambda whole: whole[500_000:501_000]),
    "columns": lambda: freed(lambda whole: whole[:1000].view(20, 50).T),
    "short": cut_short,
    "shard": lambda: freed(lambda whole: rt.ShardView.of_range(whole[500:1500], (1000,), 0)),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_tensor_that_has_lost_its_memory_is_named(path, kind):
    lost, fine = LOST[kind](), torch.ones(1000)
    calls = [
        lambda: rt.save({"model": {"w": lost}}, path),
        lambda: rt.async_save({"model": {"w": lost}}, path).result(),
    ]
    if kind != "shard":
        calls.append(lambda: drop_in.save({"model": {"w": lost}}, checkpoint_id=path, no_dist=True))
    for call in calls:
        with pytest.raises((reshard.InvalidInput, drop_in.CheckpointException), match=r"'model\.w' has lost its memory"):
            call()
        assert not rt.exists(path)
    rt.save({"model": {"w": fine.reshape(50, 20) if kind == "columns" else fine}}, path)
    with pytest.raises(reshard.InvalidInput, match=r"'model\.w' has lost its memory"):
        rt.load({"model": {"w": lost}}, path)


@pytest.mark.parametrize("kind", ["freed", "part", "short"])
def test_under_pytorchs_planner_too(path, kind):
    lost = LOST[kind]()
    with pytest.raises(dcp.api.CheckpointException, match="has lost its memory"):
        dcp.save({"model": {"w": lost}}, storage_writer=rt.StorageWriter(path))
    assert not rt.exists(path)
    # The path is free again, although the writer that failed is still in somebody's hands.
    rt.save({"model": {"w": torch.ones(1000)}}, path)
    with pytest.raises(dcp.api.CheckpointException, match="has lost its memory"):
        dcp.load({"model": {"w": lost}}, storage_reader=rt.StorageReader(path))


def after_a_failure_of_one(rank, size, path):
    try:
        dcp.save({f"w{rank}": torch.ones(1000) if rank == 0 else LOST["freed"]()}, storage_writer=rt.StorageWriter(path))
    except dcp.api.CheckpointException as error:
        assert "has lost its memory" in str(error)
    else:
        raise AssertionError("it was saved")
    rt.save({f"w{rank}": torch.ones(1000)}, path)
    return sorted(reshard.Checkpoint(path).keys())


def test_a_save_that_failed_on_another_rank_gives_the_path_back(ranks, path):
    assert ranks(2, after_a_failure_of_one, path) == [["w0", "w1"]] * 2


def test_what_is_not_initialized_is_named(path):
    lazy = torch.nn.LazyLinear(3)
    with pytest.raises(reshard.InvalidInput, match=r"'model\.weight' is not initialized"):
        rt.save({"model": dict(lazy.named_parameters())}, path)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_come_back(path, layout):
    parts = [torch.arange(2.0), torch.arange(3.0)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rt.save({"n": nested, "w": torch.ones(2)}, path)
    # Whether PyTorch's restricted unpickler takes them depends on its release; the save says if it does not.
    objects = any("allow_pickle=True: n" in str(warning.message) for warning in told)
    state = {"n": None, "w": torch.zeros(2)}
    if objects:
        with pytest.raises(reshard.UntrustedPickle):
            rt.load(state, path)
    rt.load(state, path, allow_pickle=objects)
    assert state["n"].is_nested and state["n"].layout is layout
    assert all(torch.equal(a, b) for a, b in zip(state["n"].unbind(), parts)) and state["w"].sum() == 2
