"""Save, load and reshard the state of distributed training.

This module needs neither torch nor, until an array is read, NumPy::

    with reshard.open("ckpt/step-100") as checkpoint:
        checkpoint.keys()
        checkpoint["model.embed.weight"].shape
        checkpoint["model.embed.weight"][10:20, :]

``reshard.torch`` saves and loads what PyTorch trains.
"""

from __future__ import annotations

from ._checkpoint import Checkpoint, Chunk, Tensor, VerifyReport, latest, open, steps, verify
from ._errors import (
    AlreadyExists,
    Cancelled,
    Corrupt,
    GroupError,
    Incomplete,
    InvalidInput,
    Mismatch,
    NoSuchKey,
    NotFound,
    ReshardError,
    StorageError,
    UntrustedPickle,
)
from ._reshard import __version__

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "Checkpoint",
    "Chunk",
    "Corrupt",
    "GroupError",
    "Incomplete",
    "InvalidInput",
    "Mismatch",
    "NoSuchKey",
    "NotFound",
    "ReshardError",
    "StorageError",
    "Tensor",
    "UntrustedPickle",
    "VerifyReport",
    "__version__",
    "latest",
    "open",
    "steps",
    "verify",
]
