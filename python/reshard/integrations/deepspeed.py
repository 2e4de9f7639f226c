"""DeepSpeed's checkpoints: written in the background, durable, and resumed on another number of ranks.

::

    engine, *_ = deepspeed.initialize(...)
    reshard.integrations.deepspeed.attach(engine)

Files stay DeepSpeed's own, and either can load what the other saved. ``latest`` names a checkpoint only when all its files are on the disk.
With ZeRO 1, 2 and 3 a checkpoint loads on any number of data-parallel ranks, where DeepSpeed itself refuses.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from .._errors import InvalidInput
from ..torch._group import DEFAULT_TIMEOUT
from ._engine import CheckpointEngine
from ._zero import resized, resized_frozen

__all__ = ["CheckpointEngine", "attach"]


def attach(
    engine: Any, *, background: bool = True, timeout: float = DEFAULT_TIMEOUT, allow_pickle: bool = False
) -> CheckpointEngine:
    """Gives a DeepSpeed engine this checkpoint engine, and loads that do not mind how many ranks there were."""
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        raise InvalidInput(f"the engine has a checkpoint engine of its own already, {type(engine.checkpoint_engine).__name__}")
    ours = engine.checkpoint_engine = CheckpointEngine(background=background, timeout=timeout, allow_pickle=allow_pickle)
    save, load_zero, load_module = engine.save_checkpoint, engine._load_zero_checkpoint, engine.load_module_state_dict
    names = engine._get_all_ckpt_names
    #: The folder and tag that are being loaded.
    loading = ("", "")

    def save_checkpoint(save_dir: str, *args: Any, save_latest: bool = True, **kwargs: Any) -> Any:
        ours.save_latest = save_latest
        return save(save_dir, *args, save_latest=False, **kwargs)

    def get_all_ckpt_names(folder: str, tag: str) -> Any:
        nonlocal loading
        loading = folder, tag
        # A rank that was not there takes what is the same in all files from the first.
        parts = (f"{part:02d}" for part in range(engine.mp_world_size))
        return names(folder, tag) or [engine._get_ckpt_name(folder, tag, part, "0") for part in parts]

    def load_module_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        return load_module(resized_frozen(engine, *loading, checkpoint, timeout), *args, **kwargs)

    def load_zero_checkpoint(folder: str, tag: str, load_optimizer_states: bool = True) -> Any:
        if engine.load_universal_checkpoint() or engine.loaded_checkpoint_dp_world_size == engine.seq_dp_world_size:
            return load_zero(folder, tag, load_optimizer_states)
        mine = resized(engine, folder, tag, timeout)
        engine.optimizer.load_state_dict(
            state_dict_list=[mine] * engine.seq_dp_world_size,
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
        )
        return True

    engine.save_checkpoint, engine._load_zero_checkpoint = save_checkpoint, load_zero_checkpoint
    engine._get_all_ckpt_names, engine.load_module_state_dict = get_all_ckpt_names, load_module_state_dict
    return ours
