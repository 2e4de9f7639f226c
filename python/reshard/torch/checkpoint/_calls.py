"""``save``, ``async_save`` and ``load`` with PyTorch's signatures, results and exceptions.

What PyTorch would do with its own file storage and its own planner, the engine does whole. A planner of the program's own goes
through PyTorch's orchestration, with the engine's storage where the storage is PyTorch's; a storage of the program's own is
PyTorch's affair alone.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import state_dict_saver as _saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _api_bc_check
from typing_extensions import deprecated

from ..._errors import ReshardError
from ..._types import StrPath
from .. import _load, _save
from .._describe import PLAIN, is_stateful
from .._group import group_for
from . import _torch
from ._failures import as_torch, checkpoint_exception
from ._metadata import SavedMetadata
from ._options import options
from ._route import default_load_planner, default_save_planner, reader_route, writer_route

AsyncCheckpointerType: Any = getattr(_saver, "AsyncCheckpointerType", None)
AsyncSaveResponse: Any = getattr(_saver, "AsyncSaveResponse", None)
_THREAD: Any = AsyncCheckpointerType.THREAD if AsyncCheckpointerType is not None else None


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that differ from their defaults: earlier releases of torch do not know all of them."""
    defaults = {"no_dist": False, "use_collectives": True, "async_checkpointer_type": _THREAD, "async_stager": None}
    return {name: value for name, value in arguments.items() if name not in defaults or value != defaults[name]}


def _states(state_dict: Any) -> dict[str, Any]:
    """Objects that have a state dict are asked for it, as PyTorch does."""
    return {**state_dict, **{key: state_dict[key].state_dict() for key in _stateful_keys(state_dict)}}


def _stateful_keys(state_dict: Any) -> list[Any]:
    """Keys of objects that have a state dict, in one order on all ranks: what they do there may be collective."""
    # Nearly all leaves are plain tensors, which are not even asked.
    return sorted((key for key, value in state_dict.items() if type(value) not in PLAIN and is_stateful(value)), key=str)


def _save_options(path: str, choices: dict[str, Any], process_group: Any, no_dist: bool) -> Any:
    given = {"overwrite": options.overwrite, "checksums": options.checksums, "timeout": options.timeout, **choices}
    return {"checkpoint_id": path, "process_group": process_group, "no_dist": no_dist, **given}


def _saved(report: Any, storage_writer: Any) -> Metadata:
    """What was saved; the program's writer has its identity, as if it had written it."""
    if storage_writer:
        storage_writer.save_id = report.save_id
    return SavedMetadata.of(report)


@_api_bc_check  # type: ignore[untyped-decorator,no-untyped-call,unused-ignore]
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: StrPath | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves a state dict, as :func:`torch.distributed.checkpoint.save` does and with its arguments.

    Returns:
        the checkpoint's ``Metadata``, which is read when it is first looked at.
    """
    route = writer_route(storage_writer, checkpoint_id)
    if route.path is not None and use_collectives and default_save_planner(planner):
        with as_torch("save", process_group, no_dist):
            report = _save.save(_states(state_dict), **_save_options(route.path, route.options, process_group, no_dist))
        return _saved(report, storage_writer)
    rest = _given(no_dist=no_dist, use_collectives=use_collectives)
    if route.storage is None:
        rest["checkpoint_id"] = checkpoint_id
    saved = _torch.save(state_dict, storage_writer=route.storage, planner=planner, process_group=process_group, **rest)
    return cast(Metadata, saved)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: StrPath | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = _THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Saves in the background, as :func:`torch.distributed.checkpoint.async_save` does and with its arguments.

    The engine copies the state before this returns, so staging is done then, whatever the stager's options. A stager of the
    program's own class stages as it likes, and PyTorch saves what it staged through the engine's storage.

    Returns:
        a ``Future`` of the checkpoint's ``Metadata``; with a stager that stages in the background an ``AsyncSaveResponse``.
    """
    route = writer_route(storage_writer, checkpoint_id)
    own_stager = async_stager is not None and async_stager is not storage_writer and not _is_default_stager(async_stager)
    if route.path is None or not use_collectives or own_stager or not default_save_planner(planner):
        rest = _given(
            no_dist=no_dist,
            use_collectives=use_collectives,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
        )
        if route.storage is None:
            rest["checkpoint_id"] = checkpoint_id
        return _torch.async_save(state_dict, storage_writer=route.storage, planner=planner, process_group=process_group, **rest)
    states = _states(state_dict)
    saved: Future[Metadata] = Future()
    staged: Future[None] = Future()
    in_background = async_stager is not None and AsyncSaveResponse is not None and _stages_in_background(async_stager)
    answer = AsyncSaveResponse(staging_completion=staged, upload_completion=saved) if in_background else saved
    staged.set_result(None)
    try:
        handle = _save.async_save(states, **_save_options(route.path, route.options, process_group, no_dist))
    except ReshardError as error:
        # What goes wrong is the future's to tell, as in PyTorch.
        saved.set_exception(checkpoint_exception("save", error, process_group, no_dist))
        return answer
    # The next save does not raise it again.
    handle.ask()

    def finish(durable: Future[Any]) -> None:
        error = durable.exception()
        if error is None:
            saved.set_result(_saved(durable.result(), storage_writer))
        elif isinstance(error, ReshardError):
            saved.set_exception(checkpoint_exception("save", error, process_group, no_dist))
        else:
            saved.set_exception(error)

    handle.durable.add_done_callback(finish)
    return answer


