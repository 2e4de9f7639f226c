"""Types that several modules name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ._paths import StrPath as StrPath

#: Settings of a store by name: numbers and flags of the engine's own, text for the object store's client.
StorageOptions = Mapping[str, str | int | float | bool | None]
#: Where element types differ: a difference, only casts that keep every value, or all.
CastPolicy = Literal["never", "widening", "any"]
#: Which records are compared with their checksums when they are read.
VerifyPolicy = Literal["never", "whole", "always"]
#: Whether the smallest or the largest metric is best.
Mode = Literal["min", "max"]
#: A format that can be written.
Format = Literal["dcp", "safetensors", "torch"]
#: What a conversion writes: a format, or a folder as another program has it.
Target = Literal["dcp", "safetensors", "torch", "huggingface", "deepspeed-universal", "megatron"]
#: A part of a training state.
Part = Literal["model", "optimizer"]
