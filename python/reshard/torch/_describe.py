"""From a state dict to the description that the engine takes: one :class:`_reshard.Leaf` for each leaf, with addresses.

Nested dicts and lists are flattened by the rules of `torch.distributed.checkpoint`, so that keys and paths are the same:
dicts are always opened, lists only where a tensor, a dict or such a list is in them, tuples never.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .. import _reshard
from .._errors import InvalidInput
from ._chunked import Chunked, chunks_of, copy_shards, has_shards, lists_chunks, shards_of
from ._leaf import PerRank, ShardView
from ._staging import DeviceMemory, is_cpu
from ._tensor import CODES, layout_of
from ._unsharded import LoadedShards

#: Tensors that are nothing else.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_STRIDED = torch.strided
_NUMBERS = (float, int, bool, complex)
_COMPLEX = frozenset(dtype for dtype in CODES if dtype.is_complex)
_Path = tuple[str | int, ...]

# Looked up once: most leaves are made by it.
_whole = _reshard.Leaf.whole


class Place(NamedTuple):
    """Where a leaf sits, so that a value that is loaded can be put there."""

    container: Any
    key: Any
    wrapper: PerRank | None


class Description:
    """What crosses to the engine, and what has to live until it is done."""

    def __init__(self, *, loading: bool) -> None:
        self.loading = loading
        self.leaves: list[_reshard.Leaf] = []
        #: Tensors whose memory the leaves point into.
        self.owners: list[Any] = []
        #: Records that were made here, by key.
        self.records: dict[str, bytes] = {}
        #: Values, by key.
        self.places: dict[str, Place] = {}
        #: Memory that stands in for a tensor: (stand-in, tensor), copied after a load.
        self.staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Top-level keys below which something is an empty container.
        self.empty: set[str] = set()
        #: Flattened keys of empty containers, which are not stored.
        self.vacant: set[str] = set()
        #: Devices on which tensors are.
        self.devices: set[torch.device] = set()
        #: Run after the tensors are loaded, before values are put into their places.
        self.after: list[Callable[[], None]] = []
        #: Shards of parameters of which FSDP may keep whole copies, to be freed after a load.
        self._homes: dict[int, Any] = {}
        self._shards_loaded = LoadedShards()

    # ---- leaves -------------------------------------------------------------------------------------------------------

    def add(self, key: str, path: tuple[str | int, ...] | None, leaf: Any, place: Place) -> None:
        """Adds a leaf of any kind."""
        per_rank = place.wrapper is not None
        if isinstance(leaf, torch.Tensor):
            self._add_tensor(key, path, per_rank, leaf, place)
        elif isinstance(leaf, ShardView):
            if self.loading:
                self._note_home(leaf)
            pieces = [self.piece(key, offsets, tensor) for offsets, tensor in leaf.pieces]
            self._add_pieces(key, path, per_rank, leaf.dtype, leaf.requires_grad, leaf.shape, pieces)
        elif lists_chunks(leaf):
            self._add_chunked(key, path, per_rank, chunks_of(key, leaf), getattr(leaf, "requires_grad", False))
        else:
            self._add_value(key, path, per_rank, leaf, place)

    def check_keys(self) -> None:
        """Refuses two leaves of one flattened key."""
        seen: set[str] = set()
        keys = {leaf.key for leaf in self.leaves}
        vacant = set() if self.loading else self.vacant
        # A dict of nothing but empty ones is stored nowhere either, and a load would take the leaf of its name for it.
        above = {key[:dot] for key in vacant for dot in range(len(key)) if key[dot] == "."} & keys
        taken = (vacant & keys) | {name for name in above if not any(key.startswith(f"{name}.") for key in keys)}
        if taken:
            key = min(taken)
            raise InvalidInput(
                f"an empty container and another leaf of the state have the same flattened key {key!r}", keys=[key]
            )
        if len(keys) == len(self.leaves):
            return
        for leaf in self.leaves:
            if leaf.key in seen:
                raise InvalidInput(f"two leaves of the state have the same flattened key {leaf.key!r}", keys=[leaf.key])
            seen.add(leaf.key)

    def _add_value(self, key: str, path: _Path | None, per_rank: bool, value: Any, place: Place) -> None:
        self.leaves.append(_reshard.Leaf.value(key, path, per_rank, value))
        self.places[key] = place

    def _add_tensor(self, key: str, path: Any, per_rank: bool, tensor: torch.Tensor, place: Place) -> None:
        cls = type(tensor)
        if hasattr(tensor, "global_shape") and has_shards(tensor):
            if tensor.is_meta:
                tensor = self._materialised_shards(key, tensor, place)
            self._add_chunked(key, path, per_rank, shards_of(key, tensor), tensor.requires_grad)
        elif cls in PLAIN:
            self._add_plain(key, path, per_rank, tensor, place)
        elif is_lazy(tensor):
            raise InvalidInput(
                f"{key!r} is not initialized: nobody knows its shape yet", keys=[key], hint="run the lazy module once before"
            )
        elif isinstance(tensor, DTensor):
            self._add_dtensor(key, path, per_rank, tensor, place)
        elif isinstance(tensor, ShardedTensor):
            properties = tensor.metadata().tensor_properties
            pieces = self._shards(key, tensor)
            self._add_pieces(key, path, per_rank, properties.dtype, properties.requires_grad, tensor.metadata().size, pieces)
        elif lists_chunks(tensor):
            self._add_chunked(key, path, per_rank, chunks_of(key, tensor), tensor.requires_grad)
        elif _is_wrapper(tensor):
            self._add_whole_object(key, path, per_rank, tensor, place)
        else:
            self._add_plain(key, path, per_rank, tensor, place)

    def _add_plain(self, key: str, path: Any, per_rank: bool, tensor: torch.Tensor, place: Place) -> None:
        code = CODES.get(tensor.dtype)
        if code is None or tensor.layout is not _STRIDED or tensor.is_nested:
            self._add_whole_object(key, path, per_rank, tensor, place)
            return
        grad = tensor.requires_grad
        if tensor.is_meta:
            if not self.loading:
                raise InvalidInput(f"{key!r} is on the meta device and has no content to save", keys=[key])
            tensor = torch.empty_like(tensor, device="cpu", requires_grad=False)
            self._put_after(place, tensor)
        tensor = self._readable(tensor)
        contiguous = tensor.is_contiguous()
        if not contiguous and self.loading:
            _check_writable(key, tensor)
        strides = None if contiguous else tensor.stride()
        self.leaves.append(_whole(key, path, per_rank, code, grad, tensor.shape, self._memory(key, tensor), strides))

    def _add_whole_object(self, key: str, path: Any, per_rank: bool, tensor: torch.Tensor, place: Place) -> None:
        """A tensor without plain memory of its own (sparse, quantized, a wrapper): torch.save stores it whole."""
        if not self.loading:
            self.records[key] = pickled(key, tensor.detach())
            self.leaves.append(_reshard.Leaf.record(key, path, per_rank, self.records[key]))
            return
        self._add_value(key, path, per_rank, tensor, place)

    def _add_pieces(
        self, key: str, path: Any, per_rank: bool, dtype: torch.dtype, grad: bool, shape: Any, pieces: list[_reshard.Piece]
    ) -> None:
        code = CODES.get(dtype)
        if code is None:
            raise InvalidInput(f"{key!r} is of {dtype}, which reshard cannot store in pieces", keys=[key])
        self.leaves.append(_reshard.Leaf.pieces(key, path, per_rank, code, grad, shape, pieces))

    # ---- pieces -------------------------------------------------------------------------------------------------------

    def piece(self, key: str, offsets: tuple[int, ...], tensor: torch.Tensor) -> _reshard.Piece:
        """A region that a tensor holds whole."""
        tensor, strides = self._accessible(key, tensor)
        return _reshard.Piece(offsets, tensor.shape, self._memory(key, tensor), strides)

    def _accessible(self, key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
        """A tensor of which the engine can read or write the memory, and its strides; None when it is contiguous."""
        _check_memory(key, tensor)
        tensor = self._readable(tensor)
        if tensor.is_contiguous():
            return tensor, None
        if self.loading:
            _check_writable(key, tensor)
        return tensor, tensor.stride()

    def _add_dtensor(self, key: str, path: Any, per_rank: bool, tensor: DTensor, place: Place) -> None:
        shape = tensor.shape
        layout = layout_of(key, tensor)
        if layout is None:
            self._add_pieces(key, path, per_rank, tensor.dtype, tensor.requires_grad, shape, [])
            return
        local = tensor._local_tensor
        if type(local) not in PLAIN:
            if lists_chunks(local):
                self._add_chunked(key, path, per_rank, chunks_of(key, local, tensor), tensor.requires_grad)
                return
            with torch.no_grad():
                local = tensor.to_local()
            if hasattr(local, "wait"):
                local = local.wait()
        if local.is_meta:
            if not self.loading:
                raise InvalidInput(f"{key!r} is on the meta device and has no content to save", keys=[key])
            mesh = tensor.device_mesh
            local = torch.empty_like(local, device=mesh.device_type, requires_grad=False)
            made = DTensor.from_local(
                local, mesh, tensor.placements, run_check=False, shape=tensor.size(), stride=tensor.stride()
            )
            self._put_after(place, made)
        if self.loading:
            self._shards_loaded.add(tensor)
        pieces = self._cut(key, local, layout)
        self._add_pieces(key, path, per_rank, tensor.dtype, tensor.requires_grad, shape, pieces)

    def _cut(self, key: str, local: torch.Tensor, layout: _reshard.ShardLayout) -> list[_reshard.Piece]:
        """What a local tensor holds by its layout."""
        local, strides = self._accessible(key, local)
        return layout.pieces(key, local.shape, self._memory(key, local), strides, local.element_size())

    def _shards(self, key: str, tensor: ShardedTensor) -> list[_reshard.Piece]:
        """A ShardedTensor's local shards; a shard that is itself sharded is a box inside a box."""
        pieces: list[_reshard.Piece] = []
        for shard in tensor.local_shards():
            offsets = tuple(shard.metadata.shard_offsets)
            local = shard.tensor
            if isinstance(local, DTensor):
                layout = layout_of(key, local)
                inner = self._cut(key, local._local_tensor, layout) if layout is not None else []
            elif isinstance(local, ShardedTensor):
                inner = self._shards(key, local)
            else:
                inner = [self.piece(key, (0,) * len(offsets), local)]
            pieces.extend(piece.within(offsets) for piece in inner)
        return pieces

    def _materialised_shards(self, key: str, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """Memory for a tensor that describes its shards and is on the meta device."""
        if not self.loading:
            raise InvalidInput(f"{key!r} is on the meta device and has no content to save", keys=[key])
        made = torch.empty_like(tensor, device="cpu", requires_grad=False)
        copy_shards(tensor, made)
        self._put_after(place, made)
        return made

    def _add_chunked(self, key: str, path: Any, per_rank: bool, chunked: Chunked, grad: bool) -> None:
        """A tensor that says itself which chunks it holds."""
        pieces = [self.piece(key, offsets, tensor) for offsets, tensor in chunked.pieces]
        self._add_pieces(key, path, per_rank, chunked.dtype, grad, chunked.shape, pieces)

    # ---- device memory -----------------------------------------------------------------------------------------------

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose bits are its values; to load, one that stands in for it if its are not."""
        if not is_cpu(tensor):
            self.devices.add(tensor.device)
        if not tensor.is_neg() and not tensor.is_conj():
            return tensor
        if not self.loading:
            return tensor.detach().resolve_conj().resolve_neg()
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self.staged.append((stand_in, tensor.detach()))
        return stand_in

    def _memory(self, key: str, tensor: torch.Tensor) -> int | DeviceMemory:
        """Where a tensor's memory begins: an address, or what reads and writes it."""
        _check_storage(key, tensor)
        if not is_cpu(tensor):
            # Kept alive by what reads it.
            return DeviceMemory(tensor)
        self.owners.append(tensor)
        return tensor.data_ptr()

    def wait_for_devices(self) -> None:
        """Waits until everything that was asked of the tensors' devices is done: others read and write them next."""
        for device in self.devices:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)

    def copy_back(self) -> None:
        """Copies what was loaded into stand-ins to where it belongs."""
        with torch.no_grad():
            for stand_in, tensor in self.staged:
                tensor.copy_(stand_in)
        self.wait_for_devices()
        for home in self._homes.values():
            home.free_copies()
        self._shards_loaded.free_copies()
        for step in self.after:
            step()

    def _note_home(self, view: Any) -> None:
        """Whether a view is of a parameter itself, and not of a slot in its layout."""
        home = getattr(view, "home", None)
        if home is not None and view.base.untyped_storage().data_ptr() == home.shard.untyped_storage().data_ptr():
            self._homes[id(home)] = home

    def add_number(self, key: str, path: tuple[str | int, ...] | None, holder: torch.Tensor, place: Place) -> None:
        """A number that was saved as a tensor: it stays a number here."""
        self.add(key, path, holder, place)
        self.after.append(lambda: put(place, holder.item()))

    def _put_after(self, place: Place, tensor: torch.Tensor) -> None:
        self.after.append(lambda: put(place, tensor))


