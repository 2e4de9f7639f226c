"""Tensors whose memory the CPU cannot read, on their way into a checkpoint and out of it.

The engine asks for their bytes in parts, when it is about to write or to stage them, and gives it back in boxes of elements as they
are read. All go through a few blocks of pinned memory that are kept: saving or loading a device's whole memory needs no more of
them than one tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

#: Bytes of a block, and how many there are at most.
BLOCK = 8 << 20
BLOCKS = 4


def is_cpu(tensor: torch.Tensor) -> bool:
    """Whether the CPU can read a tensor's memory."""
    return tensor.is_cpu


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


class Blocks:
    """A few blocks of memory, made when they are first needed. Who needs one when all are lent waits."""

    def __init__(self, size: int = BLOCK, count: int = BLOCKS, make: Callable[[int], torch.Tensor] = _pinned) -> None:
        self.size = size
        self._left = count
        self._make = make
        self._free: list[torch.Tensor] = []
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """A block, until the end of a with statement."""
        block = self._take()
        try:
            yield block
        finally:
            with self._changed:
                self._free.append(block)
                self._changed.notify()

    def _take(self) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._left)
            if self._free:
                return self._free.pop()
            self._left -= 1
        try:
            return self._make(self.size)
        except BaseException:
            with self._changed:
                self._left += 1
                self._changed.notify()
            raise


#: The blocks of this process.
_blocks = Blocks()


class DeviceMemory:
    """A tensor's memory where the CPU cannot read it, for the engine to read and to write in parts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """
        Args:
            tensor: any strided tensor; bytes are counted as they lie in its memory.
        """
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
        self._elements = torch.as_strided(tensor.detach(), (span,), (1,), tensor.storage_offset())
        self._bytes = self._elements.view(torch.uint8)
        #: Tells the same memory under two names.
        self.address = self._bytes.data_ptr()

    def read(self, offset: int, into: memoryview) -> None:
        """Fills a buffer with the bytes from an offset on. For any number of threads at once."""
        done = 0
        while done < len(into):
            with _blocks.lent() as block:
                part = block[: len(into) - done]
                # Returns when the block has the content: copies to the CPU wait unless told not to.
                part.copy_(self._bytes[offset + done : offset + done + len(part)])
                into[done : done + len(part)] = part.numpy().data
                done += len(part)

    def write(self, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], content: memoryview) -> None:
        """Writes a box of elements, which lie packed in a buffer, from an offset in bytes on. For any number of threads at once."""
        elements = self._elements
        if len(content) > _blocks.size:
            # Rows that fit; the engine's own boxes all do.
            dim = next(dim for dim, size in enumerate(sizes) if size > 1)
            row = len(content) // sizes[dim]
            step = max(_blocks.size // row, 1)
            for start in range(0, sizes[dim], step):
                count = min(step, sizes[dim] - start)
                first = offset + start * strides[dim] * elements.element_size()
                self.write(first, (*sizes[:dim], count, *sizes[dim + 1 :]), strides, content[start * row : (start + count) * row])
            return
        target = torch.as_strided(elements, sizes, strides, elements.storage_offset() + offset // elements.element_size())
        with _blocks.lent() as block:
            part = block[: len(content)]
            part.numpy().data[:] = content
            # Returns when the block may be used again: copies from the CPU wait unless told not to.
            target.copy_(part.view(elements.dtype).view(sizes))
