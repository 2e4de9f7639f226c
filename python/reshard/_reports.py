"""What a call did: frozen classes with real fields that print well, and that pickle.

The engine fills them by name (``built``), so that a field is written once in Rust and once here, where its type is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, NotRequired, TypedDict, get_args, get_origin, get_type_hints

from . import _html


def human_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


class Difference(TypedDict):
    """One difference between what is wanted and what is stored; both sides where there are two."""

    difference: Literal["missing", "unexpected", "shape", "dtype", "kind", "coverage", "other"]
    key: str
    text: str
    #: Similar names, of a key that is missing.
    near: NotRequired[list[str]]
    stored: NotRequired[Any]
    wanted: NotRequired[Any]
    narrowing: NotRequired[bool]
    #: The key of the scales without which the stored codes cannot be cast.
    scales: NotRequired[Any]
    detail: NotRequired[str]


#: Rows of a table in a notebook.
_MOST = 100


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


@dataclasses.dataclass(frozen=True)
class Slowest:
    """The rank whose own work, without any waiting for others, took longest, and what it was busy with most of that time."""

    rank: int
    phase: str
    seconds: float


@dataclasses.dataclass(frozen=True, repr=False)
class _Timed:
    """Common to saves and loads: where, and how long each phase took."""

    path: str
    phases: dict[str, float]
    slowest: Slowest | None

    @property
    def seconds(self) -> float:
        """All phases together, on this rank."""
        return float(sum(self.phases.values()))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {**dataclasses.asdict(self), "seconds": self.seconds}

    def _rows(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _amount(self) -> tuple[str, int]:
        raise NotImplementedError

    def line(self, rank: int = 0) -> str:
        """All in one line: what, how many bytes, how long, the phase that took longest, and the rank that did."""
        verb, count = self._amount()
        slowest, time = max(self.phases.items(), key=lambda phase: phase[1], default=("", 0.0))
        took = f"{self.seconds:.3f} s" + (f", most of it {slowest} ({time:.3f} s)" if slowest else "")
        last = self.slowest
        waited = f"; slowest: rank {last.rank}, {last.phase} ({last.seconds:.3f} s)" if last is not None else ""
        return f"{verb} {self.path}: {human_bytes(count)} on rank {rank} in {took}{waited}"

    def _phases(self) -> tuple[str, str]:
        parts = [f"{name} {time * 1000:.1f} ms" for name, time in self.phases.items()]
        return ("time", f"{self.seconds:.3f} s ({', '.join(parts)})")

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}: {self.seconds:.3f} s>"

    def _repr_html_(self) -> str:
        verb, count = self._amount()
        slowest = dict(sorted(self.phases.items(), key=lambda phase: -phase[1])[:8])
        times = {name: (round(1e6 * time), f"{time * 1000:.1f} ms") for name, time in slowest.items()}
        took = f"{verb} {human_bytes(count)} in {self.seconds:.3f} s"
        return _html.card(self.path, took, _html.facts(self._rows()), _html.treemap(times))


@dataclasses.dataclass(frozen=True, repr=False)
class SaveReport(_Timed):
    """What a save did.

    Attributes:
        path: the address.
        phases: seconds of each phase on this rank.
        slowest: the rank that took longest to write and sync its part.
        save_id: the id under which it was published.
        bytes: bytes of tensor data that this rank wrote.
        total_bytes: bytes of tensor data that all ranks wrote.
        records: records that this rank wrote.
        files: files of all ranks.
        imbalance: the most loaded rank's bytes over the mean.
        plan_cached: whether the plan of an earlier save was used.
        warnings: leftovers that could not be removed, and why; a file of another format beside the checkpoint.
    """

    save_id: str
    bytes: int
    total_bytes: int
    records: int
    files: int
    imbalance: float
    plan_cached: bool
    warnings: tuple[str, ...]

    def _amount(self) -> tuple[str, int]:
        return "saved", self.bytes

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("saved to", self.path),
            ("this rank", f"{human_bytes(self.bytes)} in {self.records} records"),
            ("all ranks", f"{human_bytes(self.total_bytes)} in {self.files} files"),
            self._phases(),
        ]
        return rows + [("warning", warning) for warning in self.warnings]


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport(_Timed):
    """What a load did on this rank.

    Attributes:
        path: the address.
        phases: seconds of each phase.
        slowest: the rank that took longest to read its part.
        tensors: tensors loaded.
        bytes_wanted: bytes put into their places.
        bytes_read: bytes read from storage.
        reads: read requests.
        files: files touched.
        verified: records whose checksum was compared.
        differences: what differs, with ``strict=False``; as in :class:`reshard.Mismatch`.
        casts: casts that were allowed.
        step: which step it was, where :class:`CheckpointManager` or :class:`Checkpointer` has restored one.
        notes: what a restore did on the way.
    """

    tensors: int
    bytes_wanted: int
    bytes_read: int
    reads: int
    files: int
    verified: int
    differences: tuple[Difference, ...]
    casts: tuple[Cast, ...]
    step: int | None = None
    notes: tuple[str, ...] = ()

    def _amount(self) -> tuple[str, int]:
        return "loaded", self.bytes_wanted

    @property
    def missing(self) -> list[str]:
        """Wanted keys that the checkpoint lacks."""
        return [d["key"] for d in self.differences if d["difference"] == "missing"]

    @property
    def unexpected(self) -> list[str]:
        """Stored keys that were not wanted."""
        return [d["key"] for d in self.differences if d["difference"] == "unexpected"]

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("loaded from", self.path),
            ("tensors", f"{self.tensors}, {human_bytes(self.bytes_wanted)}, {self.verified} records verified"),
            ("read", f"{human_bytes(self.bytes_read)} of {self.files} files in {self.reads} requests"),
            self._phases(),
        ]
        rows += [("cast", f"{cast.key}: {cast.from_} to {cast.to}") for cast in self.casts[:20]]
        rows += [("difference", d["text"]) for d in self.differences[:20]]
        hidden = max(len(self.casts) - 20, 0) + max(len(self.differences) - 20, 0)
        if hidden:
            rows.append(("", f"… and {hidden} more"))
        return rows


@dataclasses.dataclass(frozen=True)
class OptimizerReport:
    """How a given state met the optimizers that it was set into, on this rank.

    Attributes:
        missing: parameters of the optimizers that the given state does not know; an error unless ``strict=False``.
        absent: parameters that had no state when it was made.
        unexpected: parameters of the given state that the optimizers do not train.
        zero_filled: slots of members of a flat parameter that had no state, whose part of the flat slot is zeros.
        unmatched_groups: groups without a counterpart, which keep their options: optimizer and group by their numbers.
    """

    missing: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    zero_filled: tuple[str, ...] = ()
    unmatched_groups: tuple[tuple[int, int], ...] = ()


def log_report(report: SaveReport | LoadReport, rank: int) -> None:
    """One line in the log of ``reshard`` for a save or a load: what the first rank did, and with DEBUG what each did."""
    import logging

    log = logging.getLogger("reshard")
    level = logging.INFO if rank == 0 else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s", report.line(rank))
    for warning in report.warnings if rank == 0 and isinstance(report, SaveReport) else ():
        log.warning("%s", warning)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that verifying found. ``severity`` is "error" or "warning"; key, file and offset where there is one."""

    severity: Literal["error", "warning"]
    key: str | None
    file: str | None
    offset: int | None
    what: str


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport:
    """What verifying a checkpoint found. True when it is sound.

    Attributes:
        path: the address.
        sound: whether nothing is damaged or missing.
        format: "dcp", "safetensors", …; None when it could not be opened.
        writer: who wrote it, as far as can be told.
        keys, records, files: how many there are.
        bytes: bytes that were read.
        checked, unchecked: records that were compared with a checksum, and that have none.
        indexes: data files whose own index was compared with ``.metadata``, record by record.
        values: values that were decoded.
        opaque: how many values of each class were not decoded, as only their own libraries can read them.
        data: whether data was read; else structure, lengths of files and indexes alone were checked.
        seconds: how long it took.
        findings: everything that was found.
    """

    path: str
    sound: bool
    format: str | None
    writer: str
    keys: int
    records: int
    files: int
    bytes: int
    checked: int
    unchecked: int
    indexes: int
    values: int
    opaque: dict[str, int]
    data: bool
    seconds: float
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return self.sound

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        compared = f"{self.checked} of {self.records} records compared" if self.data else "no data read"
        lines = [f"{self.path}: {'sound' if self.sound else 'damaged'}, {compared}"]
        for finding in self.findings:
            about = ", ".join(name for name in (finding.key, finding.file) if name)
            lines.append(f"  {finding.severity}: {about}: {finding.what}")
        if self.opaque:
            lines.append(f"  not decoded: {sum(self.opaque.values())} opaque values of {', '.join(self.opaque)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<VerifyReport {self.path!r}: {'sound' if self.sound else 'damaged'}, {len(self.findings)} findings>"

    def _repr_html_(self) -> str:
        note = f"{'sound' if self.sound else 'damaged'}, {self.checked} of {self.records} records compared"
        rows = [(found.key or found.file or "", found.severity, found.what) for found in self.findings[:100]]
        parts = [_html.table(("where", "how grave", "what"), rows)] if rows else []
        return _html.card(self.path, note, *parts, _html.more(len(self.findings) - len(rows), "finding"))


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
        bytes: bytes of tensors that were written anew, where the source is not DCP.
        skipped: objects that were left out because only unpickling could bring them back.
    """

    from_: str
    to: str
    dropped: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    set: tuple[str, ...]
    linked: int
    copied: int
    bytes: int
    skipped: tuple[str, ...]


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

    def _cells(self) -> tuple[str, str, str]:
        """What differs, and how far a tensor moved."""
        found = self.elements
        sides = "" if self.first is None and self.second is None else f"{self.kind} {self.first} → {self.second}"
        if found is None:
            return (sides or self.kind, "", "")
        odd = [
            f"{found.new_nans} new NaN" if found.new_nans else "",
            f"{found.new_infinities} newly infinite" if found.new_infinities else "",
            "now all zero" if found.newly_zero else "",
            sides,
            f"{found.different} of {found.elements} differ",
        ]
        return (", ".join(filter(None, odd)), _short(found.relative_change), _short(found.cosine))

    @staticmethod
    def _adapted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        sides = {side: tuple(fields[side]) for side in ("first", "second") if isinstance(fields.get(side), list)}
        # Where nothing but the elements differs, their numbers lie beside the key.
        numbers = {"elements": fields} if isinstance(fields.get("elements"), int) else {}
        return {**fields, **sides, **numbers}


@dataclasses.dataclass(frozen=True)
class DiffReport:
    """What differs between two checkpoints. ``equal`` when nothing does.

    Attributes:
        first, second: the checkpoints.
        only_first, only_second: keys that one has alone.
        different: keys that both have and that differ: what broke first, then values, weights by how far they moved, and the
            optimizer's state.
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

    def _repr_html_(self) -> str:
        alone = [("only in the first", self.only_first), ("only in the second", self.only_second)]
        counts = [f"{self.same} the same", *([f"{len(self.different)} different"] if self.different else [])]
        counts += [f"{len(keys)} {where}" for where, keys in alone if keys]
        rows = [(found.key, *found._cells()) for found in self.different[:_MOST]]
        rows += [(key, where, "", "") for where, keys in alone for key in keys[: max(_MOST - len(rows), 0)]]
        differences = (
            _html.table(("key", "what", "‖Δw‖/‖w‖", "cosine"), rows, (2, 3)) if rows else "<p class=good>no difference</p>"
        )
        more = len(self.different) + len(self.only_first) + len(self.only_second) - len(rows)
        return _html.card(f"{self.first} → {self.second}", ", ".join(counts), differences, _html.more(more, "key"))


@dataclasses.dataclass(frozen=True)
class DigestEntry:
    """What one key holds: a tensor's dtype, shape and SHA-256, a plain value, or the class of an object."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    sha256: str | None = None
    value: Any = None
    class_name: str | None = None

    @staticmethod
    def _adapted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**fields, "class_name": fields.get("class")}


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

    @staticmethod
    def _adapted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**fields["step"], **fields}


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
        params: the parameters of all optimizers.
        tensors: numbers about every tensor, by key.
        unread: selected values that nobody looked at, with what they are: sparse tensors, arrays, objects that only unpickling could
            bring back.
    """

    path: str
    checked: tuple[str, ...]
    findings: tuple[HealthFinding, ...]
    params: tuple[ParamHealth, ...]
    tensors: dict[str, TensorStats]
    unread: dict[str, str]

    @staticmethod
    def _adapted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        checked = [name for name, looked in fields["checked"].items() if looked]
        params = [param for optimizer in fields["optimizers"] for param in optimizer["params"]]
        return {**fields, "checked": checked, "params": params}

    @property
    def healthy(self) -> bool:
        """Whether numbers were looked at, and no rule of severity error is broken."""
        return "numbers" in self.checked and not any(finding.severity == "error" for finding in self.findings)

    def _repr_html_(self) -> str:
        unchecked = [name for name in ("structure", "checksums", "numbers") if name not in self.checked]
        note = f"checked: {', '.join(self.checked) or 'nothing'}" + (
            f"; not checked: {', '.join(unchecked)}" if unchecked else ""
        )
        rules = [(found.key, found.rule, found.severity, found.what) for found in self.findings[:100]]
        broken = _html.table(("key", "rule", "how grave", "what"), rules) if rules else "<p class=good>no rule is broken</p>"
        worst = sorted(self.tensors.items(), key=lambda item: -(item[1].nans + item[1].infinities))[:20]
        rows = [
            (
                key,
                str(s.nans),
                str(s.infinities),
                f"{s.zeros / max(s.elements, 1):.1%}",
                _short(s.rms),
                _short(s.min),
                _short(s.max),
            )
            for key, s in worst
        ]
        numbers = _html.table(("key", "NaN", "Inf", "zero", "RMS", "min", "max"), rows, range(1, 7)) if rows else ""
        return _html.card(self.path, note, broken, numbers, _html.more(len(self.tensors) - len(rows), "tensor"))


@dataclasses.dataclass(frozen=True)
class Before:
    """What a tensor was at a step before it became what it is: "absent", or bad in another way."""

    step: str
    what: str


@dataclasses.dataclass(frozen=True)
class FirstBad:
    """A tensor that is bad since a step, and what it is there: "nan", "inf", "large", "negative", "zero" or "dead". The step before is
    ``fine``, if it was read there and found fine, else ``before``."""

    key: str
    what: str
    severity: str
    first: str
    fine: str | None
    before: Before | None

    @property
    def last(self) -> str:
        """What it was before, in words."""
        if self.before is not None:
            return f"{self.before.what} in {self.before.step}"
        return f"fine in {self.fine}" if self.fine is not None else "the first step there is"


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
    """One complete step of a run, the metrics stored with it, and numbers about its tensors when asked for; ``modules`` is how
    far each module moved since the step before."""

    name: str
    number: int | None
    path: str
    modified: int | None
    metrics: dict[str, float]
    tensors: dict[str, TrendTensor]
    modules: dict[str, float]

    @staticmethod
    def _adapted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        # JSON has no NaN, which is what a loss must not be.
        metrics = {name: math.nan if value is None else value for name, value in fields["metrics"].items()}
        return {**fields, "metrics": metrics}


@dataclasses.dataclass(frozen=True)
class Trend:
    """A run: its complete steps, oldest first, and since when tensors of the newest one are bad, the first to go bad first. ``skipped`` are
    folders that were left out, each with the reason."""

    folder: str
    steps: tuple[TrendStep, ...]
    skipped: tuple[tuple[str, str], ...]
    bad: tuple[FirstBad, ...]

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for step in self.steps for name in step.metrics))
        last = self.steps[-_MOST:]
        rows = [(step.name, *(_short(step.metrics.get(name)) for name in names)) for step in last]
        bad = [(found.key, found.what, found.first, found.last) for found in self.bad[:_MOST]]
        parts = [_html.table(("step", *names), rows, range(1, len(names) + 1))] if rows else []
        parts += (
            [_html.table(("key", "is", "since", "before"), bad)]
            if bad
            else ["<p class=good>no tensor of the newest step is bad</p>"]
        )
        parts += [_html.table(("left out", "why"), self.skipped[:_MOST])] if self.skipped else []
        note = f"{len(self.steps)} complete steps"
        return _html.card(self.folder, note, *parts, _html.more(len(self.bad) - len(bad), "tensor"))