def put(place: Place, value: Any) -> None:
    """Puts a loaded value where its leaf was."""
    if place.wrapper is not None and place.container is None:
        place.wrapper.value = value
    else:
        place.container[place.key] = value


def flatten(state: Mapping[Any, Any], description: Description, stored: Any = None) -> None:
    """Adds every leaf of a state dict. `stored` is the checkpoint when loading: a dict that it holds as one value, as PyTorch
    before 2.4 stored dicts without tensors, is one leaf."""
    _open("", (), state, None, description, stored)
    description.check_keys()


def is_stateful(value: Any) -> bool:
    """Whether an object is PyTorch's Stateful. Asking the protocol itself takes as long as saving a small tensor."""
    return type(value) not in PLAIN and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _open(
    prefix: str, path: tuple[str | int, ...], value: Mapping[Any, Any], wrapper: PerRank | None, out: Description, stored: Any
) -> None:
    """Adds the leaves below a dict."""
    per_rank = wrapper is not None
    code_of, add_leaf, add_owner = CODES.get, out.leaves.append, out.owners.append
    for name, below in value.items():
        text = name if type(name) is str else str(name)
        key = prefix + text
        # Nearly all leaves are plain contiguous tensors on the CPU: described here, with as few calls as there can be.
        if (
            type(below) in PLAIN
            and below.is_cpu
            and below.layout is _STRIDED
            and not below.is_nested
            and below.is_contiguous()
            and not below.is_neg()
            and below.untyped_storage().nbytes() >= below.nbytes + below.storage_offset() * below.itemsize
        ):
            dtype = below.dtype
            code = code_of(dtype)
            conjugated = dtype in _COMPLEX and below.is_conj()
            number = stored is not None and not below.dim() and _is_number(key, stored)
            if code is not None and not conjugated and not number and not hasattr(below, "global_shape"):
                add_owner(below)
                below_path = (*path, text) if path else None
                add_leaf(_whole(key, below_path, per_rank, code, below.requires_grad, below.shape, below.data_ptr(), None))
                continue
        _visit(key, (*path, text), below, Place(value, name, wrapper), out, stored)


