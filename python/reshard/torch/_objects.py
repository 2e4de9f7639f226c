"""Tensors that are stored whole, as objects: sparse and quantized ones, and wrappers around other tensors.

The engine does not look into them. What differs between the stored one and the one that is there is found here, before anything
is loaded.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from .._errors import InvalidInput, Mismatch
from .._reports import Cast, Difference
from .._types import CastPolicy
from ._describe import Description


def holder_of(description: Description, key: str) -> Any:
    """What is in the place of a value that is to be loaded."""
    place = description.places[key]
    if place.container is None and place.wrapper is not None:
        return place.wrapper.value
    return place.container[place.key]


def differences(
    description: Description, checkpoint: Any, stored_name: Any, cast: CastPolicy, trusted: set[str] | None, rank: int
) -> tuple[list[Difference], list[Cast]]:
    """How stored objects differ from the tensors that are there, and the casts that the policy allows, as the engine reports
    them. What cannot be read is left to the load, which says why."""
    found: list[Difference] = []
    casts: list[Cast] = []
    for key in description.places:
        holder = holder_of(description, key)
        name = key if stored_name is None else stored_name(key)
        if not isinstance(holder, torch.Tensor) or name is None:
            continue
        if description.places[key].wrapper is not None:
            name = f"{name}.rank_{rank}"
        if name not in checkpoint or checkpoint.entry(name).record is None:
            continue
        stored = _stored(checkpoint, name, trusted)
        if not isinstance(stored, torch.Tensor):
            continue
        one = _difference(key, holder, stored, cast)
        if isinstance(one, Cast):
            casts.append(one)
        elif one is not None:
            found.append(one)
    return found, casts


def mismatch(path: str, found: list[Difference]) -> Mismatch:
    """The error that lists differences, as the engine's does."""
    places = "1 place" if len(found) == 1 else f"{len(found)} places"
    lines = "\n".join(f"  {one['text']}" for one in found)
    message = f"{path} differs from what is wanted in {places}; nothing was loaded\n{lines}"
    return Mismatch(message, keys=[one["key"] for one in found], differences=found)


def _stored(checkpoint: Any, name: str, trusted: set[str] | None) -> Any:
    (found,) = checkpoint.value_records([name])
    if not found.classes or (trusted is not None and any(kind not in trusted for kind in found.classes)):
        return None
    try:
        return torch.load(io.BytesIO(found.record), weights_only=trusted is not None)
    except Exception:
        return None


def _difference(key: str, holder: torch.Tensor, stored: torch.Tensor, cast: CastPolicy) -> Difference | Cast | None:
    if holder.shape != stored.shape:
        a: Any = list(stored.shape)
        b: Any = list(holder.shape)
        text = f"shape: {key} is {a} in the checkpoint, {b} wanted"
        return {"difference": "shape", "key": key, "stored": a, "wanted": b, "text": text}
    if holder.layout != stored.layout or holder.is_quantized != stored.is_quantized:
        a, b = _kind(stored), _kind(holder)
        text = f"kind: {key} is {a} in the checkpoint, {b} wanted"
        return {"difference": "kind", "key": key, "stored": a, "wanted": b, "text": text}
    if holder.dtype == stored.dtype:
        return None
    a, b = str(stored.dtype).removeprefix("torch."), str(holder.dtype).removeprefix("torch.")
    narrowing = not _keeps_every_value(stored.dtype, holder.dtype)
    if cast == "never" or (cast == "widening" and narrowing) or stored.is_quantized:
        text = f"dtype: {key} is {a} in the checkpoint, {b} wanted"
        return {"difference": "dtype", "key": key, "stored": a, "wanted": b, "text": text, "narrowing": narrowing}
    return Cast(key, a, b, narrowing)


def _kind(tensor: torch.Tensor) -> str:
    return "a quantized tensor" if tensor.is_quantized else f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"


def _keeps_every_value(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return torch.can_cast(stored, wanted) and torch.promote_types(stored, wanted) == wanted


def copy_object(key: str, holder: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a loaded object into the tensor that is there."""
    try:
        with torch.no_grad():
            holder.copy_(value)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        kind = f"{type(holder).__module__}.{type(holder).__qualname__}"
        raise InvalidInput(
            f"{key!r} is a tensor that is stored whole, as an object, and cannot be copied into the {kind} that is there: {error}",
            keys=[key],
            hint="put None in its place: what was stored is then put there as it is",
        ) from error
