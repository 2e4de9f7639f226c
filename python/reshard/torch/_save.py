"""Saving, now and in the background."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, get_type_hints

from .. import _reshard
from .._errors import Corrupt, InvalidInput, as_raised
from .._paths import path_text
from .._progress import Progress
from .._reports import SaveReport, log_report
from .._types import StorageOptions, StrPath
from ._describe import Description, flatten, pickled
from ._group import DEFAULT_TIMEOUT, Group, described_failure, group_for, is_broken
from ._states import states_of
from .state._saved import has_unplaced, saved_form

_T = TypeVar("_T")


def chosen_path(path: StrPath | None, checkpoint_id: StrPath | None) -> str:
    """The one path that was given, under either of its names."""
    if path is not None and checkpoint_id is not None:
        raise InvalidInput("give the path as second argument or as checkpoint_id, not both")
    given = path if path is not None else checkpoint_id
    if given is None:
        raise InvalidInput("no path to save to or load from: give it as second argument or as checkpoint_id")
    return path_text(given)


def _described(state: Mapping[str, Any]) -> tuple[Description, bool]:
    """The state, and whether replicas have to be compared: options of one save, which all ranks choose alike, since their
    optimizers are of one kind."""
    if not isinstance(state, Mapping):
        raise InvalidInput(f"the state to save is a {type(state).__name__}, not a dict")
    plain, _ = states_of(state)
    unplaced = has_unplaced(plain)
    plain = saved_form(plain)
    description = Description(loading=False)
    flatten(plain, description)
    # Values may be references into the containers just made; they are converted before the caller goes on.
    description.owners.append(plain)
    description.wait_for_devices()
    return description, unplaced


class WriteOptions(TypedDict, total=False):
    """How a save writes; :func:`save` says what each means."""

    overwrite: bool
    sync: bool
    checksums: bool
    files_per_rank: int
    compression: str | None
    check_replicas: bool
    check_files: bool
    split_replicated_above: int | None


class ManagedOptions(WriteOptions, total=False):
    """What :func:`save` takes besides the path and what whoever calls it for a run knows itself."""

    no_dist: bool
    strict_values: bool
    trace: StrPath | None


class SaveOptions(ManagedOptions, total=False):
    """What :func:`save`, :func:`async_save` and :meth:`AsyncSaver.save` all take by name."""

    checkpoint_id: StrPath | None
    process_group: Any
    timeout: float
    storage_options: StorageOptions | None


def check_names(call: str, given: Mapping[str, Any], options: type) -> None:
    """Refuses names that are none of the options, as a call with a signature does."""
    unknown = given.keys() - get_type_hints(options).keys()
    if unknown:
        raise TypeError(f"{call} takes no {', '.join(sorted(unknown))}")


def save(
    state_dict: Mapping[str, Any],
    path: StrPath | None = None,
    *,
    checkpoint_id: StrPath | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    overwrite: bool = False,
    sync: bool = True,
    checksums: bool = True,
    files_per_rank: int = 1,
    compression: str | None = None,
    check_replicas: bool = False,
    check_files: bool = True,
    split_replicated_above: int | None = None,
    strict_values: bool = False,
    progress: bool = False,
    trace: StrPath | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: StorageOptions | None = None,
) -> SaveReport:
    """Saves a state dict. Every rank calls it with what it holds, as with ``torch.distributed.checkpoint.save``.

    When it returns, the checkpoint is complete and durable; when it raises, on any rank, every rank gets an exception and what
    lay at the path before is untouched.

    Args:
        state_dict: nested dicts and lists of tensors, DTensors, ShardedTensors, :class:`ShardView`, and any picklable values;
            objects with ``state_dict`` and ``load_state_dict`` at the top level are asked for their state, modules and optimizers
            (of a module that is there too) by :func:`get_model_state_dict` and :func:`get_optimizer_state_dict`.
        path: a folder, or an address such as ``s3://bucket/step-100``.
        checkpoint_id: the same, by the name that PyTorch gives it.
        process_group: the ranks that save together; all by default.
        no_dist: save what this process holds, without talking to others.
        overwrite: replace a checkpoint that is there. The old one stays readable until the new one is complete.
        sync: wait until everything is on the disk.
        checksums: compute and store checksums.
        files_per_rank: how many files each rank writes.
        compression: "zstd" compresses the records of tensors, as PyTorch's ``ZStandard`` extension does, which reads them too. They
            take less room and more time; a load of a part of one decompresses it up to there.
        check_replicas: compare replicated content between ranks and fail where it differs.
        check_files: before the checkpoint is published, look whether every rank's files are there with their lengths, so that
            ranks that save to disks of their own get an error. Costs one request a file.
        split_replicated_above: replicated regions of more bytes are split between their holders; 0 never splits.
        strict_values: refuse values that are objects and no data, which a load brings back only with ``allow_pickle=True``;
            otherwise they are saved with a warning that names them.
        progress: show a bar on rank 0.
        trace: a local file to which each rank adds what it did when, for ``chrome://tracing`` or Perfetto.
        timeout: seconds to wait for other ranks.
        storage_options: settings of the store by name.
    """
    where = chosen_path(path, checkpoint_id)
    group = group_for(process_group, no_dist, timeout=timeout, saving=True)
    options = _reshard.SaveOptions(
        overwrite=overwrite,
        sync=sync,
        checksums=checksums,
        files_per_rank=files_per_rank,
        compression=compression,
        check_replicas=check_replicas,
        check_files=check_files,
        split_replicated_above=split_replicated_above,
        plan_cache=group.plans if group else _plans_alone,
    )
    control = _reshard.Control()
    with Progress(control, "saving", enabled=progress, rank=group.rank if group else 0):
        report = _save_together(
            _reshard.save, state_dict, where, group, options, control, storage_options, strict_values=strict_values, trace=trace
        )
    log_report(report, group.rank if group else 0)
    return report


#: The plan of the last save of this process on its own; a group keeps its own.
_plans_alone = _reshard.PlanCache()


class _SaveRequest(NamedTuple):
    """What crosses to the engine."""

    path: str
    leaves: list[_reshard.Leaf]
    owners: Any
    pickle: Callable[[str, Any], bytes]
    group: Group | None
    options: _reshard.SaveOptions
    control: _reshard.Control
    failure: str | None
    storage_options: StorageOptions | None
    trace: str | None


def _save_together(
    engine: Callable[[_SaveRequest], _T],
    state: Mapping[str, Any],
    path: str,
    group: Group | None,
    options: _reshard.SaveOptions,
    control: _reshard.Control,
    storage_options: StorageOptions | None,
    earlier: BaseException | None = None,
    strict_values: bool = False,
    trace: StrPath | None = None,
) -> _T:
    """Describes the state and hands it to the engine, with all ranks of the group. Instead of that, raises what went wrong
    earlier and tells the others of it."""
    objects = SavedObjects(strict_values)
    chosen = options
    traced = None if trace is None else path_text(trace)

    def describe() -> Description:
        nonlocal chosen
        if earlier is not None:
            raise earlier
        description, unplaced = _described(state)
        if unplaced:
            chosen = options.checking_replicas()
        for key, record in description.records.items():
            objects.note(key, record)
        return description

    def work(description: Description, failure: str | None) -> _T:
        leaves, owners = description.leaves, description.owners
        with as_raised():
            request = _SaveRequest(path, leaves, owners, objects.record, group, chosen, control, failure, storage_options, traced)
            return engine(request)

    saved = run_together(group, describe, work)
    if group is None or group.rank == 0:
        objects.warn()
    return saved


class SavedObjects:
    """Values that are no data: what they are, so that the one who saves hears of it and not only the one who loads."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._found: dict[str, str] = {}

    def record(self, key: str, value: Any) -> bytes:
        """The record of an object that is not plain."""
        record = pickled(key, value)
        self.note(key, record)
        return record

    def note(self, key: str, record: bytes) -> None:
        """Looks at what loading a record would take."""
        try:
            classes = _reshard.decode_record(record).classes
        except Corrupt as error:
            raise InvalidInput(f"{key!r} cannot be saved: a load would refuse it ({error})", keys=[key]) from error
        if not classes:
            return
        from ._load import _trusted_classes

        trusted = _trusted_classes()
        names = [name for name in classes if name not in trusted]
        if not names:
            return
        if self._strict:
            message = f"{key!r} is a {names[0]}, which is not plain data: loading it would execute code"
            raise InvalidInput(message, keys=[key], hint="save what it is made of, or leave strict_values out")
        self._found[key] = names[0]

    def warn(self, stacklevel: int = 4) -> None:
        """One line about all of them."""
        if not self._found:
            return
        some = ", ".join(f"{key} ({name})" for key, name in list(self._found.items())[:5])
        more = f" and {len(self._found) - 5} more" if len(self._found) > 5 else ""
        warnings.warn(
            f"saved as objects, which load only with allow_pickle=True: {some}{more}", UserWarning, stacklevel=stacklevel
        )


