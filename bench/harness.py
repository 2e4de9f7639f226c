"""What every row is measured with: rounds in which the sides take turns, raw limits of the machine, memory of a process.

Caches are treated the same for everyone. Before a timed save everything dirty is written back (`sync`), outside of the
timing, and the place is empty. Loads read files that were written in this run and are in the page cache, into memory that
has been touched. One round before the counted ones warms up each side and is dropped.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
THREADS = 2

CACHES = (
    "Both sides write to the same disk. Before a timed save, dirty pages are written back and the place is empty; loads read "
    "files of the same run from the page cache into touched memory. Sides take turns; where a row is short, one warm-up round is dropped."
)


@dataclass
class Row:
    """One line of the table. Everything is less-is-better: seconds, megabytes, counts."""

    key: str
    title: str
    ours: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    beside: str = "PyTorch"
    limit_name: str = ""
    unit: str = "s"
    bytes: int = 0
    note: str = ""
    skipped: str = ""
    group: int = 0

    @property
    def ratio(self) -> float | None:
        """How many times less than the other side."""
        return quotient(self.other, self.ours)

    @property
    def of_limit(self) -> float | None:
        """The share of what the machine allows."""
        return quotient(self.limit, self.ours)

    def to_dict(self) -> dict[str, Any]:
        sides = {}
        for name in ("ours", "other", "limit"):
            samples = getattr(self, name)
            sides[name] = (
                {"median": median(samples), "least": min(samples), "most": max(samples), "samples": samples} if samples else None
            )
        plain = {
            name: getattr(self, name)
            for name in ("group", "key", "title", "unit", "beside", "limit_name", "bytes", "note", "skipped")
        }
        return {**plain, **sides, "ratio": self.ratio, "of_limit": self.of_limit}


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def quotient(above: Sequence[float], below: Sequence[float]) -> float | None:
    """The median over rounds where both were measured in each, the quotient of medians otherwise; none of nothing."""
    if not above or not below or not all(below):
        return None
    if len(above) == len(below):
        return median([a / b for a, b in zip(above, below)])
    return median(above) / median(below)


@dataclass
class Bench:
    """What a group of rows is given: where files go and how much to do."""

    folder: Path
    quick: bool
    rounds: int
    build: bool = True

    def place(self, name: str) -> Path:
        return self.folder / name

    def say(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)


Side = Callable[[], float]


def take_turns(rounds: int, sides: dict[str, Side], warm: bool = True) -> dict[str, list[float]]:
    """Seconds of each side, by round. Who begins changes from round to round."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1 if warm else 0, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            seconds = sides[name]()
            if number >= 0:
                samples[name].append(seconds)
    return samples


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cleared(place: Path) -> str:
    """An empty place, with nothing left to write back from before; in a trial it does not matter what is."""
    remove(place)
    if not os.environ.get("RESHARD_BENCH_TRIAL"):
        os.sync()
    return str(place)


def remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    elif place.exists():
        place.unlink()


# ---- limits ---------------------------------------------------------------------------------------------------------


def view(tensor: Any) -> memoryview:
    """A tensor's memory as bytes."""
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def in_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Runs `work(i)` on so many threads; an error of any is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def shares(views: Sequence[memoryview], threads: int) -> list[list[tuple[int, memoryview]]]:
    """The buffers with their offsets in one file, cut into as many neighbouring lots."""
    placed, at = [], 0
    for part in views:
        placed.append((at, part))
        at += len(part)
    step = -(-len(placed) // threads)
    return [placed[i * step : (i + 1) * step] for i in range(threads)]


def raw_write(path: Path, views: Sequence[memoryview], sync: bool, threads: int = THREADS, clear: bool = True) -> float:
    """Positioned writes of the buffers into one new file, and fsync if asked."""
    if clear:
        cleared(path)
    lots = shares(views, threads)

    def work() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:

            def write(number: int) -> None:
                for at, part in lots[number]:
                    done = 0
                    while done < len(part):
                        done += os.pwritev(descriptor, [part[done:]], at + done)

            in_threads(write, threads)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return timed(work)


def raw_read(path: Path, views: Sequence[memoryview], threads: int = THREADS, start: int = 0) -> float:
    """Positioned reads of one file into the buffers."""
    lots = shares(views, threads)

    def work() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:

            def read(number: int) -> None:
                for at, part in lots[number]:
                    done = 0
                    while done < len(part):
                        count = os.preadv(descriptor, [part[done:]], start + at + done)
                        if count == 0:
                            raise EOFError(path)
                        done += count

            in_threads(read, threads)
        finally:
            os.close(descriptor)

    return timed(work)


def memcpy(sources: Sequence[Any], targets: Sequence[Any], threads: int = THREADS) -> float:
    """One pass of copying arrays of NumPy, which lets go of the interpreter's lock."""
    import numpy

    pairs = list(zip(sources, targets))

    def copy(number: int) -> None:
        for source, target in pairs[number::threads]:
            numpy.copyto(target, source)

    return timed(lambda: in_threads(copy, threads))


# ---- memory ---------------------------------------------------------------------------------------------------------


def _status(name: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return _status("VmRSS:")


class Peak:
    """How far a process's memory rose above what it held at the beginning."""

    def __enter__(self) -> Peak:
        gc.collect()
        with open("/proc/self/clear_refs", "w") as marks:
            marks.write("5")
        self._before = resident()
        self.bytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = max(_status("VmHWM:") - self._before, 0)
