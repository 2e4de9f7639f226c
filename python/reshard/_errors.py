"""Exceptions, by what a handler would do about them.

Every exception says which keys, files and ranks it is about, and pickles, so that it survives the way through process
pools and result queues.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._reports import Difference


class ReshardError(Exception):
    """The base of everything that reshard raises.

    Attributes:
        keys: the flattened keys concerned.
        files: the checkpoint's files concerned.
        ranks: the ranks on which it happened, when it happened elsewhere.
        hint: what to do about it, where there is something to say.
    """

    keys: list[str]
    files: list[str]
    ranks: list[int]
    hint: str | None

    def __init__(self, message: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.keys = list(details.pop("keys", ()))
        self.files = list(details.pop("files", ()))
        self.ranks = list(details.pop("ranks", ()))
        self.hint = details.pop("hint", None)
        for name, value in details.items():
            setattr(self, name, value)
        self._details = details
        if self.hint:
            self.add_note(f"hint: {self.hint}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        details = {"keys": self.keys, "files": self.files, "ranks": self.ranks, "hint": self.hint, **self._details}
        return (_rebuild, (type(self), self.message, details))


def _rebuild(cls: type[ReshardError], message: str, details: dict[str, Any]) -> ReshardError:
    return cls(message, **details)


class NotFound(ReshardError, FileNotFoundError):
    """A checkpoint, file or key does not exist."""


class NoSuchKey(NotFound, KeyError):
    """The checkpoint has no such key. Also a ``KeyError``."""


class AlreadyExists(ReshardError, FileExistsError):
    """A checkpoint lies there and overwriting was not asked for."""


class Incomplete(ReshardError):
    """A checkpoint that was never finished, or that lost files."""


class Corrupt(ReshardError):
    """Bytes differ from what was written, or are not what the format allows."""


class Mismatch(ReshardError, ValueError):
    """What is wanted differs from what is stored; nothing was loaded.

    Attributes:
        differences: every difference, each a dict with ``difference`` ("missing", "unexpected", "shape", "dtype", "kind",
            "coverage"), ``key``, ``text``, and both sides where there are two; missing keys have ``near``, similar names.
    """

    differences: list[Difference]

    def __init__(self, message: str = "", **details: Any) -> None:
        details.setdefault("differences", [])
        super().__init__(message, **details)


class UntrustedPickle(ReshardError):
    """Reading a value would run code from the file. Pass ``allow_pickle=True`` for files you trust.

    Attributes:
        class_name: the class that unpickling would import.
    """

    class_name: str

    def __init__(self, message: str = "", **details: Any) -> None:
        details.setdefault("class_name", "")
        super().__init__(message, **details)


class StorageError(ReshardError, OSError):
    """The disk or the object store failed."""


class GroupError(ReshardError, RuntimeError):
    """The ranks could not talk to each other, or one of them failed."""


class InvalidInput(ReshardError, ValueError):
    """The caller's mistake: an argument that is not valid."""


class ResourceExhausted(ReshardError, MemoryError):
    """Memory, threads or another resource ran out."""


class InternalError(ReshardError, RuntimeError):
    """A bug in reshard. Please report it."""


class Cancelled(ReshardError):
    """The caller cancelled it; nothing was published."""


@contextmanager
def as_raised() -> Iterator[None]:
    """What is wrong with a field of a request is said as itself, and not as the field that could not be read."""
    try:
        yield
    except TypeError as error:
        if isinstance(error.__cause__, ReshardError):
            raise error.__cause__ from None
        raise
