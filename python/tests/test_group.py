"""Messages between ranks."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.torch as rt
from reshard.torch import _group
from reshard.torch._group import GlooGroup, StoreGroup, group_for

LENGTHS = [0, 1, 100, 1015, 1016, 1017, 1024, 5000, 300_000]


def message(rank, length):
    return bytes((rank * 7 + i) % 256 for i in range(min(length, 1000))) + bytes([rank]) * max(length - 1000, 0)


def exchange(group, rank, size):
    for round_, length in enumerate(LENGTHS):
        # Everyone's message has another length, in another order each round.
        own = message(rank, LENGTHS[(round_ + rank) % len(LENGTHS)])
        all_ = [message(r, LENGTHS[(round_ + r) % len(LENGTHS)]) for r in range(size)]
        assert group.all_gather(own) == all_
        root = round_ % size
        assert group.gather(root, own) == (all_ if rank == root else None)
        assert group.scatter(root, all_ if rank == root else None) == own
        assert group.broadcast(root, message(root, length) if rank == root else None) == message(root, length)


def over_gloo(rank, size):
    group = group_for()
    assert isinstance(group, GlooGroup) and (group.rank, group.size) == (rank, size)
    exchange(group, rank, size)
    assert group_for(purpose="async")._group is not group._group
    assert group_for()._group is group._group, "made once"


def over_the_store(rank, size):
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    exchange(StoreGroup(store, rank, size, 30), rank, size)


def without_gloo(rank, size, path):
    import torch

    import reshard.torch as rt

    dist.is_gloo_available = lambda: False
    rt.save({"x": torch.full((2,), 5)}, path)
    assert isinstance(group_for(), StoreGroup)
    state = {"x": torch.zeros(2, dtype=torch.int64)}
    rt.load(state, path)
    assert state["x"].tolist() == [5, 5]


@pytest.mark.parametrize("work", [over_gloo, over_the_store])
def test_messages_of_all_lengths_arrive(ranks, work):
    ranks(3, work)


def test_a_torch_without_gloo(ranks, path):
    ranks(2, without_gloo, path)


def threads_at_once(rank, size):
    group = group_for()
    other = group_for(purpose="async")
    errors = []

    def work(group):
        try:
            for _ in range(20):
                assert group.all_gather(bytes([rank])) == [bytes([r]) for r in range(size)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(g,)) for g in (group, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_foreground_and_background_do_not_meet(ranks):
    ranks(2, threads_at_once)


def test_no_group_alone():
    assert group_for() is None and group_for(no_dist=True) is None
    assert os.environ.get("RANK") is None and _group._groups == {}


def test_a_process_group_by_name_is_refused(path):
    for given in ("default", 3):
        for call in (rt.save, rt.load, rt.async_save):
            with pytest.raises(reshard.InvalidInput, match="not a process group"):
                call({"x": torch.ones(2)}, path, process_group=given)
    assert not rt.exists(path)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_rank_that_was_not_told_of_the_others_does_not_save(path, monkeypatch, name):
    state = {"x": torch.ones(2)}
    monkeypatch.setenv(name, "1")
    rt.save(state, path)
    monkeypatch.setenv(name, "2")
    for call in (rt.save, rt.async_save):
        with pytest.raises(reshard.GroupError, match=f"{name}=2") as error:
            call(state, f"{path}-2")
        assert "init_process_group" in error.value.hint and "no_dist=True" in error.value.hint
    assert not rt.exists(f"{path}-2")
    rt.save(state, f"{path}-2", no_dist=True)
    # Reading alone loses nothing.
    rt.load(state, path)
    full = rt.get_model_state_dict(torch.nn.Linear(2, 2), options=rt.StateDictOptions(full_state_dict=True))
    assert sorted(full) == ["bias", "weight"]


class Interrupted:
    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raise self.error

    def load_state_dict(self, state):
        raise AssertionError("nothing was loaded")


def interrupted(rank, size, path):
    rt.save({"x": torch.ones(2), "own": 1}, f"{path}-whole")
    for error in (KeyboardInterrupt(), SystemExit(3)):
        for call in (rt.save, rt.load, rt.async_save):
            state = {"x": torch.ones(2), "own": Interrupted(error) if rank == 0 else 1}
            try:
                call(state, f"{path}-whole" if call is rt.load else path, timeout=60)
            except BaseException as raised:
                # The rank itself goes on with its own; the others hear of it at once, and not when their patience ends.
                assert raised is error if rank == 0 else type(error).__name__ in str(raised), (rank, call, raised)
            else:
                raise AssertionError(f"{call} went on on rank {rank}")
    assert not rt.exists(path)


def test_an_interrupt_of_one_rank_reaches_the_others(ranks, path):
    ranks(2, interrupted, path, timeout=50)
