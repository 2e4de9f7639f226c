"""6. FSDP1 with flat and with original parameters: get_state_dict, save, load, set_state_dict; memory and collectives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ranks
from harness import Bench, Peak, Row, raw_read, raw_write, remove, take_turns, view

from rows import models, pytorch


class Collectives:
    """Counts what goes through process groups: what carries floating-point tensors, and messages of bytes and sizes.

    The methods of the groups themselves are wrapped, so that calls on other threads and on a bare backend count as well;
    functional collectives call C++ from C++ and are seen by a dispatch mode, on the calling thread.
    """

    METHODS = (
        "_allgather_base allgather allgather_coalesced allgather_into_tensor_coalesced all_gather_single allreduce "
        "allreduce_coalesced alltoall alltoall_base all_to_all_single broadcast gather recv recv_anysource reduce reduce_scatter "
        "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced scatter send"
    ).split()

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self
        self.tensors, self.messages, self.bytes = 0, 0, 0
        self._lock = threading.Lock()
        self._replaced: list[tuple[type, str, Any]] = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                # Waiting and wrapping are operators of the same namespace and move nothing.
                moves = any(
                    word in func.name() for word in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
                )
                if func.namespace == "_c10d_functional" and moves:
                    outer.seen((args, kwargs))
                return func(*args, **(kwargs or {}))

        self._mode = Mode()

    def seen(self, arguments: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        carried = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        with self._lock:
            self.bytes += sum(tensor.nbytes for tensor in carried)
            if any(tensor.is_floating_point() for tensor in carried):
                self.tensors += 1
            else:
                self.messages += 1

    def __enter__(self) -> Collectives:
        from torch._C._distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo

        for owner in (ProcessGroup, Backend, ProcessGroupGloo):
            for name in self.METHODS:
                if name in vars(owner):
                    self._wrap(owner, name)
        self._mode.__enter__()
        return self

    def _wrap(self, owner: type, name: str) -> None:
        original = vars(owner)[name]

        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen((args, kwargs))
            return original(group, *args, **kwargs)

        self._replaced.append((owner, name, original))
        setattr(owner, name, counted)

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        for owner, name, original in self._replaced:
            setattr(owner, name, original)


class Family:
    """One side: four functions."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "ours":
            import reshard.torch as rt

            self.get, self.set = rt.get_state_dict, rt.set_state_dict
            self.save, self.load = rt.save, rt.load
        else:
            from torch.distributed.checkpoint import state_dict

            self.get, self.set = state_dict.get_state_dict, state_dict.set_state_dict
            self.save = lambda state, place: pytorch.save(state, place, alone=False)
            self.load = lambda state, place: pytorch.load(state, place, alone=False)


STEPS = {"out": ("get", "save"), "in": ("get", "load", "set")}


def work(rank: int, size: int, folder: str, quick: bool, rounds: int, original: bool, way: str, names: list[str]):
    model = models.fsdp1(quick, original)
    optimizer = models.adam(model)
    found: dict[str, list[float]] = {
        f"{name} {step}": [] for name in names for step in (*STEPS[way], "peak", "collectives", "messages", "moved")
    }

    def once(family: Family, counted: bool, place: str) -> dict[str, float]:
        seconds = {}
        state: dict = {}

        def get() -> None:
            state["model"], state["optim"] = family.get(model, optimizer)

        steps = {
            "get": get,
            "save": lambda: family.save(state, place),
            "load": lambda: family.load(state, place),
            "set": lambda: family.set(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]),
        }
        if counted:
            with Collectives() as collectives:
                for step in STEPS[way]:
                    steps[step]()
            if way == "out" and not collectives.messages:
                raise AssertionError(f"no message of {family.name} was counted, and a save exchanges some: the counter is blind")
            return {"collectives": collectives.tensors, "messages": collectives.messages, "moved": collectives.bytes / 1e6}
        with Peak() as peak:
            for step in STEPS[way]:
                seconds[step] = ranks.together(steps[step])
        return {**seconds, "peak": peak.bytes / 1e6}

    def side(name: str, counted: bool, keep: bool = True) -> float:
        place = Path(folder) / name
        where = models.on_rank_0(rank, place) if way == "out" else str(place)
        for step, value in once(Family(name), counted, where).items():
            if keep:
                found[f"{name} {step}"].append(value)
        return 0.0

    # The limit: as many bytes as this rank's parameters and slots have, written or read by every rank at once.
    memory = [view(parameter) for parameter in model.parameters() if parameter.numel()]
    memory += [view(slot) for slots in optimizer.state.values() for slot in slots.values() if slot.numel() > 1]
    path = Path(folder) / f"raw-{size}-{rank}"
    found["limit"] = []

    def raw() -> float:
        models.on_rank_0(rank, Path(folder) / "nothing")
        if way == "out":
            remove(path)
            found["limit"].append(ranks.together(lambda: raw_write(path, memory, sync=True, threads=1, clear=False)))
        else:
            # Into other memory: the model is live.
            found["limit"].append(ranks.together(lambda: raw_read(path, room, threads=1)))
        return 0.0

    if way == "in":
        room = [memoryview(bytearray(len(part))) for part in memory]
        raw_write(path, memory, sync=False, threads=1, clear=False)
    for name in names:
        side(name, counted=False, keep=False)
    sides = {"limit": raw, **{name: (lambda name=name: side(name, counted=False)) for name in names}}
    take_turns(rounds, sides, warm=False)
    for name in names:
        side(name, counted=True)
    return found


