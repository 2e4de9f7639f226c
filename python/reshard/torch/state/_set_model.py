"""Setting a model's state: given tensors into the live parameters and buffers, flat ones included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ._errors import StateMismatch
from ._model import LiveModel, _is_fsdp_hook
from ._optimizer import fill, member_view
from ._options import StateDictOptions
from ._pieces import is_tensor

#: What is known of a given tensor (None for other values), and the value.
Given = tuple[tuple[int, tuple[int, ...]] | None, Any]
#: Brings a tensor that another rank holds.
Receive = Callable[[str, tuple[int, tuple[int, ...]], Any, torch.device], torch.Tensor]


def set_model(live: LiveModel, given: dict[str, Given], options: StateDictOptions, receive: Receive | None) -> _IncompatibleKeys:
    """Sets what is given, in the given order; missing and unexpected keys are errors or are returned."""
    own = _Own(live)
    listed = []
    for key, (facts, _) in given.items():
        if key not in own.keys:
            listed.append((key, facts[0] if facts else None, list(facts[1]) if facts else []))
    assignments, missing, unexpected = live.inner.assign(listed, options)
    places = {key: entry for key, entry in assignments}
    for key, (facts, value) in given.items():
        entry = places.get(key)
        if entry is None:
            if key in own.keys:
                own.take(key, receive(key, facts, value, torch.device("cpu")) if receive and facts else value)
            continue
        _, name, raw, kind, identity, _, flat = entry
        if kind == "extra":
            live.extra[raw].set_extra_state(value)
            continue
        target: Any = member_view(live, flat) if flat is not None else live.tensors[identity]
        device = _device(target)
        if facts is None or not is_tensor(value) and receive is None:
            raise StateMismatch(f"{key!r} is a {type(value).__name__}, not a tensor", keys=[key])
        if receive is not None:
            value = receive(key, facts, value, device)
        if flat is None and target.is_meta:
            target = _materialised(live, identity, target)
        if flat is None and own.takes(raw):
            own.take_raw(raw, key, _converted(key, target, value))
            continue
        fill(key, target, value)
    problems = own.load()
    if problems:
        raise StateMismatch("the model's own modules refused the state: " + "; ".join(problems))
    return _IncompatibleKeys(list(missing), list(unexpected))


def _device(target: Any) -> torch.device:
    if isinstance(target, torch.Tensor):
        device = target._local_tensor.device if isinstance(target, DTensor) else target.device
        if device.type != "meta":
            return device
        return torch.device(target.device_mesh.device_type) if isinstance(target, DTensor) else torch.device("cpu")
    return target.base.device  # type: ignore[no-any-return]


def _converted(key: str, target: torch.Tensor, value: Any) -> Any:
    """A given tensor as one of the kind that the target is."""
    if type(value) is torch.Tensor and not isinstance(target, DTensor):
        return value
    made = torch.empty_like(target.detach())
    fill(key, made, value)
    return made


def _materialised(live: LiveModel, identity: int, target: torch.Tensor) -> torch.Tensor:
    """Memory for a parameter or buffer that is still on the meta device, under all of its names."""
    device = _device(target)
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
            known = {entry[1] for entry in live.inner.entries([], StateDictOptions(dsd_fqn_modifiers=live.modifiers))}
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
    return "fully_shard" in getattr(inner, "__module__", "") or "_fsdp_" in getattr(inner, "__qualname__", "") or "FSDPParamGroup" in getattr(
        inner, "__qualname__", ""
    )
