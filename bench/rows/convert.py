"""9. Convert and consolidate a DCP checkpoint of 4 ranks: to safetensors, to torch.save; time and peak memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ranks
from harness import Bench, Peak, Row, cleared, remove, take_turns, timed
from programs import Missing, program

from rows import models, pytorch


def make(rank: int, size: int, folder: str, quick: bool) -> int:
    """PyTorch's own checkpoint of weights and two slots of each."""
    import torch

    state = {"model": models.fsdp2(quick, size).state_dict()}
    for slot in ("exp_avg", "exp_avg_sq"):
        state[slot] = {key: torch.ones_like(value) for key, value in state["model"].items()}
    pytorch.save(state, models.on_rank_0(rank, Path(folder)), alone=False)
    return sum(tensor.nbytes for tensor in models.locals_of(state))


def theirs(_rank: int, _size: int, source: str, target: str, kind: str, sync: bool) -> tuple[float, float]:
    """PyTorch's conversion in a process of its own: seconds without imports, and megabytes above what it held before."""
    import safetensors.torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    def work() -> None:
        if kind == "torch":
            dcp_to_torch_save(source, target)
        else:
            state: dict = {}
            _load_state_dict(state, storage_reader=FileSystemReader(source), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
            flat = {f"{top}.{key}": tensor for top, inner in state.items() for key, tensor in inner.items()}
            safetensors.torch.save_file(flat, target)
        if sync:
            descriptor = os.open(target, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    with Peak() as peak:
        seconds = timed(work)
    return seconds, peak.bytes / 1e6


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds of a whole process, and the most megabytes it held.

    Resource usage would count what this process held when it forked, so the process is asked while it runs.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            try:
                with open(f"/proc/{process.pid}/status") as status:
                    if Path(f"/proc/{process.pid}/exe").resolve() == Path(command[0]).resolve():
                        most[0] = max([most[0], *(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))])
            except OSError:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {errors}")
    return seconds, most[0] / 1e3


def rows(bench: Bench) -> Iterator[Row]:
    try:
        tool = program("reshard", bench.build)
    except Missing as missing:
        yield Row("convert/torch", "DCP of 4 ranks to torch.save", skipped=str(missing))
        yield Row("convert/safetensors", "DCP of 4 ranks to safetensors", skipped=str(missing))
        return
    source = bench.place("convert-source")
    total = sum(ranks.run(4, make, str(source), bench.quick))
    what = f"{total / 1e9:.1f} GB" if total > 1e8 else f"{total / 1e6:.1f} MB"
    rounds = min(bench.rounds, 3)
    for kind, suffix, title in (("torch", "pt", "torch.save"), ("safetensors", "safetensors", "safetensors")):
        for sync in (False, True):
            peaks: dict[str, list[float]] = {"torch": [], "ours": []}
            target = bench.place(f"converted.{suffix}")

            def torch_side() -> float:
                place = cleared(target)
                ((seconds, peak),) = ranks.run(1, theirs, str(source), place, kind, sync)
                peaks["torch"].append(peak)
                return seconds

            def our_side() -> float:
                command = [str(tool), "convert", "--quiet", str(source), cleared(target)]
                seconds, peak = measured(command if sync else [*command, "--no-sync"])
                peaks["ours"].append(peak)
                return seconds

            def copy() -> float:
                place = cleared(target)

                def work() -> None:
                    with open(place, "wb") as file:
                        for part in sorted(source.glob("*.distcp")):
                            with open(part, "rb") as piece:
                                shutil.copyfileobj(piece, file, 16 << 20)
                        if sync:
                            file.flush()
                            os.fsync(file.fileno())

                return timed(work)

            seconds = take_turns(rounds, {"limit": copy, "torch": torch_side, "ours": our_side}, warm=False)
            slug = "-synced" if sync else ""
            yield Row(
                f"convert/{kind}{slug}",
                f"{what} of DCP to {title}" + (", synced" if sync else ", not synced"),
                seconds["ours"],
                seconds["torch"],
                seconds["limit"],
                limit_name="copying the bytes" + (" + fsync" if sync else ""),
                bytes=total,
                note="ours: a whole process, checksums verified; PyTorch without its import",
            )
            if not sync:
                note = "ours: all that the process held; PyTorch: above what it held after its import"
                yield Row(
                    f"convert/{kind}-peak", f"peak memory of DCP to {title}", peaks["ours"], peaks["torch"], unit="MB", note=note
                )
            remove(target)
    remove(source)
