"""The extension module. The package around it is what people use; nothing here is stable.

What goes in is a named tuple of the package, described by a protocol with its attributes, or a typed dict; what comes out are
frozen classes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, final

from ._reports import (
    ConvertReport,
    DiffReport,
    DigestEntry,
    EditReport,
    HealthReport,
    LoadReport,
    MergeReport,
    OptimizerReport,
    PruneReport,
    RecoverReport,
    SaveReport,
    TensorStats,
    Trend,
    VerifyReport,
    ViewReport,
)
from ._tools import Editing, Keeping, Recovering, Selecting, Writing
from ._types import CastPolicy, StorageOptions, VerifyPolicy

__version__: str

_Dims = Sequence[int]
_Path = tuple[str | int, ...]
#: A position in `dtype_names()`.
_Code = int
#: A tensor of torch, which this module does not import.
_Tensor = Any
#: A value of a state dict: whatever the program puts there.
_Value = Any
#: A key of a dict inside of a state: names, numbers, any plain value.
_Key = Any

# ---- groups, control and options --------------------------------------------------------------------------------------------

class _Group(Protocol):
    """Ranks that act together, by collectives of bytes."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, data: bytes, /) -> list[bytes]:
        """Every rank's bytes, by rank."""

    def gather(self, root: int, data: bytes, /) -> list[bytes] | None:
        """Every rank's bytes on the root."""

    def broadcast(self, root: int, data: bytes | None, /) -> bytes:
        """The root's bytes on every rank."""

    def scatter(self, root: int, parts: list[bytes] | None, /) -> bytes:
        """Each rank's part of what the root has."""

@final
class Control:
    """Progress and cancellation of a save or a load."""

    def __new__(cls) -> Self: ...
    @property
    def total(self) -> int:
        """Bytes to move in all, as far as known."""

    @property
    def done(self) -> int:
        """Bytes moved so far."""

    def progress(self) -> Progress:
        """How far the whole job is, the final sync included."""

    def cancel(self) -> None:
        """Asks the work to stop at its next step."""

@final
class Progress:
    """How far a whole job is: bytes that are moved, and again those that are made durable."""

    @property
    def phase(self) -> Literal["moving", "syncing", "finishing"]:
        """What the work is at."""

    @property
    def done(self) -> int:
        """Bytes moved and synced so far."""

    @property
    def total(self) -> int:
        """Bytes to move and to sync, as far as known; never less than `done`."""

@final
class PlanCache:
    """The plan of the last save, kept for the next one of the same layout."""

    def __new__(cls) -> Self: ...

@final
class SaveOptions:
    """How to save. What is left out is for the engine to decide."""

    def __new__(
        cls,
        *,
        overwrite: bool | None = None,
        checksums: bool | None = None,
        sync: bool | None = None,
        split_replicated_above: int | None = None,
        check_replicas: bool | None = None,
        check_files: bool | None = None,
        files_per_rank: int | None = None,
        compression: str | None = None,
        plan_cache: PlanCache | None = None,
    ) -> Self: ...
    def checking_replicas(self) -> SaveOptions:
        """The same, and replicas are compared."""

@final
class LoadOptions:
    """How to load. With `ignore_unexpected` stored keys that nobody wants are no difference."""

    def __new__(
        cls,
        *,
        strict: bool = True,
        cast: CastPolicy = "never",
        verify: VerifyPolicy = "whole",
        exchange: bool = False,
        ignore_unexpected: bool = False,
    ) -> Self: ...
    @property
    def strict(self) -> bool:
        """Whether differences are an error."""

    @property
    def cast(self) -> CastPolicy:
        """Which casts are allowed where element types differ."""

# ---- leaves -----------------------------------------------------------------------------------------------------------------

class _DeviceMemory(Protocol):
    """Memory that the CPU cannot reach."""

    @property
    def address(self) -> int:
        """Tells the same memory under two names."""

    def read(self, offset: int, into: memoryview, /) -> None:
        """Fills a buffer with the bytes from an offset on."""

    def write(self, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], content: memoryview, /) -> None:
        """Writes a box of elements, which lie packed in a buffer."""

#: An address, or what reaches memory elsewhere.
_Memory = int | _DeviceMemory

@final
class Placement:
    """What one dimension of a mesh does to a tensor."""

    @staticmethod
    def replicate() -> Placement:
        """Every rank holds the same."""

    @staticmethod
    def shard(dim: int) -> Placement:
        """A dimension of the tensor is cut."""

    @staticmethod
    def strided_shard(dim: int, split_factor: int) -> Placement:
        """A dimension is cut into pieces, and each rank holds its part of every one, as PyTorch's `_StridedShard`."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class HeldRegion:
    """A region of a tensor that a rank holds, and where it begins in the rank's local tensor."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How large it is."""

    @property
    def local(self) -> tuple[int, ...]:
        """Where it begins in the local tensor."""

