"""``torch.distributed.checkpoint`` over the engine: its names, signatures, defaults, return types and exceptions.

::

    import reshard.torch.checkpoint as dcp      # instead of torch.distributed.checkpoint

Calls with PyTorch's own storage and planners go to the engine; a planner or a storage of the program's own goes through PyTorch's
orchestration. Names that are not here are PyTorch's own. ``options`` says what PyTorch has no arguments for.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import torch.distributed.checkpoint as _theirs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from . import filesystem, format_utils, hf_storage, optimizer, state_dict, state_dict_loader, state_dict_saver
from ._calls import async_save, load, load_state_dict, save, save_state_dict
from ._options import Options, options
from .filesystem import FileSystemReader, FileSystemWriter
from .hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from .optimizer import load_sharded_optimizer_state_dict


def _share_submodules() -> None:
    """Submodules of PyTorch's that are not replaced can be imported from here too."""
    for found in pkgutil.iter_modules(_theirs.__path__):
        name = f"{__name__}.{found.name}"
        if name in sys.modules or found.name.startswith("_"):
            continue
        module = importlib.import_module(f"{_theirs.__name__}.{found.name}")
        sys.modules[name] = module
        globals().setdefault(found.name, module)


_share_submodules()


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_theirs)})


__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "Options",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "filesystem",
    "format_utils",
    "hf_storage",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "optimizer",
    "options",
    "save",
    "save_state_dict",
    "state_dict",
    "state_dict_loader",
    "state_dict_saver",
]
