"""``FileSystemWriter`` and ``FileSystemReader``: PyTorch's classes, by name and by ``isinstance``, over the engine's storage.

A subclass that overrides a step of reading or writing means PyTorch's steps around it, so it gets all of them; so does a writer
of another format.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem as _theirs
from torch.distributed.checkpoint.filesystem import *  # noqa: F403
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _storage
from ..state._planned import to_stage
from . import _torch
from ._options import options

_WRITING = ("prepare_local_plan", "prepare_global_plan", "write_data", "_write_data", "finish")
_READING = ("read_metadata", "read_data", "prepare_local_plan", "prepare_global_plan", "_slice_file")


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


class FileSystemWriter(_torch.FileSystemWriter):  # type: ignore[no-redef]
    """PyTorch's writer with the engine's guarantees: checksums, an atomic commit, the old checkpoint until then."""

    _engine: _storage.StorageWriter | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns this instance's role."""
        from ._route import engine_writer, plain_writer

        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._engine = None
        if plain_writer(self) and not _overrides(type(self), FileSystemWriter, _WRITING):
            self._engine = engine_writer(self)
            self._engine.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy in memory of a state, for a save in the background."""
        return super().stage(to_stage(state_dict))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without rank coordination, every rank prepares by itself."""
        return super().prepare_local_plan(plan) if self._engine is None else self._engine.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Looks at the path once, for all ranks."""
        return super().prepare_global_plan(plans) if self._engine is None else self._engine.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes all items of a plan."""
        return super().write_data(plan, planner) if self._engine is None else self._engine.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes `.metadata`: from then on the checkpoint exists."""
        if self._engine is None:
            super().finish(metadata, results)
            return
        self._engine.finish(metadata, results)
        self.save_id = self._engine.save_id

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}


class FileSystemReader(_torch.FileSystemReader):  # type: ignore[no-redef]
    """PyTorch's reader; metadata is decoded without unpickling, and checksums are compared."""

    _engine: _storage.StorageReader | None = None

    def _reader(self) -> _storage.StorageReader | None:
        from ._route import own_registry, plain_reader

        if not plain_reader(self) or _overrides(type(self), FileSystemReader, _READING):
            return None
        if self._engine is None or self._engine.path != str(self.path):
            registry = own_registry(self)
            self._engine = _storage.StorageReader(
                str(self.path), registry, allow_pickle=options.allow_pickle, verify=options.verify
            )
            self._engine.load_id = self.load_id
        return self._engine

    def reset(self, checkpoint_id: Any = None) -> None:
        """Another checkpoint is about to be read."""
        super().reset(checkpoint_id)
        self._engine = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        engine = self._reader()
        return super().read_metadata(*args, **kwargs) if engine is None else engine.read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns what there is to read."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        engine = self._reader()
        if engine is not None:
            engine.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of a plan."""
        engine = self._reader()
        return super().read_data(plan, planner) if engine is None else engine.read_data(plan, planner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}


def _overrides(cls: type, ours: type, names: tuple[str, ...]) -> bool:
    """Whether a subclass has steps of its own."""
    return any(getattr(cls, name, None) is not getattr(ours, name, None) for name in names)
