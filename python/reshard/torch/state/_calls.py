"""The six calls, with the names, signatures, options and results of ``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ..._reports import OptimizerReport
from .._chunked import copy_shards, has_shards
from .._leaf import ShardView
from .._tensor import device_of, facts_of, is_sharded, is_tensor, regions_of
from ._as_torch import as_torch_tree
from ._await import add_slots_to_come, check_loaded, wait_for, without_waiting
from ._errors import InvalidInput, StateError, StateMismatch
from ._gather import gather_all, put
from ._model import EXTRA_STATE, FLAT_PARAM, LiveModel, check_model
from ._optimizer import Optimizers, as_tuple, fill, give, member_view, plan, read, slots_of
from ._options import StateDictOptions, options_from
from ._set_model import set_model
from ._stream import Offered, Ranks, Wanted, distribute, leaves_of
from ._template import Entry, OptimizerStateDict


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    as_torch: bool = False,
) -> dict[str, Any]:
    """The model's state by canonical names: without any wrapper, the same whatever the model is wrapped in.

    Args:
        model: the model.
        submodules: only what belongs to these (deprecated in PyTorch).
        options: see :class:`StateDictOptions`.
        as_torch: parameters that FSDP keeps flat as ShardedTensor or DTensor, which takes a collective for each of them, instead
            of as views of this rank's own memory (:class:`reshard.torch.ShardView`).
    """
    options = options_from(options)
    live = LiveModel(check_model(model), options.dsd_fqn_modifiers)
    return _get_model(live, submodules, options, as_torch)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    as_torch: bool = False,
) -> dict[str, Any]:
    """The state of the optimizers over a model, by canonical names.

    The optimizers are not touched. One that has not run has no state; the result lists the slots that it will have, where it
    is one of ``torch.optim``'s own, as places for a checkpoint. They count once something has been loaded into them. When a
    checkpoint is loaded by :func:`reshard.torch.load` or through :class:`reshard.torch.StorageReader`, the checkpoint's own slots
    are taken over, whatever the optimizer, laid out as the parameters are.
    """
    options = options_from(options)
    live = LiveModel(check_model(model), options.dsd_fqn_modifiers)
    given = as_tuple(optimizers)
    if not given:
        raise StateError("Optimizers are not passed in but optim_only is set to True.")
    return _get_optimizer(live, given, options, as_torch)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    as_torch: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state and its optimizers'; see :func:`get_model_state_dict` and :func:`get_optimizer_state_dict`."""
    options = options_from(options)
    live = LiveModel(check_model(model), options.dsd_fqn_modifiers)
    given = as_tuple(optimizers)
    model_state = _get_model(live, submodules, options, as_torch)
    return model_state, _get_optimizer(live, given, options, as_torch) if given else {}


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[Any, Any],
    *,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Sets the model's state: writes into its parameters, flat ones included.

    Returns:
        missing and unexpected keys; with ``strict`` (the default) any of them is an error that lists all.
    """
    options = options_from(options)
    live = LiveModel(check_model(model), options.dsd_fqn_modifiers)
    return _set_model(live, _by_names(live, model_state_dict), options)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[Any, Any],
    *,
    options: StateDictOptions | None = None,
) -> OptimizerReport:
    """Sets the state of optimizers. A parameter without state in the given dict has none afterwards; groups are matched by their
    members. Slots that exist are written in place; memory that a load has made for slots becomes the optimizer's own.

    Returns:
        how the given state met the optimizers: what is missing, what nobody wanted, what was filled with zeros.
    """
    options = options_from(options)
    live = LiveModel(check_model(model), options.dsd_fqn_modifiers)
    given = as_tuple(optimizers)
    if not given:
        raise StateError("Optimizers are not passed in but optim_only is set to True.")
    return _set_optimizer(live, given, optim_state_dict, options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[Any, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Sets the model's state and its optimizers'; see :func:`set_model_state_dict` and :func:`set_optimizer_state_dict`."""
    options = options_from(options)
    live = LiveModel(check_model(model), options.dsd_fqn_modifiers)
    given = as_tuple(optimizers)
    if given:
        _set_optimizer(live, given, optim_state_dict, options)
    named = _by_names(live, model_state_dict)
    if not named and not options.broadcast_from_rank0:
        return _IncompatibleKeys([], [])
    return _set_model(live, named, options)


