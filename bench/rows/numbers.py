"""12. Numbers about every tensor: one pass from the files, beside NumPy on whole tensors and beside reading alone.

From the page cache a read is a copy in memory, which takes less time than counting can: every element is counted by one store, and
a processor does one store at a time. From the disk, where checkpoints that are larger than memory are read, the pass takes what
reading takes. A disk that others use as well gives half as much from one second to the next: there are more rounds of these rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from harness import MIB, Bench, Row, cleared, raw_read, raw_write, remove, take_turns, timed, view

import reshard
import reshard.torch as rt


def numbers(array: np.ndarray) -> tuple[float, ...]:
    """What `reshard.stats` tells, the way one writes it with NumPy."""
    finite = array[np.isfinite(array)]
    magnitudes = np.abs(finite)
    np.histogram(np.log2(magnitudes[magnitudes > 0]), bins=np.arange(-150, 129))
    np.percentile(finite, [1, 5, 25, 50, 75, 95, 99])
    return (
        np.isnan(array).sum(),
        np.isinf(array).sum(),
        (array == 0).sum(),
        ((magnitudes > 0) & (magnitudes < np.finfo(array.dtype).tiny)).sum(),
        finite.min(),
        finite.max(),
        magnitudes.max(),
        finite.mean(dtype=np.float64),
        finite.std(dtype=np.float64),
        np.linalg.norm(finite.astype(np.float64)),
    )


def forgotten(place: Path) -> None:
    """Drops a place's files from the page cache, so that they are read from the disk."""
    files = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


LEAST_ROUNDS_OF_DISK = 9


def rows(bench: Bench) -> Iterator[Row]:
    count, each = (8, MIB) if bench.quick else (64, 16 * MIB)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        elements = each // dtype.itemsize
        one = torch.randn(elements, generator=torch.Generator().manual_seed(7)).mul_(0.02).to(dtype).reshape(-1, 1024)
        state = {f"layers.{i:03}.weight": one.clone() for i in range(count)}
        ours, raw = bench.place("ours"), bench.place("raw")
        rt.save(state, cleared(ours))
        views = [view(tensor) for tensor in state.values()]
        raw_write(raw, views, sync=True)
        target = [view(torch.empty_like(tensor)) for tensor in state.values()]
        wide = [tensor.float().numpy() for tensor in state.values()]

        def scanned(ours=ours, elements=elements) -> None:
            found = reshard.stats(ours)
            if any(stats.elements != elements or stats.nans for stats in found.values()):
                raise AssertionError("the numbers are not those of what was saved")

        seconds = take_turns(
            bench.rounds,
            {
                "limit": lambda raw=raw, target=target: raw_read(raw, target),
                # The arrays are in memory already: what NumPy takes is what it computes.
                "numpy": lambda wide=wide: timed(lambda: [numbers(array) for array in wide]),
                "ours": lambda scanned=scanned: timed(scanned),
            },
        )
        yield Row(
            f"numbers/{name}",
            f"numbers of {count} × {each // MIB} MiB of {name}",
            seconds["ours"],
            seconds["numpy"],
            limit=seconds["limit"],
            limit_name="raw preadv",
            bytes=count * each,
            beside="NumPy",
            note="NumPy has its arrays in memory already",
        )

        def cold_read(raw=raw, target=target) -> float:
            forgotten(raw)
            return raw_read(raw, target)

        def cold_scan(ours=ours, scanned=scanned) -> float:
            forgotten(ours)
            return timed(scanned)

        rounds = bench.rounds if bench.quick else max(bench.rounds, LEAST_ROUNDS_OF_DISK)
        seconds = take_turns(rounds, {"limit": cold_read, "ours": cold_scan})
        yield Row(
            f"numbers/{name}-disk",
            f"numbers of {count} × {each // MIB} MiB of {name}, from the disk",
            seconds["ours"],
            limit=seconds["limit"],
            limit_name="raw preadv",
            bytes=count * each,
            note="files are dropped from the page cache before each round",
        )
        for place in (ours, raw):
            remove(place)
