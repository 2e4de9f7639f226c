"""Loading an optimizer by the layout of the model's own parameters, from nothing but the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ... import _reshard
from ..._errors import NotFound
from .._group import DEFAULT_TIMEOUT, group_for
from .._tensor import is_tensor
from ._expand import entries_below, key_types_of
from ._template import Slots

if TYPE_CHECKING:
    from ..._types import StorageOptions, StrPath


@torch.no_grad()
def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    path: StrPath | Any = None,
    planner: Any = None,
    *,
    checkpoint_id: StrPath | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: StorageOptions | None = None,
) -> dict[str, Any]:
    """Loads the optimizer that a checkpoint keeps under a key, every slot laid out as its parameter is.

    The tree comes from the checkpoint itself, so no optimizer is needed, nor one that has run. Only the regions that this rank
    holds are read; no tensor is whole unless its parameter is. Single-element slots, and slots of another shape than their
    parameter's, are whole on every rank.

    Args:
        model_state_dict: the model's state dict: DTensors, ShardedTensors, :class:`reshard.torch.ShardView` or plain tensors.
        optimizer_key: the key under which the optimizer was saved.
        path: the checkpoint, or a storage reader that knows its path.
        planner: accepted as in PyTorch, and not needed.

    Returns:
        ``{optimizer_key: state}``.
    """
    # The modules that save and load ask this package about optimizers.
    from .._load import load
    from .._save import chosen_path

    if path is not None and not isinstance(path, (str, bytes)) and not hasattr(path, "__fspath__"):
        path = getattr(path, "path", None) or getattr(path, "checkpoint_id", None) or path
    known: Any = path
    where = chosen_path(known, checkpoint_id)
    group = group_for(process_group, no_dist, timeout=timeout)
    checkpoint = _reshard.Checkpoint(where, storage_options, group)
    entries = entries_below(checkpoint.entries(), (optimizer_key,))
    if not entries:
        raise NotFound(f"{where} keeps no optimizer under {optimizer_key!r}", keys=[optimizer_key])
    slots = Slots({name: value for name, value in model_state_dict.items() if is_tensor(value)})
    types = key_types_of(checkpoint, (optimizer_key,), entries)
    state = {optimizer_key: slots.tree(entries, {}, key_types=types)}
    load(
        state,
        where,
        process_group=process_group,
        no_dist=no_dist,
        allow_pickle=allow_pickle,
        timeout=timeout,
        storage_options=storage_options,
    )
    return state
