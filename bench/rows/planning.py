"""4. Planning: what to read of a tensor cut finely, and the global plan of a save for up to 4,096 ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy
import ranks
import torch
from harness import Bench, Row, cleared, memcpy, raw_write, remove, take_turns, timed, view
from programs import Missing, program
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

TENSORS = 500


def rows(bench: Bench) -> Iterator[Row]:
    yield read_plan(bench)
    yield from save_plans(bench)
    yield from cached_plan(bench)


def grid(size: int, step: int) -> list[ChunkStorageMetadata]:
    cuts = [(at, min(step, size - at)) for at in range(0, size, step)]
    return [ChunkStorageMetadata(torch.Size((y, x)), torch.Size((h, w))) for y, h in cuts for x, w in cuts]


def read_plan(bench: Bench) -> Row:
    row = Row("planning/read", "read plan, 10,000 chunks × 17,689 regions", limit_name="")
    try:
        tool = program("layout", bench.build)
    except Missing as missing:
        row.skipped = str(missing)
        return row
    size = 39_900
    saved, wanted = grid(size, 400), grid(size, 300)
    properties = TensorProperties(dtype=torch.float32)
    stored = TensorStorageMetadata(properties, torch.Size((size, size)), saved)
    # PyTorch's work grows with the number of wanted regions: in a trial, a part of them is enough.
    part = wanted[:200] if bench.quick else wanted

    def ours() -> float:
        text = subprocess.run([tool, "--bench", "moves_2d_grid"], check=True, capture_output=True, text=True).stdout
        return divan_median(text, "moves_2d_grid")

    def theirs() -> float:
        return timed(lambda: create_read_items_for_chunk_list("weight", stored, part))

    seconds = take_turns(1 if bench.quick else 2, {"ours": ours, "torch": theirs}, warm=False)
    row.ours, row.other = seconds["ours"], seconds["torch"]
    row.note = "ours: median of 50, index included" + (f"; PyTorch: only {len(part)} regions" if bench.quick else "")
    return row


def divan_median(text: str, name: str) -> float:
    """The median of a line of divan's table: fastest, slowest, median, mean."""
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    line = next(line for line in text.splitlines() if name in line)
    times = re.findall(r"([\d.]+) (s|ms|µs|ns)\b", line)
    value, unit = times[2]
    return float(value) * units[unit]


def plans(size: int) -> list[SavePlan]:
    """What so many ranks would send, each with its rows of every tensor."""
    properties = TensorProperties(dtype=torch.float32)
    whole, part = torch.Size((size * 4, 64)), torch.Size((4, 64))
    result = []
    for rank in range(size):
        items = []
        for number in range(TENSORS):
            offsets = torch.Size((rank * 4, 0))
            data = TensorWriteData(ChunkStorageMetadata(offsets, part), properties, whole)
            items.append(
                WriteItem(MetadataIndex(f"model.layers.{number}.mlp.weight", offsets), WriteItemType.SHARD, tensor_data=data)
            )
        result.append(SavePlan(items, planner_data={}))
    return result


def torch_plan(size: int, folder: Path) -> float:
    """PyTorch's global plan and commit; the ranks' own plans and what they report are made beforehand."""
    every = plans(size)
    results = [
        [WriteResult(item.index, 1024, _StorageInfo(f"__{rank}_0.distcp", 1024 * at, 1024)) for at, item in enumerate(plan.items)]
        for rank, plan in enumerate(every)
    ]
    place = cleared(folder)
    os.makedirs(place)
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    writer = FileSystemWriter(place, sync_files=False)

    def work() -> None:
        _, metadata = planner.create_global_plan(every)
        writer.finish(metadata, results)

    return timed(work)


