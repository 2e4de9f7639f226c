"""Drop-in storage for `torch.distributed.checkpoint`: its planners plan, the engine reads and writes.

``dcp.save(state, storage_writer=StorageWriter(path))`` and ``dcp.load(state, storage_reader=StorageReader(path))`` work with any
planner. Records are written in batches with checksums, `.metadata` is published last and atomically, overwriting keeps the
old checkpoint until the new one is complete, and reading runs no code from the file.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import logging
import pickle
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, staging, storage
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from .. import _reshard
from .._errors import InvalidInput, as_raised
from .._paths import path_text
from .._types import StorageOptions, StrPath, VerifyPolicy
from ._describe import Description, pickled
from ._load import _LoadRequest, _trusted_classes, into, unpickled, untrusted
from ._save import SavedObjects
from ._tensor import CODES
from ._transforms import RecordReader, RecordTransforms, tensor_of
from ._unsharded import LoadedShards
from .state._expand import complete, lacking
from .state._planned import OwnKeys, StoredEntries, check_values, to_stage, waiting_keys


@dataclasses.dataclass(frozen=True)
class _SaveId:
    """What the coordinator decided, for every rank."""

    save_id: str
    named: bool
    rank: int
    ranks: int


@dataclasses.dataclass(frozen=True)
class _WriteResult(WriteResult):
    """A result that brings along the checksums of everything its rank wrote, and which of it are slots that only wait for a
    checkpoint; one of each rank's does."""

    checksums: bytes = b""
    waiting: frozenset[str] = frozenset()


class _RecordTarget(NamedTuple):
    """Where records go and how."""

    path: str
    options: _reshard.SaveOptions
    metadata_name: str | None
    storage_options: StorageOptions | None


# Ids under which this process has written. A planner that caches plans hands out the id of an earlier save again.
_used_ids: set[str] = set()


