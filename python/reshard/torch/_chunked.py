"""Leaves that say themselves which chunks of a tensor they hold, by either of DCP's protocols.

One is three methods (``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``), of tensors or of any object.
The other is four attributes of an ordinary tensor: ``global_shape``, and for each shard where it starts in the whole
(``global_offsets``), where in this tensor (``local_offsets``), and how large it is (``local_sizes``); PyTorch 2.15 calls such a
tensor a ``CheckpointableTensor``. It may have fewer dimensions than the whole: its rows are then the leading dimensions of the whole
in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._errors import InvalidInput

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class Chunked(NamedTuple):
    """What a leaf holds of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Where a chunk starts in the whole, and a tensor of its shape.
    pieces: list[tuple[tuple[int, ...], torch.Tensor]]


def has_shards(tensor: torch.Tensor) -> bool:
    """Whether a tensor's attributes say which shards of a larger one it holds."""
    # Methods of these names are another protocol's.
    return hasattr(tensor, "global_shape") and all(
        hasattr(tensor, name) and not callable(getattr(tensor, name)) for name in _FIELDS
    )


def lists_chunks(value: Any) -> bool:
    """Whether an object lists its chunks by methods."""
    return hasattr(value, "__create_chunk_list__") and hasattr(value, "__get_tensor_shard__")


def copy_shards(source: Any, target: Any) -> None:
    """Gives a tensor over the same memory the attributes of another."""
    for name in _FIELDS:
        setattr(target, name, getattr(source, name))


def shards_of(key: str, tensor: Any) -> Chunked:
    """The shards that a tensor's attributes describe."""
    shape = tuple(tensor.global_shape)
    lists = [list(getattr(tensor, name)) for name in _FIELDS[1:]]
    if len({len(entries) for entries in lists}) != 1:
        counts = ", ".join(f"{len(entries)} {name}" for name, entries in zip(_FIELDS[1:], lists))
        raise InvalidInput(f"{key!r} describes its shards inconsistently: it has {counts}", keys=[key])
    pieces = []
    for index, (begin, at, sizes) in enumerate(zip(*lists)):
        begin, at, sizes = tuple(begin), tuple(at), tuple(sizes)
        problem = _outside(begin, sizes, shape)
        shard = None if problem else _cut(tensor, at, sizes)
        if shard is None:
            problem = problem or f"it does not lie in a tensor of shape {tuple(tensor.shape)}"
            raise InvalidInput(
                f"{key!r} describes its shards inconsistently: shard {index} of shape {sizes}, at {begin} of the whole {shape} and at "
                f"{at} of this tensor: {problem}",
                keys=[key],
            )
        if shard.numel() or 0 in shape:
            pieces.append((begin, shard))
    return Chunked(tensor.dtype, shape, pieces)


def _outside(begin: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str | None:
    if len(begin) != len(shape) or len(sizes) != len(shape):
        return f"the whole has {len(shape)} dimensions"
    if any(o < 0 or n < 0 or o + n > whole for o, n, whole in zip(begin, sizes, shape)):
        return "it reaches outside of the whole"
    return None


def _cut(tensor: torch.Tensor, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
    """A shard inside of a tensor; None where it does not fit."""
    tensor = tensor.detach()
    if len(at) != tensor.dim():
        return None
    if len(sizes) > tensor.dim() > 0:
        # The rows of the tensor are several dimensions of the whole.
        merged = len(sizes) - tensor.dim() + 1
        rows = math.prod(sizes[:merged])
        if tuple(sizes[merged:]) != tuple(tensor.shape[1:]) or any(at[1:]) or at[0] < 0 or at[0] + rows > tensor.shape[0]:
            return None
        stretch = tensor.narrow(0, at[0], rows)
        leading = [math.prod(sizes[i + 1 : merged]) * tensor.stride(0) for i in range(merged)]
        return stretch.as_strided(tuple(sizes), (*leading, *tensor.stride()[1:]), stretch.storage_offset())
    if len(sizes) != tensor.dim() or any(o < 0 or o + n > size for o, n, size in zip(at, sizes, tensor.shape)):
        return None
    return tensor[tuple(slice(o, o + n) for o, n in zip(at, sizes))]


def chunks_of(key: str, value: Any, whole: Any = None) -> Chunked:
    """The chunks that an object lists. `whole` is the tensor that it is a rank's part of, if there is one around it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    dtype, shape = _facts(key, value) if whole is None else (whole.dtype, tuple(whole.shape))
    pieces = []
    for position, chunk in enumerate(value.__create_chunk_list__()):
        begin, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if 0 in sizes and 0 not in shape:
            # Nothing of it; some classes say so in fewer dimensions.
            continue
        problem = _outside(begin, sizes, shape)
        tensor = None if problem else value.__get_tensor_shard__(MetadataIndex(key, chunk.offsets, position))
        if tensor is not None and tuple(tensor.shape) != sizes:
            problem = f"it gives a tensor of shape {tuple(tensor.shape)} for it"
        if problem or tensor is None:
            raise InvalidInput(
                f"{key!r} lists its chunks inconsistently: chunk {position} of shape {sizes} at {begin} of the whole {shape}: {problem}",
                keys=[key],
            )
        pieces.append((begin, tensor))
    return Chunked(dtype, shape, pieces)


def _facts(key: str, value: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """The element type and the whole shape: what it would write says both, else its attributes do."""
    if hasattr(value, "__create_write_items__"):
        for item in value.__create_write_items__(key, value):
            if item.tensor_data is not None:
                return item.tensor_data.properties.dtype, tuple(item.tensor_data.size)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if not isinstance(dtype, torch.dtype) or shape is None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise InvalidInput(
            f"{key!r} is a {name}, which lists its chunks but tells neither dtype nor shape of the whole tensor", keys=[key]
        )
    return dtype, tuple(shape)
