"""DeepSpeed's checkpoints: written in the background, durable, and resumed on another number of ranks.

::

    engine, *_ = deepspeed.initialize(...)
    reshard.integrations.deepspeed.attach(engine)

Files stay DeepSpeed's own, and either can load what the other saved. ``latest`` names a checkpoint only when all its files are on the disk.
With ZeRO 1, 2 and 3 a checkpoint loads on any number of data-parallel ranks, where DeepSpeed itself refuses.
"""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as _Theirs

from .._errors import InvalidInput, StorageError
from ..torch._group import DEFAULT_TIMEOUT, described_failure, group_for
from . import _files
from ._zero import resized, resized_frozen


class CheckpointEngine(_Theirs):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine, whose files are written and published in the background.

    Args:
        background: go on training while a checkpoint is written.
        timeout: seconds to wait for other ranks.
    """

    def __init__(self, *, background: bool = True, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(None)
        self.name = "reshard"
        self.background = background
        self.save_latest = True
        #: The parameters of each group in the last model file that was loaded, by name and shape.
        self.param_shapes: list[dict[str, Any]] = []
        #: The folder and tag that are being loaded.
        self.folder = ("", "")
        self._group = group_for(None, purpose="deepspeed", timeout=timeout)
        # One thread: files are written one after another, and published after the last. A program that ends waits for it.
        self._thread = ThreadPoolExecutor(1, "reshard-deepspeed")
        self._writes: list[tuple[Path, Future[None]]] = []
        self._pending: Future[None] | None = None

    def create(self, info: Any) -> None:
        """Waits for the checkpoint before."""
        self.settle()

    def save(self, state_dict: Any, path: str) -> None:
        """Takes a copy of what goes into a file now, and writes it later."""
        staged = io.BytesIO()
        torch.save(state_dict, staged)
        written = self._thread.submit(_files.write, _partial(Path(path)), lambda file: file.write(staged.getbuffer()))
        self._writes.append((Path(path), written))

    def commit(self, info: Any) -> bool:
        """Publishes the files when all ranks have written theirs, and then the name of the checkpoint."""
        writes, self._writes = self._writes, []
        latest = Path(info.save_dir) / "latest" if self.save_latest else None
        self._pending = self._thread.submit(self._publish, writes, latest, str(info.tag))
        if not self.background:
            self.settle()
        return True

    def settle(self) -> None:
        """Waits until the last checkpoint is durable; raises what went wrong with it, on any rank."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads one of DeepSpeed's files. As in DeepSpeed itself, objects in it are unpickled, which executes code from the file."""
        self.settle()
        found = torch.load(path, map_location=map_location, weights_only=False)
        if isinstance(found, dict) and found.get("param_shapes"):
            self.param_shapes = found["param_shapes"]
        return found

    def preserves_storage_sharing(self) -> bool:
        """Whether views would be saved with all that they are views of."""
        return True

    def _publish(self, writes: list[tuple[Path, Future[None]]], latest: Path | None, tag: str) -> None:
        def written() -> None:
            for _, done in writes:
                done.result()

        def renamed() -> None:
            for path, _ in writes:
                _files.rename(_partial(path), path)

        def named() -> None:
            if latest is not None and (self._group is None or self._group.rank == 0):
                _files.publish(latest, lambda file: file.write(tag.encode()))

        try:
            for each in (written, renamed, named):
                self._together(each)
        except BaseException:
            for path, _ in writes:
                _partial(path).unlink(missing_ok=True)
            raise

    def _together(self, work: Any) -> None:
        """What one rank cannot do fails on all."""
        failure, error = "", None
        try:
            work()
        except Exception as caught:
            failure, error = described_failure(caught), caught
        failures = [failure.encode()] if self._group is None else self._group.all_gather(failure.encode())
        for rank, each in enumerate(failures):
            if each:
                raise StorageError(f"the checkpoint was not written: rank {rank}: {each.decode()}") from error


def attach(engine: Any, *, background: bool = True, timeout: float = DEFAULT_TIMEOUT) -> CheckpointEngine:
    """Gives a DeepSpeed engine this checkpoint engine, and loads that do not mind how many ranks there were."""
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        raise InvalidInput(f"the engine has a checkpoint engine of its own already, {type(engine.checkpoint_engine).__name__}")
    ours = engine.checkpoint_engine = CheckpointEngine(background=background, timeout=timeout)
    save, load_zero, load_module = engine.save_checkpoint, engine._load_zero_checkpoint, engine.load_module_state_dict
    names = engine._get_all_ckpt_names

    def save_checkpoint(save_dir: str, *args: Any, save_latest: bool = True, **kwargs: Any) -> Any:
        ours.save_latest = save_latest
        return save(save_dir, *args, save_latest=False, **kwargs)

    def get_all_ckpt_names(folder: str, tag: str) -> Any:
        ours.folder = (folder, tag)
        # A rank that was not there takes what is the same in all files from the first.
        return names(folder, tag) or [engine._get_ckpt_name(folder, tag, pp_placeholder="0")]

    def load_module_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        return load_module(resized_frozen(engine, *ours.folder, checkpoint), *args, **kwargs)

    def load_zero_checkpoint(folder: str, tag: str, load_optimizer_states: bool = True) -> Any:
        if engine.load_universal_checkpoint() or engine.loaded_checkpoint_dp_world_size == engine.seq_dp_world_size:
            return load_zero(folder, tag, load_optimizer_states)
        mine = resized(engine, folder, tag, ours.param_shapes)
        engine.optimizer.load_state_dict(
            state_dict_list=[mine] * engine.seq_dp_world_size,
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
        )
        return True

    engine.save_checkpoint, engine._load_zero_checkpoint = save_checkpoint, load_zero_checkpoint
    engine._get_all_ckpt_names, engine.load_module_state_dict = get_all_ckpt_names, load_module_state_dict
    return ours


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
