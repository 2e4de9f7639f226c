"""Optimizers: reading their state by names, and giving them a state by their own ids."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from ... import _reshard
from ..._reports import OptimizerReport
from .._leaf import ShardView
from .._tensor import DTYPES, FlatPiece, FlatView, describe, is_sharded, is_tensor, layout_of, local_of, pieces_of
from ._blocks import Blocks, given_parts, put_together
from ._copy import box_of, copy_into, copy_overlap
from ._errors import StateMismatch
from ._memory import SlotMemory
from ._model import LiveModel
from ._nested import below, nested, readable, shown, unnested, unnested_state
from ._options import StateDictOptions
from ._stream import full_tensor
from ._template import OptimizerStateDict, Slots

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def as_tuple(optimizers: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, given alone or together. Of one that only gives names to another's parameters, the other."""
    given = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers or ())
    # Whoever has one has imported its module, which takes a while.
    module = sys.modules.get("torch.distributed.optim.named_optimizer")
    named: Any = getattr(module, "_NamedOptimizer", ())
    return tuple(o._optimizer if isinstance(o, named) else o for o in given)


def goes_by_names(optimizer: Any) -> bool:
    """Whether an optimizer's own state dict has names where others have numbers, as torchrec's ``KeyedOptimizer`` does."""
    own = type(optimizer).state_dict
    if own is torch.optim.Optimizer.state_dict:
        return False
    return any(isinstance(param, str) for group in own(optimizer)["param_groups"] for param in group["params"])


class LiveGroup(NamedTuple):
    """A group of an optimizer: members by identity, and everything else."""

    params: list[int]
    options: dict[str, Any]


class Described(NamedTuple):
    """An optimizer for the engine."""

    state_dict: dict[str, Any]
    groups: list[LiveGroup]


class LocalLayout(NamedTuple):
    """The layout of a sharded parameter, and the shape of what this rank holds of it."""

    layout: _reshard.ShardLayout
    local_shape: torch.Size


