"""A run in three lines: everything that a training run has to remember, saved and restored together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Unpack

import torch
from torch import nn

from .._checkpoint import open as open_checkpoint
from .._errors import InvalidInput
from .._paths import path_text
from .._reports import LoadReport, SaveReport
from .._types import StorageOptions, StrPath
from ._describe import is_stateful
from ._group import DEFAULT_TIMEOUT, group_for, together
from ._leaf import OnResize, PerRank
from ._load import load
from ._manager import STEP_KEY, CheckpointManager, ManagerOptions
from ._random import derive_random_state, random_state, random_state_like, set_random_state
from ._sampler import FollowedLoader, ResumableSampler
from ._save import AsyncSaveHandle
from ._states import state_of
from .state import StateDictOptions

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


class Checkpointer:
    """Saves a training run in the background and restores it, on any number of ranks and in any layout.

    ::

        ckpt = rt.Checkpointer("run", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, rng=True)
        start = ckpt.restore()                          # 0 on the first run
        for step in range(start, steps):
            ...
            if ckpt.step(step, metrics={"loss": loss}):  # saves every `every` steps; True when it is time to stop
                break
        ckpt.close()

    Models and optimizers go by parameter names, so that neither wrappers (DDP, FSDP, ``torch.compile``) nor the number of ranks matter;
    an optimizer that has not run yet is restored too.
    """

    def __init__(
        self,
        root: StrPath,
        *,
        model: Models | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        rng: bool = False,
        state: Mapping[str, Any] | None = None,
        every: int | None = None,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        time_limit: float | None = None,
        loader_on_resize: OnResize = "error",
        on_save: Callable[[SaveReport], None] | None = None,
        on_restore: Callable[[LoadReport], None] | None = None,
        process_group: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        storage_options: StorageOptions | None = None,
        **manager: Unpack[ManagerOptions],
    ) -> None:
        """
        Args:
            root: the folder of the run, or an address such as ``s3://bucket/run``; a folder for each step is below it.
            model: the model, or several, in a list or by name. Ranks may have different ones, as stages of a pipeline, whose parameters
                have the names that they have in the whole model.
            optimizer: the optimizer, or several, in a list or by name; each over parameters of one of the models.
            scheduler, scaler: anything with ``state_dict`` and ``load_state_dict``, or several.
            loader: the data loader: a :class:`ResumableSampler`, or a loader over one, whose position counts for all ranks; or a
                loader with a state of its own on each rank, such as torchdata's ``StatefulDataLoader``.
            rng: save the random state of Python, NumPy and torch. The same number of ranks gets each its own back; another number
                gets states that are derived from the saved ones.
            state: more to save, by name: objects with ``state_dict`` and ``load_state_dict``, containers, which are filled in place,
                and plain values, which :attr:`state` has after a restore.
            every: how many steps :meth:`step` lets pass between saves.
            signals: signals that mean that the run is about to be stopped. They are handled from now on until :meth:`close`, on the
                main thread only.
            time_limit: seconds after which :meth:`step` saves and says stop.
            loader_on_resize: what becomes of a loader's state of each rank on another number of ranks; see :class:`PerRank`.
            on_save, on_restore: called with the report of every save and restore, on every rank.
            process_group: the ranks that save together; all by default.
            timeout: seconds to wait for other ranks.
            storage_options: settings of the store by name.
            manager: what :class:`CheckpointManager` takes besides: ``keep_last``, ``keep_every``, ``keep_best``, ``metric``, ``mode``,
                ``keep_younger``, ``budget``, ``fallback``, ``async_``, ``prefix``, ``trace`` (of saves and restores), …
        """
        if every is not None and every < 1:
            raise InvalidInput("every is a number of steps, at least 1")
        self.models = _named("model", model, nn.Module)
        self.optimizers = _named("optimizer", optimizer, torch.optim.Optimizer)
        self.schedulers = _named("scheduler", scheduler, None)
        self.scalers = _named("scaler", scaler, None)
        self.loader = _positioned(loader)
        self.rng = rng
        #: More to save, by name; plain values are the restored ones after :meth:`restore`.
        self.state = dict(state or {})
        self.every = every
        self._loader_on_resize = loader_on_resize
        self._on_save, self._on_restore = on_save, on_restore
        self._group, self._timeout = process_group, timeout
        self._storage_options = storage_options
        self._trace = manager.get("trace")
        self.manager = CheckpointManager(
            root, process_group=process_group, timeout=timeout, storage_options=storage_options, **manager
        )
        self._notes: list[str] = []
        self._differ: bool | None = None
        self._optimizer_options: StateDictOptions | None = None
        #: The report of the last restore; None before the first, and on a first run.
        self.restored: LoadReport | None = None
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._signalled = threading.Event()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._before[number] = signal.signal(number, self._on_signal)

    # ---- what is saved --------------------------------------------------------------------------------------------------

    def _collected(self, apart: bool, random_parts: Sequence[str] = ()) -> tuple[dict[str, Any], list[Callable[[], None]]]:
        """The state, and what gives it back to its owners once it has been loaded. `apart` has options of groups by parameter. A restore
        says which parts of the random state were saved: not every machine has the same devices."""
        self._optimizer_options = StateDictOptions(flatten_optimizer_state_dict=True) if apart else None
        whole: dict[str, Any] = {}
        give: list[Callable[[], None]] = []
        modules = list(self.models.values())
        groups = {"model": self.models, "optimizer": self.optimizers, "scheduler": self.schedulers, "scaler": self.scalers}
        for name, owners in groups.items():
            for key, owner in owners.items():
                self._collect(whole, give, (name,) if key is None else (name, key), owner, modules)
        for name, owner in self.state.items():
            if name in whole or name in groups or name in ("loader", "rng"):
                raise InvalidInput(f"the name {name!r} is the checkpointer's own")
            self._collect(whole, give, (name,), owner, modules)
        self._collect_loader(whole, give)
        if self.rng:
            own = PerRank(random_state_like(random_parts) if random_parts else random_state(), self._derive_random)
            whole["rng"] = own
            give.append(lambda: None if own.value is None else set_random_state(own.value))
        return whole, give

    def _collect(
        self, whole: dict[str, Any], give: list[Callable[[], None]], path: tuple[str, ...], owner: Any, modules: Any
    ) -> None:
        value, take = state_of(owner, modules, self._optimizer_options)
        if isinstance(owner, torch.optim.Optimizer) and take == owner.load_state_dict:
            raise InvalidInput(f"the {'.'.join(path)} is over parameters of no model that the checkpointer has")
        container = whole
        for part in path[:-1]:
            container = container.setdefault(part, {})
        container[path[-1]] = value
        if take is not None:
            give.append(lambda: _ignore(take(container[path[-1]])))
        elif len(path) == 1 and path[0] in self.state:
            give.append(lambda: self.state.__setitem__(path[0], container[path[0]]))

    def _collect_loader(self, whole: dict[str, Any], give: list[Callable[[], None]]) -> None:
        loader = self.loader
        if loader is None:
            return
        if isinstance(loader, (ResumableSampler, FollowedLoader)):
            whole["loader"] = loader.state_dict()
            give.append(lambda: loader.load_state_dict(whole["loader"]))
            return
        before = loader.state_dict()
        own = PerRank(before, self._loader_on_resize)
        whole["loader"] = own
        give.append(
            lambda: None if own.value is before and self._loader_on_resize == "drop" else loader.load_state_dict(own.value)
        )

    def _ranks_differ(self) -> bool:
        """Whether ranks have different parameters, as stages of a pipeline do: then no rank can tell what a group of all of them has, and
        options are stored for each parameter."""
        if self._differ is None:
            group = group_for(self._group, timeout=self._timeout) if self.optimizers else None
            names = [name for model in self.models.values() for name, _ in model.named_parameters()]
            mine = hashlib.sha256(json.dumps(names).encode()).digest()
            self._differ = group is not None and len(set(group.all_gather(mine))) > 1
        return self._differ

    def _stored(self, path: str) -> tuple[bool, int | None, list[str]]:
        """Whether a checkpoint has options of groups by parameter; its step, if it says one; and the parts of the random state in it."""
        prefixes = [".".join(filter(None, ("optimizer", name))) for name in self.optimizers]

        def looked() -> tuple[bool, int | None, list[str]]:
            with open_checkpoint(path, storage_options=self._storage_options) as checkpoint:
                nested = any(f"{prefix}.param_groups.0.params" in checkpoint for prefix in prefixes)
                apart = any(key.startswith(f"{prefix}.param_groups.") for key in checkpoint for prefix in prefixes)
                step = checkpoint[STEP_KEY] if STEP_KEY in checkpoint else None
                parts = {key.split(".")[1] for key in checkpoint if key.startswith("rng.")}
                return apart and not nested, step if isinstance(step, int) else None, sorted(parts)

        found = together(group_for(self._group, timeout=self._timeout), "restoring", looked)
        return any(apart for apart, *_ in found), *found[0][1:]

    def _derive_random(self, saved: dict[int, Any], rank: int, size: int) -> None:
        derive_random_state(saved, rank, size)
        self._notes.append(f"the random state of {size} ranks was derived from that of {len(saved)}")

    # ---- saving ---------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> SaveReport | AsyncSaveHandle:
        """Saves a step, in the background unless told otherwise; older ones go when it is durable.

        Returns:
            a handle, whose ``result()`` waits; with ``async_=False`` the report.
        """
        whole, _ = self._collected(self._ranks_differ())
        saved = self.manager.save(step, whole, metrics=metrics)
        if self._on_save is not None:
            called = self._on_save
            if isinstance(saved, AsyncSaveHandle):
                saved.durable.add_done_callback(lambda done: None if done.exception() else called(done.result()))
            else:
                called(saved)
        return saved

    def step(self, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """To be called by all ranks after each step: saves where it is time to, and says whether to stop.

        On a signal, or when the time is up, on any rank, all ranks save this step, wait until it is durable, and get True.
        """
        stop = self._agreed(self._signalled.is_set() or (self._deadline is not None and time.monotonic() > self._deadline))
        if stop:
            self.save(step, metrics=metrics)
            self.manager.wait()
        elif self.every is not None and (step + 1) % self.every == 0:
            self.save(step, metrics=metrics)
        return stop

    def _agreed(self, mine: bool) -> bool:
        group = group_for(self._group, timeout=self._timeout)
        return mine if group is None else b"1" in group.all_gather(b"1" if mine else b"0")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled.set()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    @property
    def preempted(self) -> bool:
        """Whether this rank was told to stop."""
        return self._signalled.is_set()

    def wait(self) -> None:
        """Waits for the save under way; raises what went wrong with it."""
        self.manager.wait()

    def close(self) -> None:
        """Waits for the save under way, and handles no signals any more."""
        try:
            self.manager.close()
        finally:
            while self._before:
                number, before = self._before.popitem()
                signal.signal(number, before if before is not None else signal.SIG_DFL)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- restoring ------------------------------------------------------------------------------------------------------

    def restore(self, which: int | StrPath | None = None, **load_options: Any) -> int:
        """Restores the newest step, a step by its number, or a checkpoint by its path; takes what :func:`load` takes besides.

        What the checkpoint lacks of the run is a :class:`reshard.Mismatch`; with ``strict=False`` it stays as it is, and the report says
        so.

        Returns:
            the step to go on with: the one after the restored one, and 0 when there is nothing to restore.
        """
        self._notes = []
        give: list[Callable[[], None]] = []
        step: int | None = None

        def wanted(path: str) -> dict[str, Any]:
            nonlocal step
            apart, step, random_parts = self._stored(path)
            whole, give[:] = self._collected(apart, random_parts)
            return whole

        if which is None or isinstance(which, int):
            report = self.manager._restore(wanted, which, **load_options)
            if report is None:
                return 0
            step = report.step
        else:
            whole = wanted(path_text(which))
            options = {"process_group": self._group, "timeout": self._timeout, "storage_options": self._storage_options}
            report = load(whole, path_text(which), **{**options, "trace": self._trace, **load_options})
            report = dataclasses.replace(report, step=step)
        for take in give:
            take()
        report = dataclasses.replace(report, notes=tuple(self._notes))
        self.restored = report
        if self._on_restore is not None:
            self._on_restore(report)
        return 0 if step is None else step + 1

    def latest(self) -> int | None:
        """The newest complete step."""
        return self.manager.latest()

    def best(self) -> int | None:
        """The step with the best metric."""
        return self.manager.best()

    def __repr__(self) -> str:
        return f"<Checkpointer {self.manager.root!r}>"


def _ignore(_: Any) -> None:
    return None


def _named(what: str, given: Any, kind: type | None) -> dict[str | None, Any]:
    """Owners by name; one alone has none."""
    if given is None:
        return {}
    if (kind is None and is_stateful(given)) or (kind is not None and isinstance(given, kind)):
        return {None: given}
    if isinstance(given, Mapping):
        named: dict[str | None, Any] = {str(name): owner for name, owner in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        named = {str(number): owner for number, owner in enumerate(given)}
    else:
        raise InvalidInput(f"the {what} is a {type(given).__name__}")
    for name, owner in named.items():
        if not (isinstance(owner, kind) if kind is not None else is_stateful(owner)):
            raise InvalidInput(f"the {what} {name!r} is a {type(owner).__name__}")
    return named


def _positioned(loader: Any) -> Any:
    """What knows the position of a loader."""
    if loader is None or isinstance(loader, (ResumableSampler, FollowedLoader)):
        return loader
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ResumableSampler):
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, ResumableSampler):
        if getattr(loader, "num_workers", 0):
            raise InvalidInput(
                "the loader's workers take samples ahead of the training",
                hint="pass sampler.follow(loader), and iterate over that: it counts what the training has got",
            )
        return sampler
    if not is_stateful(loader):
        raise InvalidInput(
            f"the loader, a {type(loader).__name__}, has no state_dict and load_state_dict",
            hint="use a ResumableSampler, or torchdata's StatefulDataLoader",
        )
    return loader
