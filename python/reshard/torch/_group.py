"""The ranks that save or load together, over torch.distributed and on the CPU.

The engine exchanges a few small messages of bytes. They travel over a gloo group of our own, made once for each process
group, so that they never meet the training's collectives, need no device, and have a time limit. Where torch was built
without gloo, the store behind the process group carries them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, GatherOptions, PrefixStore, ScatterOptions

from .. import _reshard
from .._errors import GroupError, InvalidInput

_T = TypeVar("_T")

#: How long a rank waits for the others, in seconds, unless told otherwise.
DEFAULT_TIMEOUT = 600.0

# The first round of every exchange: the length, and as much of the message as fits. Most messages need no second one.
_HEAD = 1024
_ROOM = _HEAD - 8


class Group(Protocol):
    """What the engine needs of a group: messages, and the plan that its last save left for the next."""

    rank: int
    size: int
    plans: _reshard.PlanCache

    def all_gather(self, data: bytes) -> list[bytes]: ...

    def gather(self, root: int, data: bytes) -> list[bytes] | None: ...

    def broadcast(self, root: int, data: bytes | None) -> bytes: ...

    def scatter(self, root: int, parts: list[bytes] | None) -> bytes: ...


def _head(data: bytes) -> torch.Tensor:
    first = len(data).to_bytes(8, "little") + data[:_ROOM]
    return torch.frombuffer(bytearray(first.ljust(_HEAD, b"\0")), dtype=torch.uint8)


def _length(head: torch.Tensor) -> int:
    return int.from_bytes(head[:8].numpy().tobytes(), "little")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _rest(data: bytes, length: int) -> torch.Tensor:
    """What did not fit into the head, padded to `length`."""
    return torch.frombuffer(bytearray(data[_ROOM:].ljust(length, b"\0")), dtype=torch.uint8)


class _State:
    """Shared by all handles of one gloo group: one exchange at a time, and whether one has failed."""

    def __init__(self) -> None:
        self.broken = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, cls: type[BaseException] | None, *_: object) -> None:
        self.broken = self.broken or cls is not None
        self._lock.release()


class GlooGroup:
    """Messages over a gloo process group."""

    def __init__(self, group: Any, timeout: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.plans = _reshard.PlanCache()
        self._state = _State()

    @property
    def broken(self) -> bool:
        """Whether an exchange failed: its connections may be in any state, and the next save makes new ones."""
        return self._state.broken

    def with_timeout(self, timeout: float) -> GlooGroup:
        """The same group with another time limit."""
        other = GlooGroup(self._group, timeout)
        other._state = self._state
        other.plans = self.plans
        return other

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank gives bytes; every rank gets everyone's."""
        with self._state:
            heads = self._all_gather(_head(data))
            lengths = [_length(head) for head in heads]
            beyond = max(lengths) - _ROOM
            if beyond <= 0:
                return [_bytes(head[8 : 8 + length]) for head, length in zip(heads, lengths)]
            rests = self._all_gather(_rest(data, beyond))
        return [_joined(head, rest, length) for head, rest, length in zip(heads, rests, lengths)]

    def gather(self, root: int, data: bytes) -> list[bytes] | None:
        """Every rank gives bytes; the root gets everyone's."""
        with self._state:
            options = GatherOptions()
            options.rootRank = root
            options.timeout = self._timeout
            heads = [torch.empty(_HEAD, dtype=torch.uint8, device="cpu") for _ in range(self.size)] if self.rank == root else []
            self._group.gather([heads] if heads else [], [_head(data)], options).wait()
            if self.rank != root:
                # Long messages go straight to the root: nobody else needs to know how long they are.
                if len(data) > _ROOM:
                    self._group.send([_rest(data, len(data) - _ROOM)], root, 0).wait(self._timeout)
                return None
            lengths = [_length(head) for head in heads]
            rests: list[torch.Tensor | None] = [None] * self.size
            waiting = []
            for rank, length in enumerate(lengths):
                if length > _ROOM and rank != root:
                    rest = torch.empty(length - _ROOM, dtype=torch.uint8, device="cpu")
                    rests[rank] = rest
                    waiting.append(self._group.recv([rest], rank, 0))
            for work in waiting:
                work.wait(self._timeout)
        gathered = [_joined(head, rest, length) for head, rest, length in zip(heads, rests, lengths)]
        gathered[root] = data
        return gathered

    def broadcast(self, root: int, data: bytes | None) -> bytes:
        """The root gives bytes; every rank gets them."""
        with self._state:
            head = _head(data) if data is not None else torch.empty(_HEAD, dtype=torch.uint8, device="cpu")
            self._broadcast(root, head)
            length = _length(head)
            if length <= _ROOM:
                return _bytes(head[8 : 8 + length])
            rest = (
                _rest(data, length - _ROOM) if data is not None else torch.empty(length - _ROOM, dtype=torch.uint8, device="cpu")
            )
            self._broadcast(root, rest)
        return data if data is not None else _joined(head, rest, length)

    def scatter(self, root: int, parts: list[bytes] | None) -> bytes:
        """The root gives bytes for each rank; every rank gets its own."""
        with self._state:
            options = ScatterOptions()
            options.rootRank = root
            options.timeout = self._timeout
            head = torch.empty(_HEAD, dtype=torch.uint8, device="cpu")
            heads = [[_head(part) for part in parts]] if parts is not None else []
            self._group.scatter([head], heads, options).wait()
            if parts is not None:
                rests = [(rank, part) for rank, part in enumerate(parts) if rank != root and len(part) > _ROOM]
                # Kept until they are sent.
                sent = [_rest(part, len(part) - _ROOM) for _, part in rests]
                for work in [self._group.send([rest], rank, 0) for (rank, _), rest in zip(rests, sent)]:
                    work.wait(self._timeout)
                return parts[root]
            length = _length(head)
            if length <= _ROOM:
                return _bytes(head[8 : 8 + length])
            rest = torch.empty(length - _ROOM, dtype=torch.uint8, device="cpu")
            self._group.recv([rest], root, 0).wait(self._timeout)
        return _joined(head, rest, length)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        options = AllgatherOptions()
        options.timeout = self._timeout
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([gathered], [tensor], options).wait()
        return gathered

    def _broadcast(self, root: int, tensor: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait()


def _joined(head: torch.Tensor, rest: torch.Tensor | None, length: int) -> bytes:
    if length <= _ROOM or rest is None:
        return _bytes(head[8 : 8 + length])
    return _bytes(head[8:]) + _bytes(rest[: length - _ROOM])


class StoreGroup:
    """Messages through the key-value store behind a process group; for builds of torch without gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._round = 0
        self.rank = rank
        self.size = size
        self.plans = _reshard.PlanCache()
        self._lock = threading.Lock()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank gives bytes; every rank gets everyone's."""
        with self._lock:
            number = self._next_round()
            self._store.set(f"{number}/{self.rank}", data)
            keys = [f"{number}/{rank}" for rank in range(self.size)]
            self._store.wait(keys, self._timeout)
            gathered = [bytes(self._store.get(key)) for key in keys]
            # When all have started this round, all have read the one before the last.
            if number >= 2:
                self._store.delete_key(f"{number - 2}/{self.rank}")
        return gathered

    def gather(self, root: int, data: bytes) -> list[bytes] | None:
        """Every rank gives bytes; the root gets everyone's."""
        with self._lock:
            number = self._next_round()
            self._store.set(f"{number}/{self.rank}", data)
            return [self._taken(f"{number}/{rank}") for rank in range(self.size)] if self.rank == root else None

    def scatter(self, root: int, parts: list[bytes] | None) -> bytes:
        """The root gives bytes for each rank; every rank gets its own."""
        with self._lock:
            number = self._next_round()
            for rank, part in enumerate(parts or ()):
                self._store.set(f"{number}/{rank}", part)
            return self._taken(f"{number}/{self.rank}")

    def _next_round(self) -> int:
        number = self._round
        self._round += 1
        return number

    def _taken(self, key: str) -> bytes:
        """What is under a key that nobody else reads."""
        self._store.wait([key], self._timeout)
        value = bytes(self._store.get(key))
        self._store.delete_key(key)
        return value

    def broadcast(self, root: int, data: bytes | None) -> bytes:
        """The root gives bytes; every rank gets them."""
        return self.all_gather(data or b"")[root]


# By the process group's name and what the messages are for: a save in the background must not meet one in the foreground.
_groups: dict[tuple[str, str], tuple[Any, GlooGroup | StoreGroup]] = {}
_groups_lock = threading.Lock()


#: Where launchers say how many ranks they have started: torchrun, Open MPI, MPICH.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def group_for(
    process_group: Any = None,
    no_dist: bool = False,
    *,
    purpose: str = "sync",
    timeout: float = DEFAULT_TIMEOUT,
    saving: bool = False,
) -> Group | None:
    """The group for a save or a load; None for a process on its own."""
    _check_group(process_group)
    if no_dist:
        return None
    if not dist.is_available() or not dist.is_initialized():
        if saving:
            _check_alone()
        return None
    parent = process_group if process_group is not None else dist.group.WORLD
    if dist.get_rank(parent) < 0:
        raise InvalidInput("this rank is not part of the given process group")
    if dist.get_world_size(parent) == 1:
        return None
    name = _name(parent, purpose)
    with _groups_lock:
        known = _groups.get(name)
        if known is None or known[0] is not parent or (isinstance(known[1], GlooGroup) and known[1].broken):
            known = (parent, _make(parent, process_group is None, purpose, timeout))
            _groups[name] = known
    group = known[1]
    return group.with_timeout(timeout) if isinstance(group, GlooGroup) else group


