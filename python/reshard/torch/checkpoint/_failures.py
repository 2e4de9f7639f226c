"""Failures in PyTorch's form: a ``CheckpointException`` with the exception of each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from ..._errors import AlreadyExists, Mismatch, ReshardError


class MissingKeys(Mismatch, RuntimeError):
    """Keys that the checkpoint lacks: a ``RuntimeError``, as PyTorch's planner raises."""


class CheckpointExists(AlreadyExists, RuntimeError):
    """A checkpoint is in the way: a ``RuntimeError``, as PyTorch's writer raises."""


@contextlib.contextmanager
def as_torch(what: str, process_group: Any, no_dist: bool) -> Iterator[None]:
    """Turns the engine's exceptions into PyTorch's; the engine's are among its ``failures`` and its cause."""
    try:
        yield
    except ReshardError as error:
        raise checkpoint_exception(what, error, process_group, no_dist) from error


def checkpoint_exception(what: str, error: ReshardError, process_group: Any, no_dist: bool) -> CheckpointException:
    """A failure under the ranks on which it happened."""
    alone = no_dist or not dist.is_available() or not dist.is_initialized()
    mine = 0 if alone else dist.get_rank(process_group)
    error = _in_their_words(error).with_traceback(error.__traceback__)
    wrapped = _wrap_exception(error)
    return CheckpointException(what, dict.fromkeys(error.ranks or [mine], wrapped))


def _in_their_words(error: ReshardError) -> ReshardError:
    """A failure that begins as PyTorch would put it, and is of its type: programs look for that."""
    rest: dict[str, Any] = {"keys": error.keys, "files": error.files, "ranks": error.ranks, "hint": error.hint}
    if isinstance(error, AlreadyExists):
        return CheckpointExists(str(error), **rest)
    if not isinstance(error, Mismatch):
        return error
    rest["differences"] = error.differences
    kinds = {difference["difference"] for difference in error.differences}
    if kinds == {"missing"}:
        return MissingKeys(f"Missing key in checkpoint state_dict: {error}", **rest)
    if "shape" in kinds:
        return Mismatch(f"Size mismatch between saved and current: {error}", **rest)
    return error
