"""What a save or a load did, in numbers that print well."""

from __future__ import annotations

from html import escape
from typing import Any


def human_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


class Report:
    """Common to both reports: a dict of numbers with attributes."""

    _values: dict[str, Any]

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def seconds(self) -> float:
        """All phases together, on this rank."""
        return float(sum(self._values["phases"].values()))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {**self._values, "seconds": self.seconds}

    def _rows(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _amount(self) -> tuple[str, int]:
        raise NotImplementedError

    def line(self, rank: int = 0) -> str:
        """All in one line: what, how many bytes, how long, and the phase that took longest."""
        verb, count = self._amount()
        slowest, time = max(self._values["phases"].items(), key=lambda phase: float(phase[1]), default=("", 0.0))
        took = f"{self.seconds:.3f} s" + (f", most of it {slowest} ({time:.3f} s)" if slowest else "")
        return f"{verb} {self._values['path']}: {human_bytes(count)} on rank {rank} in {took}"

    def _phases(self) -> tuple[str, str]:
        parts = [f"{name} {time * 1000:.1f} ms" for name, time in self._values["phases"].items()]
        return ("time", f"{self.seconds:.3f} s ({', '.join(parts)})")

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def __repr__(self) -> str:
        path, seconds = self._values["path"], self.seconds
        return f"<{type(self).__name__} {path!r}: {seconds:.3f} s>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self._rows())
        return f"<table>{rows}</table>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._values,))


def log_report(report: Report, rank: int) -> None:
    """One line in the log of ``reshard`` for a save or a load: what the first rank did, and with DEBUG what each did."""
    import logging

    log = logging.getLogger("reshard")
    level = logging.INFO if rank == 0 else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s", report.line(rank))


class SaveReport(Report):
    """What a save did.

    Attributes:
        path: the address.
        save_id: the id under which it was published.
        phases: seconds of each phase on this rank.
        bytes: bytes of tensor data that this rank wrote.
        total_bytes: bytes of tensor data that all ranks wrote.
        records: records that this rank wrote.
        files: files of all ranks.
        imbalance: the most loaded rank's bytes over the mean.
        plan_cached: whether the plan of an earlier save was used.
        warnings: leftovers that could not be removed, and why.
    """

    path: str
    save_id: str
    phases: dict[str, float]
    bytes: int
    total_bytes: int
    records: int
    files: int
    imbalance: float
    plan_cached: bool
    warnings: list[str]

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


class LoadReport(Report):
    """What a load did on this rank.

    Attributes:
        path: the address.
        phases: seconds of each phase.
        tensors: tensors loaded.
        bytes_wanted: bytes put into their places.
        bytes_read: bytes read from storage.
        reads: read requests.
        files: files touched.
        verified: records whose checksum was compared.
        differences: what differs, with ``strict=False``; as in :class:`reshard.Mismatch`.
        casts: casts that were allowed, each a dict with ``key``, ``from``, ``to`` and ``narrowing``.
    """

    path: str
    phases: dict[str, float]
    tensors: int
    bytes_wanted: int
    bytes_read: int
    reads: int
    files: int
    verified: int
    differences: list[dict[str, Any]]
    casts: list[dict[str, Any]]

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
        rows += [("cast", f"{c['key']}: {c['from']} to {c['to']}") for c in self.casts[:20]]
        rows += [("difference", d["text"]) for d in self.differences[:20]]
        hidden = max(len(self.casts) - 20, 0) + max(len(self.differences) - 20, 0)
        if hidden:
            rows.append(("", f"… and {hidden} more"))
        return rows
