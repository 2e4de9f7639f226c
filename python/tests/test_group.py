"""Messages between ranks."""

import os
import threading

import pytest
import torch.distributed as dist

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


def without_gloo(rank, size, place):
    import torch

    import reshard.torch as rt

    dist.is_gloo_available = lambda: False
    rt.save({"x": torch.full((2,), 5)}, place)
    assert isinstance(group_for(), StoreGroup)
    state = {"x": torch.zeros(2, dtype=torch.int64)}
    rt.load(state, place)
    assert state["x"].tolist() == [5, 5]


@pytest.mark.parametrize("work", [over_gloo, over_the_store])
def test_messages_of_all_lengths_arrive(ranks, work):
    ranks(3, work)


def test_a_torch_without_gloo(ranks, place):
    ranks(2, without_gloo, place)


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
