"""Batches of cases, and what is said of one that failed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .case import Case, random_case
from .nets import fully_shard
from .shrink import shrunk


def batches(seed: int, size: int) -> Iterator[list[Case]]:
    """Cases without end, by their seeds; those of a batch have their numbers of ranks in common, and so do those of a seed."""
    while True:
        rng = random.Random(seed // size)
        # Few ranks are cheap, and many bugs need no more than two.
        worlds = tuple(rng.choice((1, 2, 2, 2, 3, 4, 4)) for _ in range(2))
        end = (seed // size + 1) * size
        yield [random_case(number, worlds, fully_shard is not None) for number in range(seed, end)]
        seed = end


def report(player: Any, case: Case, outcome: Any, tries: int) -> str:
    """A failure, what is left of the case when it is made smaller, and how to see it again."""

    def fails(candidate: Case) -> bool:
        return bool(player.play([candidate])[0].how == "failed")

    small = shrunk(case, fails, tries)
    said = outcome if small == case else player.play([small])[0]
    lines = [f"seed {case.seed} failed: {case.text()}", f"smaller: {small.text()}", said.text or outcome.text]
    lines.append(f"again: cd python/tests && python -m campaign --case '{small.text()}'")
    return "\n".join(lines)
