"""Loading in place, from any layout into any other."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from .. import _reshard
from .._errors import UntrustedPickle
from .._paths import path_text
from .._progress import Progress
from .._reports import LoadReport, log_report
from ._describe import Description, flatten, mutable, put
from ._group import DEFAULT_TIMEOUT, Group, group_for
from ._objects import copy_object, differences, holder_of, mismatch
from ._resize import resized
from ._save import StrPath, chosen_path, run_together
from ._states import in_one_order, states_of
from .state._expand import expand
from .state._template import OptimizerStateDict

Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: What the engine calls values that are not plain and that torch's own restricted unpickler reads nevertheless.
_RESTRICTED = {
    "torch.Tensor",
    "a sparse tensor",
    "a quantised tensor",
    "a nested tensor",
    "a tensor with attributes",
    "a tensor subclass without storage",
    "collections.OrderedDict",
    "collections.Counter",
}


def load(
    state_dict: MutableMapping[str, Any],
    path: StrPath | None = None,
    *,
    checkpoint_id: StrPath | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    strict: bool = True,
    cast: str = "never",
    rename: Rename | None = None,
    allow_pickle: bool = False,
    verify: str = "whole",
    exchange: bool = False,
    progress: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
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
        allow_pickle: unpickle values that are not plain data. Only for files you trust: it runs code from them.
        verify: compare checksums "never", of records that are read "whole", or "always".
        exchange: read what several ranks want once, and exchange it between them.
        progress: show a bar on rank 0.
        timeout: seconds to wait for other ranks.
        storage_options: settings of the store by name.

    Returns:
        what happened: bytes, times, casts, and with ``strict=False`` every difference.
    """
    where = chosen_path(path, checkpoint_id)
    group = group_for(process_group, no_dist, timeout=timeout)
    store = dict(storage_options) if storage_options else None
    checkpoint = _reshard.Checkpoint(where, store, group)
    options: dict[str, Any] = {"strict": strict, "cast": cast, "verify": verify, "exchange": exchange}
    return _load(state_dict, checkpoint, group, options, _stored_name(rename), allow_pickle, progress, store)


def load_present(
    state_dict: MutableMapping[str, Any],
    path: str,
    group: Group | None,
    *,
    partial: bool,
    ignore_unexpected: bool,
    cast: str,
    allow_pickle: bool,
    verify: str,
) -> LoadReport:
    """Loads as PyTorch does: what is wanted has to be there and to fit, what the checkpoint has beyond does not matter. With
    `partial` what is not there is left as it is."""
    checkpoint = _reshard.Checkpoint(path, None, group)
    options: dict[str, Any] = {"strict": True, "cast": cast, "verify": verify, "ignore_unexpected": ignore_unexpected}
    stored_name = (lambda key: key if key in checkpoint else None) if partial else None
    return _load(state_dict, checkpoint, group, options, stored_name, allow_pickle, False, None)


def _load(
    state_dict: MutableMapping[str, Any],
    checkpoint: _reshard.Checkpoint,
    group: Group | None,
    options: dict[str, Any],
    stored_name: Callable[[str], str | None] | None,
    allow_pickle: bool,
    progress: bool,
    store: dict[str, Any] | None,
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
        templates.extend(expand(wanted, checkpoint, stored_name))
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
            renames.update((leaf[0], stored_name(leaf[0])) for leaf in description.leaves)
        else:
            # An empty container is where something was forgotten, if the checkpoint has something for it.
            options["parts"] = sorted(description.empty)
        for name in skipped:
            below = (leaf[0] for leaf in description.leaves if leaf[2] and (leaf[0] == name or leaf[0].startswith(f"{name}.")))
            renames.update(dict.fromkeys(below))
        return description

    def _compare_objects(description: Description) -> None:
        """What the engine does not look into, with its words."""
        trusted = None if allow_pickle else _trusted_classes()
        found, casts = differences(description, checkpoint, stored_name, options["cast"], trusted, group.rank if group else 0)
        if found and options["strict"]:
            raise mismatch(where, found)
        different = {one["key"] for one in found}
        description.leaves[:] = [leaf for leaf in description.leaves if leaf[0] not in different]
        of_objects["differences"].extend(found)
        of_objects["casts"].extend(casts)

    renames: dict[str, str | None] = {}
    of_objects: dict[str, list[dict[str, Any]]] = {"differences": [], "casts": []}
    described: list[Description] = []

    def work(description: Description, failure: str | None) -> Any:
        described.append(description)
        trusted = None if allow_pickle else _trusted_classes()
        leaves, owners = description.leaves, description.owners
        return _reshard.load(checkpoint, leaves, owners, group, options, control, renames or None, trusted, failure, store)

    with Progress(control, "loading", enabled=progress, rank=group.rank if group else 0):
        values, report = run_together(group, describe, work, loading=True)
    description = described[0]
    loaded = {key: _value(key, where, found, allow_pickle) for key, found in values.items()}
    description.copy_back()
    for key, value in loaded.items():
        _put(description, key, value)
    for template in templates:
        template.take_own_names()
    for step in later:
        step()
    for key, value in wanted.items():
        if key not in asked and state_dict[key] is not value:
            state_dict[key] = value
    for key in in_one_order(asked):
        asked[key](wanted[key])
    for name, more in of_objects.items():
        report[name] = [*report[name], *more]
    done_report = LoadReport(report)
    log_report(done_report, group.rank if group else 0)
    return done_report


def into(state: dict[Any, Any], checkpoint: Any, path: str, allow_pickle: bool, verify: str) -> None:
    """Loads a state that was made from the checkpoint itself, on this rank alone."""
    description = Description(loading=True)
    flatten(state, description, checkpoint)
    description.wait_for_devices()
    options = {"strict": True, "verify": verify, "ignore_unexpected": True}
    trusted = None if allow_pickle else _trusted_classes()
    values, _ = _reshard.load(
        checkpoint, description.leaves, description.owners, None, options, _reshard.Control(), None, trusted
    )
    description.copy_back()
    for key, found in values.items():
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

    def entry(self, key: str) -> Any:
        return self._checkpoint.entry(self._stored_name(key) or key)


def _trusted_classes() -> set[str]:
    """Classes that the program has declared safe to torch's restricted unpickler."""
    trusted = set(_RESTRICTED)
    for entry in torch.serialization.get_safe_globals():
        name = entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        trusted.add(name)
        # What the engine calls a tensor of a class of its own.
        trusted.add(f"a tensor of class {name}")
    return trusted


def _value(key: str, path: str, found: tuple[Any, bytes | None], allow_pickle: bool) -> Any:
    plain, record = found
    return plain if record is None else unpickled(key, path, plain, record, allow_pickle)


def untrusted(key: str, path: str, name: str) -> UntrustedPickle:
    """The exception for a value that only running code from the file could bring back."""
    message = f"the value of {key!r} in {path} is a pickled {name}: loading it would execute code from the file"
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


def exists(path: StrPath, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether a finished checkpoint lies at a path."""
    return _reshard.is_complete(path_text(path), dict(storage_options) if storage_options else None)
