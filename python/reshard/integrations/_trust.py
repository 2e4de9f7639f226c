"""Files that trainers write beside tensors: read by torch's restricted unpickler, unless the caller trusts them."""

from __future__ import annotations

import enum
import pickle
import re
from collections.abc import Sequence
from typing import IO, Any

import torch

from .._errors import UntrustedPickle
from .._types import StrPath


def _member_of(classes: Sequence[Any]) -> Any:
    """What stands for ``getattr`` in a file: Python before 3.11.4 pickles a member of an enumeration as one. It knows the members
    of the given classes, and nothing else."""

    def member(owner: Any, name: Any) -> Any:
        if isinstance(owner, enum.EnumMeta) and owner in classes and name in owner.__members__:
            return owner[name]
        raise pickle.UnpicklingError("GLOBAL builtins.getattr is not allowed")

    member.__module__, member.__qualname__ = "builtins", "getattr"
    return member


def read_objects(
    source: StrPath | IO[bytes], name: str, *, allow_pickle: bool, hint: str, classes: Sequence[Any] = (), **options: Any
) -> Any:
    """What `torch.save` wrote. Without ``allow_pickle`` only plain data, what the program has declared safe to torch, and the
    given classes of the trainer: anything else is an error that names it."""
    if allow_pickle:
        return torch.load(source, weights_only=False, **options)
    try:
        with torch.serialization.safe_globals([*classes, _member_of(classes)]):
            return torch.load(source, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        kind = found[1] if found else "object that is not plain data"
        message = f"{name} holds a pickled {kind}: loading it would execute code from the file"
        raise UntrustedPickle(message, class_name=found[1] if found else "", hint=hint) from error