# ---- getting ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _get_model(live: LiveModel, submodules: Any, options: StateDictOptions, as_torch: bool) -> dict[str, Any]:
    if submodules:
        # Begins as PyTorch's does: programs filter it by that.
        told = "Getting submodules only model/optim state_dict is deprecated: filter the state dict of the model instead."
        warnings.warn(told, FutureWarning, stacklevel=3)
    names = live.submodule_names(submodules)
    raw = live.raw_state()
    values = dict(zip(live.inner.canonical(list(raw)), raw.values()))
    entries = live.in_order(live.inner.entries(names, options))
    state: dict[str, Any] = {}
    views: dict[Any, ShardView] = {}
    for entry in entries:
        flat = entry.flat
        if flat is not None:
            member = (flat.flat, flat.member)
            if member not in views:
                views[member] = member_view(live, flat)
            state[entry.key] = views[member]
        elif entry.name in values:
            state[entry.key] = values[entry.name]
            # A state dict holds tensors without the attributes of the parameters they are.
            own = live.tensors.get(entry.identity) if entry.identity is not None else None
            if own is not None and hasattr(own, "global_shape") and has_shards(own):
                copy_shards(own, values[entry.name])
    for key, value in _added_by_hooks(live, values, names, options).items():
        state.setdefault(key, value)
    if as_torch:
        # PyTorch leaves out what has no memory: a stage of a pipeline that is another rank's.
        state = {key: value for key, value in state.items() if not (isinstance(value, torch.Tensor) and value.is_meta)}
    if not state and not names and options.strict and not options.ignore_frozen_params and not options.full_state_dict:
        raise StateError("the model's state dict is empty")
    if as_torch and not options.full_state_dict:
        as_torch_tree(live, state)
    return _delivered(live, state, options)


def _added_by_hooks(live: LiveModel, values: dict[str, Any], names: list[str], options: StateDictOptions) -> dict[str, Any]:
    """What the model's own hooks put into its state dict beyond its parameters and buffers."""
    known = {entry.name for entry in live.inner.entries([], StateDictOptions(dsd_fqn_modifiers=options.dsd_fqn_modifiers))}
    added = {name: value for name, value in values.items() if name not in known and name.rpartition(".")[2] != FLAT_PARAM}
    if not names or not added:
        return added
    chosen = {}
    for prefix in live.inner.canonical(names):
        for name, value in added.items():
            if name.startswith(f"{prefix}."):
                chosen[name if options.keep_submodule_prefixes else name[len(prefix) + 1 :]] = value
    return chosen


@torch.no_grad()
def _get_optimizer(live: LiveModel, optimizers: Any, options: StateDictOptions, as_torch: bool) -> dict[str, Any]:
    state = read(live, optimizers, options)
    ran = _have_run(live, optimizers, as_torch or options.full_state_dict)
    awaited = add_slots_to_come(state, live, optimizers, options.flatten_optimizer_state_dict, ran)
    if as_torch and not options.full_state_dict:
        as_torch_tree(live, state)
    delivered = _delivered(live, state, options)
    if delivered and not isinstance(delivered, OptimizerStateDict):
        delivered = OptimizerStateDict(delivered)
        delivered.slots = state.slots.whole() if state.slots is not None else None
    if isinstance(delivered, OptimizerStateDict):
        delivered.unknown = state.unknown
        delivered.watch()
    wait_for(delivered, awaited)
    return delivered


def _have_run(live: LiveModel, optimizers: Sequence[Any], together: bool) -> list[bool]:
    """Which optimizers have state. Of a flat parameter a rank may hold nothing that is trained, and so its optimizer has none; where
    ranks put tensors together, what counts is whether any has."""
    own = [any(slots for slots in optimizer.state.values()) for optimizer in optimizers]
    if not (together and live.has_flats):
        return own
    return [any(ran) for ran in zip(*Ranks(live.process_group()).all_gather_object(own))]


def _delivered(live: LiveModel, state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """A state dict as the options ask for it: whole, on the CPU, or as it is."""
    if not options.full_state_dict:
        return _on_cpu(state) if options.cpu_offload else state
    receivers: list[int] | None = None
    if options.full_state_dict_ranks is not None:
        receivers = list(options.full_state_dict_ranks)
    elif options.cpu_offload and not Ranks(live.process_group()).alone:
        receivers = [0]
    nested = "state" in state and "param_groups" in state
    groups = state["param_groups"] if nested else None
    tree = _below_groups(state) if nested else state
    full: dict[str, Any] = {"state": {}} if nested else {}
    compared = bool(getattr(state, "unplaced", ()))
    received = gather_all(live, tree, receivers, options.cpu_offload, lambda path, value: put(full, path, value), compared)
    if not received:
        return {}
    if live.has_flats and isinstance(state, OptimizerStateDict):
        full = live.in_model_order(full)
    if nested:
        full["param_groups"] = _on_cpu(groups) if options.cpu_offload else groups
    return full


def _on_cpu(value: Any) -> Any:
    if isinstance(value, ShardView):
        pieces = [(offsets, tensor.cpu()) for offsets, tensor in value.pieces]
        return value if all(t.is_cpu for _, t in value.pieces) else ShardView(value.dtype, value.shape, pieces)
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        moved = {key: _on_cpu(below) for key, below in value.items()}
        if type(value) is dict:
            return moved
        if isinstance(value, OptimizerStateDict):
            kept = OptimizerStateDict(moved)
            kept.slots = value.slots
            return kept
        return type(value)(moved)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(below) for below in value)
    return value


# ---- setting ----------------------------------------------------------------------------------------------------------------


