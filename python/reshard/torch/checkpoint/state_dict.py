"""The calls of ``torch.distributed.checkpoint.state_dict``: the engine's, with tensors of PyTorch's own kinds as results."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as _theirs
from torch.distributed.checkpoint.state_dict import *  # noqa: F403
from torch.nn.modules.module import _IncompatibleKeys

from .. import state as _state


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


def get_model_state_dict(model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None) -> dict[str, Any]:  # type: ignore[no-redef]
    """See :func:`reshard.torch.get_model_state_dict`."""
    return _state.get_model_state_dict(model, submodules=submodules, options=options, as_torch=True)


def get_optimizer_state_dict(  # type: ignore[no-redef]
    model: nn.Module,
    optimizers: Any,
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """See :func:`reshard.torch.get_optimizer_state_dict`."""
    return _state.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options, as_torch=True)


def get_state_dict(  # type: ignore[no-redef]
    model: nn.Module,
    optimizers: Any,
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """See :func:`reshard.torch.get_state_dict`."""
    return _state.get_state_dict(model, optimizers, submodules=submodules, options=options, as_torch=True)


def set_model_state_dict(model: nn.Module, model_state_dict: Any, *, options: Any = None) -> _IncompatibleKeys:  # type: ignore[no-redef]
    """See :func:`reshard.torch.set_model_state_dict`."""
    return _state.set_model_state_dict(model, model_state_dict, options=options)


def set_optimizer_state_dict(model: nn.Module, optimizers: Any, optim_state_dict: Any, *, options: Any = None) -> None:  # type: ignore[no-redef]
    """See :func:`reshard.torch.set_optimizer_state_dict`."""
    _state.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


def set_state_dict(  # type: ignore[no-redef]
    model: nn.Module,
    optimizers: Any,
    *,
    model_state_dict: Any,
    optim_state_dict: Any,
    options: Any = None,
) -> _IncompatibleKeys:
    """See :func:`reshard.torch.set_state_dict`."""
    return _state.set_state_dict(
        model, optimizers, model_state_dict=model_state_dict, optim_state_dict=optim_state_dict, options=options
    )
