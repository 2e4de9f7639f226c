"""Lightning's ModelParallel strategy (FSDP2, tensor parallelism) over the engine: Lightning's own folders, saved in the background.

::

    from reshard.integrations.lightning import ModelParallelStrategy

    trainer = Trainer(strategy=ModelParallelStrategy(data_parallel_size=8), ...)

A checkpoint counts when its ``.metadata`` is there; with ``background=True`` that is after ``save_checkpoint`` has returned, and before
the next one, a load, or the end of the run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME
from lightning.pytorch import strategies as _theirs
from lightning.pytorch.trainer.states import TrainerFn

from .. import torch as rt


class _OverTheEngine:
    """What both strategies have in common."""

    _model_key: str
    background: bool
    _pending: rt.AsyncSaveHandle | None = None

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """The model's state, by names without any wrapper."""
        if not self._is_sharded:
            return super().lightning_module_state_dict()  # type: ignore[misc,no-any-return]
        return rt.get_model_state_dict(self.model)

    def optimizer_state(self: Any, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state, by parameter names."""
        if not self._is_sharded:
            return super().optimizer_state(optimizer)  # type: ignore[misc,no-any-return]
        return rt.get_optimizer_state_dict(self.model, _inner(optimizer))

    @property
    def _is_sharded(self: Any) -> bool:
        return bool(
            getattr(self, "_state_dict_type", "sharded") == "sharded" and getattr(self, "_save_distributed_checkpoint", True)
        )

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a folder as Lightning does."""
        if not self._is_sharded:
            return super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc,no-any-return]
        self.settle()
        path = Path(self.broadcast(filepath))
        if self.global_rank == 0:
            if path.is_file():
                path.unlink()
            path.mkdir(parents=True, exist_ok=True)
        state = {self._model_key: checkpoint.pop("state_dict")}
        state.update({f"optimizer_{i}": each for i, each in enumerate(checkpoint.pop("optimizer_states", []))})
        if self.global_rank == 0:
            _save_rest(checkpoint, path)
        if self.background:
            self._pending = rt.async_save(state, path, overwrite=True, storage_options=storage_options)
        else:
            rt.save(state, path, overwrite=True, storage_options=storage_options)
        return None

    def settle(self: Any) -> None:
        """Waits until the last checkpoint is durable; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder that Lightning or reshard saved, on any number of ranks."""
        self.settle()
        path = Path(self.broadcast(checkpoint_path))
        if not (path / ".metadata").exists():
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc,no-any-return]
        optimizers = self.optimizers if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []
        state = {self._model_key: rt.get_model_state_dict(self.model)}
        state.update(
            {f"optimizer_{i}": rt.get_optimizer_state_dict(self.model, _inner(each)) for i, each in enumerate(optimizers)}
        )
        rt.load(state, path, strict=self.lightning_module.strict_loading)
        rt.set_model_state_dict(self.model, state[self._model_key])
        for i, each in enumerate(optimizers):
            rt.set_optimizer_state_dict(self.model, _inner(each), state[f"optimizer_{i}"])
        found: dict[str, Any] = torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
        return found

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        """Removes a checkpoint, never one that is still being written."""
        if self._pending is not None and os.path.abspath(self._pending.path) == os.path.abspath(filepath):
            self.settle()
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    def teardown(self: Any) -> None:
        """Waits for the last checkpoint."""
        self.settle()
        super().teardown()  # type: ignore[misc]


class ModelParallelStrategy(_OverTheEngine, _theirs.ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), saved and loaded by the engine."""

    _model_key = "state_dict"

    def __init__(self, *args: Any, background: bool = True, **kwargs: Any) -> None:
        """
        Args:
            background: go on training while a checkpoint is written.
        """
        super().__init__(*args, **kwargs)
        self.background = background


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None) or optimizer


def _save_rest(checkpoint: dict[str, Any], path: Path) -> None:
    """What is neither model nor optimizer, complete or not at all."""
    partial = path / f".{_METADATA_FILENAME}.partial"
    with open(partial, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path / _METADATA_FILENAME)
