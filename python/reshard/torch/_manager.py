"""The folder of steps that every trainer keeps: save, find, restore, and remove what is no longer wanted."""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Unpack

from .. import _reshard
from .._checkpoint import open as open_checkpoint
from .._errors import Corrupt, GroupError, Incomplete, InvalidInput, ReshardError
from .._paths import path_text
from .._reports import LoadReport, SaveReport
from .._types import Mode, StorageOptions, StrPath
from ._group import DEFAULT_TIMEOUT, group_for
from ._load import LoadOptions, load
from ._save import AsyncSaveHandle, AsyncSaver, ManagedOptions, SaveOptions, check_names, save

#: The top-level key under which the manager keeps a step's number and metrics, inside the same commit.
_OWN = "_reshard"
#: Where a checkpoint of a run says its step.
STEP_KEY = f"{_OWN}.step"


class ManagerOptions(ManagedOptions, total=False):
    """What :class:`CheckpointManager` takes by name, for those that make one."""

    keep_last: int | None
    keep_every: int | None
    keep_best: int
    metric: str | None
    mode: Mode
    keep_younger: float | None
    budget: int | None
    fallback: bool
    async_: bool
    prefix: str
    staging_budget: int | None


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

    A step counts when it is complete: its files are there, and agree with each other. Old ones are removed only after a newer
    one is durable, and only the manager's own checkpoints and saves that were abandoned more than an hour ago; whatever else
    lies under such a name stays.
    """

    def __init__(
        self,
        root: StrPath,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        metric: str | None = None,
        mode: Mode = "min",
        keep_younger: float | None = None,
        budget: int | None = None,
        fallback: bool = False,
        async_: bool = True,
        prefix: str = "step-",
        process_group: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        staging_budget: int | None = None,
        storage_options: StorageOptions | None = None,
        **save_options: Unpack[ManagedOptions],
    ) -> None:
        """
        Args:
            root: the folder, or an address such as ``s3://bucket/run``.
            keep_last: how many of the newest steps to keep; None keeps all.
            keep_every: also keep every step that is a multiple of this.
            keep_best: also keep this many of the best steps by ``metric``.
            metric: the name of the metric that counts.
            mode: "min" or "max", whichever is better.
            keep_younger: also keep the steps of the last so many seconds.
            budget: no more bytes than this in all steps together: of those that are kept the oldest go first, the best last, the
                newest never.
            fallback: before a complete step goes, the first rank reads the newest ones whole until one is sound. That one stays,
                whatever else is asked for, until a newer one was found to be sound.
            async_: save in the background.
            prefix: how folders of steps are called.
            process_group: the ranks that save together; all by default.
            timeout: seconds to wait for other ranks.
            staging_budget: see :class:`AsyncSaver`.
            storage_options: settings of the store by name.
            save_options: what :func:`save` takes besides.
        """
        check_names("CheckpointManager", save_options, ManagedOptions)
        if mode not in ("min", "max"):
            raise InvalidInput(f'mode is "min" or "max", not {mode!r}')
        if keep_best and metric is None:
            raise InvalidInput("keep_best needs a metric")
        if keep_younger is not None and not keep_younger >= 0:
            raise InvalidInput(f"keep_younger is a number of seconds that is not negative, not {keep_younger!r}")
        if budget is not None and budget < 0:
            raise InvalidInput(f"budget is a number of bytes that is not negative, not {budget!r}")
        if keep_last is not None and keep_last < 1:
            raise InvalidInput("keep_last must be at least 1: the newest checkpoint is never removed")
        self.root = path_text(root).rstrip("/")
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.metric = metric
        self.mode = mode
        self.keep_younger = keep_younger
        self.budget = budget
        self.fallback = fallback
        self.prefix = prefix
        self._group = process_group
        self._timeout = timeout
        self._storage_options = storage_options
        self._save_options = save_options
        self._saver = AsyncSaver(staging_budget) if async_ else None
        self._pending: AsyncSaveHandle | None = None
        self._tidied = threading.Event()
        self._folder = _reshard.StepFolder(self.root, prefix, STEP_KEY, self._storage_options)
        #: Seconds after which a save that nobody goes on with is taken for abandoned.
        self._grace = 3600.0
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
        options: SaveOptions = {
            "overwrite": True,
            "process_group": self._group,
            "timeout": self._timeout,
            "storage_options": self._storage_options,
        }
        options |= self._save_options  # type: ignore[typeddict-item]
        # The saver raises what went wrong with the save before.
        self._pending_ended()
        if self._saver is None:
            report = save(whole, self.path(step), **options)
            self._retire()
            return report
        handle = self._saver.save(whole, self.path(step), **options)
        self._pending = handle
        # A future wakes those who wait for it before it calls back: whoever waits for the manager waits for this too.
        self._tidied.clear()
        handle.durable.add_done_callback(lambda future: self._tidy_up(saved=future.exception() is None))
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
        """The complete steps, oldest first, as this process sees them.

        Complete means that the files are there with their lengths, and that the data files' own indexes agree with
        ``.metadata``; what was checked is remembered for as long as the files do not change.
        """
        return [step.number for step in self._folder.steps() if step.why is None]

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
        if self.metric is None:
            raise InvalidInput("the manager was made without a metric")
        return self._folder.best(f"{_OWN}.metrics.{self.metric}", self.mode == "max")

    # ---- restoring ----------------------------------------------------------------------------------------------------

    def restore(
        self, state: MutableMapping[str, Any], step: int | None = None, **load_options: Unpack[LoadOptions]
    ) -> LoadReport | None:
        """Loads a step, the newest complete one by default, into a state in place; takes what :func:`load` takes besides.

        When the newest step is damaged or lacks files, the next older one is loaded, with a warning that says what is wrong.
        Returns the report of the load, whose ``step`` says which it was; None when there is nothing to restore.
        """
        return self._restore(lambda path: state, step, **load_options)

    def _restore(
        self, wanted: Callable[[str], MutableMapping[str, Any]], step: int | None = None, **load_options: Unpack[LoadOptions]
    ) -> LoadReport | None:
        """The same, with what is wanted of a checkpoint by its path."""
        self.wait()
        options: LoadOptions = {
            "process_group": self._group,
            "timeout": self._timeout,
            "storage_options": self._storage_options,
            "trace": self._save_options.get("trace"),
            **load_options,
        }
        if step is not None:
            return self._loaded(wanted, self._agreed(step, [])[0], options)
        refused: dict[int, str] = {}
        failure: ReshardError | None = None
        while True:
            chosen, skipped = self._agreed(*self._newest(refused))
            for text in skipped:
                warnings.warn(text, stacklevel=2)
            if chosen is None:
                if failure is not None:
                    raise failure
                return None
            try:
                return self._loaded(wanted, chosen, options)
            except GroupError:
                raise
            except ReshardError as error:
                # What a load raises, it raises on every rank.
                if not self._all_damaged(isinstance(error, (Corrupt, Incomplete))):
                    raise
                refused[chosen], failure = str(error), error

    def _loaded(
        self, wanted: Callable[[str], MutableMapping[str, Any]], step: int | None, options: LoadOptions
    ) -> LoadReport | None:
        if step is None:
            return None
        report = load(wanted(self.path(step)), self.path(step), **options)
        return dataclasses.replace(report, step=step)

    def _newest(self, refused: dict[int, str]) -> tuple[int | None, list[str]]:
        """The newest step that is complete and was not refused, and what is wrong with those after it."""
        if _rank(self._group) != 0:
            return None, []
        skipped: list[str] = []
        for found in reversed(self._folder.steps()):
            why = refused.get(found.number, found.why)
            if why is None:
                return found.number, skipped
            skipped.append(f"{found.path} is not restored: {why}")
        return None, skipped

    def _agreed(self, step: int | None, skipped: list[str]) -> tuple[int | None, list[str]]:
        """The first rank's choice: not every rank need see a shared folder alike."""
        group = group_for(self._group, timeout=self._timeout)
        if group is None:
            return step, skipped
        mine = json.dumps([step, skipped]).encode() if group.rank == 0 else None
        try:
            step, skipped = json.loads(group.broadcast(0, mine))
        except Exception as error:
            raise GroupError(f"the ranks could not agree on a step to restore: {error}") from error
        # One rank's word is enough.
        return step, skipped if group.rank == 0 else []

    def _all_damaged(self, damaged: bool) -> bool:
        """Whether every rank found the step damaged, so that all go on to an older one, or none does."""
        group = group_for(self._group, timeout=self._timeout)
        return damaged if group is None else all(word == b"1" for word in group.all_gather(b"1" if damaged else b"0"))

    # ---- removing -----------------------------------------------------------------------------------------------------

    def _tidy_up(self, saved: bool) -> None:
        try:
            if saved:
                self._retire()
        finally:
            self._tidied.set()

    def _retire(self) -> None:
        """Removes what is no longer wanted; the first rank does, by the engine's rules."""
        if _rank(self._group) != 0:
            return
        every = best = younger = None
        # Without a number to keep, everything complete stays that is within the budget; saves that were abandoned still go.
        if self.keep_last is not None:
            every = self.keep_every or None
            younger = self.keep_younger
            best = (f"{_OWN}.metrics.{self.metric}", self.mode == "max", self.keep_best) if self.keep_best else None
        try:
            pruned = self._folder.prune(self._grace, self.keep_last, every, best, younger, self.budget, self.fallback)
            self.warnings.extend(pruned.failed)
        except ReshardError as error:
            # The save is done; tidying up is not worth an exception.
            self.warnings.append(str(error))

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.root!r}: {len(self.steps())} steps>"


def _rank(process_group: Any) -> int:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0
    return dist.get_rank(process_group)
