"""7. Slices for tensor parallelism: one of 8 column slices of a large matrix that was saved whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ranks
from harness import MIB, Bench, Row, cleared, raw_read, raw_write, remove, take_turns, timed, view

from rows import pytorch

PARTS, MINE = 8, 3


def work(_rank: int, _size: int, folder: str, quick: bool, rounds: int):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import reshard
    import reshard.torch as rt

    height, width = (512, 512) if quick else (16384, 8192)
    whole = torch.arange(height * width, dtype=torch.int32).view(torch.float32).reshape(height, width)
    root = Path(folder)
    theirs, ours, raw = root / "torch", root / "ours", root / "raw"
    pytorch.save({"weight": whole}, cleared(theirs))
    rt.save({"weight": whole}, cleared(ours))
    # One rank of eight, without the other seven.
    dist.init_process_group("fake", store=FakeStore(), rank=MINE, world_size=PARTS)
    mesh = init_device_mesh("cpu", (PARTS,))
    local = torch.ones(height, width // PARTS)
    state = {"weight": DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=whole.stride(), run_check=False)}
    raw_write(raw, [view(local)], sync=False)
    expected = whole[:, MINE * width // PARTS : (MINE + 1) * width // PARTS].contiguous().view(torch.int32)
    reports = []

    def checked(load) -> float:
        local.zero_()
        seconds = timed(load)
        if not torch.equal(local.view(torch.int32), expected):
            raise AssertionError("the slice is not what was saved")
        return seconds

    def lazily() -> float:
        columns = slice(MINE * width // PARTS, (MINE + 1) * width // PARTS)

        def read() -> None:
            with reshard.open(str(ours)) as checkpoint:
                checkpoint["weight"][:, columns]

        return timed(read)

    seconds = take_turns(
        rounds,
        {
            "limit": lambda: raw_read(raw, [view(part) for part in local.chunk(2)]),
            "torch": lambda: checked(lambda: pytorch.load(state, str(theirs))),
            "ours": lambda: checked(lambda: reports.append(rt.load(state, str(ours), no_dist=True))),
            "open": lazily,
        },
    )
    return seconds, whole.nbytes, local.nbytes, reports[-1].bytes_read / reports[-1].bytes_wanted


def rows(bench: Bench) -> Iterator[Row]:
    folder = bench.place("slices")
    folder.mkdir(parents=True, exist_ok=True)
    ((seconds, whole, part, amplification),) = ranks.run(1, work, str(folder), bench.quick, bench.rounds)
    common = {"limit": seconds["limit"], "limit_name": "raw preadv of as many contiguous bytes", "bytes": part}
    what = f"1 of {PARTS} column slices of {whole // MIB} MiB"
    note = f"read {amplification:.2f} × what is wanted"
    yield Row("slices/load", f"load {what} as a DTensor", seconds["ours"], seconds["torch"], note=note, **common)
    yield Row("slices/open", f"read {what} with reshard.open", seconds["open"], seconds["torch"], **common)
    remove(folder)
