"""Loading in place, from any layout into any other."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from .. import _reshard
from .._errors import UntrustedPickle
from .._paths import path_text
from .._progress import Progress
from .._reports import Cast, Difference, LoadReport, log_report
from .._types import CastPolicy, StorageOptions, StrPath, VerifyPolicy
from .._view import Views, inner_views
from ._describe import Description, flatten, mutable, put
from ._group import DEFAULT_TIMEOUT, Group, group_for
from ._objects import copy_object, differences, holder_of, mismatch
from ._resize import resized
from ._save import chosen_path, run_together
from ._states import in_one_order, states_of
from .state._expand import expand
from .state._template import OptimizerStateDict

Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: What the engine calls values that are not plain and that torch's own restricted unpickler reads nevertheless.
_RESTRICTED = {
    "torch.Tensor": None,
    "a sparse tensor": "torch._utils._rebuild_sparse_tensor",
    "a quantised tensor": "torch._utils._rebuild_qtensor",
    "a nested tensor": "torch._utils._rebuild_nested_tensor",
    "a tensor with attributes": None,
    "a tensor subclass without storage": "torch._utils._rebuild_wrapper_subclass",
    "collections.OrderedDict": None,
    "collections.Counter": None,
}


class LoadOptions(TypedDict, total=False):
    """What :func:`load` takes by name, for those that hand it on."""

    process_group: Any
    no_dist: bool
    strict: bool
    cast: CastPolicy
    rename: Rename | None
    allow_pickle: bool
    verify: VerifyPolicy
    exchange: bool
    progress: bool
    trace: StrPath | None
    timeout: float
    storage_options: StorageOptions | None


def load(
    state_dict: MutableMapping[str, Any],
    path: StrPath | None = None,
    *,
    checkpoint_id: StrPath | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    strict: bool = True,
    cast: CastPolicy = "never",
    rename: Rename | None = None,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    allow_pickle: bool = False,
    verify: VerifyPolicy = "whole",
    exchange: bool = False,
    progress: bool = False,
    trace: StrPath | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: StorageOptions | None = None,
) -> LoadReport:
    """Loads into a state dict in place, whatever layout it was saved with, as with ``torch.distributed.checkpoint.load``.

    Tensors are filled where they are; other values are replaced in the containers that hold them; objects with
    ``state_dict`` and ``load_state_dict`` at the top level are asked for the one and given to the other. Every difference between
    the state and the checkpoint is found before anything is read.

    Args:
        state_dict: what is wanted, and where. Any layout of ranks; only the parts that this rank wants are read.
        path: a DCP folder, a safetensors file or folder, or a ``torch.save`` file; a path or an address.
        checkpoint_id: the same, by the name that PyTorch gives it.
        process_group: the ranks that load together; all by default.
        no_dist: load without talking to other ranks.
        strict: raise :class:`reshard.Mismatch` on any difference; otherwise load what fits and report the rest. Keys that
            the checkpoint has beyond what any rank wants count inside the top-level entries of which something is wanted,
            and inside those that have an empty dict to load into.
        cast: where element types differ: "never" (a difference), "widening" (only casts that keep every value) or "any".
        rename: from a wanted key to the checkpoint's, as a dict or a function; None leaves the key alone.
        view: see the checkpoint through rules, by which tensors are stacked, split, joined, transposed, padded or renamed: a
            :class:`reshard.View`, a file of rules, a recipe, or several, applied in order.
        parameter_map: a JSON file that says which parameters lie in the flat buffers of Megatron's distributed optimizer; see
            ``docs/other-formats.md``.
        allow_pickle: unpickle values that are not plain data. Only for files you trust: it runs code from them.
        verify: compare checksums "never", of records that are read "whole", or "always".
        exchange: read what several ranks want once, and exchange it between them.
        progress: show a bar on rank 0.
        trace: a local file to which each rank adds what it did when, for ``chrome://tracing`` or Perfetto.
        timeout: seconds to wait for other ranks.
        storage_options: settings of the store by name.

    Returns:
        what happened: bytes, times, casts, and with ``strict=False`` every difference.
    """
    where = chosen_path(path, checkpoint_id)
    group = group_for(process_group, no_dist, timeout=timeout)
    given = None if parameter_map is None else path_text(parameter_map)
    checkpoint = _reshard.Checkpoint(where, storage_options, group, views=inner_views(view), parameter_map=given)
    options = _reshard.LoadOptions(strict=strict, cast=cast, verify=verify, exchange=exchange)
    return _load(state_dict, checkpoint, group, options, _stored_name(rename), allow_pickle, progress, trace)


def load_present(
    state_dict: MutableMapping[str, Any],
    path: str,
    group: Group | None,
    *,
    partial: bool,
    ignore_unexpected: bool,
    cast: CastPolicy,
    allow_pickle: bool,
    verify: VerifyPolicy,
    model_rank: int | None = None,
) -> LoadReport:
    """Loads as PyTorch does: what is wanted has to be there and to fit, what the checkpoint has beyond does not matter. With
    `partial` what is not there is left as it is. `model_rank` is the tensor parallel rank in a folder of DeepSpeed."""
    checkpoint = _reshard.Checkpoint(path, None, group, model_rank=model_rank)
    options = _reshard.LoadOptions(cast=cast, verify=verify, ignore_unexpected=ignore_unexpected)
    stored_name = (lambda key: key if key in checkpoint else None) if partial else None
    return _load(state_dict, checkpoint, group, options, stored_name, allow_pickle, False)


class _LoadRequest(NamedTuple):
    """What crosses to the engine."""

    checkpoint: _reshard.Checkpoint
    leaves: list[_reshard.Leaf]
    owners: Any
    options: _reshard.LoadOptions
    trusted: set[str] | None
    control: _reshard.Control
    group: Group | None = None
    renames: dict[str, str | None] | None = None
    parts: Sequence[str] = ()
    failure: str | None = None
    trace: str | None = None


def _load(
    state_dict: MutableMapping[str, Any],
    checkpoint: _reshard.Checkpoint,
    group: Group | None,
    options: _reshard.LoadOptions,
    stored_name: Callable[[str], str | None] | None,
    allow_pickle: bool,
    progress: bool,
    trace: StrPath | None = None,
) -> LoadReport:
    where = checkpoint.path
    control = _reshard.Control()
    asked: dict[Any, Any] = {}
    wanted: dict[Any, Any] = {}
    later: list[Callable[[], None]] = []
    templates: list[OptimizerStateDict] = []

    def describe() -> Description:
        states, takers = states_of(mutable(state_dict))
        wanted.update(states)
        asked.update(takers)
        # An optimizer that has not run knows none of its slots: its state dict takes over the checkpoint's.
        # Each is noted as soon as it has changed: should a later one fail, all are given back.
        for template in expand(wanted, checkpoint, stored_name):
            templates.append(template)
        description = Description(loading=True)
        flatten(wanted, description, checkpoint if stored_name is None else _Renamed(checkpoint, stored_name))
        description.owners.append(wanted)
        description.wait_for_devices()
        _compare_objects(description)
        rank, size = (group.rank, group.size) if group is not None else (0, 1)
        skipped, done = resized(
            wanted, checkpoint, rank, size, lambda values: into(values, checkpoint, where, allow_pickle, "whole")
        )
        later.extend(done)
        if stored_name is not None:
            renames.update((leaf.key, stored_name(leaf.key)) for leaf in description.leaves)
        else:
            # An empty container is where something was forgotten, if the checkpoint has something for it.
            parts.extend(sorted(description.empty))
        for name in skipped:
            below = (leaf.key for leaf in description.leaves if leaf.per_rank)
            renames.update(dict.fromkeys(key for key in below if key == name or key.startswith(f"{name}.")))
        return description

    def _compare_objects(description: Description) -> None:
        """What the engine does not look into, with its words."""
        trusted = None if allow_pickle else _trusted_classes()
        found, allowed = differences(description, checkpoint, stored_name, options.cast, trusted, group.rank if group else 0)
        if found and options.strict:
            raise mismatch(where, found)
        keys = {one["key"] for one in found}
        description.leaves[:] = [leaf for leaf in description.leaves if leaf.key not in keys]
        different.extend(found)
        casts.extend(allowed)

    renames: dict[str, str | None] = {}
    parts: list[str] = []
    different: list[Difference] = []
    casts: list[Cast] = []
    described: list[Description] = []

    def work(description: Description, failure: str | None) -> _reshard.Loaded:
        described.append(description)
        return _reshard.load(
            _LoadRequest(
                checkpoint,
                description.leaves,
                description.owners,
                options,
                None if allow_pickle else _trusted_classes(),
                control,
                group,
                renames or None,
                parts,
                failure,
                None if trace is None else path_text(trace),
            )
        )

    try:
        with Progress(control, "loading", enabled=progress, rank=group.rank if group else 0):
            done = run_together(group, describe, work, loading=True)
        loaded = {key: _value(key, where, found, allow_pickle) for key, found in done.values.items()}
    except BaseException:
        for template in templates:
            template.give_back()
        raise
    description, report = described[0], done.report
    description.copy_back()
    for key, value in loaded.items():
        _put(description, key, value)
    for template in templates:
        template.settle()
    for step in later:
        step()
    for key, value in wanted.items():
        if key not in asked and state_dict[key] is not value:
            state_dict[key] = value
    for key in in_one_order(asked):
        asked[key](wanted[key])
    if different or casts:
        report = dataclasses.replace(report, differences=(*report.differences, *different), casts=(*report.casts, *casts))
    log_report(report, group.rank if group else 0)
    return report


def into(state: dict[Any, Any], checkpoint: Any, path: str, allow_pickle: bool, verify: VerifyPolicy) -> None:
    """Loads a state that was made from the checkpoint itself, on this rank alone."""
    description = Description(loading=True)
    flatten(state, description, checkpoint)
    description.wait_for_devices()
    options = _reshard.LoadOptions(verify=verify, ignore_unexpected=True)
    trusted = None if allow_pickle else _trusted_classes()
    loaded = _reshard.load(_LoadRequest(checkpoint, description.leaves, description.owners, options, trusted, _reshard.Control()))
    description.copy_back()
    for key, found in loaded.values.items():
        _put(description, key, _value(key, path, found, allow_pickle))


def _stored_name(rename: Rename | None) -> Callable[[str], str | None] | None:
    """From a wanted key to the checkpoint's; None where both are the same."""
    if isinstance(rename, Mapping):
        names = dict(rename)
        return lambda key: names.get(key, key)
    return rename


