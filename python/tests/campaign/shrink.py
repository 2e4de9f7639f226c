"""A case that fails, made smaller as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .case import Case, Part, Side, possible


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one thing, the largest steps first."""
    for number in range(len(case.parts)):
        yield replace(case, parts=case.parts[:number] + case.parts[number + 1 :])
    for name in ("save", "load"):
        yield replace(case, **{name: "ours"})
    for name in ("options", "save_options", "load_options", "settings"):
        given = getattr(case, name)
        if given:
            yield replace(case, **{name: {}})
        for key in given:
            yield replace(case, **{name: {k: v for k, v in given.items() if k != key}})
    for name in ("source", "target"):
        side = getattr(case, name)
        yield replace(case, **{name: Side(world=side.world, steps=side.steps)})
        for world in range(1, side.world):
            yield replace(case, **{name: replace(side, world=world)})
        for one in fields(Side):
            if one.name not in ("world", "steps"):
                yield replace(case, **{name: replace(side, **{one.name: one.default})})
        for steps in range(side.steps):
            yield replace(case, **{name: replace(side, steps=steps)})
    for name, value in (
        ("optimizer", "AdamW"),
        ("optimizer", "SGD"),
        ("groups", 1),
        ("empty_group", False),
        ("odd_groups", False),
        ("tensor_lr", False),
        ("optimizers", 1),
        ("width", 4),
    ):
        yield replace(case, **{name: value})
    for number, part in enumerate(case.parts):
        for one in fields(Part):
            simpler = replace(part, **{one.name: one.default})
            yield replace(case, parts=(*case.parts[:number], simpler, *case.parts[number + 1 :]))


def shrunk(case: Case, fails: Callable[[Case], bool], tries: int) -> Case:
    """The smallest case that still fails, within a number of tries."""
    if case.plain:
        return case
    seen = {case.text()}
    again = True
    while again and tries > 0:
        again = False
        for candidate in map(possible, smaller(case)):
            if candidate.text() in seen or len(candidate.text()) >= len(case.text()) + 2:
                continue
            seen.add(candidate.text())
            tries -= 1
            if fails(candidate):
                case, again = candidate, True
                break
            if tries <= 0:
                break
    return case
