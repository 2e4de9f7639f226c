"""8. Saving in the background: the stall, what a busy loop feels of it, resident memory over 50 saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ranks
from harness import MIB, Bench, Row, cleared, memcpy, remove, resident, take_turns, timed

SAVES = 50


def begin(side: str, state: dict[str, Any], place: str, saver: Any):
    """Starts a save; gives what waits for its end."""
    if side == "ours":
        return saver.save(state, place).result
    import torch.distributed.checkpoint as dcp

    return dcp.async_save(state, checkpoint_id=place, no_dist=True).result


def stall(_rank: int, _size: int, folder: str, count: int, each: int, rounds: int):
    import torch

    import reshard.torch as rt

    torch.set_num_threads(2)
    state = {f"layers.{i}.weight": torch.full((each // 4,), float(i)) for i in range(count)}
    saver = rt.AsyncSaver()
    saver.reserve(count * each)
    copies = [torch.ones_like(tensor).numpy() for tensor in state.values()]

    def start(side: str) -> float:
        place = cleared(Path(folder) / side)
        waits: list[Any] = []
        seconds = timed(lambda: waits.append(begin(side, state, place, saver)))
        waits[0]()
        return seconds

    return take_turns(
        rounds,
        {
            "limit": lambda: memcpy([tensor.numpy() for tensor in state.values()], copies),
            "torch": lambda: start("torch"),
            "ours": lambda: start("ours"),
        },
    )


def busy(_rank: int, _size: int, folder: str, count: int, each: int, rounds: int):
    """Milliseconds of a step of a training loop: alone, and while each side writes."""
    import torch

    import reshard.torch as rt

    torch.set_num_threads(1)
    state = {f"layers.{i}.weight": torch.full((each // 4,), float(i)) for i in range(count)}
    saver = rt.AsyncSaver()
    saver.reserve(count * each)
    matrix = torch.randn(192, 192)

    def step() -> None:
        # Small products and some Python between them, as in a loop that is not one big kernel.
        value = matrix
        for _ in range(10):
            value = torch.tanh(value @ matrix)

    def steps(until) -> float:
        number, start = 0, time.perf_counter()
        while not until(number, time.perf_counter() - start):
            step()
            number += 1
        return (time.perf_counter() - start) / max(number, 1)

    def alone() -> float:
        return steps(lambda _, seconds: seconds > 1.0)

    def during(side: str) -> float:
        place = cleared(Path(folder) / side)
        if side == "ours":
            handle = saver.save(state, place)
        else:
            import torch.distributed.checkpoint as dcp

            handle = dcp.async_save(state, checkpoint_id=place, no_dist=True)
        result = steps(lambda number, _: number > 0 and handle.done())
        handle.result()
        return result

    return take_turns(rounds, {"limit": alone, "torch": lambda: during("torch"), "ours": lambda: during("ours")})


def memory(_rank: int, _size: int, folder: str, side: str, count: int, each: int, saves: int) -> tuple[float, float]:
    """Resident memory after two saves and after all."""
    import torch

    import reshard.torch as rt

    state = {f"layers.{i}.weight": torch.full((each // 4,), float(i)) for i in range(count)}
    saver = rt.AsyncSaver()
    early = 0
    place = Path(folder) / side
    for number in range(saves):
        remove(place)
        begin(side, state, str(place), saver)()
        if number == 1:
            early = resident()
    return early / 1e6, resident() / 1e6


def rows(bench: Bench) -> Iterator[Row]:
    folder = bench.place("background")
    folder.mkdir(parents=True, exist_ok=True)
    count, each = (4, MIB) if bench.quick else (64, 32 * MIB)
    total = count * each
    what = f"{total / (1 << 30):.0f} GiB" if total >= 1 << 30 else f"{total // MIB} MiB"
    ((seconds),) = ranks.run(1, stall, str(folder), count, each, bench.rounds)
    yield Row(
        "background/stall",
        f"async_save returns, {what}",
        seconds["ours"],
        seconds["torch"],
        seconds["limit"],
        limit_name="memcpy by two threads",
        bytes=total,
    )
    ((seconds),) = ranks.run(1, busy, str(folder), count, each, min(bench.rounds, 3))
    yield Row(
        "background/busy",
        f"step of a busy loop while {what} are written",
        seconds["ours"],
        seconds["torch"],
        seconds["limit"],
        limit_name="the same step with nothing written",
    )
    saves, each = (5, MIB) if bench.quick else (SAVES, 32 * MIB)
    found = {side: ranks.run(1, memory, str(folder), side, 4, each, saves)[0] for side in ("torch", "ours")}
    note = "; ".join(
        f"{name}: {found[side][0]:.0f} MB after 2 saves, {found[side][1]:.0f} MB after {saves}"
        for side, name in (("ours", "reshard"), ("torch", "PyTorch"))
    )
    yield Row(
        "background/memory",
        f"resident memory after {saves} saves over that after 2",
        [found["ours"][1] / found["ours"][0]],
        [found["torch"][1] / found["torch"][0]],
        [1.0],
        limit_name="no growth",
        unit="×",
        note=note,
    )
    remove(folder)
