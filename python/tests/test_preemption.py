"""A run that is told to stop, by a signal or a time limit, on one rank: all save that step, and go on from it."""

import os
import signal

import pytest
import torch

import reshard.torch as rt


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(16, 16)


def train(rank, size, root, how, stop_at, steps=8):
    """Trains until it is told to stop; what it was told at `stop_at` reaches one rank alone."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    seen = {"step": -1}
    limit = 0.0 if how == "time limit" and stop_at == 0 else None
    ckpt = rt.Checkpointer(root, model=net, optimizer=optimizer, state={"seen": seen}, every=3, time_limit=limit, keep_last=2)
    start = ckpt.restore()
    for step in range(start, steps):
        assert seen["step"] == step - 1
        optimizer.zero_grad()
        net(torch.full((2, 16), float(step))).square().mean().backward()
        optimizer.step()
        seen["step"] = step
        if step == stop_at and rank == size - 1:
            if how in ("SIGTERM", "SIGUSR1"):
                os.kill(os.getpid(), getattr(signal, how))
        if ckpt.step(step):
            ckpt.close()
            return start, step, digest(net, optimizer)
    ckpt.close()
    return start, steps, digest(net, optimizer)


def digest(net, optimizer):
    slots = [each for state in optimizer.state.values() for each in state.values()]
    return [each.sum().item() for each in (*net.parameters(), *slots)]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1"])
def test_a_signal_on_one_rank_saves_and_stops_all(tmp_path, ranks, how):
    whole = ranks(1, train, str(tmp_path / "whole"), "never", None)[0]
    root = str(tmp_path / "run")
    # Step 5 is one at which a save in the background begins anyway, step 6 one at which it may still be under way.
    assert {(start, step) for start, step, _ in ranks(2, train, root, how, 6)} == {(0, 6)}
    ended = ranks(2, train, root, "never", None)
    assert {(start, step) for start, step, _ in ended} == {(7, 8)}
    assert ended[0][2] == whole[2]


def test_a_time_limit_saves_and_stops_all(tmp_path, ranks):
    root = str(tmp_path / "run")
    assert {(start, step) for start, step, _ in ranks(2, train, root, "time limit", 0)} == {(0, 0)}
    assert {(start, step) for start, step, _ in ranks(2, train, root, "never", None)} == {(1, 8)}
