"""The tools of the command in Python: the same semantics, with typed results."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from . import _reshard
from ._errors import ReshardError
from ._paths import StrPath, path_text

_Storage = Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Cast:
    """A tensor that was converted to another element type."""

    key: str
    from_: str
    to: str
    narrowing: bool


@dataclasses.dataclass(frozen=True)
class ConvertReport:
    """What a conversion wrote.

    Attributes:
        from_: the source.
        to: the destination.
        format: "dcp", "safetensors" or "torch".
        tensors, values: how many of each.
        bytes: bytes of tensor data.
        files: the files.
        casts: tensors of another element type than before.
        skipped: keys that the format cannot carry.
        warnings: what is worth knowing.
        seconds: how long it took.
    """

    from_: str
    to: str
    format: str
    tensors: int
    values: int
    bytes: int
    files: tuple[str, ...]
    casts: tuple[Cast, ...]
    skipped: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What averaging wrote.

    Attributes:
        sources, weights: the checkpoints and their weights.
        averaged: how many tensors.
        taken_from_first: keys that differ and have no average.
        written: the conversion that wrote the result.
    """

    sources: tuple[str, ...]
    weights: tuple[float, ...]
    averaged: int
    taken_from_first: tuple[str, ...]
    written: ConvertReport


@dataclasses.dataclass(frozen=True)
class EditReport:
    """What an edit did.

    Attributes:
        from_, to: source and destination.
        dropped, set: keys.
        renamed: old and new names.
        linked, copied: data files that the new checkpoint shares with the old one, and that had to be copied.
    """

    from_: str
    to: str
    dropped: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    set: tuple[str, ...]
    linked: int
    copied: int


@dataclasses.dataclass(frozen=True)
class ElementDifference:
    """How the elements of two tensors differ; distances are None where there are no numbers to compare."""

    elements: int
    different: int
    max_absolute: float | None
    mean_absolute: float | None
    max_relative: float | None
    mean_relative: float | None
    first_index: tuple[int, ...]
    first_l2: float | None = None
    second_l2: float | None = None
    change_l2: float | None = None
    relative_change: float | None = None
    cosine: float | None = None
    new_nans: int = 0
    new_infinities: int = 0
    newly_zero: bool = False


@dataclasses.dataclass(frozen=True)
class KeyDifference:
    """A key that is in both checkpoints and differs.

    Attributes:
        key: the key.
        kind: "kind", "shape", "dtype", "elements" or "value".
        first, second: both sides, where there are two to show.
        elements: how the elements differ, where they were compared.
    """

    key: str
    kind: str
    first: Any = None
    second: Any = None
    elements: ElementDifference | None = None


@dataclasses.dataclass(frozen=True)
class DiffReport:
    """What differs between two checkpoints. ``equal`` when nothing does.

    Attributes:
        first, second: the checkpoints.
        only_first, only_second: keys that one has alone.
        different: keys that both have and that differ.
        same: how many are the same, or within the tolerance.
    """

    first: str
    second: str
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    different: tuple[KeyDifference, ...]
    same: int

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_first or self.only_second or self.different)


@dataclasses.dataclass(frozen=True)
class DigestEntry:
    """What one key holds: a tensor's dtype, shape and SHA-256, a plain value, or the class of an object."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    sha256: str | None = None
    value: Any = None
    class_name: str | None = None


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Numbers below which a share of a tensor's elements lies.

    Exact for elements of at most 16 bits, else within 0.4 % (2⁻⁸) of the element at that rank.
    """

    p1: float
    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float


@dataclasses.dataclass(frozen=True)
class TensorStats:
    """Numbers about a tensor. All but the counts are over finite elements; None when there are none.

    Attributes:
        elements: numbers in all: two for each complex element, and for each byte of a packed type.
        nans, infinities, positive_infinities, negative_infinities, zeros, subnormals: how many of each.
        min, max, absmax: the extremes, and the largest magnitude.
        mean, std: the mean and the standard deviation of the population.
        l2, rms: the root of the sum, and of the mean, of squares.
        percentiles: numbers below which a share of the elements lies.
        magnitudes: ``(e, n)`` for n numbers of a magnitude from 2**e up to 2**(e+1), without zeros.
        histogram: counts in equal steps from min to max; empty unless asked for.
    """

    elements: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zeros: int
    nans: int
    infinities: int
    histogram: tuple[int, ...]
    positive_infinities: int = 0
    negative_infinities: int = 0
    subnormals: int = 0
    absmax: float | None = None
    l2: float | None = None
    rms: float | None = None
    percentiles: Percentiles | None = None
    magnitudes: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class UnusedFile:
    """A data file that a recovery left alone, and why."""

    file: str
    why: str


