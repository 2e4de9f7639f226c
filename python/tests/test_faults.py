"""When something goes wrong: the right exception on every rank, soon, and the old checkpoint untouched."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_cross import state_in

import reshard
import reshard.torch as rt


def outcome(work):
    """What a rank saw: the class of the exception, its text, the ranks it names, and how long it took."""
    start = time.monotonic()
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error), list(getattr(error, "ranks", [])), time.monotonic() - start
    return None


class Raising:
    """A Stateful that raises on one rank."""

    def __init__(self, bad):
        self.bad = bad

    def state_dict(self):
        if self.bad:
            raise ZeroDivisionError("on purpose")
        return {"x": torch.ones(1)}

    def load_state_dict(self, state):
        pass


def raises_on_one(rank, size, path):
    saved = outcome(lambda: rt.save({"s": Raising(rank == 1)}, path))
    rt.save({"s": Raising(False)}, path)
    loaded = outcome(lambda: rt.load({"s": Raising(rank == 2)}, path))
    rt.load({"s": Raising(False)}, path)
    in_background = outcome(lambda: rt.async_save({"s": Raising(rank == 0)}, path + "-async"))
    return saved, loaded, in_background


def test_a_rank_that_raises_before_the_engine_is_heard_by_all(ranks, path):
    results = ranks(3, raises_on_one, path)
    for case, bad in ((0, 1), (1, 2), (2, 0)):
        for rank, result in enumerate(results):
            name, text, named, took = result[case]
            assert name == ("ZeroDivisionError" if rank == bad else "GroupError"), (case, rank, text)
            assert "on purpose" in text and took < 20
            assert rank == bad or named == [bad]
    assert not rt.exists(path + "-async")


def one_rank_asks(rank, size, path):
    """A save in the background fails; rank 0 asks for the failure and goes on, rank 1 does not."""
    # Something is in the way of rank 1's file.
    if rank == 1:
        os.makedirs(path + "-bad/__1_0.distcp/x")
    handle = rt.async_save({"x": rt.PerRank(torch.ones(3))}, path + "-bad")
    first = outcome(handle.result) if rank == 0 else None
    second = outcome(lambda: rt.async_save({"x": torch.ones(3)}, path))
    third = rt.async_save({"x": torch.ones(3)}, path).result()
    return first, second, third.total_bytes


def test_a_failure_that_one_rank_has_handled_is_raised_on_the_other_and_nobody_hangs(ranks, path):
    (first, second, stored), (_, unasked, also) = ranks(2, one_rank_asks, path)
    assert first[0] == "StorageError" and first[2] == [1], first
    assert unasked[0] == "StorageError" and "__1_0" in unasked[1] and unasked[3] < 20, unasked
    assert second[0] == "GroupError" and second[2] == [1] and second[3] < 20, second
    assert stored == also == 12 and rt.exists(path)


def pickles_on_one(rank, size, path):
    return outcome(lambda: rt.save({"f": (lambda: 1) if rank == 1 else 5}, path))


def test_a_leaf_that_one_rank_cannot_pickle(ranks, path):
    results = ranks(2, pickles_on_one, path)
    assert results[0][0] == "GroupError" and results[0][2] == [1] and results[1][0] == "InvalidInput"
    assert not rt.exists(path)


def killed(rank, size, path, when):
    state = state_in("rows", size, True)
    rt.save(state, path)
    if rank == 1:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)

        class Killer:
            def state_dict(self):
                os.kill(os.getpid(), signal.SIGKILL)

            def load_state_dict(self, state):
                pass

        rt.save({"model": Killer()}, path, overwrite=True, timeout=15)
    return outcome(lambda: rt.save(state, path, overwrite=True, timeout=15))


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_rank_is_an_error_on_all_others_within_the_timeout(ranks, path, when):
    results = ranks(3, killed, path, when, may_die=True)
    assert repr(results[1]) == "Died()"
    for result in (results[0], results[2]):
        assert result is not None and result[0] == "GroupError" and result[3] < 40
    # What was there before is there still.
    with reshard.open(path) as ck:
        assert ck["model.even"].numpy().shape == (8, 12)


def on_full_disk(rank, size, places):
    # Only rank 1's folder is on the full disk, through a link: the others' data would fit.
    state = {"w": torch.zeros(1_000_000 + rank), "x": torch.ones(1)}
    return outcome(lambda: rt.save({"big": rt.PerRank(state["w"])}, places))


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


def test_a_full_disk_is_an_error_on_every_rank_and_nothing_is_left(ranks, small_disk):
    path = str(small_disk / "checkpoint")
    results = ranks(2, on_full_disk, path)
    assert all(result is not None and result[0] == "StorageError" and result[3] < 30 for result in results), results
    assert not rt.exists(path)
    rt.save({"small": torch.ones(10)}, path)


def load_damaged(rank, size, path):
    return outcome(lambda: rt.load(state_in("columns", size, False), path))


def save_rows(rank, size, path):
    rt.save(state_in("rows", size, True), path)


def test_a_corrupt_file_is_an_error_on_every_rank(ranks, path):
    ranks(3, save_rows, path)
    file = pathlib.Path(path) / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    with reshard.open(path) as ck:
        chunk = next(c for c in ck._open().entry("model.even").chunks if c.offsets[0] > 0)
        local = ck["model.even"][chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
    at = data.find(local.tobytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    # Whole records are verified; rank 0 of one rank reads all of it.
    with pytest.raises(reshard.Corrupt) as raised:
        rt.load({"model": {"even": torch.zeros(8, 12)}}, path, strict=False)
    assert raised.value.keys == ["model.even"] and raised.value.files == ["__1_0.distcp"]
    results = ranks(2, load_damaged_always, path)
    assert all(result is not None and result[0] == "Corrupt" for result in results), results


def load_damaged_always(rank, size, path):
    return outcome(lambda: rt.load(state_in("columns", size, False), path, verify="always"))


def test_a_missing_file_is_incomplete_on_every_rank(ranks, path):
    ranks(2, save_rows, path)
    (pathlib.Path(path) / "__1_0.distcp").unlink()
    results = ranks(2, load_damaged, path)
    assert all(result is not None and result[0] == "Incomplete" for result in results), results


def nothing_there(rank, size, path):
    return outcome(lambda: rt.load({"x": torch.zeros(1)}, path))


def test_nothing_there_is_not_found_on_every_rank(ranks, path):
    assert all(result[0] == "NotFound" for result in ranks(2, nothing_there, path))


def mismatch_on_one(rank, size, path):
    rt.save({"x": torch.ones(2)}, path)
    return outcome(lambda: rt.load({"x": torch.zeros(2 + rank)}, path))


def test_a_mismatch_on_one_rank_is_one_on_all(ranks, path):
    results = ranks(2, mismatch_on_one, path)
    assert [result[0] for result in results] == ["Mismatch", "Mismatch"] and results[0][2] == [1]


def subgroups(rank, size, path):
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        rt.save({"x": torch.full((2,), rank // 2)}, path, process_group=group)
        report = rt.load({"x": torch.zeros(2, dtype=torch.int64)}, path, process_group=group)
        assert report.tensors == 1
        return None
    return outcome(lambda: rt.save({"x": torch.ones(1)}, path, process_group=group))


def test_a_process_group_of_some_ranks(ranks, path):
    results = ranks(3, subgroups, path)
    assert results[0] is None and results[2] is None and results[1][0] == "InvalidInput"


def test_ctrl_c_interrupts_and_publishes_nothing(tmp_path):
    # Saving to a path on a store that never answers would hang; a big state on a slow disk is simulated by stopping early.
    code = f"""
