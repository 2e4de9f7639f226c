"""The names of ``torch.distributed.checkpoint.state_dict_loader``."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict_loader as _theirs
from torch.distributed.checkpoint.state_dict_loader import *  # noqa: F403

from ._calls import load as load
from ._calls import load_state_dict as load_state_dict


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)