def _visit(key: str, path: tuple[str | int, ...], value: Any, place: Place, out: Description, stored: Any) -> None:
    if isinstance(value, torch.Tensor):
        if stored is not None and value.dim() == 0 and _is_number(key, stored):
            out._add_value(key, path, place.wrapper is not None, value, place)
            return
        out.add(key, path if len(path) > 1 else None, value, place)
    elif isinstance(value, PerRank):
        _visit(key, path, value.value, Place(None, None, value), out, stored)
    elif isinstance(value, Mapping):
        if stored is not None and key in stored and not _is_below(key, value, stored):
            out.add(key, path, value, place)
        elif not value:
            out.empty.add(str(path[0]))
            out.vacant.add(key)
        else:
            _open(f"{key}.", path, value, place.wrapper, out, stored)
    elif isinstance(value, list) and not _is_terminal(value):
        for index, below in enumerate(value):
            _visit(f"{key}.{index}", (*path, index), below, Place(value, index, place.wrapper), out, stored)
    elif stored is not None and type(value) in _NUMBERS and (dtype := _stored_number(key, value, stored)) is not None:
        out.add_number(key, path if len(path) > 1 else None, torch.empty((), dtype=dtype, device="cpu"), place)
    else:
        out.add(key, path if len(path) > 1 else None, value, place)