import os, signal, sys, threading, time
import torch, reshard.torch as rt
from reshard import _reshard

class Stuck:
    rank, size, plans = 0, 2, _reshard.PlanCache()
    def all_gather(self, data): time.sleep(3600)
    def gather(self, root, data): time.sleep(3600)
    def broadcast(self, root, data): time.sleep(3600)

import reshard.torch._save as s
s.group_for = lambda *a, **k: Stuck()
# What runs in the background of a shell inherits that this signal is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    rt.save({{"x": torch.ones(3)}}, {str(tmp_path / "c")!r})
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=pathlib.Path(__file__).parents[1]
    )
    assert run.stdout.strip() == "interrupted", run.stderr
    assert not rt.exists(tmp_path / "c")


def in_a_fork(work):
    """What a child process forked from this one says of some work."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, repr(work()).encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        answer = said.read().decode()
    os.waitpid(child, 0)
    return answer


def test_a_fork_of_a_process_that_used_the_engine_works(tmp_path):
    rt.save({"x": torch.arange(5.0)}, tmp_path / "parent")
    opened = reshard.open(tmp_path / "parent")
    saver = rt.AsyncSaver(1 << 20)
    saver.save({"x": torch.ones(1)}, tmp_path / "first").result()

    def use():
        state = {"x": torch.zeros(5)}
        rt.load(state, tmp_path / "parent")
        assert state["x"].tolist() == opened["x"][:].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        rt.save({"x": torch.ones(2)}, tmp_path / "child", overwrite=True)
        rt.async_save({"x": torch.ones(2)}, tmp_path / "background", overwrite=True).result()
        saver.save({"x": torch.ones(2)}, tmp_path / "saver", overwrite=True).result()
        dcp.save({"x": torch.ones(2)}, storage_writer=rt.StorageWriter(tmp_path / "dcp"), no_dist=True)
        # A fork of the fork.
        return in_a_fork(lambda: reshard.verify(tmp_path / "saver").sound)

    for _ in range(2):
        assert in_a_fork(use) == repr("True")
    assert all(reshard.verify(tmp_path / name).sound for name in ("child", "background", "saver", "dcp"))


def test_a_save_under_way_is_not_waited_for_in_a_fork(tmp_path):
    handle = rt.async_save({f"x{i}": torch.ones(1000) for i in range(2000)}, tmp_path)
    if handle.done():
        pytest.skip("it was too fast")
    answer = in_a_fork(lambda: handle.result())
    assert "forked from" in answer or "SaveReport" in answer
    handle.result()
    assert reshard.verify(tmp_path).sound