@final
class ShardLayout:
    """Which regions of a tensor lie in a rank's local tensor, and where."""

    def __new__(cls, mesh_shape: _Dims, mesh_ranks: _Dims, placements: Sequence[Placement], shape: _Dims, rank: int) -> Self: ...
    @property
    def regions(self) -> list[HeldRegion]:
        """The regions."""

    def pieces(self, key: str, local_shape: _Dims, memory: _Memory, strides: _Dims | None, itemsize: int) -> list[Piece]:
        """The pieces of a local tensor that has this layout."""

@final
class Piece:
    """A region of a tensor and the memory in which it lies; without strides it is contiguous."""

    def __new__(cls, offsets: _Dims, sizes: _Dims, memory: _Memory, strides: _Dims | None = None) -> Self: ...
    def within(self, offsets: _Dims) -> Piece:
        """The same piece of a tensor of which this one's is a part that begins at these offsets."""

@final
class Leaf:
    """A leaf of a state dict: its key, its path, and what it holds."""

    @property
    def key(self) -> str:
        """Its flattened key."""

    @property
    def per_rank(self) -> bool:
        """Whether every rank has one of its own."""

    @property
    def path(self) -> _Path | None:
        """Where it sits in the state dict; None when that is its key alone."""

    @staticmethod
    def whole(
        key: str,
        path: _Path | None,
        per_rank: bool,
        dtype: _Code,
        requires_grad: bool,
        shape: _Dims,
        memory: _Memory,
        strides: _Dims | None,
    ) -> Leaf:
        """A whole tensor in one stretch of memory."""

    @staticmethod
    def pieces(
        key: str,
        path: _Path | None,
        per_rank: bool,
        dtype: _Code,
        requires_grad: bool,
        shape: _Dims,
        pieces: Sequence[Piece],
    ) -> Leaf:
        """Some regions of a tensor."""

    @staticmethod
    def value(key: str, path: _Path | None, per_rank: bool, value: _Value) -> Leaf:
        """Anything that is not a tensor: to save, or to be replaced by what is loaded."""

    @staticmethod
    def record(key: str, path: _Path | None, per_rank: bool, record: bytes) -> Leaf:
        """The bytes of a `torch.save` record."""

    @staticmethod
    def transformed(
        key: str,
        path: _Path | None,
        dtype: _Code,
        requires_grad: bool,
        shape: _Dims,
        offsets: _Dims,
        sizes: _Dims,
        record: bytes,
    ) -> Leaf:
        """The record of a region of a tensor, as transforms of the caller's made it."""

# ---- opened checkpoints -----------------------------------------------------------------------------------------------------

@final
class RecordLocation:
    """Where a record lies."""

    @property
    def file(self) -> str:
        """The file."""

    @property
    def offset(self) -> int:
        """Where it begins."""

    @property
    def length(self) -> int:
        """Its bytes."""

@final
class StoredChunk:
    """A stored region of a tensor."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How large it is."""

    @property
    def file(self) -> str:
        """The file it lies in."""

    @property
    def offset(self) -> int | None:
        """Where in the file its record begins; None where it has none of its own."""

    @property
    def length(self) -> int | None:
        """The bytes of its record."""

    @property
    def transforms(self) -> str | None:
        """What the record was stored through and the engine cannot undo."""

@final
class Entry:
    """A key of a checkpoint and what it is. Nothing is made of it before it is asked for."""

    @property
    def key(self) -> str:
        """The flattened key."""

    @property
    def path(self) -> _Path:
        """Where it sat in the state dict."""

    @property
    def dtype(self) -> str | None:
        """The name of the element type; None of a value."""

    @property
    def dtype_code(self) -> _Code | None:
        """The code of the element type; None of a value."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; of a value that of a scalar."""

    @property
    def requires_grad(self) -> bool:
        """Whether PyTorch should see it as requiring gradients."""

    @property
    def chunk_count(self) -> int:
        """How many chunks a tensor is stored in."""

    @property
    def chunks(self) -> list[StoredChunk]:
        """The chunks that a tensor is stored in."""

    @property
    def transforms(self) -> str | None:
        """What the record of a value was stored through and the engine cannot undo."""

    @property
    def record(self) -> RecordLocation | None:
        """Where the record of a value lies; None where it has none."""

