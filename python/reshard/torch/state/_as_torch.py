"""Parts of flat parameters as PyTorch has them: ShardedTensors cut along the first dimension, or DTensors on FSDP's mesh.

A rank's part of a flat parameter is not a rank's part of its rows, so this takes a collective for each tensor. One whole
tensor is in memory at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ._errors import StateError
from ._model import LiveModel
from ._pieces import FlatView
from ._stream import Ranks, gather_tree, leaves_of


def as_torch_tree(live: LiveModel, state: dict[Any, Any]) -> None:
    """Replaces every view of a flat parameter or of a slot in its layout, in place."""
    if not live.has_flats:
        return
    if live.sliced:
        raise StateError(
            "as_torch=True is not for FSDP1 over tensor parallelism: a part of a flat parameter inside of a slice is no "
            "DTensor on one mesh. Save and load without it, by reshard.torch, or shard with fully_shard."
        )
    nested = "state" in state and "param_groups" in state
    tree = {key: value for key, value in state.items() if key != "param_groups"} if nested else state
    whole = {path for path, value in leaves_of(tree) if not isinstance(value, FlatView)}
    chunk = _chunker(live)

    def receive(path: tuple[Any, ...], value: Any) -> None:
        # What this rank has whole stays as it is; what it has nothing of is still a part of the dict, as in PyTorch.
        if path in whole:
            return
        at = state
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = chunk(value) if isinstance(value, torch.Tensor) else value

    gather_tree(tree, Ranks(live.process_group()), None, False, receive)


def _chunker(live: LiveModel) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor

    module = next(m for m in live.model.modules() if isinstance(m, FSDP))
    mesh = getattr(module, "_device_mesh", None)
    group: Any = module.process_group
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def chunk(tensor: torch.Tensor) -> Any:
        if tensor.dim() == 0:
            return tensor
        if mesh is not None:
            return _create_chunk_dtensor(tensor, rank, mesh)
        per_node = torch.cuda.device_count() if tensor.is_cuda else size
        return _create_chunk_sharded_tensor(tensor, rank, size, per_node, group)

    return chunk
