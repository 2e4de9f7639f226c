"""What a tensor of any kind is to reshard: element type, whole shape, device, and the regions of it that this rank holds.

For saving, loading and the state-dict calls alike. Which regions a mesh and placements give a rank is the engine's to say
(:class:`_reshard.ShardLayout`); what stands here is how to ask it about each kind of tensor that PyTorch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from .. import _reshard
from .._errors import InvalidInput
from ._chunked import has_shards, shards_of
from ._leaf import ShardView

#: The engine's code of each element type, and the other way round.
CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_reshard.dtype_names()) if hasattr(torch, name)
}
DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in CODES.items()}

#: Where a region starts in the whole, and a tensor of the region's shape.
Piece = tuple[tuple[int, ...], torch.Tensor]


class FlatView(ShardView):
    """Regions of a tensor inside of one stretch of memory: a flat parameter's shard, or a slot of the same layout."""

    __slots__ = ("base", "home")

    def __init__(
        self, base: torch.Tensor, shape: Sequence[int], pieces: Iterable[FlatPiece | _reshard.FlatPiece], home: Any = None
    ) -> None:
        """
        Args:
            base: the memory, of one dimension or contiguous.
            shape: the shape of the whole tensor.
            pieces: regions, and the elements of the memory at which they start.
            home: what the memory is a shard of, for whoever sets it.
        """
        flat = base.detach().reshape(-1)
        # The regions come from the engine, which has proven that they fit.
        self.dtype = base.dtype
        self.shape = torch.Size(shape)
        self.pieces = [
            (piece.offsets, flat[piece.start : piece.start + torch.Size(piece.sizes).numel()].view(piece.sizes))
            for piece in pieces
        ]
        self.requires_grad = False
        self.base = base
        self.home = home


class FlatPiece(NamedTuple):
    """A region, and the element of a flat memory at which it starts."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


# ---- meshes and placements --------------------------------------------------------------------------------------------------

_layouts: dict[Any, tuple[Any, _reshard.ShardLayout]] = {}


def placed(key: str, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> _reshard.ShardLayout:
    """What placements on a mesh give this rank of a tensor of a shape."""
    name = (id(mesh), placements, shape)
    known = _layouts.get(name)
    if known is None or known[0] is not mesh:
        ranks = mesh.mesh
        wanted = [_placement(key, placement, max(len(shape), 1)) for placement in placements]
        rank = dist.get_rank() if dist.is_initialized() else 0
        if len(_layouts) > 10_000:
            _layouts.clear()
        layout = _reshard.ShardLayout(list(ranks.shape), ranks.flatten().tolist(), wanted, shape, rank)
        known = _layouts[name] = (mesh, layout)
    return known[1]


def layout_of(key: str, tensor: DTensor) -> _reshard.ShardLayout | None:
    """The layout of a DTensor; None on a rank that is not in its mesh."""
    spec = tensor._spec
    return None if spec.mesh.get_coordinate() is None else placed(key, spec.mesh, spec.placements, tensor.shape)


def _placement(key: str, placement: Any, ndim: int) -> _reshard.Placement:
    if type(placement).__name__ == "_StridedShard":
        return _reshard.Placement.strided_shard(placement.dim % ndim, placement.split_factor)
    if placement.is_shard():
        return _reshard.Placement.shard(placement.dim % ndim)
    if placement.is_replicate():
        return _reshard.Placement.replicate()
    if placement.is_partial():
        raise InvalidInput(
            f"{key!r} is a partial sum ({placement}); reduce it first, for example with redistribute()", keys=[key]
        )
    raise InvalidInput(f"{key!r} has the placement {placement}, which reshard does not know", keys=[key])


# ---- any tensor -------------------------------------------------------------------------------------------------------------


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, outside of autograd."""
    local = tensor._local_tensor.detach()
    return local.wait() if hasattr(local, "wait") else local


def pieces_of(key: str, value: Any) -> list[Piece]:
    """What this rank holds of a tensor of any kind."""
    if isinstance(value, ShardView):
        return list(value.pieces)
    if isinstance(value, DTensor):
        layout = layout_of(key, value)
        local = local_of(value)
        return [
            (held.offsets, local[tuple(slice(o, o + s) for o, s in zip(held.local, held.sizes))])
            for held in (layout.regions if layout is not None else ())
            if 0 not in held.sizes or 0 in value.shape
        ]
    if isinstance(value, ShardedTensor):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.local_shards()]
    if _describes_shards(value):
        return shards_of(key, value).pieces
    return [((0,) * value.dim(), value.detach())]


def regions_of(key: str, value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The same as offsets and sizes."""
    return [(offsets, tuple(tensor.shape)) for offsets, tensor in pieces_of(key, value)]


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


class Facts(NamedTuple):
    """The engine's code of an element type, and a whole shape."""

    dtype: int
    shape: tuple[int, ...]


def facts_of(value: Any) -> Facts | None:
    """What is known of a tensor whose elements the engine knows; None for anything else."""
    if not is_tensor(value) or value.dtype not in CODES:
        return None
    # What tensors say of their shards is for those who save them.
    shape = value.metadata().size if isinstance(value, ShardedTensor) else value.shape
    return Facts(CODES[value.dtype], tuple(shape))


def device_of(value: Any) -> torch.device:
    """The device of what this rank holds of a tensor; the one it will have where it is on the meta device still, and the CPU
    where this rank holds nothing."""
    if isinstance(value, FlatView):
        return value.base.device
    if isinstance(value, ShardView):
        return value.pieces[0][1].device if value.pieces else torch.device("cpu")
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor.device if shards else torch.device("cpu")
    if isinstance(value, DTensor):
        device = value._local_tensor.device
        return device if device.type != "meta" else torch.device(value.device_mesh.device_type)
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return torch.device("cpu")
    return value.device


def scalar_bytes(tensor: torch.Tensor) -> bytes | None:
    """The bytes of a tensor's only element, if it has one and lies on the CPU."""
    if isinstance(tensor, (DTensor, ShardedTensor)) or tensor.numel() != 1 or not tensor.is_cpu:
        return None
    return bytes(tensor.detach().contiguous().reshape(1).view(torch.uint8).tolist())


def describe(value: Any) -> _reshard.TensorDescription | None:
    """A tensor for the engine's plans; None for anything else."""
    facts = facts_of(value)
    if facts is None:
        return None
    if isinstance(value, ShardView):
        return _reshard.TensorDescription(facts.dtype, facts.shape, "cpu", None, value.pieces)
    if isinstance(value, ShardedTensor):
        return _reshard.TensorDescription(facts.dtype, facts.shape, "cpu")
    device = "cpu" if value.is_cpu else "meta" if value.is_meta else "accelerator"
    return _reshard.TensorDescription(facts.dtype, facts.shape, device, scalar_bytes(value))
