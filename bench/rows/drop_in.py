"""13. The drop-in module beside the calls that it leads to: `reshard.torch.checkpoint` and `reshard.torch`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import Bench, Row, cleared, remove, take_turns, timed

import reshard.torch as rt
import reshard.torch.checkpoint as dcp

#: Both sides end in the same code, and little is between them: single rounds differ by more than that.
ROUNDS = 9


def rows(bench: Bench) -> Iterator[Row]:
    small, large = (500, 4) if bench.quick else (20_000, 32)
    states = {
        f"{small:,} × 1 KiB": {f"layers.{i}.weight": torch.full((256,), float(i + 1)) for i in range(small)},
        f"{large} × 16 MiB": {f"layers.{i}.weight": torch.full((4 << 20,), float(i + 1)) for i in range(large)},
    }
    rounds = min(bench.rounds, 2) if bench.quick else ROUNDS
    ours, theirs = bench.place("drop-in"), bench.place("rt")
    for number, (what, state) in enumerate(states.items()):
        size = ("small", "large")[number]
        moved = sum(tensor.nbytes for tensor in state.values())

        # Not synced: the disk's moods are larger than what is looked for.
        def drop_in(state=state) -> float:
            writer = dcp.FileSystemWriter(cleared(ours), sync_files=False)
            return timed(lambda: dcp.save(state, storage_writer=writer, no_dist=True))

        def direct(state=state) -> float:
            place = cleared(theirs)
            return timed(lambda: rt.save(state, place, sync=False, no_dist=True))

        seconds = take_turns(rounds, {"ours": drop_in, "other": direct})
        title = f"save {what} through the drop-in module, not synced"
        yield Row(f"drop-in/save-{size}", title, seconds["ours"], seconds["other"], beside="rt.save", bytes=moved)
        target = {key: torch.ones_like(tensor) for key, tensor in state.items()}
        seconds = take_turns(
            rounds,
            {
                "ours": lambda: timed(lambda: dcp.load(target, checkpoint_id=str(ours), no_dist=True)),
                "other": lambda: timed(lambda: rt.load(target, str(ours), no_dist=True)),
            },
        )
        if not all(torch.equal(target[key], state[key]) for key in state):
            raise AssertionError("what was loaded is not what was saved")
        title = f"load {what} through the drop-in module"
        yield Row(f"drop-in/load-{size}", title, seconds["ours"], seconds["other"], beside="rt.load", bytes=moved)
        for place in (ours, theirs):
            remove(place)