def _by_names(live: LiveModel, state: Mapping[Any, Any]) -> dict[str, Any]:
    """A state dict keyed by names, from one keyed by submodules too (deprecated in PyTorch)."""
    if not state or not isinstance(next(iter(state)), nn.Module):
        return dict(state)
    told = (
        "Passing model_state_dict as a ``Dict[nn.Module, Dict[str, Any]]`` is deprecated: put the modules' names before the keys."
    )
    warnings.warn(told, FutureWarning, stacklevel=3)
    named: dict[str, Any] = {}
    for module, below in state.items():
        found = [name for name, candidate in live.model.named_modules() if candidate is module]
        if not found:
            raise InvalidInput("a key of model_state_dict is a module that the model does not have")
        prefix = live.inner.canonical(found[:1])[0]
        named.update({f"{prefix}.{key}" if prefix else key: value for key, value in below.items()})
    return named


@torch.no_grad()
def _set_model(live: LiveModel, given: dict[str, Any], options: StateDictOptions) -> _IncompatibleKeys:
    if not options.broadcast_from_rank0:
        if not given and not (
            options.strict and not options.ignore_frozen_params and not (options.full_state_dict and options.cpu_offload)
        ):
            return _IncompatibleKeys([], [])
        return set_model(live, {key: (facts_of(value), value) for key, value in given.items()}, options, None)
    ranks = Ranks(live.broadcast_group())
    told = _announced(ranks, [_header(key, value) for key, value in given.items()], given)
    offered = {key: (facts, value) for key, facts, value in told}
    tensors = [Offered.of(key, facts) for key, facts, _ in told if facts is not None]

    def receive(wanted: dict[str, Wanted], problem: BaseException | None) -> Iterator[tuple[str, Any]]:
        return distribute(ranks, 0, tensors, given.__getitem__, wanted, problem)

    return set_model(live, offered, options, receive)


def _header(key: str, value: Any) -> tuple[str, Any, Any]:
    """What is told of an entry before tensors are sent. Extra state is told itself, also where it is a tensor: its module takes
    it as it is."""
    if key.rpartition(".")[2] == EXTRA_STATE:
        return key, None, value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return key, facts_of(value), None if is_tensor(value) else value


def _announced(ranks: Ranks, message: Any, leaves: Mapping[Any, Any]) -> Any:
    """Rank 0's message about the leaves that it distributes. It has to have them whole; if not, all ranks hear of it."""
    sharded = [str(key) for key, value in leaves.items() if is_sharded(value)] if ranks.rank == 0 else []
    sharded, message = ranks.broadcast_object(0, (sharded, message))
    if sharded:
        raise StateMismatch(
            f"rank 0 can only distribute tensors that it has whole, and {len(sharded)} are sharded: {', '.join(sharded[:5])}",
            keys=sharded,
            hint="get the state with full_state_dict=True, or set it without broadcast_from_rank0",
        )
    return message


@torch.no_grad()
def _set_optimizer(live: LiveModel, optimizers: Any, given: Mapping[Any, Any], options: StateDictOptions) -> OptimizerReport:
    check_loaded(given)
    given = without_waiting(given)
    if options.broadcast_from_rank0:
        given = _received(live, optimizers, given)
    elif not given:
        if options.full_state_dict and options.cpu_offload:
            return OptimizerReport()
        raise StateError("the optimizers' state dict is empty, although it is to be set")
    planned = plan(live, optimizers, given, options)
    for optimizer, load in zip(optimizers, planned.loads):
        give(live, optimizer, load, planned.blocks)
    return planned.report


def _received(live: LiveModel, optimizers: Any, given: Mapping[Any, Any], group: Any = None) -> dict[Any, Any]:
    """Rank 0's state on every rank, in the layout of the parameters: tensors arrive one by one, and each rank gets its own
    part of them. The ranks are those of `group`, or else those that hold the model together."""
    ranks = Ranks(group if group is not None else live.broadcast_group())
    own = list(leaves_of(_below_groups(given))) if ranks.rank == 0 else []
    header = [(path, facts_of(value) if _large(value) else None, None if _large(value) else value) for path, value in own]
    values = {_text(path): value for path, value in own}
    header, groups = _announced(ranks, (header, given.get("param_groups")), values)
    problem: BaseException | None = None
    made: dict[str, Any] = {}
    try:
        entries = [Entry(tuple(map(str, path)), *facts) for path, facts, _ in header if facts is not None]
        tree = slots_of(live, optimizers).tree(entries, {})
        made = {_text(path): leaf for path, leaf in leaves_of(tree)}
    except BaseException as error:
        problem = error
    wanted = {key: Wanted(regions_of(key, leaf), device_of(leaf)) for key, leaf in made.items()}
    tensors = [Offered.of(_text(path), facts) for path, facts, _ in header if facts is not None]
    for key, value in distribute(ranks, 0, tensors, values.__getitem__, wanted, problem):
        fill(key, made[key], value)
    result: dict[Any, Any] = {}
    for path, facts, value in header:
        at = result
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value if facts is None else made[_text(path)]
    if groups is not None:
        result.setdefault("state", {})
        result["param_groups"] = groups
    return result


def _text(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _below_groups(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state without its groups."""
    return {key: value for key, value in state.items() if key != "param_groups"}


def _large(value: Any) -> bool:
    """Whether a leaf travels on its own and not with the message that lists all."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


__all__ = [
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
