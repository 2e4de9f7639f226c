"""Looking into a checkpoint without torch: keys, shapes, slices as NumPy arrays, and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _html, _reshard
from ._errors import InvalidInput, ReshardError
from ._paths import path_text
from ._types import StorageOptions, StrPath
from ._view import Views, inner_views

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._reports import VerifyReport

# Types that NumPy lacks. With `ml_dtypes` installed arrays have its types; without it, unsigned integers of the same size
# that hold the same bits. float4 comes two to a byte either way.
_WITHOUT_NUMPY_TYPE = {
    "bfloat16": ("bfloat16", "uint16"),
    "float8_e4m3fn": ("float8_e4m3fn", "uint8"),
    "float8_e5m2": ("float8_e5m2", "uint8"),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", "uint8"),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", "uint8"),
    "float8_e8m0fnu": ("float8_e8m0fnu", "uint8"),
    "float4_e2m1fn_x2": (None, "uint8"),
    # Two half floats: real and imaginary part.
    "complex32": (None, "uint32"),
}


class Chunk(NamedTuple):
    """A stored region of a tensor and the file it lies in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of arrays with this element type.

    bfloat16 and the float8 types come as the types of ``ml_dtypes`` when that is installed, and otherwise as ``uint16`` and
    ``uint8`` with the same bits.
    """
    import numpy

    names = _WITHOUT_NUMPY_TYPE.get(name)
    if names is None:
        return numpy.dtype(name)
    extended, plain = names
    if extended is not None:
        try:
            import ml_dtypes
        except ImportError:
            pass
        else:
            found = getattr(ml_dtypes, extended, None)
            if found is not None:
                extended_type: np.dtype[Any] = numpy.dtype(found)
                return extended_type
    return numpy.dtype(plain)


class Tensor:
    """A tensor in a checkpoint; nothing is read until it is indexed."""

    __slots__ = ("_checkpoint", "_entry", "dtype", "key", "requires_grad", "shape")

    def __init__(self, checkpoint: Checkpoint, entry: _reshard.Entry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self.key: str = entry.key
        #: The element type by its name in torch, such as "bfloat16".
        self.dtype: str = entry.dtype or ""
        self.shape: tuple[int, ...] = entry.shape
        self.requires_grad: bool = entry.requires_grad

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements."""
        return self.size * _SIZES[self.dtype]

    @property
    def chunks(self) -> list[Chunk]:
        """The regions in which it is stored."""
        return [Chunk(chunk.offsets, chunk.sizes, chunk.file) for chunk in self._entry.chunks]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Reads a slice, by NumPy's basic indexing: integers, slices with any step, ``...`` and ``None``.

        Only the stored bytes that the slice needs are read.
        """
        begin, sizes, then = _region(index, self.shape)
        array = self._read(begin, sizes)[then]
        return array

    def numpy(self) -> NDArray[Any]:
        """Reads the whole tensor."""
        return self._read((0,) * len(self.shape), self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> NDArray[Any]:
        import numpy

        checkpoint = self._checkpoint._open()
        checkpoint.check_region(self.key, offsets, sizes)
        array = numpy.empty(sizes, dtype=numpy_dtype(self.dtype))
        buffer = array.reshape(-1).view(numpy.uint8)
        checkpoint.read_into(self.key, offsets, sizes, buffer)
        return array

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        count = self._entry.chunk_count
        return f"<reshard.Tensor {self.key!r}: {self.dtype}[{shape}] in {count} chunk{'' if count == 1 else 's'}>"


_SIZES: dict[str, int] = dict(zip(_reshard.dtype_names(), _reshard.dtype_sizes()))


def _region(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """The region to read for a basic index, and the index to apply to what was read."""
    given = index if isinstance(index, tuple) else (index,)
    if given.count(Ellipsis) > 1 if all(_is_basic(part) for part in given) else True:
        raise IndexError("only integers, slices, `...` and `None` are supported, and `...` once")
    used = sum(1 for part in given if part is not None and part is not Ellipsis)
    if used > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, {used} were given")
    missing = (slice(None),) * (len(shape) - used)
    if Ellipsis in given:
        at = given.index(Ellipsis)
        parts = given[:at] + missing + given[at + 1 :]
    else:
        parts = given + missing
    begin: list[int] = []
    sizes: list[int] = []
    then: list[Any] = []
    for part in parts:
        if part is None:
            then.append(None)
            continue
        dim = len(begin)
        extent = shape[dim]
        if isinstance(part, slice):
            positions = range(*part.indices(extent))
            if len(positions) == 0:
                begin.append(0)
                sizes.append(0)
                then.append(slice(None))
                continue
            first, last = min(positions[0], positions[-1]), max(positions[0], positions[-1])
            begin.append(first)
            sizes.append(last - first + 1)
            then.append(slice(None, None, positions.step))
        else:
            position = part.__index__()
            if not -extent <= position < extent:
                raise IndexError(f"index {position} is out of bounds for dimension {dim} of size {extent}")
            begin.append(position % extent)
            sizes.append(1)
            then.append(0)
    return tuple(begin), tuple(sizes), tuple(then)


def _is_basic(part: Any) -> bool:
    return (
        part is None
        or part is Ellipsis
        or isinstance(part, slice)
        or (hasattr(part, "__index__") and not isinstance(part, bool) and getattr(part, "ndim", 0) == 0)
    )


class Checkpoint(Mapping[str, Any]):
    """An opened checkpoint: a DCP folder, safetensors, or a ``torch.save`` file.

    A mapping from flattened keys to a lazy :class:`Tensor` for tensors and to the value itself for everything else. Values
    are decoded as inert data; one that only unpickling could bring back raises :class:`UntrustedPickle`.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        view: Views | None = None,
        parameter_map: StrPath | None = None,
        storage_options: StorageOptions | None = None,
    ) -> None:
        given = None if parameter_map is None else path_text(parameter_map)
        inner = _reshard.Checkpoint(path_text(path), storage_options, views=inner_views(view), parameter_map=given)
        self._inner: _reshard.Checkpoint | None = inner

    def _open(self) -> _reshard.Checkpoint:
        if self._inner is None:
            raise InvalidInput("the checkpoint is closed")
        return self._inner

    @property
    def path(self) -> str:
        """Its address."""
        return self._open().path

    @property
    def format(self) -> str:
        """ "dcp", "safetensors", "torch", or another program's: "deepspeed", "universal", "megatron", "ranks", "accelerate",
        "lightning", "nanotron", "torch_checkpointing"."""
        return self._open().format

    @property
    def writer(self) -> str:
        """Who wrote it, as far as can be told."""
        return self._open().writer

    @property
    def save_id(self) -> str | None:
        """The id of the save, where it has one."""
        return self._open().save_id

    @property
    def files(self) -> list[str]:
        """Its data files."""
        return self._open().files

    @property
    def notes(self) -> dict[str, str]:
        """Free-form metadata of the file (safetensors)."""
        return self._open().notes

    def __getitem__(self, key: str) -> Any:
        inner = self._open()
        entry = inner.entry(key)
        return inner.value(key) if entry.dtype is None else Tensor(self, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open().keys())

    def __len__(self) -> int:
        return len(self._open())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._open()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, lazily, by key."""
        return {entry.key: Tensor(self, entry) for entry in self._open().entries() if entry.dtype is not None}

    def key_path(self, key: str) -> tuple[str | int, ...]:
        """Where a key sat in the state dict: names of dicts and indices of lists."""
        return self._open().entry(key).path

    def to_dict(self, *, lazy: bool = False, flat: bool = False) -> dict[str, Any]:
        """Everything, as nested dicts and lists like those that were saved.

        Tensors are NumPy arrays, or with ``lazy`` :class:`Tensor`; with ``flat`` the dict has the flattened keys.
        """
        inner = self._open()
        leaves: list[tuple[str, tuple[str | int, ...], Any]] = []
        for entry in inner.entries():
            if entry.dtype is None:
                leaf: Any = inner.value(entry.key)
            else:
                tensor = Tensor(self, entry)
                leaf = tensor if lazy else tensor.numpy()
            leaves.append((entry.key, entry.path, leaf))
        if flat:
            return {key: leaf for key, _, leaf in leaves}
        return _reshard.unflatten(leaves)

    def close(self) -> None:
        """Lets go of its files."""
        self._inner = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._inner is None:
            return "<reshard.Checkpoint, closed>"
        return f"<reshard.Checkpoint {self.path!r}: {len(self)} keys, {self.format}>"

    def _shown(self, key: str) -> str:
        """A plain value in a few letters; an object that only unpickling could bring back has none."""
        try:
            text = repr(self[key])
        except ReshardError:
            return ""
        return text if len(text) <= 60 else f"{text[:59]}…"

    def _repr_html_(self) -> str:
        from ._reports import human_bytes

        most = 60
        entries = self._open().entries()
        sizes = {entry.key: Tensor(self, entry).nbytes for entry in entries if entry.dtype is not None}
        rows: list[tuple[str, ...]] = []
        for entry in entries[:most]:
            what = ("value", self._shown(entry.key), "")
            if entry.dtype is not None:
                what = (entry.dtype, " × ".join(map(str, entry.shape)), human_bytes(sizes[entry.key]))
            rows.append((entry.key, *what, str(entry.chunk_count or "")))
        total = sum(sizes.values())
        boxes = {name: (size, human_bytes(size)) for name, size in _modules(sizes).items()}
        keys = _html.table(("key", "type", "shape or value", "bytes", "chunks"), rows, (3, 4))
        more = _html.more(len(entries) - most, "key")
        note = f"{self.format}, {len(entries)} keys, {human_bytes(total)}"
        return _html.card(self.path, note, _html.treemap(boxes), keys, more)


def _modules(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes by the first parts of keys: as many parts as it takes to see more than a few modules."""
    few, deepest = 8, max((key.count(".") for key in sizes), default=0)
    found: dict[str, int] = {}
    for depth in range(2, max(deepest, 2) + 1):
        found = {}
        for key, size in sizes.items():
            module = ".".join(key.split(".")[:depth])
            found[module] = found.get(module, 0) + size
        if len(found) >= few:
            break
    return found