class StorageWriter(storage.StorageWriter, staging.AsyncStager):
    """Writes what PyTorch's planners plan. Takes the arguments of ``FileSystemWriter``, and stages for ``dcp.async_save`` as that
    does."""

    def __init__(
        self,
        path: StrPath,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        *,
        checksums: bool = True,
        check_files: bool = True,
        strict_values: bool = False,
        storage_options: StorageOptions | None = None,
    ) -> None:
        """
        Args:
            path: a folder, or an address such as ``s3://bucket/step-100``.
            single_file_per_rank: whether a rank writes one file, or about one for each record.
            sync_files: wait until everything is on the disk.
            thread_count: files that each rank writes; the engine chooses its threads itself.
            per_thread_copy_ahead: taken and not needed.
            cache_staged_state_dict: taken and not needed.
            overwrite: replace a checkpoint that is there; the old one stays until the new one is complete.
            _extensions: stream extensions through which records go, as ``FileSystemWriter`` takes them. Records are made in
                memory then, all of a rank's before they are written.
            checksums: compute and store checksums.
            check_files: before publishing, look whether every rank's files are there with their lengths.
            strict_values: refuse values that are objects and no data, which a load brings back only with ``allow_pickle=True``;
                otherwise they are saved with a warning that names them.
            storage_options: settings of the store by name.
        """
        super().__init__()
        self.path = path_text(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.overwrite = overwrite
        self.checksums = checksums
        self.check_files = check_files
        self.strict_values = strict_values
        self._storage_options = storage_options
        self._transforms = RecordTransforms(_extensions)
        self.save_id = uuid.uuid4().hex
        self.is_coordinator = False
        self.rank: int | None = None
        self.use_collectives = True
        self._saving: _SaveId | None = None
        # The id under which the path was claimed.
        self._begun = ""

    def _target(self, files: int = 1) -> _RecordTarget:
        options = _reshard.SaveOptions(
            overwrite=self.overwrite,
            sync=self.sync_files,
            checksums=self.checksums,
            check_files=self.check_files,
            files_per_rank=files,
        )
        return _RecordTarget(self.path, options, self._metadata_name(), self._storage_options)

    def _metadata_name(self) -> str | None:
        """Of one rank's own metadata, when ranks save without talking to each other."""
        return None if self.use_collectives or self.rank is None else f"__{self.rank}.metadata"

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Another checkpoint is about to be written."""
        if checkpoint_id:
            self.path = path_text(checkpoint_id)
        self.save_id = uuid.uuid4().hex
        self._saving = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns this instance's role."""
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy in memory of a state, for a save in the background."""
        # PyTorch's own writer stages so. Its newer stager knows no ShardedTensor.
        return staging.BlockingAsyncStager().stage(to_stage(state_dict))

    def synchronize_staging(self) -> None:
        """Staging is done when :meth:`stage` returns."""

    def close(self) -> None:
        """Nothing of a staging is kept."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without rank coordination, every rank prepares by itself."""
        if self.use_collectives or self.rank is None:
            return plan
        begun = self._begin(self._target())
        return dataclasses.replace(plan, storage_data=_SaveId(begun.save_id, begun.named, self.rank, 1))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Looks at the path once, for all ranks."""
        if all(isinstance(plan.storage_data, _SaveId) for plan in plans):
            return plans
        begun = self._begin(self._target()._replace(metadata_name=None))
        ids = [_SaveId(begun.save_id, begun.named, rank, len(plans)) for rank in range(len(plans))]
        self._saving = ids[0]
        return [dataclasses.replace(plan, storage_data=save) for plan, save in zip(plans, ids)]

    def _begin(self, target: _RecordTarget) -> _reshard.BegunSave:
        """Claims the path. PyTorch does not say when a save has failed: the next save of this process has the path all the same, and
        others when this writer is gone."""
        with as_raised():
            begun = _reshard.begin_records(target)
        self._begun = begun.save_id
        weakref.finalize(self, _reshard.abandon_records, begun.save_id)
        return begun

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes all items of a plan, in one go."""
        saving = plan.storage_data
        if not isinstance(saving, _SaveId):
            raise InvalidInput("the plan was not prepared by this storage writer")
        if saving.save_id in _used_ids:
            # A cached plan: the files of the save it was made for may lie in the same folder.
            saving = dataclasses.replace(saving, save_id=uuid.uuid4().hex, named=True)
        _used_ids.add(saving.save_id)
        self._saving = saving
        planned = getattr(planner, "state_dict", None)
        check_values(planned)
        waiting = waiting_keys(planned)
        description = Description(loading=False)
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        objects = SavedObjects(self.strict_values)
        through: list[list[str]] = []
        items = [item for item in plan.items if item.index.fqn not in waiting]
        records = [self._record(item, planner, paths, description, objects, through) for item in items]
        objects.warn()
        description.wait_for_devices()
        files = max(self.thread_count, 1) if self.single_file_per_rank else max(len(records), 1)
        target, control = self._target(files), _reshard.Control()
        written = _reshard.write_records(target, saving, records, description.owners, control)
        results: list[WriteResult] = []
        for number, (item, place) in enumerate(zip(items, written.records)):
            info = _StorageInfo(place.file, place.offset, place.length, *([through[number]] if through else []))
            own = (item.index, place.length, info)
            results.append(WriteResult(*own) if results else _WriteResult(*own, written.checksums, waiting))
        if waiting and not results:
            results.append(_WriteResult(MetadataIndex(""), 0, None, written.checksums, waiting))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _record(
        self,
        item: Any,
        planner: SavePlanner,
        paths: dict[str, Any],
        description: Description,
        objects: SavedObjects,
        through: list[list[str]],
    ) -> _reshard.Leaf:
        key = item.index.fqn
        path = paths.get(key)
        path = path if isinstance(path, tuple) and all(type(part) in (str, int) for part in path) else None
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise InvalidInput(f"the planner gave a {type(data).__name__} for {key!r}, not bytes", keys=[key])
            record = data.getvalue()
            objects.note(key, record)
            return self._value(item, path, record, through)
        if not isinstance(data, torch.Tensor):
            raise InvalidInput(f"the planner gave a {type(data).__name__} for {key!r}, not a tensor", keys=[key])
        tensor = data.detach()
        if not tensor.numel() and not item.tensor_data.chunk.sizes.numel():
            # Shards without elements have whatever shape the wrapper left them.
            tensor = tensor.new_empty(item.tensor_data.chunk.sizes)
        code = CODES.get(tensor.dtype)
        if code is None or tensor.layout is not torch.strided:
            return self._value(item, path, objects.record(key, tensor.cpu()), through)
        chunk = item.tensor_data.chunk
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise InvalidInput(
                f"the planner gave a tensor of shape {tuple(tensor.shape)} for {key!r}, its plan says {tuple(chunk.sizes)}",
                keys=[key],
            )
        grad = item.tensor_data.properties.requires_grad
        if self._transforms:
            record, descriptors = self._transforms.tensor(item, tensor)
            through.append(descriptors)
            size, at = tuple(item.tensor_data.size), tuple(chunk.offsets)
            return _reshard.Leaf.transformed(key, path, code, grad, size, at, tuple(chunk.sizes), record)
        piece = description.piece(key, tuple(chunk.offsets), tensor)
        return _reshard.Leaf.pieces(key, path, False, code, grad, tuple(item.tensor_data.size), [piece])

    def _value(self, item: Any, path: Any, record: bytes, through: list[list[str]]) -> _reshard.Leaf:
        if self._transforms:
            record, descriptors = self._transforms.record(item, record)
            through.append(descriptors)
        return _reshard.Leaf.record(item.index.fqn, path, False, record)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes `.metadata`: from then on the checkpoint exists."""
        saving = self._saving
        if saving is None:
            raise InvalidInput("nothing was written through this storage writer")
        metadata, written = _without_waiting(metadata, results)
        if hasattr(metadata, "version"):
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", metadata.version)
        metadata.storage_data = {result.index: result.storage_data for result in written}
        self.save_id = saving.save_id
        metadata.storage_meta = self.storage_meta()
        checksums = [result.checksums for each in results for result in each if isinstance(result, _WriteResult)]
        left = _reshard.publish_records(self._target(), saving, self._begun, checksums, _encoded(metadata))
        for warning in left:
            logging.getLogger("reshard").warning("%s: %s", self.path, warning)

    def storage_meta(self) -> StorageMeta | None:
        """What the checkpoint is called."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is written."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this storage can use an id: any path, and addresses of known schemes."""
        return _reshard.is_address(path_text(checkpoint_id))


def _without_waiting(metadata: Metadata, results: list[list[WriteResult]]) -> tuple[Metadata, list[WriteResult]]:
    """What was planned and what was written, without slots that wait: to a planner they are slots, and an optimizer that has not
    run has none. The planner may use its metadata again, so that it is left alone."""
    written = [result for each in results for result in each if result.storage_data is not None]
    told = [result.waiting for each in results for result in each if isinstance(result, _WriteResult)]
    gone = frozenset[str]().union(*told)
    if not gone:
        return metadata, written
    both = sorted(gone.intersection(result.index.fqn for result in written))
    if both:
        raise InvalidInput(
            f"{len(both)} slots have content on some ranks only: {', '.join(map(repr, both[:5]))}",
            keys=both,
            hint="get the state of optimizers anew before saving, on all ranks",
        )
    paths = metadata.planner_data
    if isinstance(paths, dict):
        paths = {key: path for key, path in paths.items() if key not in gone}
    entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if key not in gone}
    return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=paths), written


class _MetadataPickler(pickle.Pickler):
    """Writes tensor properties as every torch reads them: 2.15 would add strides, at which earlier ones fail."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is TensorProperties:
            return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined,no-untyped-call]
        return NotImplemented