@dataclasses.dataclass(frozen=True)
class RecoverReport:
    """What a recovery found; ``published`` says whether `.metadata` was written."""

    path: str
    save_id: str
    ranks: int
    files: tuple[str, ...]
    keys: int
    records: int
    unused: tuple[UnusedFile, ...]
    warnings: tuple[str, ...]
    published: bool


@dataclasses.dataclass(frozen=True)
class Decision:
    """What pruning decided about one step, and why. ``state`` is "valid", "incomplete" or "other"."""

    name: str
    number: int | None
    path: str
    state: str
    modified: int | None
    bytes: int
    keep: bool
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PruneReport:
    """What pruning removed, or with ``dry_run`` would remove.

    Attributes:
        steps: every step, oldest first.
        leftovers: files of saves that were never finished, inside steps that stay.
        bytes: bytes set free.
        failed: what could not be removed, and why.
        dry_run: whether nothing was touched.
    """

    steps: tuple[Decision, ...]
    leftovers: tuple[str, ...]
    bytes: int
    failed: tuple[str, ...]
    dry_run: bool

    @property
    def removed(self) -> tuple[str, ...]:
        """The paths of the steps that went."""
        return tuple(step.path for step in self.steps if not step.keep)


def convert(
    source: StrPath,
    destination: StrPath,
    *,
    to: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    keys: Iterable[str] | None = None,
    part: str | None = None,
    prefix: str | None = None,
    add_prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    cast: str | Sequence[str] | None = None,
    ranks: int = 1,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    verify: bool = True,
    sync: bool = True,
    skip_opaque: bool = False,
    storage_options: _Storage = None,
) -> ConvertReport:
    """Writes a checkpoint in another format, in bounded memory.

    Args:
        source: a checkpoint of any format.
        destination: a folder, or a file ending in ``.safetensors`` or ``.pt``.
        to: "dcp", "safetensors" or "torch"; told by the destination's name where it says so.
        include, exclude: only keys that fit one of these globs, none that fit one of those.
        keys: only these keys.
        part: "model" or "optimizer" alone.
        prefix: only keys that start so, and without it.
        add_prefix: put before every key.
        rename: from regular expressions to what replaces them, such as ``{r"^layers\\.(\\d+)": "blocks.$1"}``.
        cast: "bfloat16", or "GLOB=bfloat16", one or several.
        ranks: as many ranks' files (DCP).
        max_shard_size: a new file beyond so many bytes (safetensors).
        overwrite: replace what is there; the old stays until the new is complete.
        verify: compare the source's checksums on the way.
        sync: wait until everything is on the disk.
        skip_opaque: leave out objects that the format cannot carry.
        storage_options: settings of the stores by name.
    """
    options = {"to": to, "ranks": ranks, "max_shard_size": max_shard_size}
    options |= _selection(include, exclude, keys, part, prefix, add_prefix, rename)
    options |= _writing(cast, overwrite, verify, sync, skip_opaque)
    return _converted(_call(_reshard.convert, path_text(source), path_text(destination), options, storage=storage_options))


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
    storage_options: _Storage = None,
) -> ConvertReport:
    """Cuts a checkpoint for other ranks.

    Args:
        source: a checkpoint of any format.
        destination: a folder.
        mesh: the device mesh, such as "4" or "dp=2,tp=4".
        rules: placements by pattern, such as "*.weight=shard(0)"; the rest is as the command does it.
        include, exclude, cast, overwrite, verify, sync, storage_options: see :func:`convert`.
    """
    options = _selection(include, exclude) | _writing(cast, overwrite, verify, sync, False)
    arguments = (path_text(source), path_text(destination), mesh, list(rules), options)
    return _converted(_call(_reshard.relayout, *arguments, storage=storage_options))


def merge(
    sources: Sequence[StrPath],
    destination: StrPath,
    *,
    weights: Sequence[float] = (),
    to: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    ranks: int = 1,
    overwrite: bool = False,
    verify: bool = True,
    sync: bool = True,
    storage_options: _Storage = None,
) -> MergeReport:
    """Averages checkpoints. Keys that have no average are the first one's.

    Args:
        sources: checkpoints with the same keys.
        destination: where to; see :func:`convert`.
        weights: one for each; all the same when empty.
        to: the format; the first one's by default.
        include, exclude, ranks, overwrite, verify, sync, storage_options: see :func:`convert`.
    """
    options = {"to": to, "ranks": ranks} | _selection(include, exclude) | _writing(None, overwrite, verify, sync, False)
    arguments = ([path_text(source) for source in sources], path_text(destination), [float(w) for w in weights], options)
    found = _call(_reshard.merge, *arguments, storage=storage_options)
    return MergeReport(
        sources=tuple(found["sources"]),
        weights=tuple(found["weights"]),
        averaged=found["averaged"],
        taken_from_first=tuple(found["taken_from_first"]),
        written=_converted(found["written"]),
    )


