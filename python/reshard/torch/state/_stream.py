"""Whole tensors between ranks, one at a time, so that no rank holds more than the largest of them beside what it keeps.

Ranks first tell each other in one small message what they hold; the engine then plans who sends what, the same on every
rank. Tensors travel as bytes over the process group, on their own device where the group can carry it, else on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ... import _reshard
from .._group import group_for
from .._leaf import ShardView
from .._tensor import CODES, DTYPES, Facts, Piece, device_of, is_sharded, is_tensor, pieces_of, regions_of, scalar_bytes, shape_of
from ._errors import StateError
from ._options import is_group_value

Path = tuple[Any, ...]


class Ranks:
    """The ranks between which tensors move."""

    def __init__(self, process_group: Any = None) -> None:
        self.alone = not dist.is_available() or not dist.is_initialized()
        self._parent = process_group
        self.group: Any = None
        self.rank, self.size = 0, 1
        if not self.alone:
            self.group = process_group if process_group is not None else dist.group.WORLD
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def all_gather_object(self, message: Any) -> list[Any]:
        """Every rank's message, by rank."""
        messages = group_for(self._parent, self.alone)
        if messages is None:
            return [message]
        return [pickle.loads(data) for data in messages.all_gather(pickle.dumps(message))]

    def broadcast_object(self, root: int, message: Any) -> Any:
        """The root's message."""
        messages = group_for(self._parent, self.alone)
        if messages is None:
            return message
        data = messages.broadcast(root, pickle.dumps(message) if self.rank == root else None)
        return message if self.rank == root else pickle.loads(data)

    def global_rank(self, rank: int) -> int:
        """A rank of the group among all ranks."""
        return dist.get_global_rank(self.group, rank) if self._parent is not None else rank

    def carrier(self, device: torch.device) -> tuple[Any, torch.device]:
        """The group that carries tensors of a device, and the device on which it carries them."""
        try:
            self.group._get_backend(device)
            return self.group, device
        except RuntimeError:
            messages = group_for(self._parent, self.alone)
            inner = getattr(messages, "_group", None)
            if inner is None:
                raise StateError(f"no process group here can carry tensors of {device}") from None
            return inner, torch.device("cpu")


