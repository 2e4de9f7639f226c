"""The plan of a save is kept for the next save of the same layout, and only for that."""

import torch
import torch.distributed as dist
from helpers import same
from test_cross import check, state_in

import reshard.torch as rt
from reshard.torch import _group


def traffic(group, work):
    """What `work` returns, and how many bytes this rank gave to the others meanwhile."""
    given = []

    def counted(name, method):
        def call(self, *arguments):
            given.append(len(arguments[-1] or b""))
            return method(self, *arguments)

        return call

    kept = {name: getattr(group, name) for name in ("all_gather", "gather", "broadcast")}
    for name, method in kept.items():
        setattr(group, name, counted(name, method))
    try:
        return work(), sum(given)
    finally:
        for name, method in kept.items():
            setattr(group, name, method)


def many(size, rank, count=300):
    """Rows of many tensors, so that a plan is much longer than a greeting."""
    return {
        f"layer.{i}.weight": rt.ShardView(torch.float32, (4 * size, 3), [((4 * rank, 0), torch.full((4, 3), float(i + rank)))])
        for i in range(count)
    }


def second_save(rank, size, path):
    reports, bytes_given = [], []
    for step in range(3):
        report, given = traffic(_group.GlooGroup, lambda: rt.save({"model": many(size, rank)}, f"{path}-{step}"))
        reports.append(report)
        bytes_given.append(given)
    loaded = {f"layer.{i}.weight": torch.zeros(4 * size, 3) for i in range(300)}
    rt.load({"model": loaded}, f"{path}-2")
    for i in range(300):
        assert same(loaded[f"layer.{i}.weight"], torch.cat([torch.full((4, 3), float(i + r)) for r in range(size)]))
    return [report.plan_cached for report in reports], bytes_given


def test_the_second_save_of_a_layout_exchanges_almost_nothing(ranks, path):
    for cached, given in ranks(4, second_save, path):
        assert cached == [False, True, True]
        # What is left: greetings, and what was written where.
        assert given[1] == given[2] < given[0]


def changes(rank, size, path):
    def saved(name, layout, extra=None, **options):
        state = state_in(layout, size, True)
        if extra is not None:
            state["extra"] = extra
        return rt.save(state, f"{path}-{name}", **options).plan_cached

    def loads(name):
        loaded = state_in("columns", size, False)
        rt.load(loaded, f"{path}-{name}")
        check(loaded, "columns", size)

    assert not saved("rows", "rows")
    assert saved("rows-again", "rows")
    assert not saved("columns", "columns")
    assert saved("columns-again", "columns")
    # One rank brings something that the others do not have.
    assert not saved("one", "columns", extra=7 if rank == 1 else None)
    assert saved("one-again", "columns", extra=8 if rank == 1 else None)
    # Another group of ranks keeps a plan of its own.
    pair = dist.new_group([0, 1])
    if rank < 2:
        own = {"x": rt.PerRank(torch.full((3,), float(rank)))}
        assert not rt.save(own, f"{path}-pair", process_group=pair).plan_cached
        assert rt.save(own, f"{path}-pair-again", process_group=pair).plan_cached
        back = {"x": rt.PerRank(torch.zeros(3))}
        rt.load(back, f"{path}-pair-again", process_group=pair)
        assert back["x"].value.tolist() == [rank] * 3
    assert saved("one-more", "columns", extra=9 if rank == 1 else None)
    for name in ("rows", "rows-again", "columns", "columns-again", "one", "one-again", "one-more"):
        loads(name)
    back = {"extra": None}
    rt.load(back, f"{path}-one-again")
    assert back["extra"] == 8


def test_a_changed_layout_is_planned_anew(ranks, path):
    ranks(3, changes, path)


def fails_between(rank, size, path):
    state = state_in("rows", size, True)
    rt.save(state, f"{path}-0")
    try:
        rt.save({**state, "bad": lambda: None} if rank == 1 else state, f"{path}-bad")
    except Exception:
        pass
    else:
        raise AssertionError("a rank could not describe its state, and the save returned")
    rt.save(state, f"{path}-1")
    loaded = state_in("columns", size, False)
    rt.load(loaded, f"{path}-1")
    check(loaded, "columns", size)
    return rt.exists(f"{path}-bad")


def test_a_save_that_failed_in_between_leaves_the_next_one_whole(ranks, path):
    assert ranks(3, fails_between, path) == [False] * 3


def test_alone_as_well(tmp_path):
    state = {"a": torch.arange(4.0), "b": 1}
    rt.save({"other": torch.zeros(1)}, tmp_path / "0")
    assert not rt.save(state, tmp_path / "1").plan_cached
    state["a"] += 1
    state["b"] = 2
    assert rt.save(state, tmp_path / "2").plan_cached
    loaded = {"a": torch.zeros(4), "b": 0}
    rt.load(loaded, tmp_path / "2")
    assert loaded["b"] == 2 and same(loaded["a"], state["a"])
    # Same keys, another shape, then another dtype.
    assert not rt.save({"a": torch.arange(6.0), "b": 2}, tmp_path / "3").plan_cached
    assert not rt.save({"a": torch.arange(6), "b": 2}, tmp_path / "4").plan_cached
    loaded = {"a": torch.zeros(6, dtype=torch.int64), "b": 0}
    rt.load(loaded, tmp_path / "4")
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4, 5]
