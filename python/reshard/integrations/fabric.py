"""Fabric's FSDP and ModelParallel strategies over the engine: Fabric's own folders, saved in the background.

::

    from reshard.integrations.fabric import FSDPStrategy

    fabric = Fabric(strategy=FSDPStrategy(state_dict_type="sharded"), ...)

``fabric.save`` returns when the state has been copied. The next save, a load, and ``fabric.strategy.settle()`` wait until it is durable;
so does a program that ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric import strategies as _theirs
from lightning.fabric.utilities.types import _Stateful
from torch.nn import Module
from torch.optim import Optimizer

from .. import torch as rt
from .._errors import Mismatch
from ._lightning import Background, inner


class _OverTheEngine(Background):
    """What both strategies have in common."""

    def __init__(self, *args: Any, background: bool = True, **kwargs: Any) -> None:
        """
        Args:
            background: go on training while a checkpoint is written.
        """
        super().__init__(*args, **kwargs)
        self.background = background

    def save_checkpoint(self: Any, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:
        """Saves a folder as Fabric does."""
        if storage_options is not None or filter is not None or not self.over_the_engine or len(_models(state)) != 1:
            return super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc,no-any-return]
        saved = _states(state)
        rest = {
            key: each.state_dict() if isinstance(each, _Stateful) else each for key, each in state.items() if key not in saved
        }
        return self.write(Path(self.broadcast(path)), saved, rest)  # type: ignore[no-any-return]

    def load_checkpoint(
        self: Any, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a folder that Fabric or reshard saved, on any number of ranks."""
        self.settle()
        path = Path(self.broadcast(path))
        if not isinstance(state, dict) or len(_models(state)) != 1 or not (path / ".metadata").exists():
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc,no-any-return]
        loaded = _states(state)
        rest: dict[str, Any] = self.read(path, loaded, strict, weights_only)
        wanted = state.keys() - loaded.keys()
        missing = sorted(wanted - rest.keys())
        if missing and strict:
            raise Mismatch(f"the checkpoint has no {', '.join(missing)}", keys=missing, hint="pass strict=False")
        (module,) = _models(state)
        for key, each in loaded.items():
            if isinstance(state[key], Module):
                rt.set_model_state_dict(state[key], each)
            else:
                rt.set_optimizer_state_dict(module, inner(state[key]), each)
        state.update({key: rest.pop(key) for key in wanted & rest.keys()})
        return rest


class FSDPStrategy(_OverTheEngine, _theirs.FSDPStrategy):
    """Fabric's ``FSDPStrategy``, saved and loaded by the engine when ``state_dict_type="sharded"``."""


class ModelParallelStrategy(_OverTheEngine, _theirs.ModelParallelStrategy):
    """Fabric's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), saved and loaded by the engine."""


def _models(state: dict[str, Any]) -> list[Module]:
    return [each for each in state.values() if isinstance(each, Module)]


def _states(state: dict[str, Any]) -> dict[str, Any]:
    """The states of models and optimizers, by names without any wrapper."""
    (module,) = _models(state)
    found = {key: rt.get_model_state_dict(each) for key, each in state.items() if isinstance(each, Module)}
    for key, each in state.items():
        if isinstance(each, Optimizer):
            found[key] = rt.get_optimizer_state_dict(module, inner(each))
    return found