def live_groups(optimizer: Any) -> list[LiveGroup]:
    """An optimizer's groups."""
    return [
        LiveGroup([id(param) for param in group["params"]], {key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def read(live: LiveModel, optimizers: Sequence[Any], options: StateDictOptions, given: Any = None) -> OptimizerStateDict:
    """The state of optimizers by names, as views of what they hold. `given` is an optimizer's own state dict, if the caller
    has it already; it may come without groups, and so does the result then."""
    described = []
    owned = []
    deep = False
    blocks = Blocks(live, options.flatten_optimizer_state_dict)
    for optimizer in optimizers:
        own = given if given is not None else type(optimizer).state_dict(optimizer)
        own = blocks.taken_from(optimizer, own)
        groups = own["param_groups"] if "param_groups" in own else type(optimizer).state_dict(optimizer)["param_groups"]
        sharded = _sharded_keys(live, optimizer, groups)
        apart = unnested_state(own["state"], sharded.__contains__)
        deep |= apart is not own["state"]
        owned.append({"state": apart, "param_groups": groups})
        described.append(Described(owned[-1], live_groups(optimizer)))
    views = _Views(live)
    layouts = _local_layouts(live, optimizers, owned)
    with readable():
        state = _reshard.optimizer_state(live.inner, described, describe, views.make, layouts, options)
    if deep and "state" in state:
        state["state"] = {name: nested(slots) if isinstance(slots, dict) else slots for name, slots in state["state"].items()}
    result = OptimizerStateDict(nested(state) if deep else state)
    if given is not None and "param_groups" not in given:
        result.pop("param_groups", None)
    if live.has_flats:
        _own_scalars(result)
    blocks.put_into(result)
    result.slots = slots_of(live, optimizers)
    result.unplaced = (*_unplaced(live, optimizers, owned), *blocks.tables)
    return result


def _unplaced(live: LiveModel, optimizers: Sequence[Any], owned: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of slots of sharded parameters that are neither as their parameter nor as this rank's part of it: scales of
    blocks, preconditioners, whatever lies in dicts. They look like replicas, and may be a rank's own. What counts is what the
    optimizers' own ``state_dict()`` gave: some nest there what they keep side by side."""
    found: dict[str, None] = {}
    for optimizer, own in zip(optimizers, owned):
        sharded = _sharded_keys(live, optimizer, own["param_groups"])
        for theirs, group in zip(own["param_groups"], optimizer.param_groups):
            for key, param in zip(theirs["params"], group["params"]):
                slots = own["state"].get(key)
                if not isinstance(slots, Mapping) or key not in sharded:
                    continue
                part = None if live.is_sharded_flat(param) else local_of(param).shape
                found.update(dict.fromkeys(shown(slot) for slot, value in slots.items() if _is_unplaced(value, part)))
    return tuple(found)


def _is_unplaced(value: Any, part: torch.Size | None) -> bool:
    if isinstance(value, Mapping):
        return any(_is_unplaced(below, torch.Size((-1,))) for below in value.values())
    if isinstance(value, (list, tuple)):
        return any(_is_unplaced(below, torch.Size((-1,))) for below in value)
    # The slots of a flat parameter itself are as large as it is, or refused.
    return (
        isinstance(value, torch.Tensor) and not is_sharded(value) and value.dim() > 0 and part is not None and value.shape != part
    )


class _Views:
    """Slots in parts, as views of the optimizer's memory."""

    def __init__(self, live: LiveModel) -> None:
        self._home = {flat.name: flat for flat in live.flats.values()}

    def make(self, code: int, shape: tuple[int, ...], parts: list[_reshard.SlotPart]) -> ShardView:
        dtype = DTYPES[code]
        if not parts:
            return FlatView(torch.empty(0, dtype=dtype, device="cpu"), shape, ())
        base = parts[0].tensor
        if all(part.tensor is base and part.within == part.sizes for part in parts) and base.is_contiguous():
            return FlatView(base, shape, [FlatPiece(part.offsets, part.sizes, part.start) for part in parts])
        pieces = [(part.offsets, box_of(part.tensor.detach(), part.start, part.within, part.at, part.sizes)) for part in parts]
        return ShardView(dtype, shape, pieces)


def _own_scalars(state: dict[Any, Any]) -> None:
    """Members of a flat parameter share its single-element slots; each gets one of its own, so that what is loaded for one
    does not silently replace what was loaded for another."""
    seen: set[int] = set()

    def visit(container: Any) -> None:
        for key, value in container.items():
            if isinstance(value, dict):
                visit(value)
            elif isinstance(value, torch.Tensor) and value.numel() == 1 and not is_sharded(value):
                if id(value) in seen:
                    container[key] = value.detach().clone()
                seen.add(id(value))

    visit(state["state"] if "state" in state else state)


def _local_layouts(live: LiveModel, optimizers: Sequence[Any], owned: Sequence[Mapping[str, Any]]) -> dict[str, LocalLayout]:
    """Layouts of sharded parameters that have plain tensors for slots in what the optimizers' own ``state_dict()`` gave."""
    wanted: dict[int, DTensor] = {}
    for optimizer, own in zip(optimizers, owned):
        for theirs, group in zip(own["param_groups"], optimizer.param_groups):
            for key, param in zip(theirs["params"], group["params"]):
                slots = own["state"].get(key) if isinstance(param, DTensor) else None
                if isinstance(slots, Mapping):
                    if any(isinstance(v, torch.Tensor) and not isinstance(v, DTensor) and v.dim() for v in slots.values()):
                        wanted[id(param)] = param
    if not wanted:
        return {}
    layouts = {}
    for name, parameter in live.parameters.items():
        param = wanted.get(parameter.identity or 0)
        layout = layout_of(name, param) if param is not None else None
        if param is not None and layout is not None:
            layouts[name] = LocalLayout(layout, local_of(param).shape)
    return layouts


def slots_of(live: LiveModel, optimizers: Sequence[Any]) -> Slots:
    """What makes slots for the parameters of optimizers, by every name that a parameter has, and by id where there is one
    optimizer."""
    trained: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                trained.setdefault(id(param), len(trained))
    layouts: dict[str, Any] = {}
    for name, parameter in live.parameters.items():
        identity, flat = parameter.identity, parameter.flat
        if identity is None or identity not in trained:
            continue
        layouts[name] = live.tensors[identity] if flat is None else member_view(live, flat)
        if len(optimizers) == 1 and flat is None:
            layouts.setdefault(str(trained[identity]), layouts[name])
    return Slots(layouts)


def member_view(live: LiveModel, part: _reshard.FlatPart) -> FlatView:
    """A member of a flat parameter as a view of this rank's shard."""
    home = live.flats[part.flat]
    return FlatView(home.shard, part.shape, part.pieces, home)


# ---- giving state to optimizers -------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """What each optimizer loads, by its own numbers or by names, and how the given state met them."""

    loads: list[_reshard.OptimizerLoad]
    report: OptimizerReport
    #: Slots that are made of other tensors, by parameter and slot.
    blocks: dict[tuple[str, str], Mapping[str, Any]]


def plan(
    live: LiveModel, optimizers: Sequence[Any], given: Mapping[Any, Any], options: StateDictOptions, by_names: bool = False
) -> Planned:
    """Plans what optimizers load."""
    given, blocks = given_parts(given)
    if live.has_flats:
        given = _without_foreign(live, given)
    named = [by_names or goes_by_names(optimizer) for optimizer in optimizers]
    groups = [live_groups(o) for o in optimizers]
    made = _Views(live).make
    given = _unnested_given(live, given)
    with readable():
        plans = {
            by: _reshard.optimizer_to_load(live.inner, given, groups, describe, made, by, options) for by in sorted(set(named))
        }
    loads = [plans[by].loads[index] for index, by in enumerate(named)]
    return Planned(loads, next(iter(plans.values())).report, blocks)


def _unnested_given(live: LiveModel, given: Mapping[Any, Any]) -> dict[Any, Any]:
    """A given state with the nested slots of sharded parameters taken apart, as :func:`read` gets them."""
    names = {
        name
        for name, parameter in live.parameters.items()
        if parameter.flat is not None
        or (parameter.identity is not None and isinstance(live.tensors.get(parameter.identity), DTensor))
    }
    if "state" in given:
        return {**given, "state": unnested_state(given["state"], names.__contains__)}
    nests = {key: value for key, value in given.items() if isinstance(value, Mapping) and str(key).startswith("state.")}
    nests = {key: value for key, value in nests.items() if str(key)[len("state.") :].rpartition(".")[0] in names}
    return {**{key: value for key, value in given.items() if key not in nests}, **unnested(nests)}


def _sharded_keys(live: LiveModel, optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> set[Any]:
    """The parameters of which this rank holds a part, by the keys of the optimizer's own state dict."""
    return {
        key
        for theirs, group in zip(groups, optimizer.param_groups)
        for key, param in zip(theirs["params"], group["params"])
        if live.is_sharded_flat(param) or (isinstance(param, DTensor) and any(p.is_shard() for p in param.placements))
    }


def _without_foreign(live: LiveModel, tree: Any) -> Any:
    """The same state with every DTensor and ShardedTensor whole: a flat parameter needs other parts than they hold. One
    tensor is gathered at a time, in the order of names, which is the same on every rank."""
    if isinstance(tree, (DTensor, ShardedTensor)):
        return full_tensor("", tree)
    if isinstance(tree, Mapping):
        if not any(isinstance(value, (Mapping, DTensor, ShardedTensor, list)) for value in tree.values()):
            return tree
        keys = sorted(tree, key=str)
        made = {key: _without_foreign(live, tree[key]) for key in keys}
        return {key: made[key] for key in tree}
    if isinstance(tree, list):
        return [_without_foreign(live, value) for value in tree]
    return tree


class Applied:
    """What an optimizer was given: its state dict by its own ids, built in its own memory where that fits."""

    def __init__(self, live: LiveModel, optimizer: Any, load: _reshard.OptimizerLoad, blocks: Mapping[Any, Any]) -> None:
        self._live = live
        #: PyTorch's own optimizers make slots of whatever shape as DTensors on their parameters' mesh, and compute with both.
        self._by_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state: dict[Any, Any] = {}
        for key, made in load.state.items():
            param = params[key] if isinstance(key, int) else None
            now = optimizer.state.get(param, {}) if param is not None else {}
            built = {slot: self._slot(shown(slot), param, below(now, slot), value) for slot, value in made.items()}
            state[key] = nested(built)
        if blocks:
            self._add_blocks(optimizer, params, state, blocks)
        state.update({key: nested(value) if isinstance(value, dict) else value for key, value in load.user_state.items()})
        self.state_dict: dict[str, Any] = {"state": state, "param_groups": load.groups}

    def _add_blocks(self, optimizer: Any, params: list[Any], state: dict[Any, Any], blocks: Mapping[Any, Any]) -> None:
        """Slots that are made of other tensors."""
        places = {id(param): index for index, param in enumerate(params)}
        for (name, slot), parts in blocks.items():
            parameter = self._live.parameters.get(name)
            index = places.get(parameter.identity or 0) if parameter is not None else None
            if index is None:
                continue
            param = params[index]
            now = optimizer.state.get(param, {}).get(slot)
            made = put_together(f"state.{name}.{slot}", optimizer, param, now, parts)
            state.setdefault(index, {})[slot] = made

    def _slot(self, slot: str, param: Any, now: Any, made: _reshard.BuiltSlot | _reshard.KeptSlot) -> Any:
        if isinstance(made, _reshard.KeptSlot):
            return self._kept(slot, param, now, made.value)
        return self._built(param, now, DTYPES[made.dtype], made.shape, made.copies)

    def _built(
        self, param: Any, now: Any, dtype: torch.dtype, shape: tuple[int, ...], copies: list[_reshard.BoxCopy]
    ) -> torch.Tensor:
        covered = sum(math.prod(copy.sizes) for copy in copies) >= math.prod(shape)
        if isinstance(now, torch.Tensor) and now.dtype == dtype and tuple(now.shape) == shape and now.is_contiguous():
            target = now.detach()
            # Zeros where nothing is given; where something of the memory itself is given, that has to be kept until then.
            if not covered:
                target = torch.zeros_like(target)
        else:
            base = _adoptable(copies, dtype, shape)
            if base is not None:
                return base
            device = param.device if param is not None else copies[0].source.device if copies else torch.device("cpu")
            target = torch.zeros(shape, dtype=dtype, device=device)
        for copy in copies:
            source = box_of(copy.source.detach(), copy.source_start, copy.source_box, copy.source_at, copy.sizes)
            copy_into(box_of(target, copy.target_start, copy.target_box, copy.target_at, copy.sizes), source)
        if isinstance(now, torch.Tensor) and covered and target.data_ptr() == now.data_ptr():
            return now
        if isinstance(now, torch.Tensor) and now.dtype == dtype and tuple(now.shape) == shape:
            now.detach().copy_(target)
            return now
        return target

    def _kept(self, slot: str, param: Any, now: Any, value: Any) -> Any:
        if isinstance(value, dict):
            below = now if isinstance(now, Mapping) else {}
            return {key: self._kept(slot, param, below.get(key), inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            same = now if isinstance(now, (list, tuple)) and len(now) == len(value) else [None] * len(value)
            return type(value)(self._kept(slot, param, there, inner) for there, inner in zip(same, value))
        if not is_tensor(value):
            return value
        shape = tuple(value.metadata().size) if isinstance(value, ShardedTensor) else tuple(value.shape)
        like = param if isinstance(param, DTensor) and shape == tuple(param.shape) and shape else None
        if isinstance(now, torch.Tensor) and now.dtype == value.dtype and tuple(now.shape) == shape:
            if (like is None and (not is_sharded(now) or isinstance(now, DTensor))) or (
                isinstance(now, DTensor) and like is not None and same_layout(now, like)
            ):
                fill(slot, now, value)
                return now
        if like is not None:
            if isinstance(value, DTensor) and same_layout(value, like):
                return _own(value)
            target = _like(like, value.dtype)
            fill(slot, target, value)
            return target
        if isinstance(value, DTensor) and param is not None and isinstance(param, DTensor):
            return value
        if is_sharded(value):
            device = param.device if param is not None else torch.device("cpu")
            whole = torch.empty(shape, dtype=value.dtype, device=device)
            fill(slot, whole, value)
        else:
            whole = _own(value)
        if isinstance(param, DTensor) and shape and self._by_torch:
            mesh = param.device_mesh
            return DTensor.from_local(whole.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole


def _adoptable(copies: list[_reshard.BoxCopy], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Memory that was made for exactly this slot and holds it already."""
    base: torch.Tensor | None = None
    for copy in copies:
        source = copy.source
        memory = SlotMemory.of(source)
        owner = memory.whole if memory is not None else None
        if base is None:
            base = owner
        if owner is None or owner is not base or copy.source_start or any(copy.source_at) or any(copy.target_at):
            return None
        if copy.source_box != copy.sizes or copy.target_box != copy.sizes or source.dtype != dtype:
            return None
        if not source.is_contiguous() or source.storage_offset() - base.storage_offset() != copy.target_start:
            return None
    if base is None or tuple(base.shape) != shape or not base.is_contiguous():
        return None
    return SlotMemory.take(base)


def _own(value: torch.Tensor) -> torch.Tensor:
    """A given tensor as an optimizer's own: the memory that was made for it, or a copy."""
    taken = SlotMemory.take(value)
    return taken if taken is not None else value.detach().clone()


def same_layout(a: DTensor, b: DTensor) -> bool:
    """Whether two DTensors are cut in the same way."""
    return a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements) and tuple(a.shape) == tuple(b.shape)


def _like(param: DTensor, dtype: torch.dtype) -> DTensor:
    local = torch.zeros(param._local_tensor.shape, dtype=dtype, device=param._local_tensor.device)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def fill(key: str, target: Any, value: Any) -> None:
    """Copies a tensor of any kind into one of any kind, live ones included. Parts that other ranks hold are gathered where
    all ranks can tell that they are needed."""
    if isinstance(value, DTensor) and isinstance(target, DTensor) and same_layout(value, target):
        copy_into(local_of(target), local_of(value))
        return
    if isinstance(value, (DTensor, ShardedTensor)):
        value = full_tensor(key, value)
    sources = pieces_of(key, value)
    for piece in pieces_of(key, target):
        done = sum(copy_overlap(piece, source) for source in sources)
        if done < piece[1].numel():
            raise StateMismatch(
                f"{key!r} is incomplete: this rank does not hold all of the region that it needs",
                keys=[key],
                hint="load the checkpoint into the state of this model, or pass a full state dict",
            )


def give(live: LiveModel, optimizer: Any, load: _reshard.OptimizerLoad, blocks: Mapping[Any, Any]) -> None:
    """Loads into an optimizer by its own ``load_state_dict``, so that its hooks run, without its casts."""
    applied = Applied(live, optimizer, load, blocks).state_dict
    rates = [group.get("lr") for group in optimizer.param_groups]
    groups = optimizer.param_groups
    type(optimizer).load_state_dict(optimizer, applied)
    # Whoever holds on to the list of groups keeps the list that is in use.
    groups[:] = optimizer.param_groups
    optimizer.param_groups = groups
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, slots in applied["state"].items():
        param = params[key] if isinstance(key, int) and key < len(params) else None
        now = optimizer.state.get(param) if param is not None else None
        if isinstance(now, dict) and isinstance(slots, dict):
            _keep_slots(now, slots)
    _keep_rates(optimizer.param_groups, rates)


def _keep_slots(now: dict[Any, Any], slots: Mapping[Any, Any]) -> None:
    """torch gives slots the dtype of their parameter, and turns text into a generator; what was saved is kept. What an optimizer
    has under other names than its state dict is its own affair."""
    for slot, value in slots.items():
        there = now.get(slot)
        if isinstance(value, Mapping) and isinstance(there, dict):
            _keep_slots(there, value)
        elif not isinstance(value, torch.Tensor):
            if slot in now:
                now[slot] = value
        elif isinstance(there, torch.Tensor) and there.dtype != value.dtype:
            now[slot] = value.to(there.device)


def _keep_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> None:
    """A rate that is a tensor stays the tensor it is: compiled steps hold on to it. Groups that share one go on sharing it only
    if they are to have the same rate."""
    taken_by: dict[int, Any] = {}
    for group, before in zip(groups, rates):
        after = group.get("lr")
        if not isinstance(before, torch.Tensor) or after is None:
            continue
        value = after.detach() if isinstance(after, torch.Tensor) else torch.tensor(after, device="cpu")
        if id(before) not in taken_by:
            taken_by[id(before)] = value.clone()
        elif not torch.equal(taken_by[id(before)].to(before.dtype).cpu(), value.to(before.dtype).cpu()):
            before = before.detach().clone()
        if after is not before:
            before.detach().copy_(value)
        group["lr"] = before
