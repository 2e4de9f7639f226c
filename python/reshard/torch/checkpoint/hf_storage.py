"""Hugging Face's format: reading through the engine, and sharded files put together by the engine's conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _torch

if _torch.HuggingFaceStorageWriter is not None:
    from torch.distributed.checkpoint import hf_storage as _theirs
    from torch.distributed.checkpoint.hf_storage import *  # noqa: F403

    def __getattr__(name: str) -> Any:
        return getattr(_theirs, name)


if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as _Reader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as _Writer
else:
    _Writer = _torch.HuggingFaceStorageWriter or object
    _Reader = _torch.HuggingFaceStorageReader or object


class HuggingFaceStorageWriter(_Writer):  # type: ignore[no-redef]
    """PyTorch's writer of safetensors; what it consolidates is verified, synced, and published when it is complete."""

    def finish(self, metadata: Any, results: Any) -> None:
        """Consolidates what the ranks wrote, where that was asked for; writes the index otherwise."""
        from ._consolidate_hf_safetensors import consolidate_safetensors_files

        if not self.save_distributed or not self.enable_consolidation:
            super().finish(metadata, results)
            return
        files = self.fqn_to_index_mapping or dict.fromkeys(metadata.state_dict_metadata, 1)
        threads = getattr(self, "thread_count_consolidation", 1)
        consolidate_safetensors_files(str(self.path), str(self.consolidated_output_path), files, threads)


class HuggingFaceStorageReader(_Reader):  # type: ignore[no-redef]
    """PyTorch's reader of safetensors; with PyTorch's own planner the engine reads."""
