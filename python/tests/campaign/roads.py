"""The ways by which a state is saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as pt

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as drop_in

from .case import Case


class App:
    """A program's own Stateful."""

    def __init__(self, model: Any, optimizers: Any, options: Any) -> None:
        self.model, self.optimizers, self.options = model, optimizers, options

    def state_dict(self) -> dict[str, Any]:
        model, optim = rt.get_state_dict(self.model, self.optimizers, options=self.options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rt.set_state_dict(
            self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"], options=self.options
        )


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    reshard.install()
    try:
        yield
    finally:
        reshard.uninstall()


def _options(case: Case, **more: Any) -> dict[str, Any]:
    return {**case.options, **more}


def _state(calls: Any, kind: Any, laid: Any, optimizers: Any, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    model, optim = calls.get_state_dict(laid.model, optimizers, options=kind(**options), **how)
    return {"model": model, "optim": optim}


def save(case: Case, laid: Any, optimizers: list[Any], path: str) -> None:
    options, more = _options(case), case.save_options
    if case.save in ("ours", "async"):
        state = _state(rt, rt.StateDictOptions, laid, optimizers, options)
        rt.save(state, path, **more) if case.save == "ours" else rt.async_save(state, path, **more).result()
    elif case.save == "direct":
        rt.save({"model": laid.model, **_named(optimizers)}, path, **more)
    elif case.save == "stateful":
        rt.save({"app": App(laid.model, optimizers, rt.StateDictOptions(**options))}, path, **more)
    elif case.save == "our_calls_storage":
        state = _state(rt, rt.StateDictOptions, laid, optimizers, options, as_torch=True)
        dcp.save(state, storage_writer=rt.StorageWriter(path))
    elif case.save == "drop_in":
        state = _state(drop_in.state_dict, drop_in.state_dict.StateDictOptions, laid, optimizers, options)
        drop_in.save(state, checkpoint_id=path)
    elif case.save == "installed":
        with _installed():
            dcp.save(_state(pt, pt.StateDictOptions, laid, optimizers, options), checkpoint_id=path)
    elif case.save == "full":
        state = _state(rt, rt.StateDictOptions, laid, optimizers, _options(case, full_state_dict=True))
        if not options.get("cpu_offload"):
            rt.save(state, path, **more)
        else:
            if dist.get_rank() == 0:
                rt.save(state, path, no_dist=True, **more)
            dist.barrier()
    else:
        state = _state(pt, pt.StateDictOptions, laid, optimizers, options)
        if case.save == "theirs":
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.save(state, storage_writer=rt.StorageWriter(path))


def _named(optimizers: list[Any]) -> dict[str, Any]:
    return {f"optim{number or ''}": optimizer for number, optimizer in enumerate(optimizers)}


def load(case: Case, laid: Any, optimizers: list[Any], path: str, saved: dict[Any, Any]) -> None:
    options, more = _options(case), case.load_options
    if case.load == "ours":
        state = _state(rt, rt.StateDictOptions, laid, optimizers, options)
        rt.load(state, path, **more)
        _set(rt, rt.StateDictOptions, laid, optimizers, options, state)
    elif case.load == "direct":
        rt.load({"model": laid.model, **_named(optimizers)}, path, **more)
    elif case.load == "stateful":
        rt.load({"app": App(laid.model, optimizers, rt.StateDictOptions(**options))}, path, **more)
    elif case.load == "our_calls_storage":
        state = _state(rt, rt.StateDictOptions, laid, optimizers, options, as_torch=True)
        dcp.load(state, storage_reader=rt.StorageReader(path))
        _set(rt, rt.StateDictOptions, laid, optimizers, options, state)
    elif case.load == "drop_in":
        state = _state(drop_in.state_dict, drop_in.state_dict.StateDictOptions, laid, optimizers, options)
        drop_in.load(state, checkpoint_id=path)
        _set(drop_in.state_dict, drop_in.state_dict.StateDictOptions, laid, optimizers, options, state)
    elif case.load == "installed":
        with _installed():
            state = _state(pt, pt.StateDictOptions, laid, optimizers, options)
            dcp.load(state, checkpoint_id=path)
            _set(pt, pt.StateDictOptions, laid, optimizers, options, state)
    elif case.load in ("by_hand", "broadcast"):
        options["full_state_dict"] = True
        state = {"model": {}, "optim": {}}
        if case.load == "broadcast":
            options["broadcast_from_rank0"] = True
        if case.load == "by_hand" or dist.get_rank() == 0:
            state = by_hand(saved)
        _set(rt, rt.StateDictOptions, laid, optimizers, options, state)
    else:
        state = _state(pt, pt.StateDictOptions, laid, optimizers, options)
        if case.load == "theirs":
            dcp.load(state, checkpoint_id=path)
        else:
            dcp.load(state, storage_reader=rt.StorageReader(path))
        _set(pt, pt.StateDictOptions, laid, optimizers, options, state)


def _set(calls: Any, kind: Any, laid: Any, optimizers: list[Any], options: dict[str, Any], state: dict[str, Any]) -> None:
    calls.set_state_dict(
        laid.model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"], options=kind(**options)
    )


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype.removeprefix("torch."))
    if not data:
        return torch.zeros(shape, dtype=kind)
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(kind).reshape(shape)


def _number(value: tuple[str, str]) -> int | float:
    """A number as the oracle tells it."""
    kind, text = value
    return {"int": int, "float": float}[kind](text)


def by_hand(saved: dict[Any, Any]) -> dict[str, Any]:
    """A full state dict made of what the oracle saw and of values as they were."""
    whole, values = saved["whole"], saved["values"]
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    groups: dict[Any, dict[str, Any]] = {}
    for key, value in whole.items():
        if key[0] in ("param", "buffer"):
            model[key[1]] = _tensor(*value)
        elif key[0] == "slot":
            state.setdefault(key[2], {})[key[3]] = _tensor(*value) if len(value) == 3 else _number(value)
        elif key[0] == "extra":
            model[f"{key[1]}._extra_state"] = values[key]
        elif key[0] == "members":
            groups.setdefault(key[1:], {})["params"] = value
        elif key[0] == "group":
            groups.setdefault(key[1:3], {})[key[3]] = values[key]
    return {"model": model, "optim": {"state": state, "param_groups": [groups[place] for place in sorted(groups)]}}
