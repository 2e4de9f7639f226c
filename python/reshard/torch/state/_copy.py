"""Copies between regions of tensors, live ones included."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._tensor import Piece


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
