"""torchtitan's checkpoint manager over the engine: all its modes, its folders, and its Hugging Face export.

In a training config, in place of ``CheckpointManager.Config(...)``::

    from reshard.integrations.torchtitan import CheckpointManager

    checkpoint = CheckpointManager.Config(enable=True, folder="checkpoint", interval=500, async_mode="async")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import dcp as _titan

from ..torch import checkpoint as _ours
from ..torch.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank


class CheckpointManager(_titan.CheckpointManager):
    """torchtitan's manager, whose saves and loads go to the engine."""

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.CheckpointManager.Config):
        """torchtitan's own options."""

    def dcp_save(self, *args: Any, **kwargs: Any) -> Any:
        """Saves a state dict, in the mode that was asked for."""
        with _names():
            return super().dcp_save(*args, **kwargs)

    def dcp_load(self, *args: Any, **kwargs: Any) -> None:
        """Loads into a state dict."""
        with _names():
            super().dcp_load(*args, **kwargs)


class _names:
    """For as long as a call lasts, the names by which torchtitan's module knows PyTorch's calls mean the engine's."""

    _OURS = {
        "dcp": _ours,
        "HuggingFaceStorageWriter": _ours.HuggingFaceStorageWriter,
        "consolidate_safetensors_files_on_every_rank": consolidate_safetensors_files_on_every_rank,
    }

    def __enter__(self) -> None:
        self._theirs = {name: vars(_titan)[name] for name in self._OURS}
        vars(_titan).update(self._OURS)

    def __exit__(self, *_: object) -> None:
        vars(_titan).update(self._theirs)