@final
class StoredValue:
    """A stored value: plain data, or the class and the record of what only unpickling could bring back."""

    @property
    def value(self) -> _Value:
        """The value, of plain data."""

    @property
    def class_name(self) -> str | None:
        """The class of what is not plain data."""

    @property
    def classes(self) -> list[str]:
        """All classes that unpickling it would import."""

    @property
    def record(self) -> bytes | None:
        """Its record; empty where it has none of its own."""

@final
class ValueRecord:
    """The record of a value, and the classes that unpickling it would import."""

    @property
    def classes(self) -> list[str]:
        """None of them for plain data."""

    @property
    def record(self) -> bytes:
        """What `torch.load` reads."""

@final
class View:
    """Rules for a view."""

    @staticmethod
    def find(rules: str, parameters: Mapping[str, int]) -> View:
        """Rules by what a person writes."""

    @staticmethod
    def parse(text: str, origin: str, parameters: Mapping[str, int]) -> View:
        """Rules as text."""

    def reversed(self) -> View:
        """The rules that undo these."""

def recipes() -> list[tuple[str, str, list[str]]]:
    """The recipes: name, what it is for, parameters."""

@final
class Checkpoint:
    """A checkpoint on disk or in an object store, of any format."""

    def __new__(
        cls,
        path: str,
        storage_options: StorageOptions | None = None,
        group: _Group | None = None,
        metadata: str | None = None,
        views: Sequence[View] | None = None,
        parameter_map: str | None = None,
        model_rank: int | None = None,
    ) -> Self: ...
    @property
    def path(self) -> str:
        """Its address."""

    @property
    def format(self) -> str:
        """The name of its format."""

    @property
    def writer(self) -> str:
        """Who wrote it, as far as can be told."""

    @property
    def save_id(self) -> str | None:
        """The id of the save, where it has one."""

    @property
    def dcp_version(self) -> str | None:
        """The version of DCP's format."""

    @property
    def files(self) -> list[str]:
        """Its data files."""

    @property
    def notes(self) -> dict[str, str]:
        """Free-form metadata of the file."""

    def __len__(self) -> int: ...
    def __contains__(self, key: str, /) -> bool: ...
    def keys(self) -> list[str]:
        """All keys, in the order of the file."""

    def entry(self, key: str) -> Entry:
        """What a key is."""

    def entries(self) -> list[Entry]:
        """Every key's, in the order of the file."""

    def check_view(self, view: View) -> ViewReport:
        """What a view would make of it, from metadata alone."""

    def check_region(self, key: str, offsets: _Dims, sizes: _Dims) -> None:
        """Refuses to read a region that would take far more than what is stored of its tensor."""

    def read_into(self, key: str, offsets: _Dims, sizes: _Dims, buffer: object) -> None:
        """Reads a region of a tensor into a contiguous buffer of bytes, in row-major order."""

    def stored_record(self, key: str, file: str, offset: int, length: int) -> bytes:
        """Reads a record as it lies in its file, for a caller who can undo what it was stored through."""

    def value(self, key: str) -> _Value:
        """Reads a plain value; one that needs unpickling is an error that names its class."""

    def stored_value(self, key: str) -> StoredValue:
        """Reads a value of any kind."""

    def value_records(self, keys: list[str]) -> list[ValueRecord]:
        """The records of values, for a reader that unpickles: made anew for plain data, as they lie in their files for anything
        else."""

def decode_record(record: bytes) -> StoredValue:
    """What a `torch.save` record holds. Nothing is run."""

def dtype_names() -> list[str]:
    """The element types, by code."""

def dtype_sizes() -> list[int]:
    """The bytes of an element, by code."""

def is_complete(path: str, storage_options: StorageOptions | None = None) -> bool:
    """Whether a finished checkpoint lies at a path."""

def is_address(text: str) -> bool:
    """Whether a text is a path, or an address of a scheme that is known here."""

# ---- saving and loading -----------------------------------------------------------------------------------------------------

class _SaveRequest(Protocol):
    """What to save and how."""

    @property
    def path(self) -> str:
        """Where to."""

    @property
    def leaves(self) -> list[Leaf]:
        """What."""

    @property
    def owners(self) -> object:
        """Whatever keeps the leaves' memory alive."""

    @property
    def pickle(self) -> Callable[[str, _Value], bytes]:
        """Makes a record of an object that is not plain."""

    @property
    def group(self) -> _Group | None:
        """The ranks that save together."""

    @property
    def options(self) -> SaveOptions:
        """How."""

    @property
    def control(self) -> Control:
        """Through which it is watched."""

    @property
    def failure(self) -> str | None:
        """Says that this rank failed before it could describe anything, so that no other rank waits for it."""

    @property
    def storage_options(self) -> StorageOptions | None:
        """Settings of the store."""

    @property
    def trace(self) -> str | None:
        """A file to which a trace of the call is added."""

