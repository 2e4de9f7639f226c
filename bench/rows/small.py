"""2. Small tensors: 20,000 of 1 KiB."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import Bench, Row, cleared, raw_read, raw_write, remove, take_turns, timed, view

import reshard.torch as rt
from rows import pytorch


def rows(bench: Bench) -> Iterator[Row]:
    count = 500 if bench.quick else 20_000
    what = f"{count:,} × 1 KiB"
    state = {f"layers.{i}.weight": torch.full((256,), float(i + 1)) for i in range(count)}
    target = {key: torch.ones(256) for key in state}
    whole = torch.cat(list(state.values()))
    whole_target = torch.ones_like(whole)
    theirs, ours, raw = bench.place("torch"), bench.place("ours"), bench.place("raw")
    rounds = min(bench.rounds, 3)
    seconds = take_turns(
        rounds,
        {
            "limit": lambda: raw_write(raw, [view(whole)], sync=True, threads=1),
            "torch": lambda: (place := cleared(theirs)) and timed(lambda: pytorch.save(state, place)),
            "ours": lambda: (place := cleared(ours)) and timed(lambda: rt.save(state, place)),
        },
    )
    size = whole.nbytes
    yield Row(
        "small/save",
        f"save {what}, synced",
        seconds["ours"],
        seconds["torch"],
        seconds["limit"],
        limit_name="raw write + fsync",
        bytes=size,
    )
    seconds = take_turns(
        rounds,
        {
            "limit": lambda: raw_read(raw, [view(whole_target)], threads=1),
            "torch": lambda: timed(lambda: pytorch.load(target, str(theirs))),
            "ours": lambda: timed(lambda: rt.load(target, str(ours))),
        },
    )
    if not all(torch.equal(target[key], state[key]) for key in state):
        raise AssertionError("what was loaded is not what was saved")
    yield Row(
        "small/load", f"load {what}", seconds["ours"], seconds["torch"], seconds["limit"], limit_name="raw preadv", bytes=size
    )
    for place in (theirs, ours, raw):
        remove(place)
