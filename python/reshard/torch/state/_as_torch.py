"""Parts of flat parameters as PyTorch has them: ShardedTensors cut along the first dimension, or DTensors on FSDP's mesh.

A rank's part of a flat parameter is not a rank's part of its rows, so this takes a collective for each tensor. One whole
tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .._tensor import FlatView
from ._errors import StateError
from ._gather import gather_all, put
from ._model import LiveModel
from ._stream import Path, leaves_of
from ._template import OptimizerStateDict


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
    own = dict(leaves_of(tree))
    chunker = _Chunker(live)
    made: dict[Any, Any] = {}

    def receive(path: Path, value: Any) -> None:
        # What this rank has whole stays as it is; what it has nothing of is still a part of the dict, as in PyTorch.
        if path in own and not isinstance(own[path], FlatView):
            value = own[path]
        elif isinstance(value, torch.Tensor):
            value = chunker.chunk(path, value)
        put(made, path, value)

    gather_all(live, tree, None, False, receive, bool(getattr(state, "unplaced", ())))
    # What no rank had a say in.
    for path, value in own.items():
        if not _is_there(made, path):
            put(made, path, value)
    if not isinstance(state, OptimizerStateDict):
        # A model's state has the model's order already.
        state.update(made)
        return
    for key, value in live.in_model_order(made).items():
        # A key that is there keeps its place in a dict: all are put anew, in one order on all ranks.
        state.pop(key, None)
        state[key] = value
    if nested:
        state["param_groups"] = state.pop("param_groups")


def _is_there(tree: Any, path: Path) -> bool:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


class _Chunker:
    """Cuts whole tensors as the FSDP module does that a parameter belongs to."""

    def __init__(self, live: LiveModel) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        self._live = live
        self._modules: dict[int, Any] = {}
        self._first: Any = None
        for module in live.model.modules():
            if isinstance(module, FSDP):
                self._first = self._first or module
                self._modules[id(getattr(module, "_handle", None))] = module
        self._cuts: dict[int, Callable[[torch.Tensor], Any]] = {}

    def chunk(self, path: Path, tensor: torch.Tensor) -> Any:
        """This rank's part of a whole tensor."""
        if tensor.dim() == 0:
            return tensor
        flat = self._live.flat_of(path)
        module = self._modules.get(id(flat.handle), self._first) if flat is not None else self._first
        if id(module) not in self._cuts:
            self._cuts[id(module)] = _cut_of(module)
        return self._cuts[id(module)](tensor)


def _cut_of(module: Any) -> Callable[[torch.Tensor], Any]:
    from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor

    mesh = getattr(module, "_device_mesh", None)
    group: Any = module.process_group
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def cut(tensor: torch.Tensor) -> Any:
        if mesh is not None:
            return _create_chunk_dtensor(tensor, rank, mesh)
        if not tensor.numel():
            # Before torch 2.6 shards without elements count as overlapping; of nothing every rank has the whole.
            return tensor
        per_node = torch.cuda.device_count() if tensor.is_cuda else size
        return _create_chunk_sharded_tensor(tensor, rank, size, per_node, group)

    return cut
