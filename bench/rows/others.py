"""11. What one would pick instead: safetensors, torch.save and PyTorch's async_save."""

from __future__ import annotations

import os
from collections.abc import Iterator

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from harness import MIB, Bench, Row, cleared, raw_read, raw_write, remove, take_turns, timed, view

import reshard.torch as rt


def synced(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def rows(bench: Bench) -> Iterator[Row]:
    count, each = (8, MIB) if bench.quick else (64, 16 * MIB)
    state = {f"layers.{i:03}.weight": torch.full((each // 4096, 1024), float(i + 1)) for i in range(count)}
    yield from compared(bench, state, f"{count} × {each // MIB} MiB", "large", bench.rounds)
    count = 500 if bench.quick else 20_000
    state = {f"layers.{i}.weight": torch.full((256,), float(i + 1)) for i in range(count)}
    yield from compared(bench, state, f"{count:,} × 1 KiB", "small", min(bench.rounds, 3))
    yield from background(bench)


def compared(bench: Bench, state: dict[str, torch.Tensor], what: str, slug: str, rounds: int) -> Iterator[Row]:
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    views = [view(tensor) for tensor in state.values()]
    into = [view(tensor) for tensor in target.values()]
    ours, raw = bench.place("ours"), bench.place("raw")
    files = {"safetensors": bench.place("model.safetensors"), "torch.save": bench.place("model.pt")}
    savers = {
        "safetensors": lambda place: safetensors.torch.save_file(state, place),
        "torch.save": lambda place: torch.save(state, place),
    }
    loaders = {
        "safetensors": lambda place: safetensors.torch.load_file(place),
        "torch.save": lambda place: torch.load(place, weights_only=True),
    }

    def save(name: str) -> float:
        place = cleared(files[name])
        return timed(lambda: (savers[name](place), synced(place)))

    def load(name: str) -> float:
        # Into the tensors that are there, as the others do and as training needs it.
        def work() -> None:
            loaded = loaders[name](str(files[name]))
            for key, tensor in target.items():
                tensor.copy_(loaded[key])

        return timed(work)

    total = sum(map(len, views))
    seconds = take_turns(
        rounds,
        {
            "limit": lambda: raw_write(raw, views, sync=True),
            "ours": lambda: (place := cleared(ours)) and timed(lambda: rt.save(state, place)),
            **{name: (lambda name=name: save(name)) for name in savers},
        },
    )
    for name in savers:
        common = {"limit": seconds["limit"], "limit_name": "raw write + fsync", "bytes": total, "beside": name}
        yield Row(f"others/{slug}-save-{name}", f"save {what}, synced; beside {name}", seconds["ours"], seconds[name], **common)
    seconds = take_turns(
        rounds,
        {
            "limit": lambda: raw_read(raw, into),
            "ours": lambda: timed(lambda: rt.load(target, str(ours))),
            **{name: (lambda name=name: load(name)) for name in loaders},
        },
    )
    for name in loaders:
        common = {"limit": seconds["limit"], "limit_name": "raw preadv", "bytes": total, "beside": name}
        note = "the file is then copied into the tensors that are there"
        yield Row(
            f"others/{slug}-load-{name}", f"load {what}; beside {name}", seconds["ours"], seconds[name], note=note, **common
        )
    for place in (ours, raw, *files.values()):
        remove(place)


def background(bench: Bench) -> Iterator[Row]:
    """From the call until the checkpoint is durable."""
    count, each = (8, MIB) if bench.quick else (64, 16 * MIB)
    state = {f"layers.{i:03}.weight": torch.full((each // 4096, 1024), float(i + 1)) for i in range(count)}
    theirs, ours, raw = bench.place("torch"), bench.place("ours"), bench.place("raw")
    views = [view(tensor) for tensor in state.values()]
    saver = rt.AsyncSaver()
    saver.reserve(count * each)
    seconds = take_turns(
        bench.rounds,
        {
            "limit": lambda: raw_write(raw, views, sync=True),
            "torch": lambda: (
                (place := cleared(theirs)) and timed(lambda: dcp.async_save(state, checkpoint_id=place, no_dist=True).result())
            ),
            "ours": lambda: (place := cleared(ours)) and timed(lambda: saver.save(state, place).result()),
        },
    )
    yield Row(
        "others/async-durable",
        f"async_save of {count} × {each // MIB} MiB until it is durable",
        seconds["ours"],
        seconds["torch"],
        seconds["limit"],
        limit_name="raw write + fsync",
        beside="PyTorch async_save",
        bytes=count * each,
        note="reshard writes in the background at low priority",
    )
    for place in (theirs, ours, raw):
        remove(place)
