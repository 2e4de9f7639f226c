"""Tensors as pieces: which regions of a whole lie where in memory of this rank, and copies between such pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ... import _reshard
from .._chunked import has_shards, shards_of
from .._describe import CODES, _placement
from .._leaf import ShardView

#: Element types by the engine's code.
DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in CODES.items()}

#: Where a region starts in the whole, and a tensor of the region's shape.
Piece = tuple[tuple[int, ...], torch.Tensor]
#: Offsets, sizes, and offsets in the local tensor.
Region = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class FlatView(ShardView):
    """Regions of a tensor inside of one stretch of memory: a flat parameter's shard, or a slot of the same layout."""

    __slots__ = ("base", "home")

    def __init__(
        self,
        base: torch.Tensor,
        shape: Sequence[int],
        pieces: Sequence[tuple[Sequence[int], Sequence[int], int]],
        home: Any = None,
        requires_grad: bool = False,
    ) -> None:
        """
        Args:
            base: the memory, of one dimension or contiguous.
            shape: the shape of the whole tensor.
            pieces: offsets, sizes, and the element of the memory at which the region starts.
            home: what the memory is a shard of, for whoever sets it.
        """
        flat = base.detach().reshape(-1)
        views = []
        for offsets, sizes, start in pieces:
            numel = 1
            for size in sizes:
                numel *= size
            views.append((tuple(offsets), flat[start : start + numel].view(tuple(sizes))))
        # The regions come from the engine, which has proven that they fit.
        self.dtype = base.dtype
        self.shape = torch.Size(shape)
        self.pieces = views
        self.requires_grad = requires_grad
        self.base = base
        self.home = home


_regions: dict[Any, tuple[Any, list[Region]]] = {}


def regions_of(key: str, tensor: DTensor) -> list[Region]:
    """The regions of a DTensor that lie in this rank's local tensor."""
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return []
    name = (id(mesh), tensor.placements, tuple(tensor.shape))
    known = _regions.get(name)
    if known is None or known[0] is not mesh:
        ranks = mesh.mesh
        wanted = [_placement(key, placement, max(tensor.dim(), 1)) for placement in tensor.placements]
        rank = dist.get_rank() if dist.is_initialized() else 0
        found = _reshard.local_regions(list(ranks.shape), ranks.flatten().tolist(), wanted, list(tensor.shape), rank)
        if len(_regions) > 10_000:
            _regions.clear()
        known = (mesh, [(tuple(offsets), tuple(sizes), tuple(local)) for offsets, sizes, local in found])
        _regions[name] = known
    return known[1]


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, outside of autograd."""
    local = tensor._local_tensor.detach()
    return local.wait() if hasattr(local, "wait") else local


def pieces_of(key: str, value: Any) -> list[Piece]:
    """What this rank holds of a tensor of any kind."""
    if isinstance(value, ShardView):
        return list(value.pieces)
    if isinstance(value, DTensor):
        local = local_of(value)
        return [
            (offsets, local[tuple(slice(o, o + s) for o, s in zip(at, sizes))])
            for offsets, sizes, at in regions_of(key, value)
            if 0 not in sizes or 0 in value.shape
        ]
    if isinstance(value, ShardedTensor):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.local_shards()]
    if _describes_shards(value):
        return shards_of(key, value).pieces
    return [((0,) * value.dim(), value.detach())]


def is_tensor(value: Any) -> bool:
    """A tensor of any kind, or something that stands for one."""
    return isinstance(value, (torch.Tensor, ShardView))


def is_sharded(value: Any) -> bool:
    """Whether a rank may hold only a part of it."""
    return isinstance(value, (ShardView, DTensor, ShardedTensor)) or _describes_shards(value)


def _describes_shards(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "global_shape") and has_shards(value)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of the whole tensor, whatever a rank holds of it."""
    if isinstance(value, ShardedTensor):
        return tuple(value.metadata().size)
    return tuple(value.global_shape if _describes_shards(value) else value.shape)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same place."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies unless both are the same memory."""
    if target.numel() and not same_memory(target, source):
        target.copy_(source)


def copy_overlap(target: Piece, source: Piece) -> int:
    """Copies what two pieces have in common; how many elements that is."""
    offsets, into = target
    other, tensor = source
    low = [max(a, b) for a, b in zip(offsets, other)]
    high = [min(a + n, b + m) for a, n, b, m in zip(offsets, into.shape, other, tensor.shape)]
    count = 1
    for a, b in zip(low, high):
        if b <= a:
            return 0
        count *= b - a
    mine = into[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets))]
    theirs = tensor[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, other))]
    copy_into(mine, theirs)
    return count


def box_of(tensor: torch.Tensor, start: int, box: Sequence[int], at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A part of a row-major box that starts at an element of a tensor."""
    if start or tuple(box) != tuple(tensor.shape):
        numel = 1
        for size in box:
            numel *= size
        tensor = (
            tensor.reshape(-1)[start : start + numel].view(tuple(box))
            if tensor.is_contiguous()
            else _strided(tensor, start, box, numel)
        )
    if tuple(sizes) == tuple(box):
        return tensor
    return tensor[tuple(slice(a, a + n) for a, n in zip(at, sizes))]


def _strided(tensor: torch.Tensor, start: int, box: Sequence[int], numel: int) -> torch.Tensor:
    return tensor.contiguous().reshape(-1)[start : start + numel].view(tuple(box))


def scalar_bytes(tensor: torch.Tensor) -> bytes | None:
    """The bytes of a tensor's only element, if it has one and lies on the CPU."""
    if isinstance(tensor, (DTensor, ShardedTensor)) or tensor.numel() != 1 or not tensor.is_cpu:
        return None
    return bytes(tensor.detach().contiguous().reshape(1).view(torch.uint8).tolist())


def describe(value: Any) -> tuple[Any, ...] | None:
    """Facts of a tensor for the engine; None for anything else."""
    if isinstance(value, ShardView):
        return (CODES[value.dtype], tuple(value.shape), 0, None, list(value.pieces))
    if not isinstance(value, torch.Tensor):
        return None
    code = CODES.get(value.dtype)
    if code is None:
        return None
    if isinstance(value, ShardedTensor):
        return (code, tuple(value.metadata().size), 0, None, None)
    device = 0 if value.is_cpu else 2 if value.is_meta else 1
    return (code, tuple(value.shape), device, scalar_bytes(value), None)
