"""Which calls the engine can take whole: those with PyTorch's own planner and PyTorch's own file storage."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from ... import _reshard
from ..._paths import path_text
from .. import _storage
from . import _torch
from ._options import options
from .filesystem import FileSystemReader, FileSystemWriter
from .hf_storage import HuggingFaceStorageReader


class Route(NamedTuple):
    """Where a call goes: a path for the engine, and the storage that PyTorch's orchestration would use."""

    path: str | None
    storage: Any
    options: dict[str, Any]


def _no_id() -> RuntimeError:
    return RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")


def writer_route(storage: Any, checkpoint_id: Any) -> Route:
    """Where a save goes."""
    if not storage:
        if not checkpoint_id:
            raise _no_id()
        # What no part of the engine can write to is PyTorch's to find a storage for.
        path = path_text(checkpoint_id) if _reshard.is_address(path_text(checkpoint_id)) else None
        writer = None if path is None else _storage.StorageWriter(path, overwrite=options.overwrite, checksums=options.checksums)
        return Route(path, writer, {})
    if checkpoint_id is not None:
        storage.reset(checkpoint_id)
    if type(storage) not in (_torch.FileSystemWriter, FileSystemWriter) or not plain_writer(storage):
        return Route(None, storage, {})
    chosen = {"sync": storage.sync_files, "overwrite": getattr(storage, "overwrite", True) and options.overwrite}
    chosen["files_per_rank"] = max(storage.thread_count, 1)
    # A file for each tensor is what the storage can do, not a save of the engine's own.
    path = path_text(storage.path) if storage.single_file_per_rank and not _extensions(storage) else None
    return Route(path, engine_writer(storage), chosen)


def plain_writer(storage: Any) -> bool:
    """Whether a file system writer writes what the engine does: local files, in torch's own format."""
    kind = getattr(storage, "serialization_format", None)
    return type(storage.fs) is filesystem.FileSystem and (kind is None or kind.value == "torch_save")


def _extensions(storage: Any) -> Any:
    """What a writer's records go through."""
    return getattr(getattr(storage, "transforms", None), "extensions", ())


def engine_writer(storage: Any) -> _storage.StorageWriter:
    """The engine's storage in place of PyTorch's, with the same choices."""
    return _storage.StorageWriter(
        storage.path,
        storage.single_file_per_rank,
        storage.sync_files,
        storage.thread_count,
        overwrite=getattr(storage, "overwrite", True) and options.overwrite,
        _extensions=_extensions(storage),
        checksums=options.checksums,
    )


def reader_route(storage: Any, checkpoint_id: Any, process_group: Any, no_dist: bool) -> Route:
    """Where a load comes from."""
    if not storage:
        if not checkpoint_id:
            raise _no_id()
        path = path_text(checkpoint_id) if _reshard.is_address(path_text(checkpoint_id)) else None
    else:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        files = type(storage) in (_torch.FileSystemReader, FileSystemReader)
        tensors = type(storage) in (_torch.HuggingFaceStorageReader, HuggingFaceStorageReader)
        if not tensors and not (files and plain_reader(storage)):
            return Route(None, storage, {})
        path = path_text(storage.path)
    if path is None:
        return Route(None, storage, {})
    registry = own_registry(storage)
    reader = _storage.StorageReader(path, registry, allow_pickle=options.allow_pickle, verify=options.verify)
    return Route(None if registry is not None or _of_single_ranks(path) else path, reader, {})


def plain_reader(storage: Any) -> bool:
    """Whether a file system reader reads what the engine does: local files."""
    return type(storage.fs) is filesystem.FileSystem


def own_registry(storage: Any) -> Any | None:
    """The registry of a reader that has other stream extensions than every reader."""
    registry = getattr(getattr(storage, "transforms", None), "extension_registry", None)
    known = registry is None or registry.extensions.keys() == type(registry)().extensions.keys()
    return None if known else registry


def _of_single_ranks(path: str) -> bool:
    """Whether a folder was saved without rank coordination: metadata of each rank, and none of all."""
    return not os.path.exists(os.path.join(path, ".metadata")) and os.path.exists(os.path.join(path, "__0.metadata"))


def default_save_planner(planner: Any) -> bool:
    """Whether a plan would be PyTorch's own."""
    if planner is None:
        return True
    nested = getattr(planner, "flatten_state_dict", False) and getattr(planner, "flatten_sharded_tensors", False)
    lowest = getattr(planner, "dedup_save_to_lowest_rank", False)
    return type(planner) is DefaultSavePlanner and nested and not lowest


def default_load_planner(planner: Any) -> bool:
    """Whether a plan would be PyTorch's own."""
    if planner is None:
        return True
    nested = getattr(planner, "flatten_state_dict", False) and getattr(planner, "flatten_sharded_tensors", False)
    return type(planner) is DefaultLoadPlanner and nested