def run_together(
    group: Group | None,
    describe: Callable[[], Description],
    work: Callable[[Description, str | None], _T],
    loading: bool = False,
) -> _T:
    """Describes and works. A rank that cannot describe tells the others, so that nobody waits for it."""
    try:
        description = describe()
    except BaseException as error:
        # Also an interrupt, or a call of sys.exit(), in some object's state_dict().
        if group is None:
            raise
        try:
            work(Description(loading=loading), described_failure(error))
        except Exception:
            pass
        raise
    return work(description, None)


class AsyncSaveHandle:
    """A save under way.

    Attributes:
        path: where to.
        staged: done when the state may change again; it is when ``async_save`` returns.
        durable: done when the checkpoint is complete and durable, with its :class:`SaveReport`.
    """

    def __init__(self, path: str, inner: _reshard.SaveHandle, control: _reshard.Control, rank: int = 0) -> None:
        self.path = path
        self._rank = rank
        self.staged: Future[None] = Future()
        self.durable: Future[SaveReport] = Future()
        self._inner = inner
        self._control = control
        self._asked = False
        self.staged.set_result(None)
        _handles.add(self)
        # Not a daemon: a program that ends waits for its last checkpoint.
        threading.Thread(target=self._watch, name="reshard-wait").start()

    def _watch(self) -> None:
        try:
            report = self._inner.wait()
        except BaseException as error:
            self.durable.set_exception(error)
        else:
            log_report(report, self._rank)
            self.durable.set_result(report)

    def _forked(self) -> None:
        """In a process forked meanwhile nobody hears how the save ends."""
        if not self.durable.done():
            self._asked = True
            self.durable = Future()
            self.durable.set_exception(InvalidInput(f"the save to {self.path} is of the process that this one was forked from"))

    @property
    def stall(self) -> float:
        """Seconds for which ``async_save`` kept its caller waiting."""
        return self._inner.stall

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is durable; raises what went wrong."""
        self._asked = self._asked or self.durable.done()
        try:
            return self.durable.result(timeout)
        finally:
            self._asked = self._asked or self.durable.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits; what went wrong, or None."""
        error = self.durable.exception(timeout)
        self._asked = True
        return error

    def ask(self) -> None:
        """Takes it upon the caller to look at what goes wrong: the next save will not raise it."""
        self._asked = True

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.durable.done()

    def cancel(self) -> None:
        """Asks it to stop. Nothing is published then, unless it already was."""
        self._inner.cancel()

    def progress(self) -> tuple[int, int]:
        """Bytes written and bytes to write, on this rank."""
        return self._control.done, self._control.total

    def __await__(self) -> Any:
        import asyncio

        return asyncio.wrap_future(self.durable).__await__()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.durable.exception() else "durable"
        return f"<AsyncSaveHandle {self.path!r}: {state}>"