def _is_below(key: str, value: Any, stored: Any) -> bool:
    """Whether a checkpoint has something of what a container holds under keys of its own: another entry has the container's then, as
    in ``{"a": {"b": {"c": 1}}, "a.b": 2}``."""
    below = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, each in below:
        inside = f"{key}.{name}"
        if inside in stored or (isinstance(each, (Mapping, list)) and _is_below(inside, each, stored)):
            return True
    return False


def _is_number(key: str, stored: Any) -> bool:
    """Whether what is a tensor of one element here was saved as a value: the learning rate of an optimizer may be either."""
    return key in stored and stored.entry(key).dtype is None


def _stored_number(key: str, value: Any, stored: Any) -> torch.dtype | None:
    """The dtype of a tensor without dimensions that was saved for what is a number of its kind here."""
    if key not in stored:
        return None
    entry = stored.entry(key)
    if entry.dtype is None or entry.shape:
        return None
    dtype: torch.dtype = getattr(torch, entry.dtype)
    kind = float if dtype.is_floating_point else complex if dtype.is_complex else bool if dtype == torch.bool else int
    return dtype if type(value) is kind else None


def _is_terminal(value: list[Any]) -> bool:
    """Whether a list is one leaf: nothing in it gives a reason to open it."""
    for entry in value:
        if isinstance(entry, (torch.Tensor, Mapping, ShardView, PerRank)):
            return False
        if isinstance(entry, list) and not _is_terminal(entry):
            return False
    return True


