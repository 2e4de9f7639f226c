"""Leaves of a state dict that are neither tensors nor plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from .. import _reshard

#: What to do with content of each rank when another number of ranks loads it.
OnResize = Literal["error", "drop"] | Callable[[dict[int, Any], int, int], Any]


class PerRank:
    """Content that every rank has of its own under one key, such as random-number state or a data loader's position.

    Without it, a value under one key is taken to be the same on all ranks and is stored once. ``save`` stores every rank's;
    ``load`` brings back to each rank what the rank of the same number saved, into :attr:`value`. The value may be a tensor,
    any other leaf, or a whole container.
    """

    __slots__ = ("on_resize", "value")

    def __init__(self, value: Any, on_resize: OnResize = "error") -> None:
        """
        Args:
            value: this rank's.
            on_resize: what a load does when another number of ranks saved: "error"; "drop", which leaves :attr:`value` as it is; or a
                function that gets what each rank saved, this rank and the number of ranks, and returns this rank's value:
                ``on_resize({0: …, 1: …}, rank, world_size)``.
        """
        if on_resize not in ("error", "drop") and not callable(on_resize):
            raise ValueError(f'on_resize is "error", "drop" or a function, not {on_resize!r}')
        self.value = value
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def _where(piece: tuple[tuple[int, ...], torch.Tensor]) -> tuple[int, ...]:
    """Where a region starts."""
    return piece[0]


class ShardView:
    """The regions of one tensor that this rank holds, as views of the memory in which they live.

    What a flat parameter's slice or a ZeRO partition is: ``save`` writes the regions as they lie there, ``load`` writes into
    them. No collective, no copy.
    """

    __slots__ = ("_reshard_slot", "dtype", "pieces", "requires_grad", "shape")

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        pieces: Sequence[tuple[Sequence[int], torch.Tensor]],
        requires_grad: bool = False,
    ) -> None:
        """
        Args:
            dtype: the element type.
            shape: the shape of the whole tensor.
            pieces: what this rank holds: where a region starts in the whole, and a tensor of the region's shape that is
                a view of the memory to save from and to load into. May be empty.
            requires_grad: whether PyTorch should see the tensor as requiring gradients.
        """
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self.pieces: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self.requires_grad = requires_grad
        for offsets, tensor in pieces:
            offsets = tuple(offsets)
            if tensor.dtype != dtype:
                raise ValueError(f"a piece is {tensor.dtype}, the tensor is {dtype}")
            if len(offsets) != len(self.shape) or tensor.dim() != len(self.shape):
                raise ValueError(f"a piece at {offsets} of shape {tuple(tensor.shape)} does not fit into {tuple(self.shape)}")
            if any(o < 0 or o + s > n for o, s, n in zip(offsets, tensor.shape, self.shape)):
                raise ValueError(f"a piece at {offsets} of shape {tuple(tensor.shape)} reaches outside of {tuple(self.shape)}")
            self.pieces.append((offsets, tensor))

    @classmethod
    def of_range(cls, part: torch.Tensor, shape: Sequence[int], start: int) -> ShardView:
        """A stretch of the flattened tensor, as ZeRO cuts it.

        Args:
            part: the elements from ``start`` on, in one dimension: the memory to save from and to load into.
            shape: the shape of the whole tensor.
            start: the first element's number in the flattened whole.
        """
        if part.dim() != 1:
            raise ValueError(f"a stretch of a flattened tensor has one dimension, not {part.dim()}")
        pieces = _reshard.flat_pieces(tuple(shape), start, start + part.numel())
        ends = [piece.start + torch.Size(piece.sizes).numel() for piece in pieces]
        views = [(piece.offsets, part.detach()[piece.start : end].view(piece.sizes)) for piece, end in zip(pieces, ends)]
        return cls(part.dtype, shape, views)

    def size(self) -> torch.Size:
        """The shape of the whole tensor, as tensors have it."""
        return self.shape

    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return self.shape.numel()

    def __eq__(self, other: object) -> bool:
        """Whether two views are of tensors of one shape and dtype, and hold the same regions with the same elements."""
        if not isinstance(other, ShardView):
            return NotImplemented
        if self.dtype != other.dtype or self.shape != other.shape or len(self.pieces) != len(other.pieces):
            return False
        theirs = sorted(other.pieces, key=_where)
        return all(
            a == b and x.shape == y.shape and torch.equal(x, y) for (a, x), (b, y) in zip(sorted(self.pieces, key=_where), theirs)
        )

    # What it holds changes; like a tensor, it is told from others by what it is.
    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        # A pickle would hold this rank's part only, and PyTorch's save keeps one rank's pickle of every key.
        raise TypeError(
            "a ShardView is one rank's part of a tensor and cannot be pickled: save it with reshard.torch.save, or get the state "
            "with as_torch=True for PyTorch's own save"
        )

    def __copy__(self) -> ShardView:
        return ShardView(self.dtype, self.shape, self.pieces, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardView:
        pieces = [(offsets, tensor.detach().clone()) for offsets, tensor in self.pieces]
        return ShardView(self.dtype, self.shape, pieces, self.requires_grad)

    def __repr__(self) -> str:
        regions = ", ".join(
            "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, tensor.shape)) + "]" for offsets, tensor in self.pieces
        )
        return f"ShardView({self.dtype}, {tuple(self.shape)}, holds {regions or 'nothing'})"
