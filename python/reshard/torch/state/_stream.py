"""Whole tensors between ranks, one at a time, so that no rank holds more than the largest of them beside what it keeps.

Ranks first tell each other in one small message what they hold; the engine then plans who sends what, the same on every
rank. Tensors travel as bytes over the process group, on their own device where the group can carry it, else on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ... import _reshard
from .._describe import CODES
from .._group import group_for
from .._leaf import ShardView
from ._errors import StateError
from ._pieces import DTYPES, Piece, is_sharded, is_tensor, pieces_of, scalar_bytes, shape_of

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
    """All leaves below nested dicts, with their paths."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if value:
                yield from leaves_of(value, (*path, key))
        else:
            yield (*path, key), value


def _facts(key: str, value: Any, compared: bool = False) -> tuple[Any, ...]:
    if is_sharded(value):
        shape = shape_of(value)
        regions = [(list(offsets), list(tensor.shape)) for offsets, tensor in pieces_of(key, value)]
        return ("regions", CODES[value.dtype], list(shape), regions)
    if is_tensor(value):
        content = hashlib.sha256(_bytes(value).cpu().numpy().tobytes()).digest() if compared else scalar_bytes(value)
        return ("same", CODES[value.dtype], list(value.shape), content)
    if _reshard.is_plain(value):
        return ("plain", value)
    return ("other", type(value).__qualname__)


def _name(path: Path) -> tuple[str, str]:
    """What the engine calls a leaf: slots of one parameter belong together."""
    if len(path) > 2 and path[0] == "state":
        return str(path[1]), repr(path[2:])
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
        facts.setdefault(name, {})[slot] = _facts(name, value, compared)
    told = ranks.all_gather_object((facts, {name: path for name, (path, _) in own.items()}))
    paths: dict[tuple[str, str], Path] = {}
    for _, theirs in told:
        for name, path in theirs.items():
            paths.setdefault(name, path)
    steps, values = _reshard.full_slots(
        [inventory for inventory, _ in told], list(receivers) if receivers is not None else None, cpu_offload
    )
    wanted = list(range(ranks.size)) if receivers is None else list(receivers)
    tensors = {(name, slot): (DTYPES[code], shape, parts) for name, slot, code, shape, parts in steps}
    sources = {(name, slot): rank for name, slot, rank in values}
    # The order in which ranks, from the first on, have them: the same everywhere, and the model's own on the first.
    for both, path in paths.items():
        value = own[both][1] if both in own else None
        if both in tensors:
            dtype, shape, parts = tensors[both]
            pieces = pieces_of(both[0], value) if value is not None else []
            result = gather_pieces(ranks, dtype, shape, parts, pieces, wanted, _device(value))
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


def _device(value: Any) -> torch.device:
    if isinstance(value, ShardView):
        return value.pieces[0][1].device if value.pieces else torch.device("cpu")
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor.device if shards else torch.device("cpu")
    return value.device if isinstance(value, torch.Tensor) else torch.device("cpu")


def _shared(ranks: Ranks, value: Any, rank: int, everyone_has_it: bool) -> Any:
    """A leaf that is the same on every rank that has it."""
    if everyone_has_it or ranks.size == 1:
        return value
    return ranks.broadcast_object(rank, value.cpu() if isinstance(value, torch.Tensor) and ranks.rank == rank else value)


def gather_pieces(
    ranks: Ranks,
    dtype: torch.dtype,
    shape: Sequence[int],
    parts: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    own: Sequence[Piece],
    receivers: Sequence[int],
    device: torch.device,
) -> torch.Tensor | None:
    """A whole tensor from parts `(rank, offsets, sizes)`, on the ranks that receive it."""
    counts = [0] * ranks.size
    for rank, _, sizes in parts:
        counts[rank] += math.prod(sizes)
    senders = [rank for rank, count in enumerate(counts) if count]
    mine = dict(own)
    size = torch.empty((), dtype=dtype).element_size()
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
        for rank, offsets, _ in parts:
            if rank == ranks.rank:
                data = _bytes(mine[tuple(offsets)])
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
    for rank, offsets, sizes in parts:
        region = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
        if rank == ranks.rank and tuple(offsets) in mine:
            region.copy_(mine[tuple(offsets)])
            continue
        count = math.prod(sizes) * size
        data = buffers[rank][places[rank] : places[rank] + count]
        places[rank] += count
        region.copy_(_typed(data, dtype).view(tuple(sizes)))
    return full


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
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


