"""Whole copies of sharded parameters that FSDP keeps after a forward without backward.

The root module (and with some strategies every module) stays unsharded then, and the next forward uses what is there. A load
writes into the shards, so the copies have to go: the next forward gathers anew. Freeing them needs no other rank, but all ranks of
a group have to do it, since the gathering that follows is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed.tensor import DTensor


def _fsdp2_class() -> type | tuple[()]:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        try:
            # torch 2.5
            from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]
        except ImportError:
            return ()
    return FSDPModule


FSDP2 = _fsdp2_class()


def _param_groups(module: Any) -> Iterator[Any]:
    """The groups of parameters that ``fully_shard`` gathers together."""
    if not isinstance(module, FSDP2):
        return
    state = module._get_fsdp_state()  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        # One for each module, in earlier releases.
        groups = [state._fsdp_param_group]
    yield from (group for group in groups if group is not None)


def reshard_modules(model: nn.Module) -> None:
    """Brings every parameter that ``fully_shard`` manages into its sharded form, as ``state_dict()`` does."""
    for module in model.modules():
        for group in _param_groups(module):
            group._to_sharded()


class LoadedShards:
    """Shards that a load has written, and the copies of them that are to go."""

    def __init__(self) -> None:
        self._written: list[DTensor] = []

    def add(self, tensor: DTensor) -> None:
        """A tensor that was loaded into."""
        self._written.append(tensor)

    def free_copies(self) -> None:
        """Reshards what has been loaded into and is still unsharded, of whatever model it is a part."""
        if not self._written:
            return
        modules = list(_composable_state._module_state_mapping)
        unsharded = [group for module in modules for group in _param_groups(module) if not group.is_sharded]
        if not unsharded:
            return
        written = {_identity(tensor) for tensor in self._written}
        for group in unsharded:
            if any(_identity(param.sharded_param) in written for param in group.fsdp_params):
                group._to_sharded()


def _identity(tensor: DTensor) -> Any:
    """What tells a shard from others. A state dict holds other objects over the same memory; a shard without elements has no
    memory, and this rank has to do as those that hold something."""
    local = tensor._local_tensor
    address = local.untyped_storage().data_ptr() if local.numel() else 0
    return address or (tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))