class _Renamed:
    """A checkpoint's keys, asked for by their wanted names."""

    def __init__(self, checkpoint: _reshard.Checkpoint, stored_name: Callable[[str], str | None]) -> None:
        self._checkpoint = checkpoint
        self._stored_name = stored_name

    def __contains__(self, key: str) -> bool:
        name = self._stored_name(key)
        return name is not None and name in self._checkpoint

    def entry(self, key: str) -> _reshard.Entry:
        return self._checkpoint.entry(self._stored_name(key) or key)


@functools.cache
def _restricted_kinds() -> frozenset[str]:
    """What the restricted unpickler of this PyTorch takes: releases differ in that."""
    from torch._weights_only_unpickler import _get_allowed_globals

    allowed = _get_allowed_globals()
    return frozenset(kind for kind, name in _RESTRICTED.items() if name is None or name in allowed)


def _trusted_classes() -> set[str]:
    """Classes that the program has declared safe to torch's restricted unpickler."""
    trusted = set(_restricted_kinds())
    for entry in torch.serialization.get_safe_globals():
        name = entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        trusted.add(name)
        # What the engine calls a tensor of a class of its own.
        trusted.add(f"a tensor of class {name}")
    return trusted


def _value(key: str, path: str, found: _reshard.StoredValue, allow_pickle: bool) -> Any:
    if found.record is None:
        return found.value
    return unpickled(key, path, found.class_name or "", found.record, allow_pickle)


