"""5. FSDP2: save on 4 ranks; load on 4, 3 and 2; read amplification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ranks
from harness import Bench, Row, raw_read, raw_write, remove, take_turns, view

from rows import models, pytorch


def state_of(quick: bool, size: int):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = models.fsdp2(quick, size)
    optimizer = models.adam(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def save(rank: int, size: int, folder: str, quick: bool, rounds: int):
    import reshard.torch as rt

    state = state_of(quick, size)
    views = [view(tensor.contiguous()) for tensor in models.locals_of(state) if tensor.numel()]
    root = Path(folder)

    def raw() -> float:
        models.on_rank_0(rank, root / "nothing")
        path = root / f"raw{rank}"
        remove(path)
        seconds: list[float] = []
        ranks.together(lambda: seconds.append(raw_write(path, views, sync=True, threads=1, clear=False)))
        return seconds[0]

    def theirs() -> float:
        place = models.on_rank_0(rank, root / "torch")
        return ranks.together(lambda: pytorch.save(state, place, alone=False))

    def ours() -> float:
        place = models.on_rank_0(rank, root / "ours")
        return ranks.together(lambda: rt.save(state, place))

    seconds = take_turns(rounds, {"limit": raw, "torch": theirs, "ours": ours})
    return seconds, sum(map(len, views))


def load(rank: int, size: int, folder: str, quick: bool, rounds: int):
    import torch

    import reshard.torch as rt

    state = state_of(quick, size)
    views = [view(tensor) for tensor in models.locals_of(state) if tensor.numel() and tensor.is_contiguous()]
    own = sum(map(len, views))
    root = Path(folder)
    moved = []

    def raw() -> float:
        # As many bytes as this rank wants, from the file of one of the ranks that saved.
        return ranks.together(lambda: raw_read_wrapping(root / f"raw{rank}", views))

    def ours() -> float:
        reports = []
        seconds = ranks.together(lambda: reports.append(rt.load(state, str(root / "ours"))))
        moved.append((reports[0].bytes_read, reports[0].bytes_wanted))
        return seconds

    seconds = take_turns(
        rounds,
        {
            "limit": raw,
            "torch": lambda: ranks.together(lambda: pytorch.load(state, str(root / "torch"), alone=False)),
            "ours": ours,
        },
    )
    # What both put into memory is the same: the model was saved from the same seed.
    before = [tensor.clone() for tensor in models.locals_of(state)]
    pytorch.load(state, str(root / "torch"), alone=False)
    if not all(torch.equal(a, b) for a, b in zip(before, models.locals_of(state), strict=True)):
        raise AssertionError("PyTorch and reshard loaded different content")
    return seconds, own, moved[-1]


def raw_read_wrapping(path: Path, views: list[memoryview]) -> None:
    """Fills the buffers from a file that may hold fewer bytes, beginning anew at its start."""
    left, lot = path.stat().st_size, []
    room = left
    for part in views:
        if len(part) > room:
            raw_read(path, lot, threads=1)
            lot, room = [], left
        lot.append(part[:room])
        room -= len(lot[-1])
    raw_read(path, lot, threads=1)


def rows(bench: Bench) -> Iterator[Row]:
    folder = bench.place("fsdp2")
    folder.mkdir(parents=True, exist_ok=True)
    results = ranks.run(4, save, str(folder), bench.quick, bench.rounds)
    seconds = ranks.slowest([result[0] for result in results])
    total = sum(result[1] for result in results)
    what = f"{total / 1e9:.1f} GB" if total > 1e8 else f"{total / 1e6:.1f} MB"
    yield Row(
        "fsdp2/save",
        f"save {what}, 4 ranks, synced",
        seconds["ours"],
        seconds["torch"],
        seconds["limit"],
        limit_name="raw write + fsync by 4 processes",
        bytes=total,
    )
    for size in (4, 3, 2):
        results = ranks.run(size, load, str(folder), bench.quick, bench.rounds)
        seconds = ranks.slowest([result[0] for result in results])
        read, wanted = (sum(result[2][i] for result in results) for i in (0, 1))
        yield Row(
            f"fsdp2/load-{size}",
            f"load {what} of 4 ranks on {size}",
            seconds["ours"],
            seconds["torch"],
            seconds["limit"],
            limit_name=f"raw preadv by {size} processes",
            bytes=sum(result[1] for result in results),
        )
        yield Row(
            f"fsdp2/amplification-{size}",
            f"bytes read over bytes wanted, on {size}",
            [read / wanted],
            unit="×",
            limit=[1.0],
            limit_name="exactly what is wanted",
        )
    remove(folder)
