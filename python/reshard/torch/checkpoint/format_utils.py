"""Conversions between DCP folders and ``torch.save`` files, by the engine: bounded memory, and nothing is unpickled."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import format_utils as _theirs
from torch.distributed.checkpoint.format_utils import *  # noqa: F403

from ... import _tools


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:  # type: ignore[no-redef]
    """Converts a DCP folder into a ``torch.save`` file, which is replaced if it is there."""
    _tools.convert(dcp_checkpoint_dir, torch_save_path, to="torch", overwrite=True)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:  # type: ignore[no-redef]
    """Converts a ``torch.save`` file into a DCP folder, which is replaced if it is there."""
    _tools.convert(torch_save_path, dcp_checkpoint_dir, to="dcp", overwrite=True)