def open(
    path: StrPath,
    *,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: StorageOptions | None = None,
) -> Checkpoint:
    """Opens the checkpoint at a path or address (``s3://…``, ``gs://…``, ``az://…``) for reading.

    Args:
        path: a DCP folder, a safetensors file or folder of them, a ``torch.save`` file, or the folder that a trainer wrote.
        view: see it through rules; a :class:`reshard.View`, a file of rules, a recipe, or several, applied in order.
        parameter_map: a JSON file that says which parameters lie in the flat buffers of Megatron's distributed optimizer; see
            ``docs/other-formats.md``.
        storage_options: settings of the store by name, such as ``endpoint`` or ``region``; what is not given is taken
            from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``).
    """
    return Checkpoint(path, view=view, parameter_map=parameter_map, storage_options=storage_options)


def steps(root: StrPath, *, deep: bool = False, storage_options: StorageOptions | None = None) -> list[tuple[int, str]]:
    """The valid checkpoints in a folder of steps, ``(step, path)``, oldest first.

    A step is a sub-folder with a number in its name, such as ``step-100`` or ``epoch=3-step=500``, whose last number counts. A save
    that was not finished, or whose files are missing or cut short, is not valid; with ``deep`` all data is read and compared
    with its checksums too.
    """
    root = path_text(root).rstrip("/")
    return [(step, f"{root}/{name}") for step, name in _reshard.steps(root, deep, storage_options)]


def latest(root: StrPath, *, deep: bool = False, storage_options: StorageOptions | None = None) -> str | None:
    """The path of the newest valid checkpoint in a folder of steps, or None; see :func:`steps`."""
    root = path_text(root).rstrip("/")
    name = _reshard.latest(root, deep, storage_options)
    return None if name is None else f"{root}/{name}"


def verify(
    path: StrPath,
    *,
    data: bool = True,
    view: Views | None = None,
    parameter_map: StrPath | None = None,
    storage_options: StorageOptions | None = None,
) -> VerifyReport:
    """Checks a checkpoint: structure, coverage, lengths of files, everything that is stored twice, and every checksum.

    Args:
        path: a path or an address.
        data: read all data and compare checksums; without it the other checks alone are made.
        view: see it through rules; what it is made from is verified, and that the rules leave no holes.
        parameter_map: a JSON file that says which parameters lie in the flat buffers of Megatron's distributed optimizer; see
            ``docs/other-formats.md``.
        storage_options: settings of the store by name.
    """
    given = None if parameter_map is None else path_text(parameter_map)
    return _reshard.verify(path_text(path), data, storage_options, inner_views(view), given)