def untrusted(key: str, path: str, name: str) -> UntrustedPickle:
    """The exception for a value that only running code from the file could bring back."""
    message = f"the value of {key!r} in {path} is not plain data ({name}): loading it would execute code from the file"
    hint = "pass allow_pickle=True only for files you trust, or declare the class with torch.serialization.add_safe_globals"
    return UntrustedPickle(message, keys=[key], class_name=name, hint=hint)


def unpickled(key: str, path: str, name: str, record: bytes, allow_pickle: bool) -> Any:
    """The object of a record: by torch's restricted unpickler, unless the caller trusts the file."""
    if not record:
        message = f"{key!r} in {path} is a {name} inside of a torch.save file, which reshard does not unpickle"
        raise UntrustedPickle(message, keys=[key], class_name=name, hint="load that file with torch.load if you trust it")
    if allow_pickle:
        return torch.load(io.BytesIO(record), weights_only=False)
    try:
        return torch.load(io.BytesIO(record), weights_only=True)
    except Exception as error:
        raise untrusted(key, path, name) from error


def _put(description: Description, key: str, value: Any) -> None:
    if type(value) in (int, float, bool, complex):
        # A number into the tensor of one element that stands for it here.
        holder = holder_of(description, key)
        if isinstance(holder, torch.Tensor) and holder.dim() == 0:
            with torch.no_grad():
                holder.fill_(value)
            return
    if isinstance(value, torch.Tensor):
        # A tensor that was stored whole, as an object: into the one that is there, if it fits.
        holder = holder_of(description, key)
        if isinstance(holder, torch.Tensor) and holder.shape == value.shape:
            copy_object(key, holder, value)
            return
    put(description.places[key], value)


def exists(path: StrPath, *, storage_options: StorageOptions | None = None) -> bool:
    """Whether a finished checkpoint lies at a path."""
    return _reshard.is_complete(path_text(path), storage_options)
