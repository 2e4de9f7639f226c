"""Setting a model's state: given tensors into the live parameters and buffers, flat ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ... import _reshard
from .._leaf import ShardView
from .._tensor import Facts, device_of, regions_of
from ._errors import StateMismatch
from ._model import LiveModel, _is_fsdp_hook
from ._optimizer import fill, member_view
from ._options import StateDictOptions
from ._stream import Wanted

#: What is known of a given tensor (None for other values), and the value.
Given = tuple[Facts | None, Any]


class _GivenEntry(NamedTuple):
    """A given tensor for the engine; another value without a dtype."""

    key: str
    dtype: int | None
    shape: tuple[int, ...]


#: Brings tensors that another rank holds: from what this rank wants of them, or why it can not go on, to the tensors.
Receive = Callable[[dict[str, Wanted], BaseException | None], Iterable[tuple[str, Any]]]


def set_model(live: LiveModel, given: dict[str, Given], options: StateDictOptions, receive: Receive | None) -> _IncompatibleKeys:
    """Sets what is given, in the given order; missing and unexpected keys are errors or are returned."""
    live.free_copies()
    if receive is None:
        plan = _Plan(live, given, options)
        arriving: Iterable[tuple[str, Any]] = ((key, value) for key, (_, value) in given.items() if key in plan.tensors)
    else:
        try:
            plan = _Plan(live, given, options)
            arriving = receive(plan.wanted(), None)
        except BaseException as problem:
            # All ranks hear of it, and nobody waits for this one.
            list(receive({}, problem))
            raise
    for key, value in arriving:
        plan.set(key, value)
    for key, value in plan.values:
        plan.set(key, value)
    problems = plan.own.load()
    if problems:
        raise StateMismatch("the model's own modules refused the state: " + "; ".join(problems))
    return _IncompatibleKeys(list(plan.missing), list(plan.unexpected))


class _Plan:
    """Where everything goes that is given."""

    def __init__(self, live: LiveModel, given: dict[str, Given], options: StateDictOptions) -> None:
        self.live = live
        self.own = _Own(live)
        nothing = (None, ())
        listed = [_GivenEntry(key, *(facts or nothing)) for key, (facts, _) in given.items() if key not in self.own.keys]
        assigned = live.inner.assign(listed, options)
        self.missing, self.unexpected = assigned.missing, assigned.unexpected
        self._entries = assigned.entries
        #: Facts of tensors that go somewhere, and other values that do.
        self.tensors: dict[str, Facts] = {}
        self.values: list[tuple[str, Any]] = []
        for key, (facts, value) in given.items():
            entry = self._entries.get(key)
            if entry is None and key not in self.own.keys:
                continue
            if facts is not None and (entry is None or entry.kind != "extra"):
                self.tensors[key] = facts
            elif entry is None or entry.kind == "extra":
                self.values.append((key, value))
            else:
                raise StateMismatch(f"{key!r} is a {type(value).__name__}, not a tensor", keys=[key])

    def wanted(self) -> dict[str, Wanted]:
        """What this rank needs of each tensor."""
        wanted: dict[str, Wanted] = {}
        for key, facts in self.tensors.items():
            entry = self._entries.get(key)
            target = self._target(entry) if entry is not None else None
            if target is None or (isinstance(target, torch.Tensor) and not isinstance(target, DTensor)):
                wanted[key] = Wanted([((0,) * len(facts.shape), facts.shape)], device_of(target))
            else:
                wanted[key] = Wanted(regions_of(key, target), device_of(target))
        return wanted

    def _target(self, entry: _reshard.ModelEntry) -> Any:
        return member_view(self.live, entry.flat) if entry.flat is not None else self.live.tensors[entry.identity or 0]

    def set(self, key: str, value: Any) -> None:
        """Sets one thing."""
        entry = self._entries.get(key)
        if entry is None:
            self.own.take(key, _whole(value))
            return
        if entry.kind == "extra":
            self.live.extra[entry.raw].set_extra_state(value)
            return
        target = self._target(entry)
        if entry.flat is None and target.is_meta:
            target = _materialised(self.live, entry.identity or 0, target)
        if entry.flat is None and self.own.takes(entry.raw):
            self.own.take_raw(entry.raw, key, _converted(key, target, value))
        else:
            fill(key, target, value)


def _whole(value: Any) -> Any:
    """A tensor that came in parts, one of which is all of it."""
    return value.pieces[0][1] if isinstance(value, ShardView) else value


def _converted(key: str, target: torch.Tensor, value: Any) -> Any:
    """A given tensor as one of the kind that the target is."""
    if isinstance(value, ShardView) and not isinstance(target, DTensor):
        value = _whole(value)
    if type(value) is torch.Tensor and not isinstance(target, DTensor):
        return value
    made = torch.empty_like(target.detach())
    fill(key, made, value)
    return made


def _materialised(live: LiveModel, identity: int, target: torch.Tensor) -> torch.Tensor:
    """Memory for a parameter or buffer that is still on the meta device, under all of its names."""
    device = device_of(target)
    if isinstance(target, DTensor):
        local = torch.empty(target._local_tensor.shape, dtype=target.dtype, device=device)
        made: Any = DTensor.from_local(
            local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
        )
    else:
        made = torch.empty(target.shape, dtype=target.dtype, device=device)
    if isinstance(target, nn.Parameter):
        made = nn.Parameter(made, requires_grad=target.requires_grad)
    for module in live.model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is target:
                    held[name] = made
    live.tensors[identity] = made
    return made  # type: ignore[no-any-return]


class _Own:
    """Modules that load their state themselves: by a method of their own or by hooks."""

    def __init__(self, live: LiveModel) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._given: dict[str, dict[str, Any]] = {}
        self._raw: dict[str, str] = {}
        for name, module in live.model.named_modules(remove_duplicate=False):
            if _loads_itself(module):
                self._modules[f"{name}." if name else ""] = module
        #: Keys that only hooks know.
        self.keys: set[str] = set()
        if self._modules:
            raw = list(live.raw_state())
            names = live.inner.canonical(raw)
            known = {entry.name for entry in live.inner.entries([], StateDictOptions(dsd_fqn_modifiers=live.modifiers))}
            for name, raw_name in zip(names, raw):
                if name not in known and self._owner(raw_name) is not None and not raw_name.endswith("._flat_param"):
                    self.keys.add(name)
                    self._raw[name] = raw_name

    def _owner(self, raw: str) -> str | None:
        """The innermost such module that a name lies in."""
        found = [prefix for prefix in self._modules if raw.startswith(prefix)]
        return max(found, key=len, default=None)

    def takes(self, raw: str) -> bool:
        """Whether a parameter or buffer of exactly such a module is meant."""
        prefix, _, _ = raw.rpartition(".")
        return (f"{prefix}." if prefix else "") in self._modules

    def take(self, key: str, value: Any) -> None:
        raw = self._raw[key]
        self._given.setdefault(self._owner(raw) or "", {})[raw] = value

    def take_raw(self, raw: str, key: str, value: Any) -> None:
        prefix, _, _ = raw.rpartition(".")
        self._given.setdefault(f"{prefix}." if prefix else "", {})[raw] = value

    def load(self) -> list[str]:
        """Gives modules what was given for them; what they complain about."""
        problems: list[str] = []
        for prefix, state in self._given.items():
            module = self._modules[prefix]
            missing: list[str] = []
            unexpected: list[str] = []
            errors: list[str] = []
            hooks = module._load_state_dict_pre_hooks
            kept = dict(hooks)
            try:
                for handle, hook in kept.items():
                    if _is_fsdp_hook(hook):
                        del hooks[handle]
                module._load_from_state_dict(state, prefix, {"version": module._version}, False, missing, unexpected, errors)
            finally:
                hooks.clear()
                hooks.update(kept)
            incompatible = _IncompatibleKeys(missing, unexpected)
            for hook in module._load_state_dict_post_hooks.values():
                if not _is_fsdp_hook(hook):
                    hook(module, incompatible)
            problems.extend(errors)
        return problems


def _loads_itself(module: nn.Module) -> bool:
    if isinstance(module, (FSDP, ActivationWrapper)):
        return False
    if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return True
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    return any(not _is_fsdp_hook(hook) and not _only_shards(hook) for hook in hooks)


def _only_shards(hook: Any) -> bool:
    """A hook of ``fully_shard``, which brings parameters into their sharded form."""
    inner = getattr(hook, "hook", None) or hook
    return (
        "fully_shard" in getattr(inner, "__module__", "")
        or "_fsdp_" in getattr(inner, "__qualname__", "")
        or "FSDPParamGroup" in getattr(inner, "__qualname__", "")
    )