#: What a rank wants of a tensor: regions `(offsets, sizes)`, and the device to have them on.
Wanted = tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], torch.device]


def distribute(
    ranks: Ranks,
    root: int,
    offered: Sequence[tuple[str, int, Sequence[int]]],
    source: Callable[[str], torch.Tensor],
    wanted: Mapping[str, Wanted],
    problem: BaseException | None,
) -> Iterator[tuple[str, ShardView]]:
    """Tensors of the root to whoever wants what of them, one at a time. Every rank gives what was offered to it, what it
    wants, and why it can not go on; all of them then go the same steps, or fail together."""
    own = [
        (key, [(list(offsets), list(sizes)) for offsets, sizes in regions], device.type)
        for key, (regions, device) in wanted.items()
    ]
    told = agree(ranks, problem, own)
    # All ranks have to choose the same group to carry a tensor, also those that want nothing of it.
    kinds = {key: kind for message in reversed(told) for key, _, kind in message}
    regions = [[(key, parts) for key, parts, _ in message] for message in told]
    steps, _ = _reshard.broadcast_steps(root, [(key, code, list(shape)) for key, code, shape in offered], regions)
    for key, code, shape, parts in steps:
        dtype = DTYPES[code]
        device = wanted[key][1] if key in wanted and wanted[key][1].type == kinds[key] else torch.device(kinds[key])
        tensor = source(key).detach() if ranks.rank == root else None
        pieces = _distributed(ranks, root, tensor, dtype, tuple(shape), parts, device)
        if key in wanted:
            yield key, ShardView(dtype, shape, pieces)


def _distributed(
    ranks: Ranks,
    root: int,
    tensor: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parts: Sequence[Any],
    device: torch.device,
) -> list[Piece]:
    mine = [(tuple(offsets), tuple(sizes)) for rank, offsets, sizes in parts if rank == ranks.rank]
    whole = ((0,) * len(shape), shape)
    others = {rank for rank, _, sizes in parts if rank != root and math.prod(sizes)}
    group: Any = None
    carried = device
    if others:
        group, carried = ranks.carrier(device)
    if len(others) == ranks.size - 1 and others and all((tuple(o), tuple(s)) == whole for rank, o, s in parts if rank != root):
        data = _bytes(tensor.to(carried)) if tensor is not None else _buffer(math.prod(shape), dtype, carried)
        dist.broadcast(data, src=dist.get_global_rank(group, root), group=group)
        if tensor is None:
            return [(whole[0], _typed(data, dtype).view(shape))]
        return [(offsets, _region(tensor, offsets, sizes)) for offsets, sizes in mine]
    if tensor is not None:
        for rank in sorted(others):
            its = [_bytes(_region(tensor, o, s).to(carried)) for to, o, s in parts if to == rank]
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
        whole: torch.Tensor = value.detach().full_tensor()
        return whole
    metadata = value.metadata()
    ranks = Ranks(value._process_group if value._process_group is not dist.group.WORLD else None)
    parts: list[Any] = [
        (_group_rank(ranks, shard.placement), shard.shard_offsets, shard.shard_sizes) for shard in metadata.shards_metadata
    ]
    own = pieces_of(key, value)
    made = gather_pieces(ranks, value.dtype, metadata.size, parts, own, list(range(ranks.size)), _device(value))
    assert made is not None
    return made
