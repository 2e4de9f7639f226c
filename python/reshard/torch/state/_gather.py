"""Gathering a model's state where its parameters are shared between different ranks.

FSDP modules of one model may have process groups of their own, as experts have that only some ranks train. Each tensor is
gathered between the ranks of its own group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ._model import LiveModel
from ._stream import Path, Ranks, gather_tree, leaves_of


def gather_all(
    live: LiveModel,
    tree: Mapping[Any, Any],
    receivers: Sequence[int] | None,
    cpu_offload: bool,
    receive: Callable[[Path, Any], None],
    compared: bool = False,
) -> bool:
    """Gathers every leaf of a nested dict and gives it to `receive` on the ranks that receive it. Whether this rank is one:
    receivers are ranks among those that hold the model together, and of a smaller group rank 0 where it has none of them.
    `compared` refuses tensors that look like replicas and are not."""
    default = live.process_group()
    by_group: dict[Any, dict[Any, Any]] = {group: {} for group in (default, *live.process_groups())}
    if len(by_group) == 1:
        gather_tree(tree, Ranks(default), receivers, cpu_offload, receive, compared)
        return receivers is None or Ranks(default).rank in receivers
    for path, value in leaves_of(tree):
        flat = live.flat_of(path, value)
        put(by_group[default if flat is None else flat.process_group()], path, value)
    received = False
    # In one order on all ranks, so that no two of them wait for each other in different groups.
    for group in sorted(by_group, key=_ranks_of):
        ranks = Ranks(group)
        wanted = None if receivers is None else _members(ranks, default, receivers)
        gather_tree(by_group[group], ranks, wanted, cpu_offload, receive, compared)
        received = received or wanted is None or ranks.rank in wanted
    return received


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def _members(ranks: Ranks, default: Any, receivers: Sequence[int]) -> list[int]:
    """Receivers, by their ranks in another group."""
    everyone, members = _ranks_of(default), _ranks_of(ranks.group)
    return [members.index(everyone[rank]) for rank in receivers if everyone[rank] in members] or [0]


def put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Puts a leaf into nested dicts."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
