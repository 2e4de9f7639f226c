"""Lightning's FSDP and ModelParallel strategies over the engine: Lightning's own folders, saved in the background.

::

    from reshard.integrations.lightning import FSDPStrategy

    trainer = Trainer(strategy=FSDPStrategy(state_dict_type="sharded"), ...)

With ``background=True`` a checkpoint is complete after ``save_checkpoint`` has returned, and before the next one, a load, or the end of the
run. For Fabric there is :mod:`reshard.integrations.fabric`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import strategies as _theirs
from lightning.pytorch.trainer.states import TrainerFn

from .. import torch as rt
from ._lightning import Background, inner


class _OverTheEngine(Background):
    """What both strategies have in common."""

    _model_key: str

    def __init__(self, *args: Any, background: bool = True, **kwargs: Any) -> None:
        """
        Args:
            background: go on training while a checkpoint is written.
        """
        super().__init__(*args, **kwargs)
        self.background = background

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """The model's state, by names without any wrapper."""
        if not self.over_the_engine:
            return super().lightning_module_state_dict()  # type: ignore[misc,no-any-return]
        return rt.get_model_state_dict(self.model)

    def optimizer_state(self: Any, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state, by parameter names."""
        if not self.over_the_engine:
            return super().optimizer_state(optimizer)  # type: ignore[misc,no-any-return]
        return rt.get_optimizer_state_dict(self.model, inner(optimizer))

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a folder as Lightning does."""
        if storage_options is not None or not self.over_the_engine:
            return super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc,no-any-return]
        state = {self._model_key: checkpoint.pop("state_dict")}
        state.update({f"optimizer_{i}": each for i, each in enumerate(checkpoint.pop("optimizer_states", []))})
        return self.write(Path(self.broadcast(filepath)), state, checkpoint)  # type: ignore[no-any-return]

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder that Lightning or reshard saved, on any number of ranks."""
        self.settle()
        path = Path(self.broadcast(checkpoint_path))
        if not (path / ".metadata").exists():
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc,no-any-return]
        optimizers = self.optimizers if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []
        state = {self._model_key: rt.get_model_state_dict(self.model)}
        for i, each in enumerate(optimizers):
            state[f"optimizer_{i}"] = rt.get_optimizer_state_dict(self.model, inner(each))
        rest = self.read(path, state, self.lightning_module.strict_loading, weights_only)
        rt.set_model_state_dict(self.model, state[self._model_key])
        for i, each in enumerate(optimizers):
            rt.set_optimizer_state_dict(self.model, inner(each), state[f"optimizer_{i}"])
        return rest  # type: ignore[no-any-return]


class FSDPStrategy(_OverTheEngine, _theirs.FSDPStrategy):
    """Lightning's ``FSDPStrategy``, saved and loaded by the engine when ``state_dict_type="sharded"``."""

    _model_key = "model"


class ModelParallelStrategy(_OverTheEngine, _theirs.ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), saved and loaded by the engine."""

    _model_key = "state_dict"
