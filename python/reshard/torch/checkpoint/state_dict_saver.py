"""The names of ``torch.distributed.checkpoint.state_dict_saver``."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict_saver as _theirs
from torch.distributed.checkpoint.state_dict_saver import *  # noqa: F403

from ._calls import async_save as async_save
from ._calls import save as save
from ._calls import save_state_dict as save_state_dict


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)