def _is_default_stager(stager: Any) -> bool:
    from torch.distributed.checkpoint import staging

    return type(stager) in (staging.BlockingAsyncStager, getattr(staging, "DefaultStager", None))


def _stages_in_background(stager: Any) -> bool:
    config = getattr(stager, "_config", None)
    return bool(getattr(config, "use_async_staging", False))


@_api_bc_check  # type: ignore[untyped-decorator,no-untyped-call,unused-ignore]
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: StrPath | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Loads into a state dict in place, as :func:`torch.distributed.checkpoint.load` does and with its arguments."""
    route = reader_route(storage_reader, checkpoint_id, process_group, no_dist)
    if route.path is None or not default_load_planner(planner):
        rest = _given(no_dist=no_dist)
        if route.storage is None:
            rest["checkpoint_id"] = checkpoint_id
        _torch.load(state_dict, storage_reader=route.storage, planner=planner, process_group=process_group, **rest)
        return
    stateful = _stateful_keys(state_dict)
    wanted = {**state_dict, **{key: state_dict[key].state_dict() for key in stateful}}
    with as_torch("load", process_group, no_dist):
        _load.load_present(
            wanted,
            route.path,
            group_for(process_group, no_dist, timeout=options.timeout),
            partial=bool(getattr(planner, "allow_partial_load", False)),
            ignore_unexpected=not options.strict,
            cast=options.cast,
            allow_pickle=options.allow_pickle,
            verify=options.verify,
        )
    for key, found in wanted.items():
        # Tensors are loaded in place; all else is put there anew, as by PyTorch.
        if (found is not state_dict[key] or type(found) not in PLAIN) and key not in stateful:
            state_dict[key] = found
    for key in stateful:
        state_dict[key].load_state_dict(wanted[key])


_OLD = "`{0}_state_dict` is deprecated and will be removed in future versions. Please use `{0}` instead."


@deprecated(_OLD.format("save"), category=FutureWarning)
def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
) -> Metadata:
    """PyTorch's older name of :func:`save`."""
    storage_writer.reset()
    route = writer_route(storage_writer, None)
    # Which rank publishes is PyTorch's orchestration's choice alone.
    if coordinator_rank == 0 and route.path is not None and default_save_planner(planner):
        saved = save(state_dict, storage_writer=storage_writer, planner=planner, process_group=process_group, no_dist=no_dist)
        return cast(Metadata, saved)
    return _torch.save_state_dict(state_dict, route.storage, process_group, coordinator_rank, no_dist, planner)


@deprecated(_OLD.format("load"), category=FutureWarning)
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: Any = None,
) -> None:
    """PyTorch's older name of :func:`load`."""
    storage_reader.reset()
    route = reader_route(storage_reader, None, process_group, no_dist)
    if route.path is not None and default_load_planner(planner):
        load(state_dict, storage_reader=storage_reader, planner=planner, process_group=process_group, no_dist=no_dist)
    else:
        _torch.load_state_dict(state_dict, route.storage, process_group, coordinator_rank, no_dist, planner)


__all__ = ["async_save", "default_planner", "load", "load_state_dict", "save", "save_state_dict"]