class _LoadRequest(Protocol):
    """What to load and how."""

    @property
    def checkpoint(self) -> Checkpoint:
        """From where."""

    @property
    def leaves(self) -> list[Leaf]:
        """What."""

    @property
    def owners(self) -> object:
        """Whatever keeps the leaves' memory alive."""

    @property
    def group(self) -> _Group | None:
        """The ranks that load together."""

    @property
    def options(self) -> LoadOptions:
        """How."""

    @property
    def control(self) -> Control:
        """Through which it is watched."""

    @property
    def renames(self) -> dict[str, str | None] | None:
        """From wanted keys to stored ones, or to None for keys to leave alone."""

    @property
    def parts(self) -> Sequence[str]:
        """Top-level entries that are wanted although they are empty here."""

    @property
    def trusted(self) -> set[str] | None:
        """The classes that the caller would unpickle; None trusts all."""

    @property
    def trace(self) -> str | None:
        """A file to which a trace of the call is added."""

    @property
    def failure(self) -> str | None:
        """Says that this rank failed before it could describe anything, so that no other rank waits for it."""

@final
class Loaded:
    """What was loaded."""

    @property
    def values(self) -> dict[str, StoredValue]:
        """What is not a tensor, by wanted key."""

    @property
    def report(self) -> LoadReport:
        """What happened."""

@final
class SaveHandle:
    """A save under way."""

    @property
    def stall(self) -> float:
        """Seconds for which the caller was kept waiting: planning and copying."""

    def done(self) -> bool:
        """Whether it has ended, well or badly."""

    def cancel(self) -> None:
        """Asks it to stop. Nothing is published then, unless it already was."""

    def wait(self) -> SaveReport:
        """Waits until the checkpoint is durable, or failed."""

@final
class AsyncSaver:
    """Saves in the background, one save at a time, with staging memory and plans that it keeps."""

    def __new__(cls, budget: int) -> Self: ...
    def reserve(self, bytes: int) -> None:
        """Allocates staging memory ahead of the first save."""

    def save(self, request: _SaveRequest) -> SaveHandle:
        """Plans and copies now, writes and publishes in the background."""

def save(request: _SaveRequest) -> SaveReport:
    """Saves."""

def load(request: _LoadRequest) -> Loaded:
    """Loads what the leaves describe."""

# ---- records that torch's planners plan -------------------------------------------------------------------------------------

class _RecordTarget(Protocol):
    """Where records go and how."""

    @property
    def path(self) -> str:
        """The folder."""

    @property
    def options(self) -> SaveOptions:
        """How."""

    @property
    def metadata_name(self) -> str | None:
        """The name of the metadata, where it is not `.metadata`."""

    @property
    def storage_options(self) -> StorageOptions | None:
        """Settings of the store."""

class _Begun(Protocol):
    """A save that was begun: what the coordinator decided, for every rank."""

    @property
    def save_id(self) -> str:
        """The id of the save."""

    @property
    def named(self) -> bool:
        """Whether data files carry it in their names."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> int:
        """How many there are."""

@final
class BegunSave:
    """The id of a save that was begun, and whether its data files carry it in their names."""

    @property
    def save_id(self) -> str:
        """The id of the save."""

    @property
    def named(self) -> bool:
        """Whether data files carry it in their names."""

@final
class WrittenRecords:
    """What a rank wrote."""

    @property
    def records(self) -> list[RecordLocation]:
        """Where every record lies, in the order given."""

    @property
    def checksums(self) -> bytes:
        """The checksums, for `publish_records`."""

def begin_records(target: _RecordTarget) -> BegunSave:
    """Prepares a path."""

def abandon_records(begun: str) -> None:
    """Gives up a save that was begun, when no rank of it writes any more."""

def write_records(target: _RecordTarget, save: _Begun, records: list[Leaf], owners: object, control: Control) -> WrittenRecords:
    """Writes one rank's records: leaves that are bytes, or one region of a tensor."""

def publish_records(target: _RecordTarget, save: _Begun, begun: str, checksums: list[bytes], metadata: bytes) -> list[str]:
    """Publishes what all ranks wrote; returns warnings. `begun` is the id under which the path was claimed."""

# ---- tools ------------------------------------------------------------------------------------------------------------------

def verify(
    path: str,
    data: bool,
    storage_options: StorageOptions | None = None,
    views: Sequence[View] | None = None,
    parameter_map: str | None = None,
) -> VerifyReport:
    """Checks a checkpoint."""

