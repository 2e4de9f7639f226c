"""Exceptions of the state-dict family. They are also what PyTorch raises in the same places, so that handlers keep working."""

from __future__ import annotations

from ..._errors import InvalidInput, Mismatch, ReshardError


class StateError(ReshardError, RuntimeError):
    """A model, an optimizer or a state dict is not made the way it has to be."""


class StateMismatch(Mismatch, RuntimeError):
    """A state dict does not fit the model or the optimizers; every difference is listed."""


class StateIncomplete(StateMismatch):
    """Parts of a tensor are on no rank."""


__all__ = ["InvalidInput", "StateError", "StateIncomplete", "StateMismatch"]