def edit(
    source: StrPath,
    destination: StrPath,
    *,
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    set: Mapping[str, Any] | None = None,
    storage_options: _Storage = None,
) -> EditReport:
    """Drops and renames keys and sets plain values. Data files are linked where the store can, not copied.

    Args:
        source: a DCP checkpoint.
        destination: a path of its own.
        drop: globs of keys to leave out.
        rename: from regular expressions to what replaces them.
        set: plain values by key.
        storage_options: settings of the stores by name.
    """
    options = {"drop": list(drop), "rename": _pairs(rename)}
    arguments = (path_text(source), path_text(destination), options, dict(set or {}))
    found = _call(_reshard.edit, *arguments, storage=storage_options)
    return EditReport(
        from_=found["from"],
        to=found["to"],
        dropped=tuple(found["dropped"]),
        renamed=tuple((old, new) for old, new in found["renamed"]),
        set=tuple(found["set"]),
        linked=found["linked"],
        copied=found["copied"],
    )


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
    storage_options: _Storage = None,
) -> DiffReport:
    """What differs between two checkpoints, of whatever formats and layouts.

    Args:
        first, second: the checkpoints.
        include, exclude: only keys that fit one of these globs, none that fit one of those.
        rename: from regular expressions to what replaces them in the first one's keys.
        tolerance, absolute, relative: distances up to which elements count as the same.
        elements: compare elements; otherwise shapes and dtypes alone.
        storage_options: settings of the stores by name.
    """
    options = _selection(include, exclude, rename=rename)
    distances = (tolerance if absolute is None else absolute, tolerance if relative is None else relative)
    arguments = (path_text(first), path_text(second), options, *map(float, distances), elements)
    found = _call(_reshard.diff, *arguments, storage=storage_options)
    return DiffReport(
        first=found["first"],
        second=found["second"],
        only_first=tuple(found["only_first"]),
        only_second=tuple(found["only_second"]),
        different=tuple(_difference(entry) for entry in found["different"]),
        same=found["same"],
    )


def _difference(entry: dict[str, Any]) -> KeyDifference:
    kind = entry.get("difference", entry.get("kind", ""))
    elements = entry.get("elements")
    if isinstance(elements, dict):
        numbers: dict[str, Any] | None = elements
    else:
        numbers = entry if isinstance(elements, int) else None
    return KeyDifference(
        key=entry["key"],
        kind=kind,
        first=_tuple(entry.get("first")),
        second=_tuple(entry.get("second")),
        elements=None if numbers is None else _elements(numbers),
    )


def _elements(numbers: dict[str, Any]) -> ElementDifference:
    values = {field.name: _tuple(numbers.get(field.name)) for field in dataclasses.fields(ElementDifference)}
    return ElementDifference(**values)


def digest(
    path: StrPath,
    *,
    include: Sequence[str] | None = None,
    verify: bool = True,
    storage_options: _Storage = None,
) -> dict[str, DigestEntry]:
    """What each key holds, independent of format and layout: two checkpoints hold the same where digests are equal."""
    found = _call(_reshard.digest, path_text(path), _selection(include), verify, storage=storage_options)
    return {key: _digest(entry) for key, entry in found.get("entries", found).items()}


def _digest(entry: dict[str, Any]) -> DigestEntry:
    shape = entry.get("shape")
    return DigestEntry(
        dtype=entry.get("dtype"),
        shape=None if shape is None else tuple(shape),
        sha256=entry.get("sha256"),
        value=entry.get("value"),
        class_name=entry.get("class"),
    )


@overload
def stats(path: StrPath, key: str, *, bins: int = 0, storage_options: _Storage = None) -> TensorStats: ...
@overload
def stats(
    path: StrPath,
    key: None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    bins: int = 0,
    verify: bool = False,
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
    storage_options: _Storage = None,
) -> TensorStats | dict[str, TensorStats]:
    """Numbers about one tensor, or about every tensor by key, in one pass and bounded memory.

    Args:
        path: a checkpoint.
        key: the tensor; without it all of them.
        include, exclude: only keys that fit one of these globs, none that fit one of those.
        bins: a histogram of so many equal steps between the extremes.
        verify: compare stored checksums on the way; those of one tensor always are.
        storage_options: settings of the store by name.
    """
    if key is not None:
        return _stats(_call(_reshard.stats, path_text(path), key, bins, storage=storage_options))
    found = _call(_reshard.scan, path_text(path), _selection(include, exclude), bins, verify, storage=storage_options)
    return {name: _stats(entry) for name, entry in found.items()}


