"""One module for each group of rows; `rows.GROUPS` gives them by number."""

from __future__ import annotations

from importlib import import_module

_NAMES = {
    1: ("large", "Large tensors, one process"),
    2: ("small", "Small tensors"),
    3: ("metadata", "Metadata of many chunks"),
    4: ("planning", "Planning"),
    5: ("fsdp2", "FSDP2"),
    6: ("fsdp1", "FSDP1"),
    7: ("slices", "Slices for tensor parallelism"),
    8: ("background", "Saving in the background"),
    9: ("convert", "Convert and consolidate"),
    10: ("objects", "Object store on loopback"),
    11: ("others", "What one would pick instead"),
    12: ("numbers", "Numbers of every tensor"),
    13: ("drop_in", "The drop-in module"),
    14: ("zero", "DeepSpeed's folders"),
    15: ("views", "Through rules"),
}

NUMBERS = list(_NAMES)


def title(number: int) -> str:
    return _NAMES[number][1]


def module(number: int):
    return import_module(f"rows.{_NAMES[number][0]}")
