"""DeepSpeed's checkpoints: written in the background, durable, and resumed on another number of ranks.

::

    engine, *_ = deepspeed.initialize(...)
    reshard.integrations.deepspeed.attach(engine)

Files stay DeepSpeed's own, and either can load what the other saved. ``latest`` names a checkpoint only when all its files are on the disk.
With ZeRO 1, 2 and 3 a checkpoint loads on any number of data-parallel ranks, where DeepSpeed itself refuses.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as _Theirs

from .. import _reshard
from .._errors import InvalidInput
from ..torch._group import DEFAULT_TIMEOUT, group_for, together
from ._trust import read_objects
from ._zero import resized, resized_frozen


class CheckpointEngine(_Theirs):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine, whose files are written and published in the background.

    Args:
        background: go on training while a checkpoint is written.
        timeout: seconds to wait for other ranks.
        allow_pickle: unpickle whatever a checkpoint's files hold, which executes code from them. Only for files you trust; without it
            plain data, DeepSpeed's own classes and those that the program declared safe to torch are loaded.
    """

    def __init__(self, *, background: bool = True, timeout: float = DEFAULT_TIMEOUT, allow_pickle: bool = False) -> None:
        super().__init__(None)
        self.name = "reshard"
        self.allow_pickle = allow_pickle
        self.background = background
        self.timeout = timeout
        self.save_latest = True
        self._group = group_for(None, purpose="deepspeed", timeout=timeout)
        # One thread: files are written one after another, and published after the last. A program that ends waits for it.
        self._thread = ThreadPoolExecutor(1, "reshard-deepspeed")
        self._writes: list[tuple[str, Future[None]]] = []
        self._pending: Future[None] | None = None

    def create(self, info: Any) -> None:
        """Waits for the checkpoint before."""
        self.settle()

    def save(self, state_dict: Any, path: str) -> None:
        """Takes a copy of what goes into a file now, and writes it later."""
        staged = io.BytesIO()
        torch.save(state_dict, staged)
        folder, name = os.path.split(path)
        write = lambda: _reshard.publish_file(folder, _partial(name), staged.getvalue())
        self._writes.append((path, self._thread.submit(write)))

    def commit(self, info: Any) -> bool:
        """Publishes the files when all ranks have written theirs, and then the name of the checkpoint."""
        writes, self._writes = self._writes, []
        self._pending = self._thread.submit(self._publish, writes, str(info.save_dir), str(info.tag), self.save_latest)
        if not self.background:
            self.settle()
        return True

    def settle(self) -> None:
        """Waits until the last checkpoint is durable; raises what went wrong with it, on any rank."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads one of DeepSpeed's files."""
        self.settle()
        return self.read(path, map_location=map_location)

    def read(self, path: str, **options: Any) -> Any:
        """What one of DeepSpeed's files holds; DeepSpeed itself would execute code from it."""
        hint = "pass allow_pickle=True to attach only for files you trust, or declare the class with torch.serialization.add_safe_globals"
        return read_objects(path, path, allow_pickle=self.allow_pickle, hint=hint, classes=_own_classes(), **options)

    def preserves_storage_sharing(self) -> bool:
        """Whether views would be saved with all that they are views of."""
        return True

    def _publish(self, writes: list[tuple[str, Future[None]]], folder: str, tag: str, latest: bool) -> None:
        def written() -> None:
            for _, done in writes:
                done.result()

        def renamed() -> None:
            for below, name in (os.path.split(path) for path, _ in writes):
                _reshard.rename_file(below, _partial(name), name)

        def named() -> None:
            if latest and (self._group is None or self._group.rank == 0):
                _reshard.publish_file(folder, "latest", tag.encode())

        try:
            for each in (written, renamed, named):
                together(self._group, f"writing the checkpoint {tag}", each)
        except BaseException:
            for below, name in (os.path.split(path) for path, _ in writes):
                if os.path.exists(os.path.join(below, _partial(name))):
                    os.unlink(os.path.join(below, _partial(name)))
            raise


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


def _own_classes() -> list[Any]:
    """The classes of which DeepSpeed itself stores instances beside tensors; they only hold numbers."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def _partial(name: str) -> str:
    return f".{name}.partial"
