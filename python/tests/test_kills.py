"""Ranks that are killed with SIGKILL while they save, with a checkpoint already there: the old one or a new one is found, whole."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as dcp

ROUNDS = 40 if os.environ.get("RESHARD_CAMPAIGN") else 4
SIZE = 200_000


def killed_after(seconds):
    """Without any warning, from a thread of its own."""

    def kill():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


@contextlib.contextmanager
def until_killed():
    """The peer may be killed first: this rank is told of the group, by our error or as the cause of PyTorch's, and of nothing else."""
    try:
        yield
    except Exception as error:
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        if not any(isinstance(cause, reshard.GroupError) for cause in causes):
            raise
        os.kill(os.getpid(), signal.SIGKILL)


def rounds(seed, low, high, number_after):
    """Kills after random times, which grow as long as nothing gets done in them: a machine may be busy. Gives the last number."""
    generator, slower, last = random.Random(seed), 1.0, 0
    for played in range(ROUNDS + 10):
        if played >= ROUNDS and last:
            break
        found = number_after(slower * generator.uniform(low, high), last)
        assert found >= last
        slower = slower if found > last else 2 * slower
        last = found
    return last


def sharded(rank, size, number):
    """This rank's rows, and a whole; both say which save they are of."""
    part = torch.full((SIZE // size,), float(number))
    return {"w": rt.ShardView.of_range(part, (SIZE,), rank * part.numel()), "v": torch.full((300,), number), "number": number}


def number_at(path):
    with reshard.open(path) as checkpoint:
        number = checkpoint["number"]
        assert (checkpoint["w"].numpy() == number).all() and (checkpoint["v"].numpy() == number).all()
    assert reshard.verify(path).sound
    return number


def overwrite(rank, size, path, how, first, seconds):
    """Saves over and over to one path, until it is killed."""
    killed_after(seconds)
    with until_killed():
        for number in range(first, first + 100_000):
            # PyTorch's leaves, which the drop-in module is given.
            state = {**sharded(rank, size, number), "w": torch.full((SIZE,), float(number))}
            if how == "save":
                dcp.save(state, checkpoint_id=path)
            else:
                dcp.async_save(state, checkpoint_id=path).result()


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_the_drop_in_module(tmp_path, ranks, how):
    path = str(tmp_path / "checkpoint")
    dcp.save({"w": torch.zeros(SIZE), "v": torch.zeros(300, dtype=torch.int64), "number": 0}, checkpoint_id=path, no_dist=True)

    def played(seconds, last):
        ranks(2, overwrite, path, how, last + 1, seconds, may_die=True)
        return number_at(path)

    assert rounds(5, 0.02, 0.3, played) > 0, "some save was published"


class Counted(nn.Module):
    """A model whose every weight is the number of the step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))


def run(rank, size, root, seconds):
    model = Counted()
    with until_killed():
        ckpt = rt.Checkpointer(root, model=model, loader=rt.ResumableSampler(1000), keep_last=2, signals=())
        start = ckpt.restore()
        assert (model.weight == start).all() and ckpt.loader.position == 3 * start
        if seconds is None:
            ckpt.close()
            return start
        killed_after(seconds)
        for step in range(start, start + 100_000):
            with torch.no_grad():
                model.weight.fill_(step + 1)
            ckpt.loader.position = 3 * (step + 1)
            ckpt.save(step)
    return None


def test_the_checkpointer(tmp_path, ranks):
    root = str(tmp_path / "run")

    def played(seconds, last):
        ranks(2, run, root, seconds, may_die=True)
        latest = reshard.latest(root)
        assert latest is None or reshard.verify(latest).sound
        (start,) = ranks(1, run, root, None)
        return start

    assert rounds(6, 0.05, 0.4, played) > 0, "some step was published"