def pickled(key: str, value: Any) -> bytes:
    """The `torch.save` record of an object that is not plain."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise InvalidInput(f"{key!r} is a {name}, which cannot be pickled: {error}", keys=[key]) from error
    return buffer.getvalue()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor subclass keeps its content in other tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) in PLAIN or tensor.is_meta or tensor.layout is not _STRIDED:
        return False
    return is_traceable_wrapper_subclass(tensor) or (tensor.numel() > 0 and tensor.data_ptr() == 0)


def _check_storage(key: str, tensor: torch.Tensor) -> None:
    """A tensor outlives its memory where the storage was resized, as FSDP does; reading it then would end the process."""
    if not tensor.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if there < needed:
        raise InvalidInput(
            f"{key!r} has lost its memory: its storage has {there} bytes, of which the tensor needs {needed}",
            keys=[key],
            hint="wrappers such as FSDP free what they have resharded: take the state from get_model_state_dict, not from tensors that "
            "were kept",
        )


def _check_memory(key: str, local: torch.Tensor) -> None:
    """A part of a tensor is a stretch of memory; a wrapper has none, and its own tensors need not be cut where it is."""
    if type(local) not in PLAIN and _is_wrapper(local):
        name = f"{type(local).__module__}.{type(local).__qualname__}"
        raise InvalidInput(
            f"{key!r} is sharded, and this rank's part is a {name}, which keeps its content in other tensors",
            keys=[key],
            hint="save those tensors, or what to_local() gives inside of PerRank: each rank's part is then stored as an object; or have "
            "the class list its chunks (__create_chunk_list__)",
        )


def _check_writable(key: str, tensor: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
        raise InvalidInput(
            f"{key!r} is an expanded tensor, several of whose elements are one: it cannot be loaded into", keys=[key]
        )


def mutable(state: Any) -> MutableMapping[str, Any]:
    """The state to load into, which must be one that values can be put into."""
    if not isinstance(state, MutableMapping):
        raise InvalidInput(f"the state to load into is a {type(state).__name__}, not a dict")
    return state