class AsyncSaver:
    """Saves in the background, one save at a time, with staging memory and plans that it keeps from one to the next.

    ``async_save`` keeps one for the process; make one of your own to choose how much memory it may stage into.
    """

    def __init__(self, staging_budget: int | None = None) -> None:
        """
        Args:
            staging_budget: the most bytes to stage; what is beyond is written before ``save`` returns. By default half of
                the machine's memory, shared between the ranks on it.
        """
        self._budget = _default_budget() if staging_budget is None else staging_budget
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._inner = _reshard.AsyncSaver(self._budget)
        self._last: AsyncSaveHandle | None = None

    def reserve(self, size: int) -> None:
        """Allocates staging memory ahead of time, so that the first save is as fast as the others."""
        self._inner.reserve(size)

    def save(self, state_dict: Mapping[str, Any], path: StrPath | None = None, **options: Unpack[SaveOptions]) -> AsyncSaveHandle:
        """Plans and copies now, writes and publishes in the background; see :func:`reshard.torch.async_save`."""
        check_names("async_save", options, SaveOptions)
        where = chosen_path(path, options.get("checkpoint_id"))
        process_group = options.get("process_group")
        if self._process != os.getpid():
            # Forked: what the other process lent to a save is not given back here.
            self._begin()
        earlier = self._settle()
        if earlier is not None and is_broken(process_group, purpose="async"):
            raise earlier
        timeout = options.get("timeout", DEFAULT_TIMEOUT)
        group = group_for(process_group, options.get("no_dist", False), purpose="async", timeout=timeout, saving=True)
        given: dict[str, Any] = {name: value for name, value in options.items() if name in WriteOptions.__annotations__}
        chosen = _reshard.SaveOptions(**given)
        control = _reshard.Control()
        store = options.get("storage_options")
        strict = options.get("strict_values", False)
        trace = options.get("trace")
        inner = _save_together(self._inner.save, state_dict, where, group, chosen, control, store, earlier, strict, trace)
        self._last = AsyncSaveHandle(where, inner, control, group.rank if group else 0)
        return self._last

    def _settle(self) -> BaseException | None:
        """Waits for the save before; a failure that nobody has asked for is to be raised. Other ranks may have been asked for
        theirs and go on to the next save: they are to be told."""
        last, self._last = self._last, None
        error = last.durable.exception() if last is not None else None
        return error if last is not None and not last._asked else None


def _default_budget() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return memory // 2 // max(ranks, 1)


_saver: AsyncSaver | None = None
_saver_lock = threading.Lock()
#: Saves that may be under way.
_handles: weakref.WeakSet[AsyncSaveHandle] = weakref.WeakSet()


def _forked() -> None:
    """Called in a child process after a fork."""
    global _saver_lock
    _saver_lock = threading.Lock()
    for handle in list(_handles):
        handle._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def async_save(state_dict: Mapping[str, Any], path: StrPath | None = None, **options: Unpack[SaveOptions]) -> AsyncSaveHandle:
    """Saves in the background: returns when the state has been copied, and writes while training goes on.

    Takes what :func:`save` takes, except ``progress``. A save that is still being written is waited for first; if it failed
    and nobody asked it, its exception is raised here.

    Returns:
        a handle: ``handle.result()`` waits until the checkpoint is durable and gives the :class:`SaveReport`, ``handle.staged``
        and ``handle.durable`` are futures.
    """
    global _saver
    with _saver_lock:
        if _saver is None:
            _saver = AsyncSaver()
    return _saver.save(state_dict, path, **options)
