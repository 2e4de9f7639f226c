"""accelerate's and the transformers Trainer's sharded checkpoints (FSDP1 and FSDP2) over the engine.

::

    import reshard.integrations.accelerate as reshard_accelerate

    reshard_accelerate.install()

Folders stay what accelerate expects, and either can load what the other saved. With FSDP1 the moments of the optimizer are restored on
any number of ranks; accelerate itself leaves them at zero without a word.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from accelerate.utils import fsdp_utils as _theirs
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate.utils.modeling import is_peft_model

from .. import torch as rt
from .._errors import InvalidInput

_NAMES = ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer")
_originals = {name: getattr(_theirs, name) for name in _NAMES}
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Puts the engine under accelerate, and under the Trainer where it has been imported."""
    if _replaced:
        return
    for name in _NAMES:
        if getattr(_theirs, name) is not _originals[name]:
            raise InvalidInput(f"accelerate's {name} has been replaced already; nothing was changed")
    ours = {id(_originals[name]): globals()[name] for name in _NAMES}
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        if str(names.get("__name__", "")).startswith("reshard"):
            continue
        for name, value in list(names.items()):
            if id(value) in ours:
                _replaced.append((module, name, value))
                names[name] = ours[id(value)]


def uninstall() -> None:
    """Puts accelerate's own functions back."""
    while _replaced:
        module, name, value = _replaced.pop()
        vars(module)[name] = value


def _sharded(plugin: Any, use_dcp: bool) -> bool:
    from torch.distributed.fsdp import StateDictType

    return bool(plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT) and use_dcp


def _adapter(model: Any, adapter_only: bool) -> bool:
    """The Trainer always asks for the adapter alone, which means something where there is one."""
    return adapter_only and bool(is_peft_model(model))


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Saves a model where accelerate does."""
    if _adapter(model, adapter_only) or not _sharded(fsdp_plugin, use_dcp):
        return _originals["save_fsdp_model"](fsdp_plugin, accelerator, model, output_dir, model_index, adapter_only, use_dcp)
    rt.save(
        {"model": rt.get_model_state_dict(model)}, os.path.join(output_dir, f"{FSDP_MODEL_NAME}_{model_index}"), overwrite=True
    )


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Loads a model that accelerate or reshard saved."""
    if _adapter(model, adapter_only) or not _sharded(fsdp_plugin, use_dcp):
        return _originals["load_fsdp_model"](fsdp_plugin, accelerator, model, input_dir, model_index, adapter_only, use_dcp)
    accelerator.wait_for_everyone()
    state = {"model": rt.get_model_state_dict(model)}
    rt.load(state, _folder(input_dir, f"{FSDP_MODEL_NAME}_{model_index}"), cast="any")
    return rt.set_model_state_dict(model, state["model"])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Saves an optimizer where accelerate does."""
    if not _sharded(fsdp_plugin, use_dcp):
        return _originals["save_fsdp_optimizer"](fsdp_plugin, accelerator, optimizer, model, output_dir, optimizer_index, use_dcp)
    state = rt.get_optimizer_state_dict(model, _inner(optimizer))
    rt.save({"optimizer": state}, os.path.join(output_dir, f"{OPTIMIZER_NAME}_{optimizer_index}"), overwrite=True)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Loads an optimizer that accelerate or reshard saved."""
    if not _sharded(fsdp_plugin, use_dcp):
        return _originals["load_fsdp_optimizer"](
            fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, adapter_only, use_dcp
        )
    accelerator.wait_for_everyone()
    state = {"optimizer": rt.get_optimizer_state_dict(model, _inner(optimizer))}
    rt.load(state, _folder(input_dir, f"{OPTIMIZER_NAME}_{optimizer_index}"), cast="any")
    rt.set_optimizer_state_dict(model, _inner(optimizer), state["optimizer"])


def _folder(given: str, name: str) -> Path:
    """accelerate takes the folder itself, and the one above it."""
    return Path(given) if name in str(given) else Path(given) / name
