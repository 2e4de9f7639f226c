"""What Lightning's and Fabric's strategies have in common over the engine: Lightning's own folders, written in the background."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME

from .. import _reshard
from .. import open as open_checkpoint
from .. import torch as rt
from ._trust import read_objects

#: What is neither model nor optimizer is also part of the checkpoint: it is published with the rest, where `meta.pt` is a file of its own.
_REST = "lightning_meta"


class Background:
    """A strategy that writes while training goes on. A checkpoint counts when its ``.metadata`` is there."""

    background: bool = True
    _pending: rt.AsyncSaveHandle | None = None

    @property
    def over_the_engine(self: Any) -> bool:
        """Whether checkpoints are folders; single files stay Lightning's own."""
        return bool(
            getattr(self, "_state_dict_type", "sharded") == "sharded" and getattr(self, "_save_distributed_checkpoint", True)
        )

    def settle(self) -> None:
        """Waits until the last checkpoint is durable; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def write(self: Any, path: Path, state: dict[str, Any], rest: dict[str, Any]) -> None:
        """Saves a folder as Lightning does."""
        self.settle()
        if self.global_rank == 0:
            if path.is_file() or path.is_symlink():
                path.unlink()
            path.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            torch.save(rest, buffer)
            state = {**state, _REST: buffer.getvalue()}
            # Lightning takes a folder for a checkpoint when it has this file.
            _reshard.publish_file(str(path), _METADATA_FILENAME, buffer.getvalue())
        self.barrier()
        if self.background:
            self._pending = rt.async_save(state, path, overwrite=True)
        else:
            rt.save(state, path, overwrite=True)

    def read(self: Any, path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
        """Loads a folder that Lightning or reshard saved, and returns what is neither model nor optimizer."""
        rt.load(state, path, strict=strict, cast="any")
        with open_checkpoint(path) as checkpoint:
            rest = checkpoint[_REST] if _REST in checkpoint else None
        file = path / _METADATA_FILENAME
        hint = "pass weights_only=False only for files you trust, or declare the class with torch.serialization.add_safe_globals"
        found: dict[str, Any] = read_objects(
            file if rest is None else io.BytesIO(rest), str(file), allow_pickle=weights_only is False, hint=hint
        )
        return found

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        """Removes a checkpoint, never one that is still being written."""
        if self._pending is not None and os.path.realpath(self._pending.path) == os.path.realpath(filepath):
            self.settle()
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    def teardown(self) -> None:
        """Waits for the last checkpoint."""
        self.settle()
        super().teardown()  # type: ignore[misc]


def inner(optimizer: Any) -> Any:
    """The optimizer in Lightning's and Fabric's wrappers."""
    return getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None) or optimizer
