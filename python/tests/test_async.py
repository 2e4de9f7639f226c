"""Saving in the background."""

import asyncio
import threading

import pytest
import torch
from helpers import same
from test_cross import check, state_in

import reshard
import reshard.torch as rt


def test_what_changes_after_staging_is_not_saved(path):
    tensor = torch.arange(1_000_000, dtype=torch.float32)
    value = {"lr": 0.1}
    handle = rt.async_save({"w": tensor, "v": value}, path)
    assert handle.staged.done() and handle.staged.result() is None
    tensor.zero_()
    value["lr"] = 99
    report = handle.result()
    assert report.bytes == 4_000_000 and handle.done() and handle.exception() is None
    state = {"w": torch.zeros(1_000_000), "v": {"lr": None}}
    rt.load(state, path)
    assert same(state["w"], torch.arange(1_000_000, dtype=torch.float32)) and state["v"]["lr"] == 0.1
    assert handle.stall > 0 and "durable" in repr(handle) and handle.progress()[0] == 4_000_000


def test_many_in_a_row_and_awaited(tmp_path):
    handles = [rt.async_save({"w": torch.full((1000,), float(i))}, tmp_path / f"step-{i}") for i in range(4)]

    async def wait():
        return [await handle for handle in handles]

    reports = asyncio.run(wait())
    assert [report.path for report in reports] == [str(tmp_path / f"step-{i}") for i in range(4)]
    assert reports[3].plan_cached
    assert reshard.latest(tmp_path) == str(tmp_path / "step-3")


def test_what_exceeds_the_budget_is_still_saved(path):
    saver = rt.AsyncSaver(staging_budget=1000)
    saver.reserve(1000)
    state = {str(i): torch.full((100,), float(i)) for i in range(20)}
    saver.save(state, path).result()
    loaded = {key: torch.zeros(100) for key in state}
    rt.load(loaded, path)
    assert all(same(loaded[key], state[key]) for key in state)


def test_a_failure_is_told_by_the_handle(path):
    rt.save({"w": torch.ones(1)}, path)
    saver = rt.AsyncSaver()
    with pytest.raises(reshard.AlreadyExists):
        saver.save({"w": torch.ones(1)}, path)


def test_a_failure_that_nobody_asked_for_is_told_by_the_next_save(tmp_path):
    saver = rt.AsyncSaver()
    handle = saver.save({"w": torch.ones(4_000_000)}, tmp_path / "a")
    handle.cancel()
    error = None
    while not handle.done():
        threading.Event().wait(0.01)
    if handle.durable.exception() is None:
        pytest.skip("the save was done before it could be cancelled")
    with pytest.raises(reshard.Cancelled):
        saver.save({"w": torch.ones(1)}, tmp_path / "b")
    assert error is None and not rt.exists(tmp_path / "a")
    saver.save({"w": torch.ones(1)}, tmp_path / "b").result()


def on_ranks(rank, size, path):
    state = state_in("rows", size, True)
    for step in range(3):
        handle = rt.async_save(state, f"{path}-{step}")
        # A save in the foreground meanwhile, over the other group.
        rt.save({"x": torch.ones(2)}, f"{path}-{step}-sync")
        report = handle.result(60)
        assert report.plan_cached == (step > 0)
    loaded = state_in("columns", size, False)
    rt.load(loaded, f"{path}-2")
    check(loaded, "columns", size)


def test_on_ranks(ranks, path):
    ranks(3, on_ranks, path)
