"""The tools of the command in Python: the same semantics, with typed results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict, overload

from . import _reshard
from ._errors import as_raised
from ._paths import path_text
from ._types import Format, Part, StorageOptions, StrPath, Target
from ._view import Views, inner_views

if TYPE_CHECKING:
    from ._reports import (
        ConvertReport,
        DiffReport,
        DigestEntry,
        EditReport,
        HealthReport,
        MergeReport,
        PruneReport,
        RecoverReport,
        TensorStats,
        Trend,
    )

_Storage = StorageOptions | None
_Texts = str | Sequence[str]


# What crosses into the engine, by the names that its structs have. What is left out is for the engine to decide.


class Selecting(TypedDict, total=False):
    """Which keys, under which names, seen through which rules."""

    include: Required[_Texts | None]
    exclude: _Texts | None
    keys: Iterable[str] | None
    part: Part | None
    prefix: str | None
    add_prefix: str | None
    rename: Mapping[str, str] | None
    view: list[_reshard.View] | None
    parameter_map: str | None


class Writing(TypedDict, total=False):
    """What to write, and how."""

    to: Target | None
    ranks: int
    max_shard_size: int | None
    compression: str | None
    cast: _Texts | None
    overwrite: Required[bool]
    verify: bool
    sync: bool
    skip_opaque: bool


class Editing(TypedDict, total=False):
    """What an edit changes."""

    drop: Required[_Texts]
    rename: Mapping[str, str] | None
    set: Mapping[str, Any] | None
    skip_opaque: bool


class Recovering(TypedDict, total=False):
    """How to rebuild a `.metadata`."""

    replace: Required[bool]
    accept_absent_ranks: bool
    undo_edits: bool
    dry_run: bool


class Keeping(TypedDict, total=False):
    """Which steps to keep."""

    keep_last: Required[int | None]
    keep_every: int | None
    keep_best: str | None
    keep_younger: float | None
    budget: int | None
    fallback: bool
    grace: float
    abandoned: bool


def _file(path: StrPath | None) -> str | None:
    return None if path is None else path_text(path)


def _selecting(include: _Texts | None, exclude: _Texts | None, view: Views | None, parameter_map: StrPath | None) -> Selecting:
    """What most tools can be told about what they look at."""
    return {"include": include, "exclude": exclude, "view": inner_views(view), "parameter_map": _file(parameter_map)}


def convert(
    source: StrPath,
    destination: StrPath,
    *,
    to: Target | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    keys: Iterable[str] | None = None,
    part: Part | None = None,
    prefix: str | None = None,
    add_prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    cast: str | Sequence[str] | None = None,
    ranks: int = 1,
    max_shard_size: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    sync: bool = True,
    skip_opaque: bool = False,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> ConvertReport:
    """Writes a checkpoint in another format, in bounded memory.

    Args:
        source: a checkpoint of any format.
        destination: a folder, or a file ending in ``.safetensors`` or ``.pt``.
        to: "dcp", "safetensors" or "torch"; inferred from the destination's name if None. "huggingface" is the model alone as
            Hugging Face's hub has it, "deepspeed-universal" and "megatron" are what these trainers resume from.
        include, exclude: only keys matching one of these globs, none matching one of those.
        keys: only these keys.
        part: "model" or "optimizer" alone.
        prefix: only keys that start so, and without it.
        add_prefix: put before every key.
        rename: from regular expressions to what replaces them, such as ``{r"^layers\\.(\\d+)": "blocks.$1"}``.
        cast: "bfloat16", or "GLOB=bfloat16", one or several.
        ranks: as many ranks' files (DCP).
        max_shard_size: a new file beyond so many bytes (safetensors, Hugging Face).
        compression: "zstd" compresses the records of tensors (DCP).
        overwrite: replace what is there; the old stays until the new is complete.
        verify: compare the source's checksums on the way.
        sync: wait until everything is on the disk.
        skip_opaque: leave out objects that the format cannot carry.
        view: see the source through rules (:class:`reshard.View`, a file, a recipe), before all else.
        parameter_map: a JSON file that says which parameters lie in the flat buffers of Megatron's distributed optimizer; see
            ``docs/other-formats.md``.
        storage_options: settings of the stores by name.
    """
    selecting = _selecting(include, exclude, view, parameter_map)
    selecting.update({"keys": keys, "part": part, "prefix": prefix, "add_prefix": add_prefix, "rename": rename})
    writing: Writing = {
        "to": to,
        "ranks": ranks,
        "max_shard_size": max_shard_size,
        "compression": compression,
        "cast": cast,
        "overwrite": overwrite,
        "verify": verify,
        "sync": sync,
        "skip_opaque": skip_opaque,
    }
    with as_raised():
        return _reshard.convert(path_text(source), path_text(destination), selecting, writing, storage_options)


def relayout(
    source: StrPath,
    destination: StrPath,
    *,
    mesh: str,
    rules: Sequence[str] = (),
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    cast: str | Sequence[str] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    sync: bool = True,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> ConvertReport:
    """Reshards a checkpoint for a device mesh.

    Args:
        source: a checkpoint of any format.
        destination: a folder.
        mesh: the device mesh, such as "4" or "dp=2,tp=4".
        rules: placements by pattern, such as "*.weight=S(0)", one for each dimension of the mesh; the first that matches counts.
        include, exclude, cast, overwrite, verify, sync, view, parameter_map, storage_options: see :func:`convert`.
    """
    selecting = _selecting(include, exclude, view, parameter_map)
    writing: Writing = {"cast": cast, "overwrite": overwrite, "verify": verify, "sync": sync}
    with as_raised():
        layout = (mesh, list(rules))
        return _reshard.relayout(path_text(source), path_text(destination), layout, selecting, writing, storage_options)


def merge(
    sources: Sequence[StrPath],
    destination: StrPath,
    *,
    weights: Sequence[float] = (),
    to: Format | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    ranks: int = 1,
    overwrite: bool = False,
    verify: bool = True,
    sync: bool = True,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> MergeReport:
    """Averages checkpoints. Keys that have no average are the first one's.

    Args:
        sources: checkpoints with the same keys.
        destination: where to; see :func:`convert`.
        weights: one for each; all the same when empty.
        to: the format; the first one's by default.
        include, exclude, ranks, overwrite, verify, sync, parameter_map, storage_options: see :func:`convert`.
    """
    selecting = _selecting(include, exclude, None, parameter_map)
    writing: Writing = {"to": to, "ranks": ranks, "overwrite": overwrite, "verify": verify, "sync": sync}
    paths = [path_text(source) for source in sources]
    with as_raised():
        return _reshard.merge(paths, path_text(destination), list(weights), selecting, writing, storage_options)


def edit(
    source: StrPath,
    destination: StrPath,
    *,
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    set: Mapping[str, Any] | None = None,
    skip_opaque: bool = False,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> EditReport:
    """Drops and renames keys and sets plain values, in a new DCP checkpoint. Data files of DCP are linked where the store can, not
    copied; what is of another format is written anew.

    Args:
        source: the checkpoint.
        destination: a path of its own.
        drop: globs of keys to leave out.
        rename: from regular expressions to what replaces them.
        set: plain values by key.
        skip_opaque: leave out objects that a DCP checkpoint cannot carry.
        view: rules through which to see the source, before all else.
        parameter_map: see :func:`convert`.
        storage_options: settings of the stores by name.
    """
    editing: Editing = {"drop": drop, "rename": rename, "set": set, "skip_opaque": skip_opaque}
    selecting = _selecting(None, None, view, parameter_map)
    with as_raised():
        return _reshard.edit(path_text(source), path_text(destination), selecting, editing, storage_options)


def diff(
    first: StrPath,
    second: StrPath,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    tolerance: float = 0.0,
    absolute: float | None = None,
    relative: float | None = None,
    elements: bool = True,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> DiffReport:
    """What differs between two checkpoints, of whatever formats and layouts.

    Args:
        first, second: the checkpoints.
        include, exclude: only keys matching one of these globs, none matching one of those.
        rename: from regular expressions to what replaces them in the first one's keys.
        tolerance, absolute, relative: distances up to which elements count as the same.
        elements: compare elements; otherwise shapes and dtypes alone.
        view: rules through which to see the first one.
        parameter_map: see :func:`convert`.
        storage_options: settings of the stores by name.
    """
    selecting = _selecting(include, exclude, view, parameter_map)
    selecting["rename"] = rename
    within = (tolerance if absolute is None else absolute, tolerance if relative is None else relative)
    with as_raised():
        return _reshard.diff(path_text(first), path_text(second), selecting, within if elements else None, storage_options)


def digest(
    path: StrPath,
    *,
    include: Sequence[str] | None = None,
    verify: bool = True,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> dict[str, DigestEntry]:
    """What each key holds, independent of format and layout: two checkpoints hold the same where digests are equal."""
    with as_raised():
        return _reshard.digest(path_text(path), _selecting(include, None, view, parameter_map), verify, storage_options)


@overload
def stats(
    path: StrPath,
    key: str,
    *,
    bins: int = 0,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> TensorStats: ...
@overload
def stats(
    path: StrPath,
    key: None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    bins: int = 0,
    verify: bool = False,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> dict[str, TensorStats]: ...
def stats(
    path: StrPath,
    key: str | None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    bins: int = 0,
    verify: bool = False,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> TensorStats | dict[str, TensorStats]:
    """Numbers about one tensor, or about every tensor by key, in one pass and bounded memory.

    Args:
        path: a checkpoint.
        key: the tensor; without it all of them.
        include, exclude: only keys matching one of these globs, none matching one of those.
        bins: a histogram of so many equal steps between the extremes.
        verify: compare stored checksums on the way; those of one tensor always are.
        view: rules through which to see it.
        parameter_map: see :func:`convert`.
        storage_options: settings of the store by name.
    """
    options = _selecting(include, exclude, view, parameter_map)
    with as_raised():
        if key is not None:
            return _reshard.stats(path_text(path), key, options, bins, storage_options)
        return _reshard.scan(path_text(path), options, bins, verify, storage_options)


def health(
    path: StrPath,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    limits: Mapping[str, float | None] | None = None,
    verify: bool = False,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: _Storage = None,
) -> HealthReport:
    """What is wrong with a checkpoint's numbers: NaN, dead layers, exploding weights, the optimizer's moments.

    Args:
        path: a checkpoint.
        include, exclude: only keys matching one of these globs, none matching one of those.
        limits: limits of rules by name; None turns a rule off. ``reshard stats --rules`` lists them.
        verify: compare stored checksums on the way.
        view: rules through which to see it.
        parameter_map: see :func:`convert`.
        storage_options: settings of the store by name.
    """
    options = _selecting(include, exclude, view, parameter_map)
    with as_raised():
        return _reshard.health(path_text(path), options, _limits(limits), verify, storage_options)


def _limits(limits: Mapping[str, float | None] | None) -> list[str]:
    return [f"{name}={'off' if limit is None else repr(float(limit))}" for name, limit in (limits or {}).items()]


def trend(
    folder: StrPath,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    numbers: bool = False,
    limits: Mapping[str, float | None] | None = None,
    storage_options: _Storage = None,
) -> Trend:
    """A run's steps side by side: stored metrics, how far weights moved, the first step at which a tensor is bad.

    Args:
        folder: holds a folder for each step.
        include, exclude: only keys matching one of these globs, none matching one of those.
        numbers: read every step; otherwise only the newest, and of others what the search for a bad step needs.
        limits: limits of rules by name, as for :func:`health`.
        storage_options: settings of the store by name.
    """
    with as_raised():
        options: Selecting = {"include": include, "exclude": exclude}
        return _reshard.trend(path_text(folder), options, numbers, _limits(limits), storage_options)


def recover(
    path: StrPath,
    *,
    replace: bool = False,
    accept_absent_ranks: bool = False,
    undo_edits: bool = False,
    dry_run: bool = False,
    storage_options: _Storage = None,
) -> RecoverReport:
    """Builds a lost or damaged `.metadata` from the data files that reshard wrote.

    Args:
        path: the checkpoint's folder.
        replace: also where `.metadata` can be read.
        accept_absent_ranks: also where files of some ranks are gone.
        undo_edits: also where an edit's changes would be lost.
        dry_run: look, and write nothing.
        storage_options: settings of the store by name.
    """
    recovering: Recovering = {
        "replace": replace,
        "accept_absent_ranks": accept_absent_ranks,
        "undo_edits": undo_edits,
        "dry_run": dry_run,
    }
    with as_raised():
        return _reshard.recover(path_text(path), recovering, storage_options)


def prune(
    folder: StrPath,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    keep_younger: float | None = None,
    budget: int | None = None,
    fallback: bool = False,
    grace: float = 3600.0,
    abandoned: bool = False,
    deep: bool = False,
    dry_run: bool = False,
    storage_options: _Storage = None,
) -> PruneReport:
    """Removes steps that no rule keeps; without a rule nothing. The newest valid step always stays.

    Args:
        folder: the folder of steps.
        keep_last: the last so many.
        keep_every: those whose number is a multiple of this.
        keep_best: the best by a number in the checkpoint, such as "metrics.loss:min:3".
        keep_younger: those younger than so many seconds.
        budget: no more bytes than this in all steps together: the oldest go first, the best last.
        fallback: before a complete step goes, read the newest ones whole until one is sound; that one stays.
        grace: leftovers that were changed within so many seconds stay.
        abandoned: also incomplete steps that are newer than the newest valid one; only when no job saves here.
        deep: read all data of a step before calling it valid.
        dry_run: look, and remove nothing.
        storage_options: settings of the store by name.
    """
    keeping: Keeping = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_best": keep_best,
        "keep_younger": keep_younger,
        "budget": budget,
        "fallback": fallback,
        "grace": grace,
        "abandoned": abandoned,
    }
    with as_raised():
        return _reshard.prune(path_text(folder), keeping, deep, dry_run, storage_options)