def _check_group(process_group: Any) -> None:
    """Refuses what is not a process group, before it is taken for none."""
    if (
        process_group is None
        or process_group is dist.GroupMember.NON_GROUP_MEMBER
        or isinstance(process_group, dist.ProcessGroup)
    ):
        return
    kind = type(process_group).__name__
    hint = (
        "pass mesh.get_group()"
        if kind == "DeviceMesh"
        else "pass what torch.distributed.new_group() returned, or nothing for all ranks"
    )
    raise InvalidInput(f"process_group is a {kind} ({process_group!r}), not a process group", hint=hint)


def _check_alone() -> None:
    """Refuses to save alone where other ranks do the same: all would write to one path, and the state of one would survive."""
    for name in _WORLD_SIZES:
        size = os.environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise GroupError(
                f"the environment says that there are {size} ranks ({name}={size}), but torch.distributed is not initialized: each "
                "rank would save alone, and only one rank's state would survive",
                hint="call torch.distributed.init_process_group() first, or pass no_dist=True if this process saves for itself, to a "
                "path of its own",
            )


def is_broken(process_group: Any = None, *, purpose: str) -> bool:
    """Whether the last exchange of the group failed, so that nobody can be told anything before new connections are made."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    parent = process_group if process_group is not None else dist.group.WORLD
    with _groups_lock:
        known = _groups.get(_name(parent, purpose))
    return known is not None and known[0] is parent and isinstance(known[1], GlooGroup) and known[1].broken


def _name(parent: Any, purpose: str) -> tuple[str, str]:
    return (getattr(parent, "group_name", None) or repr(parent), purpose)


def _make(parent: Any, everyone: bool, purpose: str, timeout: float) -> GlooGroup | StoreGroup:
    limit = timedelta(seconds=timeout)
    if dist.is_gloo_available():
        if everyone:
            made = dist.new_group(backend="gloo", timeout=limit)
        else:
            ranks = dist.get_process_group_ranks(parent)
            made = dist.new_group(ranks, backend="gloo", timeout=limit, use_local_synchronization=True)
        return GlooGroup(made, timeout)
    store = dist.distributed_c10d._get_default_store()
    name = getattr(parent, "group_name", "default")
    store = PrefixStore(f"reshard/{name}/{purpose}", store)
    return StoreGroup(store, dist.get_rank(parent), dist.get_world_size(parent), timeout)


def described_failure(error: BaseException) -> str:
    """An exception in one line, for other ranks."""
    return f"{type(error).__name__}: {error}"


def together(group: Group | None, doing: str, work: Callable[[], _T]) -> list[_T]:
    """Does some work on every rank of a group. Where one fails, all do.

    Returns:
        what every rank has got, by rank, as JSON carries it.
    """
    if group is None:
        return [work()]
    failure: BaseException | None = None
    got: _T | None = None
    try:
        got = work()
    except Exception as error:
        failure = error
    told = json.dumps([got, None if failure is None else described_failure(failure)]).encode()
    answers = [json.loads(answer) for answer in group.all_gather(told)]
    if failure is not None:
        raise failure
    failed = {rank: why for rank, (_, why) in enumerate(answers) if why is not None}
    if failed:
        rank, why = next(iter(failed.items()))
        raise GroupError(f"{doing} failed on rank {rank}: {why}", ranks=list(failed))
    return [answer for answer, _ in answers]


__all__ = [
    "DEFAULT_TIMEOUT",
    "GlooGroup",
    "Group",
    "GroupError",
    "StoreGroup",
    "described_failure",
    "group_for",
    "is_broken",
    "together",
]
