"""ZeRO's state of another number of ranks, as this rank would have saved it: DeepSpeed says which parts of which parameters this rank
holds, the engine finds them in the checkpoint."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from .. import torch as rt
from .._errors import Incomplete, InvalidInput
from ..torch._group import group_for
from ..torch._load import load_present


def resized(engine: Any, folder: str, tag: str, timeout: float) -> dict[str, Any]:
    """The optimizer's state as it would have been saved by this rank, had there been as many ranks as now."""
    first = _first(engine, folder, tag)
    third = engine.zero_optimization_partition_weights()
    flat, base = (
        ("fp32_flat_groups", "optimizer_state_dict") if third else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    unlike = {
        "experts": engine.has_moe_layers,
        "another number of tensor-parallel ranks": engine.loaded_checkpoint_mp_world_size not in (None, engine.mp_world_size),
        "optimizer states on NVMe": engine.zero_nvme_offload_optimizer(),
        "elastic_checkpoint": not isinstance(first[base], dict),
    }
    if any(unlike.values()):
        what = next(what for what, there in unlike.items() if there)
        message = f"a checkpoint of {engine.loaded_checkpoint_dp_world_size} ranks with {what} loads on as many ranks only"
        raise InvalidInput(message, hint="convert it with DeepSpeed's ds_to_universal")
    optimizer = engine.optimizer
    current = (
        optimizer.fp32_partitioned_groups_flat if third else [group["params"][0] for group in optimizer.optimizer.param_groups]
    )
    like: dict[str, Any] = next(iter(first[base]["state"].values()), {})
    wanted: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    weights: list[torch.Tensor] = []
    slots: dict[int, dict[str, Any]] = {}
    groups = _held(engine, third)
    for number, (partition, held) in enumerate(zip(current, groups, strict=True)):
        whole = torch.zeros(partition.numel(), dtype=partition.dtype, device="cpu")
        weights.append(whole)
        own = slots[number] = {
            name: torch.zeros(partition.numel(), dtype=value.dtype, device="cpu") if _is_flat(value) else copy.deepcopy(value)
            for name, value in like.items()
        }
        for position, (name, shape, at, start, numel) in enumerate(held):
            parts = {slot: value[at : at + numel] for slot, value in own.items() if _is_flat(value)}
            cut = {slot: rt.ShardView.of_range(part, shape, start) for slot, part in parts.items()}
            wanted["model"][name] = rt.ShardView.of_range(whole[at : at + numel], shape, start)
            wanted["optim"]["state"][name] = {**own, **cut} if position == 0 else cut
    _load(engine, wanted, folder, tag, timeout)
    for number, held in enumerate(groups):
        # What is no partition, such as the step, is the same in a whole group: its first parameter's.
        loaded = wanted["optim"]["state"][held[0][0]]
        slots[number].update({slot: value for slot, value in loaded.items() if not _is_flat(slots[number][slot])})
    options = _groups(optimizer, first[base]["param_groups"], third)
    mine = {**first, flat: weights, base: {"state": slots, "param_groups": options}}
    for key, attribute in (("group_paddings", "groups_padding"), ("param_alignment_paddings", "round_robin_bit16_padding")):
        if key in mine and hasattr(optimizer, attribute):
            mine[key] = getattr(optimizer, attribute)
    return mine


def _first(engine: Any, folder: str, tag: str) -> dict[str, Any]:
    """The optimizer's state of the first rank that saved; of its tensors only what is looked at is read."""
    bf16 = engine.bfloat16_enabled()
    paths = [engine._get_all_zero_checkpoint_names(folder, tag, each)[0] for each in (bf16, not bf16)]
    for path in paths:
        if os.path.exists(path):
            read: dict[str, Any] = engine.checkpoint_engine.read(path, map_location="cpu", mmap=True)
            state: dict[str, Any] = read["optimizer_state_dict"]
            return state
    raise Incomplete(f"{paths[0]} is missing, without which the checkpoint cannot be loaded", files=[paths[0]])


def resized_frozen(engine: Any, folder: str, tag: str, checkpoint: dict[str, Any], timeout: float) -> dict[str, Any]:
    """A model file of stage 3, whose frozen parameters are cut as this rank holds them."""
    frozen, count = checkpoint.get("frozen_param_fragments"), checkpoint.get("dp_world_size")
    if not frozen or not engine.zero_optimization_partition_weights() or count in (None, engine.seq_dp_world_size):
        return checkpoint
    parameters = {name: each for each, name in engine.param_names.items() if name in frozen}
    cut = {name: frozen[name].new_zeros(each.partition_numel()) for name, each in parameters.items()}
    rank = torch.distributed.get_rank(engine.optimizer.dp_process_group)
    wanted = {}
    for name, each in parameters.items():
        start, numel = _share(each, rank)
        wanted[name] = rt.ShardView.of_range(cut[name][:numel], each.ds_shape, start)
    _load(engine, {"model": wanted}, folder, tag, timeout)
    return {**checkpoint, "frozen_param_fragments": cut}


def _load(engine: Any, wanted: dict[str, Any], folder: str, tag: str, timeout: float) -> None:
    """Loads from DeepSpeed's files, with tensor parallelism from those of this rank's part of the model; what they hold besides does not
    matter."""
    options: Any = {"partial": False, "ignore_unexpected": True, "cast": "never", "allow_pickle": False, "verify": "whole"}
    part, alike = (engine.checkpoint_mp_rank, engine.optimizer.dp_process_group) if engine.mp_world_size > 1 else (None, None)
    load_present(wanted, f"{folder}/{tag}", group_for(alike, timeout=timeout), **options, model_rank=part)


def _held(engine: Any, third: bool) -> list[list[tuple[str, Any, int, int, int]]]:
    """What this rank holds, by group: of each parameter the name, the shape, where its part lies in the rank's partition, and the part's
    first element and length."""
    groups: list[list[tuple[str, Any, int, int, int]]] = []
    optimizer, rank = engine.optimizer, torch.distributed.get_rank(engine.optimizer.dp_process_group)
    for group in optimizer.fp16_groups if third else getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups:
        at, held = 0, []
        for each in group:
            if third:
                held.append((engine.param_names[each], each.ds_shape, at, *_share(each, rank)))
                at += each.partition_numel()
            else:
                mapped = each._hp_mapping
                there = (
                    (mapped.hp_fragment_address.start, mapped.lp_fragment_address.start, mapped.lp_fragment_address.numel)
                    if mapped
                    else (0, 0, 0)
                )
                held.append((engine.param_names[each], each.shape, *there))
        groups.append(held)
    return groups


def _share(parameter: Any, rank: int) -> tuple[int, int]:
    """Stage 3 cuts each parameter by itself into equal parts, the last ones padded: a rank's first element, and how many it has."""
    start = min(rank * parameter.partition_numel(), parameter.ds_numel)
    return start, min(parameter.partition_numel(), parameter.ds_numel - start)


def _is_flat(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() == 1


def _groups(optimizer: Any, saved: list[dict[str, Any]], third: bool) -> list[dict[str, Any]]:
    """The options that were saved, over the partitions that there are now."""
    if third:
        optimizer._set_fp32_optimizer_param_groups()
    current = optimizer.optimizer.state_dict()["param_groups"]
    if third:
        optimizer._clear_fp32_optimizer_param_groups()
    return [{**old, "params": new["params"]} for old, new in zip(saved, current, strict=True)]
