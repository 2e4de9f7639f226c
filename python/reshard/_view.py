"""Views: a checkpoint seen through rules."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import _reshard
from ._errors import InvalidInput
from ._paths import path_text
from ._reports import ViewReport
from ._types import StorageOptions, StrPath


class View:
    """Rules through which a checkpoint is seen: other names, tensors stacked, split, joined, transposed, padded, cast.

    Nothing is copied: whoever loads reads exactly the bytes that it wants, from where they are. ``docs/views.md`` describes
    the rules.

    Args:
        rules: a file of rules, the name of a recipe (:func:`reshard.recipes`), or rules as dicts with the same keys as in a
            file: ``{"from": "a.{x}", "to": "b.{x}", "steps": [{"transpose": [0, 1]}]}``, one or a list.
        reverse: the rules backwards.
        **parameters: values for the numbers that the rules leave open, such as ``heads=32``.
    """

    def __init__(
        self,
        rules: StrPath | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        reverse: bool = False,
        **parameters: int,
    ) -> None:
        if isinstance(rules, (str, os.PathLike)):
            inner = _reshard.View.find(path_text(rules), parameters)
        else:
            several = [rules] if isinstance(rules, Mapping) else list(rules)
            inner = _reshard.View.parse(f"rule = {_toml(several)}", "the rules", parameters)
        self._inner = inner.reversed() if reverse else inner

    @classmethod
    def parse(cls, text: str, *, reverse: bool = False, **parameters: int) -> View:
        """Rules from a text, as it would stand in a file."""
        view = cls.__new__(cls)
        inner = _reshard.View.parse(text, "the rules", parameters)
        view._inner = inner.reversed() if reverse else inner
        return view

    def reversed(self) -> View:
        """The rules that undo these; an error names the first that nothing undoes."""
        view = View.__new__(View)
        view._inner = self._inner.reversed()
        return view

    def check(self, path: StrPath, *, storage_options: StorageOptions | None = None) -> ViewReport:
        """What the rules would make of a checkpoint, from metadata alone; a rule that does not fit is an error."""
        return _reshard.Checkpoint(path_text(path), storage_options).check_view(self._inner)


#: A view, what one is made from, or several to be applied one after the other.
Views = View | StrPath | Mapping[str, Any] | Sequence["View | StrPath | Mapping[str, Any]"]


def inner_views(view: Views | None) -> list[_reshard.View] | None:
    """The engine's views, of whatever was given."""
    if view is None:
        return None
    several = [view] if isinstance(view, (View, str, os.PathLike, Mapping)) else list(view)
    return [(one if isinstance(one, View) else View(one))._inner for one in several]


def recipes() -> dict[str, str]:
    """The recipes that come with reshard, by name: what each is for."""
    return {name: description for name, description, _ in _reshard.recipes()}


def _toml(value: Any) -> str:
    """Plain data as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(str(key))} = {_toml(below)}" for key, below in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise InvalidInput(f"a rule holds {value!r}; text, numbers, lists and dicts are allowed")
