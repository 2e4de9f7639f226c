"""Failures in PyTorch's form: a ``CheckpointException`` with the exception of each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from ..._errors import Mismatch, ReshardError


class MissingKeys(Mismatch, RuntimeError):
    """Keys that the checkpoint lacks: a ``RuntimeError``, as PyTorch's planner raises."""


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
    if isinstance(error, Mismatch) and error.differences and all(d["difference"] == "missing" for d in error.differences):
        missing = MissingKeys(f"Missing key in checkpoint state_dict: {error}", keys=error.keys, differences=error.differences)
        error = missing.with_traceback(error.__traceback__)
    wrapped = _wrap_exception(error)
    return CheckpointException(what, dict.fromkeys(error.ranks or [mine], wrapped))
