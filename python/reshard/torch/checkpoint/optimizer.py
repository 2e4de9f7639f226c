"""``load_sharded_optimizer_state_dict`` with PyTorch's signature."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import optimizer as _theirs
from torch.distributed.checkpoint.optimizer import *  # noqa: F403

from .. import state as _state
from . import _torch
from ._failures import as_torch
from ._options import options
from ._route import default_load_planner, reader_route


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


def load_sharded_optimizer_state_dict(  # type: ignore[no-redef]
    model_state_dict: Any, optimizer_key: str, storage_reader: Any, planner: Any = None
) -> dict[str, Any]:
    """See :func:`reshard.torch.load_sharded_optimizer_state_dict`."""
    route = reader_route(storage_reader, None, None, False)
    if route.path is None or not default_load_planner(planner):
        return _torch.load_sharded_optimizer_state_dict(model_state_dict, optimizer_key, route.storage, planner)
    with as_torch("load", None, False):
        return _state.load_sharded_optimizer_state_dict(
            model_state_dict, optimizer_key, route.path, allow_pickle=options.allow_pickle, timeout=options.timeout
        )