def _stats(found: dict[str, Any]) -> TensorStats:
    values = {name: _tuple(value) for name, value in found.items()}
    percentiles = values.pop("percentiles")
    values["magnitudes"] = tuple((exponent, count) for exponent, count in values["magnitudes"])
    return TensorStats(percentiles=None if percentiles is None else Percentiles(**percentiles), **values)


@dataclasses.dataclass(frozen=True)
class HealthFinding:
    """A rule that is broken: ``value`` is the number that broke it, ``limit`` the rule's."""

    rule: str
    severity: str
    key: str
    what: str
    value: float | None
    limit: float | None


@dataclasses.dataclass(frozen=True)
class ParamHealth:
    """A parameter that has optimizer state; ``update_ratio`` is its next update over its weights, estimated."""

    param: str
    weights: str | None
    group: int | None
    step: float | None
    first_moment_rms: float | None
    second_moment_max: float | None
    update_ratio: float | None


@dataclasses.dataclass(frozen=True)
class HealthReport:
    """What a checkpoint's numbers say.

    Attributes:
        path: the checkpoint.
        checked: which of "structure", "checksums" and "numbers" the verdict rests on.
        findings: rules that are broken, errors first.
        params: the optimizer's parameters, where there is an optimizer.
        tensors: numbers about every tensor, by key.
    """

    path: str
    checked: tuple[str, ...]
    findings: tuple[HealthFinding, ...]
    params: tuple[ParamHealth, ...]
    tensors: dict[str, TensorStats]

    @property
    def healthy(self) -> bool:
        """Whether no rule of gravity is broken, by what was checked."""
        return not any(finding.severity == "error" for finding in self.findings)


def health(
    path: StrPath,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    limits: Mapping[str, float | None] | None = None,
    verify: bool = False,
    storage_options: _Storage = None,
) -> HealthReport:
    """What is wrong with a checkpoint's numbers: NaN, dead layers, exploding weights, the optimizer's moments.

    Args:
        path: a checkpoint.
        include, exclude: only keys that fit one of these globs, none that fit one of those.
        limits: limits of rules by name; None turns a rule off. ``reshard stats --rules`` lists them.
        verify: compare stored checksums on the way.
        storage_options: settings of the store by name.
    """
    texts = [f"{name}={'off' if limit is None else repr(float(limit))}" for name, limit in (limits or {}).items()]
    found = _call(_reshard.health, path_text(path), _selection(include, exclude), texts, verify, storage=storage_options)
    optimizer = found["optimizer"] or {}
    return HealthReport(
        path=found["path"],
        checked=tuple(name for name, looked in found["checked"].items() if looked),
        findings=tuple(HealthFinding(**entry) for entry in found["findings"]),
        params=tuple(ParamHealth(**entry) for entry in optimizer.get("params", ())),
        tensors={name: _stats(entry) for name, entry in found["tensors"].items()},
    )


@dataclasses.dataclass(frozen=True)
class FirstBad:
    """A tensor that is bad ("nan", "inf" or "zero") since a step, and the last step at which it was fine."""

    key: str
    what: str
    first: str
    fine: str | None


@dataclasses.dataclass(frozen=True)
class TrendTensor:
    """A tensor at one step; ``change`` is how far it moved since the step before, as a share of its norm."""

    rms: float | None
    absmax: float | None
    nans: int
    infinities: int
    zeros: int
    change: float | None
    cosine: float | None


@dataclasses.dataclass(frozen=True)
class TrendStep:
    """One complete step of a run, the metrics stored with it, and numbers about its tensors when asked for."""

    name: str
    number: int | None
    path: str
    modified: int | None
    metrics: dict[str, float]
    tensors: dict[str, TrendTensor]


@dataclasses.dataclass(frozen=True)
class Trend:
    """A run: its complete steps, oldest first, and since when tensors of the newest one are bad."""

    folder: str
    steps: tuple[TrendStep, ...]
    bad: tuple[FirstBad, ...]


