"""DeepSpeed's checkpoint engine over ours: files are written and published in the background, and read without executing code."""

from __future__ import annotations

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as _Theirs

from .. import _reshard
from ..torch._group import DEFAULT_TIMEOUT, group_for, together
from ._trust import read_objects


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


def _own_classes() -> list[Any]:
    """The classes of which DeepSpeed itself stores instances beside tensors; they only hold numbers."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def _partial(name: str) -> str:
    return f".{name}.partial"