def unavailable() -> str:
    """Why the state-dict family cannot be measured, if it cannot."""
    from torch import nn

    import reshard.torch as rt

    if not hasattr(rt, "get_state_dict") or not hasattr(rt, "set_state_dict"):
        return "not available: this reshard.torch has no get_state_dict"
    try:
        model = nn.Linear(2, 2)
        rt.get_state_dict(model, models.adam(model))
    except AttributeError as error:
        return f"not available: the extension is older than the package ({error})"
    return ""


def rows(bench: Bench) -> Iterator[Row]:
    skipped = unavailable()
    names = ["torch"] if skipped else ["torch", "ours"]
    rounds = min(bench.rounds, 3)
    for original in (False, True):
        kind, slug = ("original", "orig") if original else ("flat", "flat")
        folder = bench.place(f"fsdp1-{slug}")
        folder.mkdir(parents=True, exist_ok=True)
        for way, size, title in (("out", 4, "get_state_dict + save, 4 ranks"), ("in", 3, "get + load + set_state_dict, 3 ranks")):
            arguments = (str(folder), bench.quick, rounds, original, way, names)
            found = ranks.slowest(ranks.run(size, work, *arguments))
            sums = {name: [sum(times) for times in zip(*(found[f"{name} {step}"] for step in STEPS[way]))] for name in names}

            def sides(step: str) -> dict[str, list[float]]:
                return {"ours": found.get(f"ours {step}", []), "other": found[f"torch {step}"]}

            prefix, about = f"fsdp1-{slug}/{way}", f"FSDP1 {kind}: "
            limit_name = "raw write + fsync by 4 processes" if way == "out" else "raw preadv by 3 processes"
            limit = {"limit": found["limit"], "limit_name": limit_name}
            yield Row(prefix, about + title, sums.get("ours", []), sums["torch"], skipped=skipped, **limit)
            for step in STEPS[way]:
                name = {"get": "get_state_dict", "set": "set_state_dict"}.get(step, step)
                yield Row(
                    f"{prefix}-{step}",
                    f"{about}{name}, {size} ranks",
                    **sides(step),
                    skipped=skipped,
                    **(limit if step in ("save", "load") else {}),
                )
            yield Row(
                f"{prefix}-peak",
                f"{about}peak memory of a rank above its state, {size} ranks",
                **sides("peak"),
                unit="MB",
                skipped=skipped,
            )
            moved = "; ".join(
                f"{name} also {found[f'{name} messages'][0]:.0f} messages of bytes, {found[f'{name} moved'][0]:.1f} MB in all"
                for name in names
            )
            yield Row(
                f"{prefix}-collectives",
                f"{about}tensor collectives of a rank, {size} ranks",
                **sides("collectives"),
                unit="",
                note=moved.replace("torch", "PyTorch").replace("ours", "reshard"),
                skipped=skipped,
            )
        remove(folder)