def steps(folder: str, deep: bool = False, storage_options: StorageOptions | None = None) -> list[tuple[int, str]]:
    """The valid steps of a folder by number and name, oldest first."""

def latest(folder: str, deep: bool = False, storage_options: StorageOptions | None = None) -> str | None:
    """The name of the newest valid step of a folder."""

def run_command(program: str, arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""

def convert(
    source: str,
    destination: str,
    selecting: Selecting,
    writing: Writing,
    storage_options: StorageOptions | None = None,
) -> ConvertReport:
    """Writes a checkpoint in another format."""

def relayout(
    source: str,
    destination: str,
    layout: tuple[str, list[str]],
    selecting: Selecting,
    writing: Writing,
    storage_options: StorageOptions | None = None,
) -> ConvertReport:
    """Reshards a checkpoint for a device mesh, with rules for placements."""

def merge(
    sources: list[str],
    destination: str,
    weights: list[float],
    selecting: Selecting,
    writing: Writing,
    storage_options: StorageOptions | None = None,
) -> MergeReport:
    """Averages checkpoints."""

def edit(
    source: str,
    destination: str,
    selecting: Selecting,
    editing: Editing,
    storage_options: StorageOptions | None = None,
) -> EditReport:
    """Drops and renames keys and sets values; data of DCP is not touched."""

def diff(
    first: str,
    second: str,
    selecting: Selecting,
    tolerance: tuple[float, float] | None,
    storage_options: StorageOptions | None = None,
) -> DiffReport:
    """What differs between two checkpoints. The tolerance is absolute and relative; None compares no elements."""

def digest(
    path: str,
    selecting: Selecting,
    verify: bool,
    storage_options: StorageOptions | None = None,
) -> dict[str, DigestEntry]:
    """What a checkpoint holds, independent of how."""

def stats(path: str, key: str, selecting: Selecting, bins: int, storage_options: StorageOptions | None = None) -> TensorStats:
    """Numbers about a tensor."""

def scan(
    path: str,
    selecting: Selecting,
    bins: int,
    verify: bool,
    storage_options: StorageOptions | None = None,
) -> dict[str, TensorStats]:
    """Numbers about every selected tensor."""

def health(
    path: str,
    selecting: Selecting,
    limits: list[str],
    verify: bool,
    storage_options: StorageOptions | None = None,
) -> HealthReport:
    """Numbers about every selected tensor, judged by rules."""

def trend(
    folder: str,
    selecting: Selecting,
    numbers: bool,
    limits: list[str],
    storage_options: StorageOptions | None = None,
) -> Trend:
    """A run's steps side by side."""

def recover(path: str, recovering: Recovering, storage_options: StorageOptions | None = None) -> RecoverReport:
    """`.metadata` from data files."""

def prune(
    folder: str,
    keeping: Keeping,
    deep: bool,
    dry_run: bool,
    storage_options: StorageOptions | None = None,
) -> PruneReport:
    """Removes old steps of a folder."""

@final
class Step:
    """One step of a folder."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def path(self) -> str:
        """Its address."""

    @property
    def why(self) -> str | None:
        """Why it is not complete; None when it is."""

@final
class Pruned:
    """What removing steps did."""

    @property
    def removed(self) -> list[str]:
        """Names of the steps that went."""

    @property
    def failed(self) -> list[str]:
        """What could not be removed, and why."""

@final
class StepFolder:
    """A folder whose steps are named by a prefix and a number."""

    def __new__(cls, root: str, prefix: str, marker: str, storage_options: StorageOptions | None = None) -> Self: ...
    def steps(self) -> list[Step]:
        """The steps that are DCP checkpoints, complete or not, oldest first."""

    def best(self, key: str, largest: bool) -> int | None:
        """The step with the best number under a key."""

    def prune(
        self,
        grace: float,
        last: int | None = None,
        every: int | None = None,
        best: tuple[str, bool, int] | None = None,
        younger: float | None = None,
        budget: int | None = None,
        fallback: bool = False,
    ) -> Pruned:
        """Removes the steps that no rule keeps and saves that were abandoned longer ago than `grace` seconds."""

# ---- state of models and optimizers -----------------------------------------------------------------------------------------

class _StateDictOptions(Protocol):
    """The fields of `StateDictOptions`."""

    full_state_dict: bool
    cpu_offload: bool
    ignore_frozen_params: bool
    keep_submodule_prefixes: bool
    strict: bool
    broadcast_from_rank0: bool
    flatten_optimizer_state_dict: bool
    dsd_fqn_modifiers: str
    full_state_dict_ranks: Sequence[int] | None

class _Buffer(Protocol):
    """A buffer of a module."""

    @property
    def name(self) -> str:
        """Its name in the module."""

    @property
    def identity(self) -> int:
        """What tells it from others."""

    @property
    def persistent(self) -> bool:
        """Whether it is a part of state dicts."""

class _Slice(Protocol):
    """The slice of a parameter that tensor parallelism leaves this rank."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the slice begins."""

class _Member(Protocol):
    """A parameter inside of a flat one."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the member."""

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""

    @property
    def aliases(self) -> list[str]:
        """Other names of it."""

    @property
    def slice(self) -> _Slice | None:
        """Where tensor parallelism leaves this rank one slice of it."""

class _Extent(Protocol):
    """A stretch of a flat parameter."""

    @property
    def member(self) -> int | None:
        """Of which member; None is padding."""

    @property
    def numel(self) -> int:
        """How many elements."""

class _Flat(Protocol):
    """A flat parameter of FSDP."""

    @property
    def name(self) -> str:
        """Its name in the live model."""

    @property
    def dtype(self) -> _Code:
        """Its element type."""

    @property
    def members(self) -> Sequence[_Member]:
        """What it is made of."""

    @property
    def extents(self) -> Sequence[_Extent]:
        """In which order, padding included."""

    @property
    def strategy(self) -> str:
        """FSDP's name of how it is sharded."""

    @property
    def rank(self) -> int:
        """This rank in its group."""

    @property
    def world(self) -> int:
        """The size of its group."""

    @property
    def use_orig_params(self) -> bool:
        """Whether the optimizer has the original parameters."""

class _Parameter(Protocol):
    """A parameter of a module."""

    @property
    def name(self) -> str:
        """Its name in the module."""

    @property
    def identity(self) -> int:
        """What tells it from others."""

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""

    @property
    def dtype(self) -> _Code | None:
        """Its element type; None where it has no shape of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""

    @property
    def flat(self) -> _Flat | None:
        """What it is made of, of a flat parameter."""

class _Child(Protocol):
    """A module by its name in another."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def module(self) -> _Module:
        """The module."""

class _Module(Protocol):
    """A module, with what lies directly in it."""

    @property
    def wrapper(self) -> str | dict[str, str] | None:
        """Which wrapper it is, or how it changes names."""

    @property
    def parameters(self) -> Sequence[_Parameter]:
        """Its own parameters."""

    @property
    def buffers(self) -> Sequence[_Buffer]:
        """Its own buffers."""

    @property
    def extra_state(self) -> bool:
        """Whether it has extra state."""

    @property
    def manages(self) -> _Flat | None:
        """The flat parameter behind its original parameters."""

    @property
    def children(self) -> Sequence[_Child]:
        """The modules below it."""

@final
class FlatPiece:
    """A region of a member of a flat parameter, and the element of this rank's shard at which it begins."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the member."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How large it is."""

    @property
    def start(self) -> int:
        """The element of the shard."""

def flat_pieces(shape: _Dims, start: int, end: int) -> list[FlatPiece]:
    """The regions of the elements from `start` up to `end` of a flattened tensor, in order."""

@final
class FlatPart:
    """What this rank holds of a member of a flat parameter."""

    @property
    def flat(self) -> str:
        """The name of the flat parameter."""

    @property
    def member(self) -> int:
        """The number of the member."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole member."""

    @property
    def pieces(self) -> list[FlatPiece]:
        """The regions."""

@final
class NamedParameter:
    """A parameter by one of its names."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def identity(self) -> int | None:
        """What tells it from others."""

    @property
    def flat(self) -> FlatPart | None:
        """What this rank holds of it, where it is inside of a flat parameter."""

@final
class ModelEntry:
    """One entry of a model's state dict."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def name(self) -> str:
        """The canonical name."""

    @property
    def raw(self) -> str:
        """The name in the live model."""

    @property
    def kind(self) -> Literal["parameter", "buffer", "extra"]:
        """What it is."""

    @property
    def identity(self) -> int | None:
        """What tells its tensor from others."""

    @property
    def flat(self) -> FlatPart | None:
        """What this rank holds of it, where it is inside of a flat parameter."""

class _Given(Protocol):
    """A given tensor; another value without a dtype."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def dtype(self) -> _Code | None:
        """Its element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""

@final
class Assigned:
    """Which given key goes to which entry."""

    @property
    def entries(self) -> dict[str, ModelEntry]:
        """By given key."""

    @property
    def missing(self) -> list[str]:
        """Keys that were not given."""

    @property
    def unexpected(self) -> list[str]:
        """Given keys that go nowhere."""

@final
class StateModel:
    """A model's modules, wrappers, parameters and flat parameters."""

    def __new__(cls, module: _Module) -> StateModel: ...
    def canonical(self, names: list[str]) -> list[str]:
        """The canonical forms of names in the live model."""

    def parameters(self) -> list[NamedParameter]:
        """All parameters, under every name that they have."""

    def primary(self, name: str) -> str:
        """The name under which a parameter is stored, whichever of its names is given."""

    def entries(self, submodules: list[str], options: _StateDictOptions) -> list[ModelEntry]:
        """The entries of the state dict, of submodules if any are named."""

    def assign(self, given: Sequence[_Given], options: _StateDictOptions) -> Assigned:
        """Where given keys go."""

@final
class TensorDescription:
    """What is known of a tensor: element type, whole shape, device, its only element if it has one, and the regions of it that are
    here, if it is not here whole."""

    def __new__(
        cls,
        dtype: _Code,
        shape: _Dims,
        device: str,
        scalar: bytes | None = None,
        pieces: Sequence[tuple[tuple[int, ...], _Tensor]] | None = None,
    ) -> Self: ...

@final
class SlotPart:
    """A region of a tensor inside of another: of a row-major box `within`, which starts at an element, the part `at`."""

    @property
    def tensor(self) -> _Tensor:
        """The tensor it lies in."""

    @property
    def start(self) -> int:
        """The element at which the box begins."""

    @property
    def within(self) -> tuple[int, ...]:
        """The shape of the box."""

    @property
    def at(self) -> tuple[int, ...]:
        """Where the region begins in the box."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How large it is."""

class _LiveGroup(Protocol):
    """A group of a live optimizer."""

    @property
    def params(self) -> list[int]:
        """Its members by identity."""

    @property
    def options(self) -> dict[str, _Value]:
        """Everything else."""

class _Optimizer(Protocol):
    """An optimizer."""

    @property
    def state_dict(self) -> dict[str, _Value]:
        """What its own `state_dict()` gives."""

    @property
    def groups(self) -> Sequence[_LiveGroup]:
        """Its groups."""

class _LocalLayout(Protocol):
    """The layout of a sharded parameter."""

    @property
    def layout(self) -> ShardLayout:
        """The layout."""

    @property
    def local_shape(self) -> _Dims:
        """The shape of what this rank holds."""

_Describe = Callable[[_Value], TensorDescription | None]
_Sharded = Callable[[_Code, tuple[int, ...], list[SlotPart]], _Value]

def optimizer_state(
    model: StateModel,
    optimizers: Sequence[_Optimizer],
    describe: _Describe,
    sharded: _Sharded,
    layouts: Mapping[str, _LocalLayout],
    options: _StateDictOptions,
) -> dict[str, _Value]:
    """The state of optimizers by names. `layouts` are those of sharded parameters whose slots may be plain tensors of the local
    shape."""

@final
class KeptSlot:
    """A slot that is taken as it is given."""

    @property
    def value(self) -> _Value:
        """What is given."""

@final
class BoxCopy:
    """A copy of a box from one tensor into another. On each side it is a part of a row-major box that begins at an element."""

    @property
    def source(self) -> _Tensor:
        """Where from."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How large it is."""

    @property
    def source_start(self) -> int:
        """The element at which the source's box begins."""

    @property
    def source_box(self) -> tuple[int, ...]:
        """The shape of the source's box."""

    @property
    def source_at(self) -> tuple[int, ...]:
        """Where in it."""

    @property
    def target_start(self) -> int:
        """The element at which the target's box begins."""

    @property
    def target_box(self) -> tuple[int, ...]:
        """The shape of the target's box."""

    @property
    def target_at(self) -> tuple[int, ...]:
        """Where in it."""

@final
class BuiltSlot:
    """A slot that is put together from parts of what is given."""

    @property
    def dtype(self) -> _Code:
        """Its element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def copies(self) -> list[BoxCopy]:
        """What is copied into it."""

@final
class OptimizerLoad:
    """What one optimizer loads."""

    @property
    def state(self) -> dict[str | int, dict[str, KeptSlot | BuiltSlot]]:
        """Slots by the optimizer's own keys and by name."""

    @property
    def user_state(self) -> dict[str, _Value]:
        """State that belongs to no parameter."""

    @property
    def groups(self) -> list[dict[str, _Value]]:
        """Its groups."""

@final
class OptimizerPlan:
    """What optimizers load."""

    @property
    def loads(self) -> list[OptimizerLoad]:
        """One for each."""

    @property
    def report(self) -> OptimizerReport:
        """How the given state met them."""

def optimizer_to_load(
    model: StateModel,
    given: dict[_Key, _Value],
    live: Sequence[Sequence[_LiveGroup]],
    describe: _Describe,
    sharded: _Sharded,
    by_names: bool,
    options: _StateDictOptions,
) -> OptimizerPlan:
    """What each optimizer loads of a given state dict, nested or flattened, by names or by ids."""

def rekey_optimizer(state: dict[str, _Value], mapping: dict[_Key, _Key], describe: _Describe) -> dict[str, _Value]:
    """An optimizer's state with other names for its parameters, by a mapping from the names it has."""

class _StoredSlot(Protocol):
    """An entry of a checkpoint below an optimizer."""

    @property
    def path(self) -> tuple[_Key, ...]:
        """Its path below the optimizer."""

    @property
    def dtype(self) -> _Code | None:
        """Its element type; None for a value."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

@final
class PlannedSlot:
    """What becomes of an entry of a checkpoint below an optimizer."""

    @property
    def key(self) -> str:
        """Its flattened key."""

    @property
    def path(self) -> _Path:
        """Its path below the optimizer."""

    @property
    def parameter(self) -> str | None:
        """The parameter it is a slot of."""

    @property
    def dtype(self) -> _Code | None:
        """Its element type; None for a value."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def by_parameter(self) -> bool:
        """Whether it has the layout of its parameter."""

@final
class SlotPlan:
    """What an optimizer's slots are."""

    @property
    def slots(self) -> list[PlannedSlot]:
        """One for each entry."""

    @property
    def unknown(self) -> list[str]:
        """Names that are no parameters here."""

def plan_slots(params: Mapping[str, _Dims], entries: Sequence[_StoredSlot]) -> SlotPlan:
    """What an optimizer's slots are, from a checkpoint's entries and the shapes of the parameters."""

@final
class TransferPart:
    """A region that a rank sends or receives."""

    @property
    def rank(self) -> int:
        """The rank."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the whole."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How large it is."""

@final
class TransferStep:
    """A tensor on its way, whole or in parts."""

    @property
    def key(self) -> str:
        """Its key; of an optimizer's slot the parameter."""

    @property
    def slot(self) -> str:
        """The slot, of an optimizer's."""

    @property
    def dtype(self) -> _Code:
        """Its element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""

    @property
    def parts(self) -> list[TransferPart]:
        """Who sends or receives what of it."""

@final
class ValueSource:
    """The rank that tells a value."""

    @property
    def key(self) -> str:
        """Its key; of an optimizer's slot the parameter."""

    @property
    def slot(self) -> str:
        """The slot, of an optimizer's."""

    @property
    def rank(self) -> int:
        """The rank."""

@final
class GatherPlan:
    """How a full state is gathered."""

    @property
    def steps(self) -> list[TransferStep]:
        """Tensors."""

    @property
    def values(self) -> list[ValueSource]:
        """Everything else."""

def gather_plan(inventories: Sequence[dict[str, dict[str, object]]], ranks: list[int] | None, cpu_offload: bool) -> GatherPlan:
    """The plan of a full state from every rank's leaves, by parameter and slot. `ranks` receive whole tensors; None: all."""

class _Offered(Protocol):
    """A tensor that one rank has whole."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def dtype(self) -> _Code:
        """Its element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

class _Wanted(Protocol):
    """What a rank wants of a tensor."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def regions(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes."""

def broadcast_steps(owner: int, offered: Sequence[_Offered], wanted: Sequence[Sequence[_Wanted]]) -> list[TransferStep]:
    """Who gets what of the tensors that one rank has, one step for each tensor in the order offered."""

def unflatten(entries: Iterable[tuple[str, _Path, _Value]], key_types: _Value = None) -> dict[_Key, _Value]:
    """Nested dicts and lists from keys, paths and leaves. Paths know only text; `key_types` say which keys were something else."""

def key_types(state: dict[_Key, _Value], values: dict[_Key, _Value] | None = None) -> _Value:
    """The keys of nested dicts that their text does not give back, as one plain value; None if there are none."""

def is_plain(object: _Value) -> bool:
    """Whether an object is plain: it is stored as data and comes back without running anything."""

def publish_file(folder: str, name: str, content: bytes) -> None:
    """Writes a file of a folder, in place of the one that is there: nobody ever finds a part of it, and it is on the disk when this
    returns."""

def rename_file(folder: str, name: str, to: str) -> None:
    """Gives a file of a folder another name, over what is there, durably."""