def _encoded(metadata: Metadata) -> bytes:
    buffer = io.BytesIO()
    _MetadataPickler(buffer, protocol=4).dump(metadata)
    return buffer.getvalue()


class StorageReader(storage.StorageReader):
    """Reads what PyTorch's planners plan; from DCP folders, and from safetensors and ``torch.save`` files too."""

    def __init__(
        self,
        path: StrPath,
        _extension_registry: Any | None = None,
        *,
        allow_pickle: bool = False,
        verify: VerifyPolicy = "whole",
        storage_options: StorageOptions | None = None,
    ) -> None:
        """
        Args:
            path: a path or an address.
            _extension_registry: stream extensions that undo what records went through, as ``FileSystemReader`` takes it. What
                zstd has compressed needs none.
            allow_pickle: hand values that are not plain data to the planner as they lie in the file; the planner unpickles
                them. Only for files you trust: it runs code from them.
            verify: compare checksums "never", of records that are read "whole", or "always".
            storage_options: settings of the store by name.
        """
        super().__init__()
        self.path = path_text(path)
        self.allow_pickle = allow_pickle
        self.verify = verify
        self.load_id = uuid.uuid4().hex
        self._storage_options = storage_options
        self._transforms = RecordReader(_extension_registry)
        self._checkpoint: _reshard.Checkpoint | None = None
        self._sizes: dict[str, torch.Size] = {}
        #: Chunks behind transforms that the engine does not know, by key and offsets.
        self._through: dict[str, dict[tuple[int, ...], _reshard.StoredChunk]] = {}

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Another checkpoint is about to be read."""
        if checkpoint_id:
            self.path = path_text(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self._checkpoint = None
        self._sizes = {}
        self._through = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, read without unpickling."""
        rank = kwargs.get("rank")
        name = None if rank is None else f"__{rank}.metadata"
        checkpoint = _reshard.Checkpoint(self.path, self._storage_options, None, name)
        entries: dict[str, Any] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for entry in checkpoint.entries():
            key = entry.key
            paths[key] = entry.path
            if entry.dtype is None:
                entries[key] = BytesStorageMetadata()
                record = entry.record
                if record is not None:
                    places[MetadataIndex(key)] = _StorageInfo(record.file, record.offset, record.length)
                continue
            size = torch.Size(entry.shape)
            self._sizes[key] = size
            stored = []
            for position, chunk in enumerate(entry.chunks):
                begin = torch.Size(chunk.offsets)
                stored.append(ChunkStorageMetadata(begin, torch.Size(chunk.sizes)))
                offset, length = (-1 if number is None else number for number in (chunk.offset, chunk.length))
                places[MetadataIndex(key, begin, position)] = _StorageInfo(chunk.file, offset, length)
            properties = TensorProperties(dtype=getattr(torch, entry.dtype), requires_grad=entry.requires_grad)
            entries[key] = TensorStorageMetadata(properties, size, stored)
        self._checkpoint = checkpoint
        metadata = Metadata(StoredEntries(entries), planner_data=paths, storage_data=places)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, save_id=checkpoint.save_id, load_id=self.load_id)
        if hasattr(metadata, "version"):
            metadata.version = checkpoint.dcp_version
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known from reading the metadata."""
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._sizes[key] = entry.size

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to prepare."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of a plan, in one go, straight into the tensors that the planner gives."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            checkpoint = self._checkpoint = _reshard.Checkpoint(self.path, self._storage_options)
        description = Description(loading=True)
        groups: dict[str, tuple[torch.dtype, list[_reshard.Piece]]] = {}
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            stored = self._transformed(checkpoint, item)
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths and target.numel() + item.lengths.numel():
                raise InvalidInput(
                    f"the planner gave a tensor of shape {tuple(target.shape)} for {tuple(item.lengths)} elements of "
                    f"{item.storage_index.fqn!r}",
                    keys=[item.storage_index.fqn],
                )
            targets.append((item, target))
            if stored is not None:
                target.copy_(tensor_of(item, self.path, stored))
                continue
            if not target.numel():
                continue
            key = item.storage_index.fqn
            dtype, pieces = groups.setdefault(key, (target.dtype, []))
            if target.dtype != dtype:
                # One key, two element types: the second is converted after reading.
                stand_in = torch.empty(target.shape, dtype=dtype, device="cpu")
                description.staged.append((stand_in, target))
                target = stand_in
            chunk = item.storage_index.offset or (0,) * len(item.storage_offsets)
            begin = tuple(a + b for a, b in zip(chunk, item.storage_offsets))
            pieces.append(description.piece(key, begin, target))
        for key, (dtype, pieces) in groups.items():
            code = CODES.get(dtype)
            if code is None:
                raise InvalidInput(f"{key!r} is wanted as {dtype}, which reshard cannot read into", keys=[key])
            description.leaves.append(_reshard.Leaf.pieces(key, None, False, code, False, self._sizes[key], pieces))
        description.wait_for_devices()
        options = _reshard.LoadOptions(cast="any", verify=self.verify, ignore_unexpected=True)
        _reshard.load(_LoadRequest(checkpoint, description.leaves, description.owners, options, None, _reshard.Control()))
        description.copy_back()
        for item, target in targets:
            # The engine writes behind PyTorch's back; whoever watches the memory is to see it.
            torch.autograd.graph.increment_version(target)
            planner.commit_tensor(item, target)
        own_keys = OwnKeys(getattr(planner, "original_state_dict", None))
        values: list[ReadItem] = []
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                continue
            stored = self._transformed(checkpoint, item)
            if stored is None:
                values.append(item)
            else:
                key = item.storage_index.fqn
                planner.load_bytes(item, io.BytesIO(self._safe(key, _reshard.decode_record(stored).classes, stored)))
        for item, record in zip(values, self._values(checkpoint, [item.storage_index.fqn for item in values])):
            planner.load_bytes(item, io.BytesIO(record))
        own_keys.restore()
        self._load_slots(checkpoint, planner)
        _free_copies(planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _transformed(self, checkpoint: _reshard.Checkpoint, item: ReadItem) -> bytes | None:
        """The record of an item that was stored through what the engine cannot undo; None of all others."""
        key = item.storage_index.fqn
        entry = checkpoint.entry(key)
        if entry.dtype is None:
            place, through = entry.record, entry.transforms
            if place is None or through is None:
                return None
            file, offset, length = place.file, place.offset, place.length
        else:
            if key not in self._through:
                self._through[key] = {chunk.offsets: chunk for chunk in entry.chunks if chunk.transforms is not None}
            chunk = self._through[key].get(tuple(item.storage_index.offset or (0,) * len(entry.shape)))
            if chunk is None or chunk.transforms is None or chunk.offset is None or chunk.length is None:
                return None
            through, file, offset, length = chunk.transforms, chunk.file, chunk.offset, chunk.length
        return self._transforms.undone(item, self.path, through, checkpoint.stored_record(key, file, offset, length))

    def _load_slots(self, checkpoint: _reshard.Checkpoint, planner: LoadPlanner) -> None:
        """Slots of optimizers that the checkpoint has and the state dict does not list: an optimizer that has not run can not
        list all of them, and planners plan only what is listed."""
        state = getattr(planner, "original_state_dict", None)
        extra = lacking(state, checkpoint) if isinstance(state, dict) else {}
        if extra:
            into(extra, checkpoint, self.path, self.allow_pickle, self.verify)
            complete(state, extra)

    def _values(self, checkpoint: _reshard.Checkpoint, keys: list[str]) -> list[bytes]:
        """Records of values for the planner, which unpickles whatever it is given: none of them lies in the file as it is,
        unless the caller trusts the file."""
        records = checkpoint.value_records(keys)
        return [self._safe(key, found.classes, found.record) for key, found in zip(keys, records)]

    def _safe(self, key: str, classes: list[str], record: bytes) -> bytes:
        if not classes or (self.allow_pickle and record):
            # Plain data, which the engine has written anew; or what the caller has vouched for.
            return record
        trusted = _trusted_classes()
        for name in classes:
            if name not in trusted and record:
                raise untrusted(key, self.path, name)
        again = pickled(key, unpickled(key, self.path, classes[0], record, False))
        # What an object pickles itself as is up to the object; nothing may come in by that which the file did not name.
        for name in _reshard.decode_record(again).classes:
            if name not in trusted:
                raise untrusted(key, self.path, name)
        return again

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is read from."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this storage can use an id: any path, and addresses of known schemes."""
        return _reshard.is_address(path_text(checkpoint_id))


def _free_copies(planner: LoadPlanner) -> None:
    """What FSDP keeps unsharded of the parameters that were loaded into goes."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict):
        return
    loaded = LoadedShards()
    for value in state.values():
        if isinstance(value, DTensor):
            loaded.add(value)
    loaded.free_copies()
