"""Which parameters lie in the buckets of Megatron's distributed optimizer: what its ``dp_reshardable`` checkpoints do not say."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .._errors import InvalidInput
from .._paths import StrPath, path_text


def parameter_map(optimizer: Any, model_sharded_state_dict: Any) -> dict[str, Any]:
    """The map of this rank's buckets, as plain data.

    Args:
        optimizer: Megatron's distributed optimizer, or a chain of them.
        model_sharded_state_dict: what ``model.sharded_state_dict()`` returns.
    """
    tensors = sorted(_leaves(model_sharded_state_dict), key=_address)
    addresses = [_address(tensor) for tensor in tensors]
    chained = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    buckets = []
    for number, inner in enumerate(chained):
        prefix = f"chained_{number}." if len(chained) > 1 else ""
        prefix += f"optimizer.distributed.dp_group_idx_{inner.data_parallel_group_idx}"
        for index, (buffer, ranges) in enumerate(zip(inner.buffers, inner.gbuf_ranges, strict=True)):
            (dtype,) = ranges
            for position, bucket in enumerate(buffer.buckets):
                parameters = []
                for parameter in bucket.params_list:
                    start = buffer.param_index_map[parameter][0] - bucket.offset
                    first = bisect_left(addresses, parameter.data_ptr())
                    last = bisect_left(addresses, parameter.data_ptr() + parameter.numel() * parameter.element_size())
                    parameters += _placed(parameter, start, tensors[first:last])
                elements = getattr(bucket, "numel_unpadded", None)
                if elements is None:
                    elements = max(buffer.param_index_map[parameter][1] for parameter in bucket.params_list) - bucket.offset
                key = f"{prefix}.gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{position}"
                buckets.append({"key": key, "elements": int(elements), "parameters": parameters})
    return {"version": 1, "buckets": buckets}


def save_parameter_map(path: StrPath, optimizer: Any, model_sharded_state_dict: Any) -> None:
    """Writes the map of all ranks' buckets, once for a training: every rank calls it, rank 0 writes.

    ``reshard --parameter-map FILE`` and ``parameter_map=`` take it; see ``docs/other-formats.md``.

    Args:
        path: the file to write.
        optimizer: Megatron's distributed optimizer, or a chain of them.
        model_sharded_state_dict: what ``model.sharded_state_dict()`` returns.
    """
    mine = parameter_map(optimizer, model_sharded_state_dict)
    every = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        every = gathered
    if not dist.is_initialized() or dist.get_rank() == 0:
        buckets = {bucket["key"]: bucket for one in every for bucket in one["buckets"]}
        text = json.dumps({"version": 1, "buckets": list(buckets.values())}, indent=1) + "\n"
        name = path_text(path)
        with open(f"{name}.partial", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{name}.partial", name)


def _address(tensor: Any) -> int:
    """Where a sharded tensor's part lies in memory."""
    return tensor.data.data_ptr()


def _leaves(tree: Any) -> Iterator[Any]:
    """What is sharded in a tree of dicts and lists; a factory's parts, such as the two halves of a gated layer."""
    if isinstance(tree, dict):
        for below in tree.values():
            yield from _leaves(below)
    elif isinstance(tree, list | tuple):
        for below in tree:
            yield from _leaves(below)
    elif hasattr(tree, "build") and hasattr(tree, "build_fn"):
        yield from _leaves(tree.build())
    elif hasattr(tree, "local_shape") and isinstance(tree.data, torch.Tensor):
        yield tree


def _placed(parameter: torch.Tensor, start: int, tensors: list[Any]) -> list[dict[str, Any]]:
    """The boxes of which a parameter of this rank is made, with their places in the bucket."""
    first, size = parameter.data_ptr(), parameter.element_size()
    boxes: list[dict[str, Any]] = []
    for tensor in tensors:
        if not tensor.data.is_contiguous():
            continue
        shape = [1] * tensor.prepend_axis_num + list(tensor.local_shape)
        box = {"name": tensor.key, "start": start + (tensor.data.data_ptr() - first) // size, "shape": shape}
        boxes.append(box | {"offset": list(tensor.global_offset), "of": list(tensor.global_shape)})
    covered = sum(torch.Size(box["shape"]).numel() for box in boxes)
    if covered != parameter.numel():
        raise InvalidInput(
            f"the model's sharded state dict has {covered} of the {parameter.numel()} elements of a parameter of shape "
            f"{list(parameter.shape)}; give what model.sharded_state_dict() returns for the model that the optimizer trains"
        )
    return boxes
