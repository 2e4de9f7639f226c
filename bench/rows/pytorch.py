"""PyTorch's side of a row, with its defaults unless the row says otherwise."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter


def save(state: dict[str, Any], place: str, sync: bool = True, threads: int = 1, alone: bool = True) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(place, sync_files=sync, thread_count=threads), no_dist=alone)


def load(state: dict[str, Any], place: str, alone: bool = True) -> None:
    dcp.load(state, storage_reader=FileSystemReader(place), no_dist=alone)
