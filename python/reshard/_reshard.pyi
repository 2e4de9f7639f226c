"""The extension module. The package around it is what people use; nothing here is stable."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, final

__version__: str

_Leaves = list[tuple[Any, ...]]
_Dims = Sequence[int]

@final
class Control:
    """Progress and cancellation of a save or a load."""

    def __new__(cls) -> Self: ...
    @property
    def total(self) -> int: ...
    @property
    def done(self) -> int: ...
    def cancel(self) -> None: ...

@final
class PlanCache:
    """The plan of the last save, kept for the next one of the same layout."""

    def __new__(cls) -> Self: ...

class _SaveRequest(Protocol):
    """What to save and how, as attributes."""

    @property
    def path(self) -> str: ...
    @property
    def leaves(self) -> _Leaves: ...
    @property
    def owners(self) -> Any: ...
    @property
    def pickle(self) -> Callable[[str, Any], bytes]: ...
    @property
    def group(self) -> Any: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def control(self) -> Control: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def storage_options(self) -> dict[str, Any] | None: ...

@final
class Checkpoint:
    """A checkpoint on disk or in an object store, of any format."""

    def __new__(
        cls,
        path: str,
        storage_options: dict[str, Any] | None = None,
        group: Any = None,
        metadata: str | None = None,
    ) -> Self: ...
    @property
    def path(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def writer(self) -> str: ...
    @property
    def save_id(self) -> str | None: ...
    @property
    def dcp_version(self) -> str | None: ...
    @property
    def files(self) -> list[str]: ...
    @property
    def notes(self) -> dict[str, str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: str, /) -> bool: ...
    def keys(self) -> list[str]: ...
    def entry(self, key: str) -> tuple[Any, ...]: ...
    def entries(self) -> list[tuple[str, tuple[Any, ...]]]: ...
    def value_place(self, key: str) -> tuple[int, int, int] | None: ...
    def check_region(self, key: str, offsets: _Dims, sizes: _Dims) -> None: ...
    def read_into(self, key: str, offsets: _Dims, sizes: _Dims, buffer: Any) -> None: ...
    def value(self, key: str) -> Any: ...
    def value_or_record(self, key: str) -> tuple[Any, bytes | None]: ...
    def value_records(self, keys: list[str]) -> list[tuple[list[str], bytes]]: ...

@final
class SaveHandle:
    """A save under way."""

    @property
    def stall(self) -> float: ...
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def wait(self) -> dict[str, Any]: ...

@final
class AsyncSaver:
    """Saves in the background."""

    def __new__(cls, budget: int) -> Self: ...
    def reserve(self, bytes: int) -> None: ...
    def save(self, request: _SaveRequest) -> SaveHandle: ...

def decode_record(record: bytes) -> tuple[Any, list[str] | None]: ...
def dtype_names() -> list[str]: ...
def dtype_sizes() -> list[int]: ...
def is_complete(path: str, storage_options: dict[str, Any] | None = None) -> bool: ...
def local_regions(
    mesh_shape: _Dims, mesh_ranks: _Dims, placements: Sequence[tuple[str, int, int]], shape: _Dims, rank: int
) -> list[tuple[list[int], list[int], list[int]]]: ...
def save(request: _SaveRequest) -> dict[str, Any]: ...
def load(
    source: str | Checkpoint,
    leaves: _Leaves,
    owners: Any,
    group: Any,
    options: dict[str, Any],
    control: Control,
    renames: Mapping[str, str | None] | None = None,
    trusted: set[str] | None = None,
    failure: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> tuple[dict[str, tuple[Any, bytes | None]], dict[str, Any]]: ...
def begin_records(
    path: str,
    options: dict[str, Any],
    metadata_name: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> tuple[str, bool]: ...
def write_records(
    path: str,
    save_id: str,
    named: bool,
    rank: int,
    ranks: int,
    records: _Leaves,
    owners: Any,
    options: dict[str, Any],
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> tuple[list[tuple[str, int, int]], bytes]: ...
def publish_records(
    path: str,
    save_id: str,
    named: bool,
    begun: str,
    sums: list[bytes],
    metadata: bytes,
    options: dict[str, Any],
    metadata_name: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[str]: ...
def verify(path: str, data: bool, control: Control, storage_options: dict[str, Any] | None = None) -> dict[str, Any]: ...
def steps(folder: str, deep: bool = False, storage_options: dict[str, Any] | None = None) -> list[tuple[int, str]]: ...
def run_command(program: str, arguments: Sequence[str]) -> int: ...
def latest(folder: str, deep: bool = False, storage_options: dict[str, Any] | None = None) -> str | None: ...
def convert(
    source: str,
    destination: str,
    options: dict[str, Any],
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def relayout(
    source: str,
    destination: str,
    mesh: str,
    rules: list[str],
    options: dict[str, Any],
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def merge(
    sources: list[str],
    destination: str,
    weights: list[float],
    options: dict[str, Any],
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def edit(
    source: str,
    destination: str,
    options: dict[str, Any],
    values: dict[str, Any],
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def diff(
    first: str,
    second: str,
    options: dict[str, Any],
    absolute: float,
    relative: float,
    elements: bool,
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def digest(
    path: str, options: dict[str, Any], verify: bool, control: Control, storage_options: dict[str, Any] | None = None
) -> str: ...
def scan(
    path: str,
    options: dict[str, Any],
    bins: int,
    verify: bool,
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def health(
    path: str,
    options: dict[str, Any],
    limits: list[str],
    verify: bool,
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def trend(
    folder: str, options: dict[str, Any], numbers: bool, control: Control, storage_options: dict[str, Any] | None = None
) -> str: ...
def stats(path: str, key: str, bins: int, control: Control, storage_options: dict[str, Any] | None = None) -> str: ...
def recover(
    path: str,
    replace: bool,
    accept_absent_ranks: bool,
    undo_edits: bool,
    dry_run: bool,
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...
def prune(
    folder: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, bool, int] | None,
    keep_younger: float | None,
    grace: float,
    abandoned: bool,
    deep: bool,
    dry_run: bool,
    control: Control,
    storage_options: dict[str, Any] | None = None,
) -> str: ...

@final
class Step:
    """One step of a folder."""

    @property
    def number(self) -> int: ...
    @property
    def path(self) -> str: ...
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

    def __new__(cls, root: str, prefix: str, marker: str, storage_options: dict[str, Any] | None = None) -> Self: ...
    def steps(self) -> list[Step]: ...
    def best(self, key: str, largest: bool) -> int | None: ...
    def prune(
        self,
        grace: float,
        last: int | None = None,
        every: int | None = None,
        best: tuple[str, bool, int] | None = None,
    ) -> Pruned: ...

def is_address(text: str) -> bool: ...

@final
class StateModel:
    def __new__(cls, module: tuple[Any, ...]) -> StateModel: ...
    def canonical(self, names: list[str]) -> list[str]: ...
    def parameters(self) -> list[tuple[str, int, Any]]: ...
    def primary(self, name: str) -> str: ...
    def nearest(self, name: str) -> str | None: ...
    def entries(self, submodules: list[str], options: Any) -> list[tuple[Any, ...]]: ...
    def assign(
        self, given: list[tuple[str, int | None, list[int]]], options: Any
    ) -> tuple[list[tuple[str, tuple[Any, ...]]], list[str], list[str]]: ...
    def member_pieces(self, name: str, rank: int | None = None) -> list[tuple[Any, ...]]: ...

def optimizer_state(
    model: StateModel,
    optimizers: list[tuple[Any, ...]],
    describe: Callable[[Any], tuple[Any, ...] | None],
    sharded: Callable[[int, tuple[int, ...], list[Any]], Any],
    layouts: dict[str, Any],
    options: Any,
) -> tuple[dict[Any, Any], dict[str, Any], dict[str, float]]: ...
def optimizer_to_load(
    model: StateModel,
    given: dict[Any, Any],
    live: list[Any],
    describe: Callable[[Any], tuple[Any, ...] | None],
    sharded: Callable[[int, tuple[int, ...], list[Any]], Any],
    by_names: bool,
    options: Any,
) -> tuple[list[tuple[Any, ...]], dict[str, Any]]: ...
def full_slots(
    inventories: list[dict[str, Any]], ranks: list[int] | None, cpu_offload: bool
) -> tuple[list[tuple[Any, ...]], list[tuple[str, str, int]]]: ...
def broadcast_steps(
    owner: int, offered: list[tuple[str, int, list[int]]], wanted: list[list[tuple[str, list[Any]]]]
) -> tuple[list[tuple[Any, ...]], list[str]]: ...
def plan_optimizer(params: dict[str, Any], entries: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[str]]: ...
def unflatten(entries: list[tuple[str, tuple[str | int, ...], Any]], key_types: Any = None) -> dict[Any, Any]: ...
def key_types(state: dict[Any, Any], values: dict[Any, Any] | None = None) -> tuple[tuple[str, Any], ...] | None: ...
def rekey_optimizer(state: dict[Any, Any], mapping: dict[Any, Any], describe: Callable[[Any], Any]) -> dict[Any, Any]: ...
def is_plain(object: Any) -> bool: ...
def forked() -> None: ...