def save_plans(bench: Bench) -> Iterator[Row]:
    sizes = [64, 256, 512, 1024, 4096]
    measured: dict[str, dict] = {}
    reason = ""
    try:
        tool = program("bars", bench.build)
    except Missing as missing:
        tool, reason = None, str(missing)
    folder = bench.place("plan")
    theirs: dict[int, list[float]] = {size: [] for size in sizes}
    # PyTorch before and after ours; beyond 512 ranks once, beyond 1,024 it would take minutes.
    for moment in range(2):
        for size in sizes:
            if size <= (64 if bench.quick else 512) or (size == 1024 and moment == 1 and not bench.quick):
                theirs[size].append(torch_plan(size, folder))
        if moment == 0 and tool:
            target = bench.place("bars.json")
            command = [tool, "--bench", "planning", "--json", str(target), "--dir", str(bench.folder)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            for found in json.loads(target.read_text()):
                measured[found["name"]] = found
            remove(target)
    remove(folder)
    for size in sizes:
        row = Row(
            f"planning/save-{size}", f"plan and commit {size:,} ranks × {TENSORS} tensors", other=theirs[size], skipped=reason
        )
        found = measured.get(f"plan + commit {size:,} ranks × {TENSORS}")
        if found:
            row.ours = [found["ours_ms"] / 1e3]
            written = re.search(r"\.metadata ([\d.]+) MB", found["note"])
            if written:
                source = numpy.ones(int(float(written[1]) * 1e6), dtype=numpy.uint8)
                target = source.copy()
                row.limit = [memcpy([source], [target], threads=1) for _ in range(3)]
                row.limit_name = "memcpy of the .metadata"
            row.note = "ours with every rank's local plan: " + found["note"]
        elif not reason:
            row.skipped = f"the benchmark bars printed no such row (it has {', '.join(measured) or 'none'})"
        if not theirs[size]:
            row.note += ("; " if row.note else "") + (
                "PyTorch not run in a trial" if bench.quick else "PyTorch not run: it would take minutes"
            )
        yield row


def saves(rank: int, size: int, folder: str, tensors: int, rounds: int) -> dict:
    """First saves and the ones after them, in fresh places, of many small sharded tensors."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import reshard.torch as rt

    mesh = init_device_mesh("cpu", (size,))
    state = {f"layers.{i}.weight": DTensor.from_local(torch.full((8, 16), float(rank)), mesh, [Shard(0)]) for i in range(tensors)}
    cached = []

    def place(name: str) -> str:
        if rank == 0:
            cleared(Path(folder) / name)
        dist.barrier()
        return os.path.join(folder, name)

    def theirs() -> float:
        where = place("torch")
        # Its cache lives on the class, by the planner's type.
        planner = DefaultSavePlanner(enable_plan_caching=True)
        return ranks.together(lambda: dcp.save(state, checkpoint_id=where, planner=planner))

    def ours() -> float:
        where = place("ours")
        return ranks.together(lambda: cached.append(rt.save(state, where).plan_cached))

    saver = rt.AsyncSaver()
    cached_behind = []

    def behind() -> float:
        where = place("ours")
        return ranks.together(lambda: cached_behind.append(saver.save(state, where).result().plan_cached))

    data = [view(torch.cat([tensor.to_local() for tensor in state.values()]))]

    def raw() -> float:
        place("nothing")
        path = Path(folder) / f"raw{rank}"
        remove(path)
        return ranks.together(lambda: raw_write(path, data, sync=True, threads=1, clear=False))

    sides = {"limit": raw, "torch": theirs, "ours": ours, "behind": behind}
    first = {f"{name} first": seconds for name, seconds in take_turns(1, sides, warm=False).items()}
    again = take_turns(rounds, sides, warm=False)
    flags = {"cached": [float(flag) for flag in cached], "cached behind": [float(flag) for flag in cached_behind]}
    return {**first, **again, **flags}


def cached_plan(bench: Bench) -> Iterator[Row]:
    tensors = 50 if bench.quick else 2000
    folder = bench.place("cached")
    folder.mkdir(parents=True, exist_ok=True)
    seconds = ranks.slowest(ranks.run(4, saves, str(folder), tensors, bench.rounds))
    what = f"{tensors:,} sharded tensors of 2 KiB, 4 ranks"
    limit = {"limit": seconds["limit"], "limit_name": "raw write + fsync by 4 processes"}
    yield Row("planning/first", f"first save of {what}", seconds["ours first"], seconds["torch first"], **limit)
    for side, flags, key, how in (
        ("ours", "cached", "again", ""),
        ("behind", "cached behind", "again-async", ", by an AsyncSaver until durable"),
    ):
        hits = int(sum(seconds[flags][1:]))
        note = f"the plan was taken from the cache in {hits} of {bench.rounds} saves; PyTorch with enable_plan_caching"
        yield Row(f"planning/{key}", f"second save of {what}{how}", seconds[side], seconds["torch"], note=note, **limit)
    remove(folder)
