"""Megatron Core's distributed checkpoints over the engine: a save strategy and a load strategy of its format ``torch_dist``.

::

    from megatron.core import dist_checkpointing
    from reshard.integrations.megatron import LoadStrategy, SaveStrategy

    dist_checkpointing.save(state, path, SaveStrategy())
    state = dist_checkpointing.load(state, path, LoadStrategy())

The optimizer's state that Megatron saves as flat buffers (``dp_reshardable``) can be read by parameter with a map, which Megatron
knows while it runs::

    from reshard.integrations.megatron import save_parameter_map

    save_parameter_map("parameters.json", optimizer, model.sharded_state_dict())

Megatron plans, the engine writes and reads: checksums, an atomic commit, and nothing unpickled that Megatron's own classes do not need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as _dcp
from megatron.core.dist_checkpointing.strategies import torch as _theirs

from .. import torch as rt
from ._parameter_map import parameter_map, save_parameter_map

__all__ = ["LoadStrategy", "SaveStrategy", "parameter_map", "save_parameter_map"]


class SaveStrategy(_theirs.TorchDistSaveShardedStrategy):
    """Saves what Megatron's planner plans through the engine's storage."""

    def __init__(self, keep_only_main_replica: bool = True, thread_count: int = 2) -> None:
        super().__init__("torch_dist", 1, keep_only_main_replica, thread_count)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves a sharded state dict."""
        state, _, _ = _theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state = _theirs.mcore_to_pyt_state_dict(state, False)
        planner = _theirs.MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        _dcp.save(state, storage_writer=rt.StorageWriter(checkpoint_dir, thread_count=self.thread_count), planner=planner)


class LoadStrategy(_theirs.TorchDistLoadShardedStrategy):
    """Loads what Megatron's planner plans through the engine's storage.

    Args:
        allow_pickle: unpickle Megatron's own objects (``ShardedObject``, such as extra states and random states); loading them executes
            code from the file.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        super().__init__()
        self.allow_pickle = allow_pickle

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *rest: Any) -> Any:
        """Loads into a sharded state dict."""
        theirs = _theirs._get_filesystem_reader
        _theirs._get_filesystem_reader = lambda folder, cache_metadata=False: _Reader(folder, allow_pickle=self.allow_pickle)
        try:
            return super().load(sharded_state_dict, checkpoint_dir, *rest)
        finally:
            _theirs._get_filesystem_reader = theirs


class _Reader(rt.StorageReader):
    """Reads the metadata once, as Megatron's own reader does."""

    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The checkpoint's metadata."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
