"""The folder of steps that every trainer keeps: save, find, restore, and remove what is no longer wanted."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from .. import _reshard
from .._checkpoint import open as open_checkpoint
from .._errors import GroupError, InvalidInput, ReshardError
from .._reports import LoadReport, SaveReport
from ._group import DEFAULT_TIMEOUT, group_for
from ._load import load
from ._save import AsyncSaveHandle, AsyncSaver, StrPath, save

#: The top-level key under which the manager keeps a step's number and metrics, inside the same commit.
_OWN = "_reshard"


class CheckpointManager:
    """Keeps the checkpoints of a run under one root, a folder for each step.

    ::

        manager = CheckpointManager("ckpt", keep_last=3, keep_every=1000)
        restored = manager.restore(state)
        for step in range(restored.step + 1 if restored else 0, steps):
            ...
            if step % 100 == 0:
                manager.save(step, state, metrics={"loss": loss})
        manager.close()

    A step counts when it is complete. Old ones are removed only after a newer one is durable.
    """

    def __init__(
        self,
        root: StrPath,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        metric: str | None = None,
        mode: str = "min",
        async_: bool = True,
        prefix: str = "step-",
        process_group: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        staging_budget: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **save_options: Any,
    ) -> None:
        """
        Args:
            root: the folder, or an address such as ``s3://bucket/run``.
            keep_last: how many of the newest steps to keep; None keeps all.
            keep_every: also keep every step that is a multiple of this.
            keep_best: also keep this many of the best steps by ``metric``.
            metric: the name of the metric that counts.
            mode: "min" or "max", whichever is better.
            async_: save in the background.
            prefix: how folders of steps are called.
            process_group: the ranks that save together; all by default.
            timeout: seconds to wait for other ranks.
            staging_budget: see :class:`AsyncSaver`.
            storage_options: settings of the store by name.
            save_options: what :func:`save` takes besides.
        """
        if mode not in ("min", "max"):
            raise InvalidInput(f'mode is "min" or "max", not {mode!r}')
        if keep_best and metric is None:
            raise InvalidInput("keep_best needs a metric")
        if keep_last is not None and keep_last < 1:
            raise InvalidInput("keep_last must be at least 1: the newest checkpoint is never removed")
        self.root = os.fspath(root).rstrip("/")
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.metric = metric
        self.mode = mode
        self.prefix = prefix
        self._group = process_group
        self._timeout = timeout
        self._storage_options = dict(storage_options) if storage_options else None
        self._save_options = save_options
        self._saver = AsyncSaver(staging_budget) if async_ else None
        self._pending: AsyncSaveHandle | None = None
        self._tidied = threading.Event()
        #: What could not be removed, and why.
        self.warnings: list[str] = []

    # ---- saving -------------------------------------------------------------------------------------------------------

    def path(self, step: int) -> str:
        """The path of a step."""
        return f"{self.root}/{self.prefix}{step}"

    def save(
        self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None
    ) -> SaveReport | AsyncSaveHandle:
        """Saves a step; a step of that number that is there is replaced.

        Returns a report, or with ``async_`` a handle. In the background a failure is raised by the handle, or by the next call
        of the manager.
        """
        if _OWN in state:
            raise InvalidInput(f"the key {_OWN!r} is the manager's own")
        own = {"step": int(step), "metrics": {name: float(value) for name, value in (metrics or {}).items()}}
        whole = {**state, _OWN: own}
        options = {
            "overwrite": True,
            "process_group": self._group,
            "timeout": self._timeout,
            "storage_options": self._storage_options,
            **self._save_options,
        }
        # The saver raises what went wrong with the save before.
        self._pending_ended()
        if self._saver is None:
            report = save(whole, self.path(step), **options)
            self._retire(step)
            return report
        handle = self._saver.save(whole, self.path(step), **options)
        self._pending = handle
        # A future wakes those who wait for it before it calls back: whoever waits for the manager waits for this too.
        self._tidied.clear()
        handle.durable.add_done_callback(lambda future: self._tidy_up(step, saved=future.exception() is None))
        return handle

    def wait(self) -> None:
        """Waits for the save under way and the removal of what it replaces; raises what went wrong with it."""
        pending = self._pending_ended()
        if pending is not None and not pending._asked:
            pending.result()

    def _pending_ended(self) -> AsyncSaveHandle | None:
        """Waits for the save under way and the removal of what it replaces."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.durable.exception()
            self._tidied.wait()
        return pending

    def close(self) -> None:
        """Waits for the save under way."""
        self.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- finding ------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The complete steps, oldest first, as this process sees them."""
        numbers = (self._number(name) for name in _reshard.list_children(self.root, self._storage_options))
        found = sorted(number for number in numbers if number is not None)
        return [step for step in found if _reshard.is_complete(self.path(step), self._storage_options)]

    def _number(self, name: str) -> int | None:
        """The step of a folder of ours."""
        digits = name.removeprefix(self.prefix)
        return int(digits) if name.startswith(self.prefix) and digits.isdecimal() and str(int(digits)) == digits else None

    def latest(self) -> int | None:
        """The newest complete step."""
        found = self.steps()
        return found[-1] if found else None

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step."""
        prefix = f"{_OWN}.metrics."
        with open_checkpoint(self.path(step), storage_options=self._storage_options) as checkpoint:
            return {key.removeprefix(prefix): checkpoint[key] for key in checkpoint if key.startswith(prefix)}

    def best(self) -> int | None:
        """The step with the best metric; None when no step has it."""
        ranked = self._ranked(self.steps())
        return ranked[0] if ranked else None

    def _ranked(self, found: list[int]) -> list[int]:
        if self.metric is None:
            raise InvalidInput("the manager was made without a metric")
        scored = []
        for step in found:
            value = self.metrics(step).get(self.metric)
            if value is not None and value == value:
                scored.append((value if self.mode == "min" else -value, -step, step))
        return [step for _, _, step in sorted(scored)]

    # ---- restoring ----------------------------------------------------------------------------------------------------

    def restore(self, state: MutableMapping[str, Any], step: int | None = None, **load_options: Any) -> LoadReport | None:
        """Loads a step, the newest by default, into a state in place; takes what :func:`load` takes besides.

        Returns the report of the load, whose ``step`` says which it was; None when there is nothing to restore.
        """
        self.wait()
        chosen = self._agreed(self.latest() if step is None else step)
        if chosen is None:
            return None
        options = {
            "process_group": self._group,
            "timeout": self._timeout,
            "storage_options": self._storage_options,
            **load_options,
        }
        report = load(state, self.path(chosen), **options)
        report._values["step"] = chosen
        return report

    def _agreed(self, step: int | None) -> int | None:
        """The first rank's choice: not every rank need see a shared folder alike."""
        group = group_for(self._group, timeout=self._timeout)
        if group is None:
            return step
        mine = struct.pack("<?q", step is not None, step or 0)
        try:
            found, number = struct.unpack("<?q", group.broadcast(0, mine if group.rank == 0 else None))
        except Exception as error:
            raise GroupError(f"the ranks could not agree on a step to restore: {error}") from error
        return int(number) if found else None

    # ---- removing -----------------------------------------------------------------------------------------------------

    def _tidy_up(self, step: int, saved: bool) -> None:
        try:
            if saved:
                self._retire(step)
        finally:
            self._tidied.set()

    def _retire(self, saved: int) -> None:
        """Removes what is no longer wanted; the first rank does."""
        if _rank(self._group) != 0:
            return
        try:
            self._remove(self._unwanted(self.steps()), saved)
        except ReshardError as error:
            # The save is done; tidying up is not worth an exception.
            self.warnings.append(str(error))

    def _unwanted(self, found: list[int]) -> list[int]:
        if self.keep_last is None:
            return []
        keep = set(found[-self.keep_last :])
        if self.keep_every:
            keep |= {step for step in found if step % self.keep_every == 0}
        if self.keep_best:
            keep |= set(self._ranked(found)[: self.keep_best])
        return [step for step in found if step not in keep]

    def _remove(self, unwanted: list[int], saved: int) -> None:
        for name in _reshard.list_children(self.root, self._storage_options):
            step = self._number(name)
            if step is None:
                continue
            path = f"{self.root}/{name}"
            # A save that was never finished, of a step before the one just saved, is of a run that stopped.
            unfinished = step < saved and not _reshard.is_complete(path, self._storage_options)
            if step in unwanted or unfinished:
                try:
                    _reshard.remove_checkpoint(path, self._storage_options)
                except ReshardError as error:
                    self.warnings.append(f"{path} could not be removed: {error}")

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.root!r}: {len(self.steps())} steps>"


def _rank(process_group: Any) -> int:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0
    return dist.get_rank(process_group)
