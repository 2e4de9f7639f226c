"""The ``Metadata`` that a save returns. Making its objects takes longer than planning does, and few look at them: they are read
from the checkpoint when somebody does."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..._errors import NotFound
from ..._reports import SaveReport

_FIELDS = tuple(field.name for field in dataclasses.fields(Metadata))


class SavedMetadata(Metadata):
    """A checkpoint's metadata, read when it is first looked at."""

    @classmethod
    def of(cls, report: SaveReport) -> SavedMetadata:
        """The metadata of what was just saved."""
        made = cls.__new__(cls)
        made.__dict__["_saved"] = (report.path, report.save_id)
        return made

    def _value(self, name: str) -> Any:
        if name not in self.__dict__ and "_saved" in self.__dict__:
            self._read()
        return self.__dict__.get(name)

    def _read(self) -> None:
        from .._storage import StorageReader

        path, save_id = self.__dict__["_saved"]
        metadata = StorageReader(path).read_metadata()
        found = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
        if found != save_id:
            raise NotFound(f"the checkpoint whose metadata this is, save {save_id}, is no longer at {path}: save {found} is")
        del self.__dict__["_saved"]
        for name in _FIELDS:
            self.__dict__.setdefault(name, getattr(metadata, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Metadata, tuple(getattr(self, name) for name in _FIELDS)

    def __repr__(self) -> str:
        if "_saved" in self.__dict__:
            return f"<Metadata of {self.__dict__['_saved'][0]}, not read yet>"
        return f"Metadata({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


def _field(name: str) -> property:
    return property(lambda self: self._value(name), lambda self, value: self.__dict__.__setitem__(name, value))


for _name in _FIELDS:
    setattr(SavedMetadata, _name, _field(_name))