def trend(
    folder: StrPath,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    numbers: bool = False,
    storage_options: _Storage = None,
) -> Trend:
    """A run's steps side by side: stored metrics, how far weights moved, the first step at which a tensor is bad.

    Args:
        folder: holds a folder for each step.
        include, exclude: only keys that fit one of these globs, none that fit one of those.
        numbers: read every step; otherwise only the newest, and of others what the search for a bad step needs.
        storage_options: settings of the store by name.
    """
    found = _call(_reshard.trend, path_text(folder), _selection(include, exclude), numbers, storage=storage_options)
    steps = (
        TrendStep(
            **{
                **step,
                # JSON has no NaN, which is what a loss must not be.
                "metrics": {name: math.nan if value is None else value for name, value in step["metrics"].items()},
                "tensors": {key: TrendTensor(**tensor) for key, tensor in step["tensors"].items()},
            }
        )
        for step in found["steps"]
    )
    return Trend(found["folder"], tuple(steps), tuple(FirstBad(**entry) for entry in found["bad"]))


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
    arguments = (path_text(path), replace, accept_absent_ranks, undo_edits, dry_run)
    found = _call(_reshard.recover, *arguments, storage=storage_options)
    unused = tuple(UnusedFile(entry["file"], entry["why"]) for entry in found["unused"])
    names = ("path", "save_id", "ranks", "keys", "records", "published")
    values = {name: found[name] for name in names}
    return RecoverReport(files=tuple(found["files"]), warnings=tuple(found["warnings"]), unused=unused, **values)


def prune(
    folder: StrPath,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    keep_younger: float | None = None,
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
        grace: leftovers that were changed within so many seconds stay.
        abandoned: also incomplete steps that are newer than the newest valid one; only when no job saves here.
        deep: read all data of a step before calling it valid.
        dry_run: look, and remove nothing.
        storage_options: settings of the store by name.
    """
    rules = (keep_last, keep_every, _best(keep_best), keep_younger)
    arguments = (path_text(folder), *rules, float(grace), abandoned, deep, dry_run)
    found = _call(_reshard.prune, *arguments, storage=storage_options)
    return PruneReport(
        steps=tuple(_decision(entry) for entry in found["steps"]),
        leftovers=tuple(found["leftovers"]),
        bytes=found["bytes"],
        failed=tuple(found["failed"]),
        dry_run=found["dry_run"],
    )


def _decision(entry: dict[str, Any]) -> Decision:
    step = entry["step"]
    values = {name: step[name] for name in ("name", "number", "path", "state", "modified", "bytes")}
    return Decision(keep=entry["keep"], why=tuple(entry["why"]), **values)


def _best(text: str | None) -> tuple[str, bool, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(.+):(min|max)(?::(\d+))?", text)
    if found is None:
        from ._errors import InvalidInput

        raise InvalidInput(f"{text!r} does not say what is best: write it like metrics.loss:min or metrics.accuracy:max:3")
    return found[1], found[2] == "max", int(found[3] or 1)


def _selection(
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    keys: Iterable[str] | None = None,
    part: str | None = None,
    prefix: str | None = None,
    add_prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "include": None if include is None else [include] if isinstance(include, str) else list(include),
        "exclude": None if exclude is None else [exclude] if isinstance(exclude, str) else list(exclude),
        "keys": None if keys is None else list(keys),
        "part": part,
        "prefix": prefix,
        "add_prefix": add_prefix,
        "rename": _pairs(rename),
    }


def _writing(cast: str | Sequence[str] | None, overwrite: bool, verify: bool, sync: bool, skip_opaque: bool) -> dict[str, Any]:
    casts = [cast] if isinstance(cast, str) else None if cast is None else list(cast)
    return {"cast": casts, "overwrite": overwrite, "verify": verify, "sync": sync, "skip_opaque": skip_opaque}


def _pairs(rename: Mapping[str, str] | None) -> list[tuple[str, str]] | None:
    return None if rename is None else list(rename.items())


def _converted(found: dict[str, Any]) -> ConvertReport:
    names = ("to", "format", "tensors", "values", "bytes", "seconds")
    casts = tuple(Cast(c["key"], c["from"], c["to"], c["narrowing"]) for c in found["casts"])
    return ConvertReport(
        from_=found["from"],
        files=tuple(found["files"]),
        casts=casts,
        skipped=tuple(found["skipped"]),
        warnings=tuple(found["warnings"]),
        **{name: found[name] for name in names},
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _call(tool: Any, *arguments: Any, storage: _Storage) -> dict[str, Any]:
    found = json.loads(tool(*arguments, _reshard.Control(), dict(storage) if storage else None))
    if not isinstance(found, dict):
        raise ReshardError("a tool's report is no JSON object; this is a bug in reshard")
    return found
