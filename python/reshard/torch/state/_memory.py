"""The memory of slots that an optimizer does not have yet: made, waiting, loaded, taken.

``reshard.torch.load`` and ``StorageReader`` take the slots of an optimizer that has not run from the checkpoint, but PyTorch's
own ``load`` fills only what a dict lists. PyTorch lists slots by stepping the optimizer. Here they are listed in memory that
belongs to no optimizer, which counts for nothing until something was loaded into it: setting, saving and broadcasting leave out
what still waits, so presence stays that of the checkpoint. :class:`SlotMemory` is that life; docs/optimizer-state.md tells it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from .._leaf import ShardView
from .._tensor import FlatView


class SlotMemory:
    """What has become of memory that was made for a slot. It stays with the tensor, also in copies of the dict.

    Attributes:
        free: no optimizer has it yet, and one may take it as its own.
        whole: of a part of the memory of a slot, all of it.
    """

    __slots__ = ("_empty_at", "free", "whole")

    def __init__(self, free: bool = False, whole: torch.Tensor | None = None) -> None:
        self.free = free
        self.whole = whole
        #: The memory's version while it has no content; every write of PyTorch's advances that.
        self._empty_at: int | None = None

    @classmethod
    def made(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that is new, and nobody's."""
        tensor._reshard_slot = cls(free=True)  # type: ignore[attr-defined]
        return tensor

    @classmethod
    def part(cls, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """A tensor is a part of the memory of a slot."""
        tensor._reshard_slot = cls(whole=whole)  # type: ignore[attr-defined]

    @staticmethod
    def of(tensor: Any) -> SlotMemory | None:
        """What is known of a tensor's memory."""
        known = getattr(tensor, "_reshard_slot", None)
        return known if isinstance(known, SlotMemory) else None

    @classmethod
    def is_known(cls, leaf: Any) -> bool:
        """Whether a slot's memory was made here."""
        return any(cls.of(tensor) is not None for tensor in memory_of(leaf) or [leaf])

    @classmethod
    def wait(cls, leaf: Any) -> None:
        """A slot is listed, and waits for content."""
        memory = memory_of(leaf)
        if not memory and isinstance(leaf, (ShardView, ShardedTensor)):
            # This rank holds nothing of it, and nothing is ever written into it.
            leaf._reshard_slot = cls()  # type: ignore[union-attr]
            leaf._reshard_slot._empty_at = 0  # type: ignore[union-attr]
        for tensor in memory:
            known = cls.of(tensor)
            if known is None:
                known = tensor._reshard_slot = cls()  # type: ignore[attr-defined]
            known._empty_at = tensor._version

    @classmethod
    def waits(cls, leaf: Any) -> bool:
        """Whether a slot is still without content."""
        memory = memory_of(leaf)
        if not memory:
            known = cls.of(leaf)
            return known is not None and known._empty_at is not None
        return all((of := cls.of(t)) is not None and of._empty_at == t._version for t in memory)

    @classmethod
    def loaded(cls, tree: Any) -> None:
        """All in a tree has content, or is about to get it from something that advances no version."""
        for leaf in leaves_in(tree):
            for tensor in memory_of(leaf) or [leaf]:
                known = cls.of(tensor)
                if known is not None:
                    known._empty_at = None

    @classmethod
    def take(cls, tensor: torch.Tensor) -> torch.Tensor | None:
        """The memory as an optimizer's own, if it is free; no second one gets it."""
        known = cls.of(tensor)
        if known is None or not known.free:
            return None
        known.free = False
        return tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> SlotMemory:
        # Of other memory nothing is known.
        return SlotMemory()

    def __reduce__(self) -> tuple[Any, ...]:
        # Tensors are pickled with their attributes, and what torch.load reads by default has no class of ours in it.
        return (OrderedDict, ())


def memory_of(leaf: Any) -> list[torch.Tensor]:
    """The tensors of this rank that a leaf's content lies in."""
    if isinstance(leaf, FlatView):
        return [leaf.base]
    if isinstance(leaf, ShardView):
        return [tensor for _, tensor in leaf.pieces]
    if isinstance(leaf, DTensor):
        return [leaf._local_tensor]
    if isinstance(leaf, ShardedTensor):
        return [shard.tensor for shard in leaf.local_shards()]
    return [leaf] if isinstance(leaf, torch.Tensor) else []


def leaves_in(tree: Any) -> Iterator[Any]:
    """Everything in nested dicts that is none."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_in(value)
    else:
        yield tree