def leaves_of(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All leaves below nested dicts, with their paths. In the flattened form a value of a group is one, whatever it is."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and (path or not is_group_value(key)):
            if value:
                yield from leaves_of(value, (*path, key))
        else:
            yield (*path, key), value


class HeldRegions(NamedTuple):
    """What a rank tells of a leaf: regions of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    regions: list[tuple[tuple[int, ...], tuple[int, ...]]]


class HeldSame(NamedTuple):
    """A tensor that is the same on every rank; its content where that is to be compared."""

    dtype: int
    shape: tuple[int, ...]
    content: bytes | None


class HeldPlain(NamedTuple):
    """A plain value."""

    value: Any


class HeldOther(NamedTuple):
    """Anything else."""

    class_name: str


def _held(key: str, value: Any, compared: bool = False) -> HeldRegions | HeldSame | HeldPlain | HeldOther:
    if is_sharded(value):
        return HeldRegions(CODES[value.dtype], shape_of(value), regions_of(key, value))
    if is_tensor(value):
        content = hashlib.sha256(_bytes(value).cpu().numpy().tobytes()).digest() if compared else scalar_bytes(value)
        return HeldSame(CODES[value.dtype], tuple(value.shape), content)
    return HeldPlain(value) if _reshard.is_plain(value) else HeldOther(type(value).__qualname__)


def _name(path: Path) -> tuple[str, str]:
    """What the engine calls a leaf: slots of one parameter belong together."""
    if len(path) > 2 and path[0] == "state":
        plain = all(type(step) is str and "." not in step for step in path[2:])
        return str(path[1]), ".".join(path[2:]) if plain else repr(path[2:])
    return repr(path), ""


def gather_tree(
    tree: Mapping[Any, Any],
    ranks: Ranks,
    receivers: Sequence[int] | None,
    cpu_offload: bool,
    receive: Callable[[Path, Any], None],
    compared: bool = False,
) -> None:
    """Gathers every leaf of a nested dict, one at a time, and gives it to `receive` on the ranks that receive it.

    A leaf that this rank does not have is received too, if another rank has it. `compared` refuses tensors that look like
    replicas and are not.
    """
    own = {_name(path): (path, value) for path, value in leaves_of(tree)}
    facts: dict[str, dict[str, Any]] = {}
    for (name, slot), (_, value) in own.items():
        facts.setdefault(name, {})[slot] = _held(name, value, compared)
    told = ranks.all_gather_object((facts, {name: path for name, (path, _) in own.items()}))
    paths: dict[tuple[str, str], Path] = {}
    for _, theirs in told:
        for name, path in theirs.items():
            paths.setdefault(name, path)
    plan = _reshard.gather_plan(
        [inventory for inventory, _ in told], list(receivers) if receivers is not None else None, cpu_offload
    )
    wanted = list(range(ranks.size)) if receivers is None else list(receivers)
    tensors = {(step.key, step.slot): step for step in plan.steps}
    sources = {(source.key, source.slot): source.rank for source in plan.values}
    # The order in which ranks, from the first on, have them: the same everywhere, and the model's own on the first.
    for both, path in paths.items():
        value = own[both][1] if both in own else None
        if both in tensors:
            step = tensors[both]
            pieces = pieces_of(both[0], value) if value is not None else []
            result = gather_pieces(ranks, DTYPES[step.dtype], step.shape, step.parts, pieces, wanted, device_of(value))
        elif both in sources:
            holders = {rank for rank, (inventory, _) in enumerate(told) if both[1] in inventory.get(both[0], {})}
            result = _shared(ranks, value, sources[both], set(wanted) <= holders)
        else:
            # Only ranks that hold nothing of its parameter have it, and they have no say.
            continue
        if ranks.rank in wanted:
            if cpu_offload and isinstance(result, torch.Tensor):
                result = result.cpu()
            receive(path, result)


def _shared(ranks: Ranks, value: Any, rank: int, everyone_has_it: bool) -> Any:
    """A leaf that is the same on every rank that has it."""
    if everyone_has_it or ranks.size == 1:
        return value
    return ranks.broadcast_object(rank, value.cpu() if isinstance(value, torch.Tensor) and ranks.rank == rank else value)


def gather_pieces(
    ranks: Ranks,
    dtype: torch.dtype,
    shape: Sequence[int],
    parts: Sequence[_reshard.TransferPart | ShardPart],
    own: Sequence[Piece],
    receivers: Sequence[int],
    device: torch.device,
) -> torch.Tensor | None:
    """A whole tensor from parts, on the ranks that receive it."""
    counts = [0] * ranks.size
    for part in parts:
        counts[part.rank] += math.prod(part.sizes)
    senders = [rank for rank, count in enumerate(counts) if count]
    mine = dict(own)
    size = dtype.itemsize
    silent = ranks.size == 1 or (len(receivers) == 1 and senders == list(receivers))
    buffers: list[torch.Tensor] = []
    if silent:
        if ranks.rank not in receivers:
            return None
    else:
        group, carried = ranks.carrier(device)
        width = max(counts, default=0) * size
        packed = torch.empty(width, dtype=torch.uint8, device=carried)
        at = 0
        for part in parts:
            if part.rank == ranks.rank:
                data = _bytes(mine[part.offsets])
                packed[at : at + data.numel()].copy_(data)
                at += data.numel()
        if len(receivers) == ranks.size:
            buffers = [torch.empty_like(packed) for _ in range(ranks.size)]
            dist.all_gather(buffers, packed, group=group)
        else:
            for receiver in receivers:
                target = [torch.empty_like(packed) for _ in range(ranks.size)] if ranks.rank == receiver else None
                dist.gather(packed, target, dst=dist.get_global_rank(group, receiver), group=group)
                buffers = target or buffers
        if ranks.rank not in receivers:
            return None
    full = torch.empty(tuple(shape), dtype=dtype, device=device)
    places = [0] * ranks.size
    for part in parts:
        rank, region = part.rank, _region(full, part.offsets, part.sizes)
        if rank == ranks.rank and part.offsets in mine:
            region.copy_(mine[part.offsets])
            continue
        count = math.prod(part.sizes) * size
        data = buffers[rank][places[rank] : places[rank] + count]
        places[rank] += count
        region.copy_(_typed(data, dtype).view(part.sizes))
    return full


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    if data.storage_offset() % size:
        data = data.clone()
    return data.view(dtype) if data.numel() else torch.empty(0, dtype=dtype, device=data.device)


def agree(ranks: Ranks, problem: BaseException | None, message: Any) -> list[Any]:
    """Every rank's message, or the same failure everywhere: a rank that can not go on must not leave others waiting."""
    told = ranks.all_gather_object((None if problem is None else f"{type(problem).__name__}: {problem}", message))
    if problem is not None:
        raise problem
    failed = {rank: text for rank, (text, _) in enumerate(told) if text is not None}
    if failed:
        raise StateError("; ".join(f"rank {rank} failed with {text}" for rank, text in failed.items()))
    return [message for _, message in told]


class ShardPart(NamedTuple):
    """A shard of a ShardedTensor and the rank that has it."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Wanted(NamedTuple):
    """What a rank wants of a tensor: regions by offsets and sizes, and the device to have them on."""

    regions: list[tuple[tuple[int, ...], tuple[int, ...]]]
    device: torch.device


class Offered(NamedTuple):
    """A tensor that one rank has whole."""

    key: str
    dtype: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, key: str, facts: Facts) -> Offered:
        """From what is known of it."""
        return cls(key, facts.dtype, facts.shape)


class _WantedTensor(NamedTuple):
    """What a rank tells the others that it wants."""

    key: str
    regions: list[tuple[tuple[int, ...], tuple[int, ...]]]
    device: str


def distribute(
    ranks: Ranks,
    root: int,
    offered: list[Offered],
    source: Callable[[str], torch.Tensor],
    wanted: Mapping[str, Wanted],
    problem: BaseException | None,
) -> Iterator[tuple[str, ShardView]]:
    """Tensors of the root to whoever wants what of them, one at a time. Every rank gives what was offered to it, what it
    wants, and why it can not go on; all of them then go the same steps, or fail together."""
    told = agree(ranks, problem, [_WantedTensor(key, want.regions, want.device.type) for key, want in wanted.items()])
    # All ranks have to choose the same group to carry a tensor, also those that want nothing of it.
    kinds = {want.key: want.device for message in reversed(told) for want in message}
    for step in _reshard.broadcast_steps(root, offered, told):
        key, dtype = step.key, DTYPES[step.dtype]
        device = wanted[key].device if key in wanted and wanted[key].device.type == kinds[key] else torch.device(kinds[key])
        tensor = source(key).detach() if ranks.rank == root else None
        pieces = _distributed(ranks, root, tensor, dtype, step.shape, step.parts, device)
        if key in wanted:
            yield key, ShardView(dtype, step.shape, pieces)


def _distributed(
    ranks: Ranks,
    root: int,
    tensor: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parts: Sequence[_reshard.TransferPart],
    device: torch.device,
) -> list[Piece]:
    mine = [(part.offsets, part.sizes) for part in parts if part.rank == ranks.rank]
    whole = ((0,) * len(shape), shape)
    others = {part.rank for part in parts if part.rank != root and 0 not in part.sizes}
    group: Any = None
    carried = device
    if others:
        group, carried = ranks.carrier(device)
    if (
        len(others) == ranks.size - 1
        and others
        and all((part.offsets, part.sizes) == whole for part in parts if part.rank != root)
    ):
        data = _bytes(tensor.to(carried)) if tensor is not None else _buffer(math.prod(shape), dtype, carried)
        dist.broadcast(data, src=dist.get_global_rank(group, root), group=group)
        if tensor is None:
            return [(whole[0], _typed(data, dtype).view(shape))]
        return [(offsets, _region(tensor, offsets, sizes)) for offsets, sizes in mine]
    if tensor is not None:
        for rank in sorted(others):
            its = [_bytes(_region(tensor, part.offsets, part.sizes).to(carried)) for part in parts if part.rank == rank]
            dist.send(torch.cat(its) if len(its) > 1 else its[0], dst=dist.get_global_rank(group, rank), group=group)
        return [(offsets, _region(tensor, offsets, sizes)) for offsets, sizes in mine]
    data = _buffer(sum(math.prod(sizes) for _, sizes in mine), dtype, carried)
    if data.numel():
        dist.recv(data, src=dist.get_global_rank(group, root), group=group)
    pieces = []
    at = 0
    for offsets, sizes in mine:
        length = math.prod(sizes) * dtype.itemsize
        pieces.append((offsets, _typed(data[at : at + length], dtype).view(sizes)))
        at += length
    return pieces


def _buffer(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)


def _region(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]


def _group_rank(ranks: Ranks, placement: Any) -> int:
    """A shard's place among the ranks of its group; placements count all ranks."""
    rank = int(placement.rank())
    return dist.get_group_rank(ranks.group, rank) if ranks._parent is not None else rank


def full_tensor(key: str, value: Any) -> torch.Tensor:
    """The whole of a DTensor or ShardedTensor, over its own ranks, on all of them."""
    if not isinstance(value, ShardedTensor):
        if not value.numel():
            # Nothing to gather; and torch 2.5 fails at it, on the ranks that would be the last.
            return torch.empty(value.shape, dtype=value.dtype, device=device_of(value))
        whole: torch.Tensor = value.detach().full_tensor()
        return whole
    metadata = value.metadata()
    ranks = Ranks(value._process_group if value._process_group is not dist.group.WORLD else None)
    parts = [
        ShardPart(_group_rank(ranks, shard.placement), tuple(shard.shard_offsets), tuple(shard.shard_sizes))
        for shard in metadata.shards_metadata
    ]
    own = pieces_of(key, value)
    made = gather_pieces(ranks, value.dtype, metadata.size, parts, own, list(range(ranks.size)), device_of(value))
    assert made is not None
    return made