@dataclasses.dataclass(frozen=True)
class MadeKey:
    """A key that a rule makes.

    Attributes:
        key: the new key.
        shape, dtype: of a tensor; None for a value.
        from_: the keys that it is made from.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    from_: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ViewReport:
    """What a view makes of a checkpoint.

    Attributes:
        made: what each rule makes, by the rule's name.
        kept: how many keys stay as they are.
        dropped: keys that are left out.
    """

    made: dict[str, tuple[MadeKey, ...]]
    kept: int
    dropped: tuple[str, ...]

    @staticmethod
    def _adapted(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**fields, "made": {rule["rule"]: rule["made"] for rule in fields["rules"]}}


def built(name: str, fields: Mapping[str, Any]) -> Any:
    """The report of a class by its name, from what the engine gives; called by the extension."""
    return _built(globals()[name], fields)


def _built(cls: Any, fields: Mapping[str, Any]) -> Any:
    hints = _hints(cls)
    adapted = cls._adapted(fields) if hasattr(cls, "_adapted") else fields
    # Some names are Python's own words.
    given = {f"{field}_" if f"{field}_" in hints else field: value for field, value in adapted.items()}
    return cls(**{field: _typed(hints[field], value) for field, value in given.items() if field in hints})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _typed(hint: Any, value: Any) -> Any:
    """A value as a field has it: lists as tuples, dicts as the classes they stand for."""
    for kind in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        if isinstance(value, list) and get_origin(kind) is tuple:
            inner = get_args(kind)
            return tuple(_typed(inner[0 if inner[-1] is Ellipsis else at], below) for at, below in enumerate(value))
        if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
            return _built(kind, value)
        if isinstance(value, Mapping) and get_origin(kind) is dict:
            return {key: _typed(get_args(kind)[1], below) for key, below in value.items()}
    return value
