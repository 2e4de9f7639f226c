"""Stream extensions of `torch.distributed.checkpoint`: what a caller's own transforms make of records, and what they make of those again.

The engine reads and writes zstd by itself. Everything else is for the extensions that the caller gives.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from .._errors import InvalidInput


def _classes(name: str) -> Any:
    found = getattr(filesystem, name, None)
    if found is None:
        raise InvalidInput(f"torch {torch.__version__} has no stream extensions; they came with 2.7")
    return found


class RecordTransforms:
    """What records go through on their way to a file, in the order of PyTorch's writer."""

    def __init__(self, extensions: Sequence[Any] | None) -> None:
        self._transforms = _classes("_StorageWriterTransforms")(extensions) if extensions else None
        # Readers undo what is named in the order of the names, from the file on. PyTorch's writer names several the other way
        # round, and no reader reads what it wrote.
        self._descriptors = [extension.get_descriptor() for extension in extensions or ()]

    def __bool__(self) -> bool:
        return self._transforms is not None

    def tensor(self, item: WriteItem, tensor: torch.Tensor) -> tuple[bytes, list[str]]:
        """The record of a tensor, and the descriptors of what was done to it."""
        # A part of a larger tensor would bring all of it along.
        whole = tensor.cpu()
        own = whole if whole.numel() == whole.untyped_storage().nbytes() // max(whole.element_size(), 1) else whole.clone()
        return self._through(item, lambda stream: torch.save(own, stream))

    def record(self, item: WriteItem, record: bytes) -> tuple[bytes, list[str]]:
        """The record of a value, and the descriptors of what was done to it."""
        return self._through(item, lambda stream: stream.write(record))

    def _through(self, item: WriteItem, write: Any) -> tuple[bytes, list[str]]:
        assert self._transforms is not None
        output = io.BytesIO()
        stream, _ = self._transforms.transform_save_stream(item, output)
        write(stream)
        stream.close()
        return output.getvalue(), list(self._descriptors)


class RecordReader:
    """Undoes what the engine cannot, by a registry of the caller's."""

    def __init__(self, registry: Any | None) -> None:
        self._transforms = _classes("_StorageReaderTransforms")(registry) if registry is not None else None

    def undone(self, item: ReadItem, path: str, descriptors: str, record: bytes) -> bytes:
        """A record as it was before it went through transforms."""
        key = item.storage_index.fqn
        names = descriptors.split(", ")
        if self._transforms is None:
            raise InvalidInput(
                f"{key!r} in {path} was stored through {descriptors}; give the extensions that undo it as `_extension_registry`",
                keys=[key],
            )
        known = self._transforms.extension_registry.extensions
        lacking = [name for name in names if name.partition("/")[0] not in known]
        if lacking:
            raise InvalidInput(
                f"{key!r} in {path} was stored through {', '.join(lacking)}, which the given registry does not have", keys=[key]
            )
        stream: IO[bytes] = self._transforms.transform_load_stream(item, names, io.BytesIO(record))
        return stream.read()


def tensor_of(item: ReadItem, path: str, record: bytes) -> torch.Tensor:
    """What an item wants of the tensor in a record. Nothing in the record is run."""
    tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        key = item.storage_index.fqn
        raise InvalidInput(f"the record of {key!r} in {path} holds a {type(tensor).__name__}, not a tensor", keys=[key])
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor
