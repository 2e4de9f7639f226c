"""1. Large tensors, one process: save synced and not, load, with and without checksums."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import MIB, Bench, Row, cleared, raw_read, raw_write, remove, take_turns, timed, view

import reshard.torch as rt
from rows import pytorch


def rows(bench: Bench) -> Iterator[Row]:
    count, each = (8, MIB) if bench.quick else (128, 16 * MIB)
    what = f"{count} × {each // MIB} MiB"
    state = {f"layers.{i:03}.weight": torch.full((each // 4096, 1024), float(i + 1)) for i in range(count)}
    views = [view(tensor) for tensor in state.values()]
    total = count * each
    theirs, ours, raw = bench.place("torch"), bench.place("ours"), bench.place("raw")

    for sync in (True, False):
        name = "synced" if sync else "not synced"
        seconds = take_turns(
            bench.rounds,
            {
                "limit": lambda: raw_write(raw, views, sync),
                "torch": lambda: (place := cleared(theirs)) and timed(lambda: pytorch.save(state, place, sync)),
                "two": lambda: (place := cleared(theirs)) and timed(lambda: pytorch.save(state, place, sync, threads=2)),
                "plain": lambda: (place := cleared(ours)) and timed(lambda: rt.save(state, place, sync=sync, checksums=False)),
                "ours": lambda: (place := cleared(ours)) and timed(lambda: rt.save(state, place, sync=sync)),
            },
        )
        limit = "raw write + fsync" if sync else "raw write"
        slug = "synced" if sync else "unsynced"
        common = {"limit": seconds["limit"], "limit_name": limit, "bytes": total}
        yield Row(f"large/save-{slug}", f"save {what}, {name}", seconds["ours"], seconds["torch"], **common)
        yield Row(
            f"large/save-{slug}-two-threads",
            f"save {what}, {name}; PyTorch with 2 threads",
            seconds["ours"],
            seconds["two"],
            **common,
        )
        yield Row(
            f"large/save-{slug}-no-checksums", f"save {what}, {name}, no checksums", seconds["plain"], seconds["torch"], **common
        )

    for place, save in ((theirs, pytorch.save), (ours, rt.save)):
        save(state, cleared(place))
    raw_write(raw, views, sync=True)
    target = {key: torch.ones_like(tensor) for key, tensor in state.items()}
    target_views = [view(tensor) for tensor in target.values()]

    def check(load) -> float:
        for tensor in target.values():
            tensor.zero_()
        seconds = timed(load)
        if not all(torch.equal(target[key], state[key]) for key in (next(iter(state)), f"layers.{count - 1:03}.weight")):
            raise AssertionError("what was loaded is not what was saved")
        return seconds

    seconds = take_turns(
        bench.rounds,
        {
            "limit": lambda: check(lambda: raw_read(raw, target_views)),
            "torch": lambda: check(lambda: pytorch.load(target, str(theirs))),
            "plain": lambda: check(lambda: rt.load(target, str(ours), verify="never")),
            "ours": lambda: check(lambda: rt.load(target, str(ours))),
        },
    )
    common = {"limit": seconds["limit"], "limit_name": "raw preadv", "bytes": total}
    yield Row(
        "large/load",
        f"load {what}, checksums verified",
        seconds["ours"],
        seconds["torch"],
        note="PyTorch verifies none",
        **common,
    )
    yield Row("large/load-no-checksums", f"load {what}, no checksums", seconds["plain"], seconds["torch"], **common)
    for place in (theirs, ours, raw):
        remove(place)
