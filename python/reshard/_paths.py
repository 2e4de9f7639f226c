"""Paths as the engine takes them: text in UTF-8."""

from __future__ import annotations

import os

from ._errors import InvalidInput

StrPath = str | os.PathLike[str]


def path_text(path: StrPath | bytes) -> str:
    """A path or an address as text; bytes are decoded as the system does. One that is not valid UTF-8 is an error by name."""
    text = os.fsdecode(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"the path {text!r} is not valid UTF-8; rename it, or reach it through a link whose name is") from None
    return text
