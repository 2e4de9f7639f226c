"""Where ZeRO keeps each rank's part of parameters and moments, and the same state cut for another number of ranks.

A parameter, flattened, is a sequence of fragments: each lies in one rank's flat partition of one group. Stages 1 and 2 say where in
``param_slice_mappings``; stage 3 cuts each parameter by itself into equal parts, the last one padded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from .._errors import InvalidInput, Mismatch


class _Fragment(NamedTuple):
    """A part of a flattened parameter, and where it lies."""

    rank: int
    group: int
    start: int
    numel: int


class _Wanted(NamedTuple):
    """A part of a flattened parameter, and where it goes in this rank's partition of its group."""

    name: str
    offset: int
    start: int
    numel: int


def resized(engine: Any, folder: str, tag: str, shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """The optimizer's state as it would have been saved by this rank, had there been as many ranks as now."""
    optimizer = engine.optimizer
    if engine.has_moe_layers or engine.zero_nvme_offload_optimizer():
        what = "experts" if engine.has_moe_layers else "optimizer states on NVMe"
        raise InvalidInput(
            f"a checkpoint of {engine.loaded_checkpoint_dp_world_size} ranks with {what} loads on as many ranks only",
            hint="convert it with DeepSpeed's ds_to_universal",
        )
    states = [_read(path)["optimizer_state_dict"] for path in _optimizer_files(engine, folder, tag)]
    third = engine.zero_optimization_partition_weights()
    flat, base = (
        ("fp32_flat_groups", "optimizer_state_dict") if third else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    if not isinstance(states[0][base], dict):
        raise InvalidInput("an elastic checkpoint of DeepSpeed loads on as many ranks as there were only")
    found = _cut(shapes, len(states)) if third else _mapped(states)
    groups = _wanted_third(engine) if third else _wanted(engine)

    def moved(group: int, size: int, values: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor | None = None
        for wanted in groups[group]:
            for target, fragment, source in _overlaps(wanted, found):
                values_there = values(fragment.rank, fragment.group).detach().view(-1)
                if whole is None:
                    whole = torch.zeros(size, dtype=values_there.dtype)
                whole[target] = values_there[source]
        return torch.zeros(size) if whole is None else whole

    mine = dict(states[0])
    current = (
        optimizer.fp32_partitioned_groups_flat if third else [group["params"][0] for group in optimizer.optimizer.param_groups]
    )
    mine[flat] = [moved(g, part.numel(), lambda r, old: states[r][flat][old]) for g, part in enumerate(current)]
    slots: dict[int, dict[str, Any]] = {}
    for g, part in enumerate(current):
        first = found[groups[g][0].name][0].group if groups[g] else g
        for name, value in states[0][base]["state"].get(first, {}).items():
            if torch.is_tensor(value) and value.dim() == 1:
                value = moved(g, part.numel(), lambda r, old, name=name: states[r][base]["state"][old][name])  # type: ignore[misc]
            slots.setdefault(g, {})[name] = value
    mine[base] = {"state": slots, "param_groups": _groups(optimizer, states[0][base]["param_groups"], third)}
    for key, attribute in (("group_paddings", "groups_padding"), ("param_alignment_paddings", "round_robin_bit16_padding")):
        if key in mine and hasattr(optimizer, attribute):
            mine[key] = getattr(optimizer, attribute)
    return mine


def resized_frozen(engine: Any, folder: str, tag: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A model file of stage 3, whose frozen parameters are cut as this rank holds them."""
    frozen, count = checkpoint.get("frozen_param_fragments"), checkpoint.get("dp_world_size")
    if not frozen or not engine.zero_optimization_partition_weights() or count in (None, engine.seq_dp_world_size):
        return checkpoint
    files = [_read(engine._get_ckpt_name(folder, tag, pp_placeholder=str(rank))) for rank in range(count)]
    found = _cut([{name: shape} for name, shape in checkpoint["frozen_param_shapes"].items()], count)
    rank, size = torch.distributed.get_rank(engine.optimizer.dp_process_group), engine.seq_dp_world_size
    cut = {}
    for name, shape in checkpoint["frozen_param_shapes"].items():
        part = _share(prod(shape), size)
        cut[name] = frozen[name].new_zeros(part)
        wanted = _Wanted(name, 0, rank * part, max(0, min(part, prod(shape) - rank * part)))
        for target, fragment, source in _overlaps(wanted, found):
            cut[name][target] = files[fragment.rank]["frozen_param_fragments"][name].view(-1)[source]
    return {**checkpoint, "frozen_param_fragments": cut}


def _optimizer_files(engine: Any, folder: str, tag: str) -> list[str]:
    either = [
        engine._get_all_zero_checkpoint_names(folder, tag, bf16)
        for bf16 in (engine.bfloat16_enabled(), not engine.bfloat16_enabled())
    ]
    for names in either:
        if all(os.path.exists(name) for name in names):
            return list(names)
    missing = [name for name in either[0] if not os.path.exists(name)]
    raise Mismatch(f"files of the checkpoint are missing: {', '.join(missing)}", files=missing)


def _read(path: str) -> Any:
    """One of DeepSpeed's files; of those that can be mapped only what is used is read."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=torch.serialization._is_zipfile(open(path, "rb")))


def _share(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


def _mapped(states: list[dict[str, Any]]) -> dict[str, list[_Fragment]]:
    found: dict[str, list[_Fragment]] = {}
    for rank, state in enumerate(states):
        for group, mapping in enumerate(state["param_slice_mappings"]):
            for name, address in mapping.items():
                found.setdefault(name, []).append(_Fragment(rank, group, address.start, address.numel))
    return found


def _cut(shapes: list[dict[str, Any]], ranks: int) -> dict[str, list[_Fragment]]:
    found: dict[str, list[_Fragment]] = {}
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            part = _share(prod(shape), ranks)
            sizes = [max(0, min(part, prod(shape) - rank * part)) for rank in range(ranks)]
            found[name] = [_Fragment(rank, group, offset, size) for rank, size in enumerate(sizes)]
            offset += part
    return found


def _wanted(engine: Any) -> list[list[_Wanted]]:
    optimizer = engine.optimizer
    groups = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.bf16_groups
    wanted: list[list[_Wanted]] = []
    for group in groups:
        mapped = [(engine.param_names[each], each._hp_mapping) for each in group if each._hp_mapping is not None]
        wanted.append(
            [
                _Wanted(name, at.hp_fragment_address.start, at.lp_fragment_address.start, at.lp_fragment_address.numel)
                for name, at in mapped
            ]
        )
    return wanted


def _wanted_third(engine: Any) -> list[list[_Wanted]]:
    rank, ranks = torch.distributed.get_rank(engine.optimizer.dp_process_group), engine.seq_dp_world_size
    wanted: list[list[_Wanted]] = []
    for group in engine.optimizer.fp16_groups:
        offset, parts = 0, []
        for each in group:
            part = _share(each.ds_numel, ranks)
            numel = max(0, min(part, each.ds_numel - rank * part))
            parts.append(_Wanted(engine.param_names[each], offset, rank * part, numel))
            offset += part
        wanted.append(parts)
    return wanted


def _overlaps(wanted: _Wanted, found: dict[str, list[_Fragment]]) -> Iterator[tuple[slice, _Fragment, slice]]:
    """Where what is wanted lies: a slice of the target, the fragment, and a slice of its partition."""
    if wanted.name not in found:
        raise Mismatch(f"the checkpoint has no parameter {wanted.name!r}", keys=[wanted.name])
    at, end = 0, wanted.start + wanted.numel
    for fragment in found[wanted.name]:
        start, stop = max(at, wanted.start), min(at + fragment.numel, end)
        if start < stop:
            target, source = wanted.offset + start - wanted.start, fragment.start + start - at
            yield slice(target, target + stop - start), fragment, slice(source, source + stop - start)
        at += fragment.numel
    if at < end:
        raise Mismatch(f"{wanted.name!r} has {at} elements in the checkpoint and more in the model", keys=[wanted.name])


def _groups(optimizer: Any, saved: list[dict[str, Any]], third: bool) -> list[dict[str, Any]]:
    """The options that were saved, over the partitions that there are now."""
    if third:
        optimizer._set_fp32_optimizer_param_groups()
    current = optimizer.optimizer.state_dict()["param_groups"]
    if third:
        optimizer._clear_fp32_optimizer_param_groups()
    return [{**old, "params": new["params"]} for old, new in zip(saved, current, strict=True)]
