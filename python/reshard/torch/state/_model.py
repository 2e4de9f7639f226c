"""A live model, described once: wrappers, parameters by identity, buffers, extra state, and FSDP's flat parameters.

The description goes to the engine, which answers everything about names. What stays here is what names stand for: the
tensors, and for a flat parameter the one piece of memory in which this rank's shard lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.utils import _free_storage
from torch.nn.parallel import DistributedDataParallel as DDP

from ... import _reshard
from .._tensor import CODES, facts_of, placed
from .._unsharded import FSDP2, reshard_modules
from ._errors import InvalidInput, StateError
from ._options import GROUP_VALUES, StateDictOptions, is_group_value

FLAT_PARAM = "_flat_param"
EXTRA_STATE = "_extra_state"
_FSDP_HOOKS = "torch.distributed.fsdp._state_dict_utils"


def _compiled_class() -> type | tuple[()]:
    try:
        from torch._dynamo.eval_frame import OptimizedModule
    except ImportError:
        return ()
    return OptimizedModule


_COMPILED = _compiled_class()


def _handle_of(module: nn.Module) -> Any:
    """The handle of an FSDP module's flat parameter; None for other modules, and for one without parameters."""
    return getattr(module, "_handle", None) if isinstance(module, FSDP) else None


class SliceDescription(NamedTuple):
    """The slice of a parameter that tensor parallelism leaves this rank: the whole shape, and where the slice begins."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]


class MemberDescription(NamedTuple):
    """A parameter inside of a flat one."""

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    aliases: list[str]
    slice: SliceDescription | None


class ExtentDescription(NamedTuple):
    """A stretch of a flat parameter: of a member, or padding."""

    member: int | None
    numel: int


class FlatDescription(NamedTuple):
    """A flat parameter for the engine."""

    name: str
    dtype: int
    members: list[MemberDescription]
    extents: list[ExtentDescription]
    strategy: str
    rank: int
    world: int
    use_orig_params: bool


class ParameterDescription(NamedTuple):
    """A parameter; without a dtype where it has no shape of its own."""

    name: str
    identity: int
    requires_grad: bool
    dtype: int | None
    shape: tuple[int, ...]
    flat: FlatDescription | None


class BufferDescription(NamedTuple):
    """A buffer."""

    name: str
    identity: int
    persistent: bool


class ModuleDescription(NamedTuple):
    """A module for the engine, with what lies directly in it and the modules below it."""

    wrapper: str | dict[str, str] | None
    parameters: list[ParameterDescription]
    buffers: list[BufferDescription]
    extra_state: bool
    manages: FlatDescription | None
    children: list[ChildDescription]


class ChildDescription(NamedTuple):
    """A module by its name in another."""

    name: str
    module: ModuleDescription


def _spans_all(mesh: DeviceMesh) -> bool:
    """Whether a mesh is a part of one that has all ranks."""
    root = getattr(mesh, "_get_root_mesh", None)
    if root is None:
        # Of torch 2.5 the mesh does not know it.
        from torch.distributed.device_mesh import _mesh_resources

        return bool(_mesh_resources.get_root_mesh(mesh).size() == dist.get_world_size())
    return bool(root().size() == dist.get_world_size())


class Flat:
    """A flat parameter: its handle, and the memory of this rank's shard."""

    __slots__ = ("handle", "name", "param")

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.param = handle.flat_param

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, padding included. FSDP sets ``_local_shard`` when it first runs; before, the data is the shard."""
        shard = getattr(self.param, "_local_shard", None)
        with torch.no_grad():
            memory: torch.Tensor = self.param.detach() if shard is None else shard.detach()
            return memory

    @property
    def sharded(self) -> bool:
        """Whether every rank holds only a part."""
        return bool(self.handle.uses_sharded_strategy)

    def process_group(self) -> Any:
        """The ranks between which it is shared; None is all ranks."""
        group = self.handle.process_group
        if "HYBRID" in self.handle._sharding_strategy.name or group is None or group.size() == dist.get_world_size():
            return None
        return group

    def reshard(self) -> None:
        """Registers original parameters again that some strategies leave unsharded between forward and backward."""
        shard = getattr(self.param, "_local_shard", None)
        if shard is None or not self.sharded:
            return
        # The same question that FSDP asks itself.
        if self.param.data_ptr() != shard.data_ptr() or getattr(self.handle, "_skipped_use_sharded_views", False):
            self._free()

    def free_copies(self) -> None:
        """Frees an unsharded copy, which the next forward would use instead of what has been written into the shard."""
        if not self.sharded:
            return
        copies = [getattr(self.param, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded")]
        allocated = [copy for copy in copies if copy is not None and copy.untyped_storage().size()]
        if allocated:
            self._free()
            for copy in allocated:
                _free_storage(copy)

    def _free(self) -> None:
        self.handle.reshard(True)
        self.handle.post_reshard()


class LiveModel:
    """A model and its description."""

    def __init__(self, model: nn.Module, modifiers: str = "_fqn_modifiers") -> None:
        self.model = model
        self.modifiers = modifiers
        self.tensors: dict[int, torch.Tensor] = {}
        self.flats: dict[str, Flat] = {}
        #: Modules with extra state, by the name of that state in the live model.
        self.extra: dict[str, nn.Module] = {}
        #: Original parameters behind which a flat one is: their own shape is that of this rank's part.
        self._managed: set[int] = set()
        #: Flat parameters, and original ones behind them, of which every rank holds only a part.
        self._parts: set[int] = set()
        #: Whether members of flat parameters are slices by tensor parallelism.
        self.sliced = False
        self._handles: dict[int, Any] = {}
        reshard_modules(model)
        for module in model.modules():
            handle = _handle_of(module)
            if handle is not None:
                Flat("", handle).reshard()
                param = handle.flat_param
                self._handles[id(param)] = handle
                managed = [id(p) for p in (*(param._params or ()), *(param._shared_params or ()))]
                self._managed.update(managed)
                if handle.uses_sharded_strategy:
                    self._parts.update((id(param), *managed))
        self.inner = _reshard.StateModel(self._module(model, "", None))
        self._parameters: dict[str, _reshard.NamedParameter] | None = None

    @property
    def has_flats(self) -> bool:
        """Whether FSDP keeps some parameters flat."""
        return bool(self.flats)

    def is_sharded_flat(self, param: torch.Tensor) -> bool:
        """Whether a parameter is a flat one, or a part of one, of which this rank holds a shard."""
        return id(param) in self._parts

    def free_copies(self) -> None:
        """Frees unsharded copies of parameters: what is written into their shards is what is used from now on."""
        for flat in self.flats.values():
            flat.free_copies()

    @property
    def parameters(self) -> dict[str, _reshard.NamedParameter]:
        """Identity and place in a flat parameter, by every name that a parameter has."""
        if self._parameters is None:
            self._parameters = {parameter.name: parameter for parameter in self.inner.parameters()}
        return self._parameters

    def process_groups(self) -> set[Any]:
        """The ranks between which parameters are shared, for each flat parameter; None is all ranks."""
        if not dist.is_initialized() or self.sliced:
            return {None}
        return {flat.process_group() for flat in self.flats.values()} or {None}

    def process_group(self) -> Any:
        """The ranks that hold the model together: all of them, unless FSDP was given fewer."""
        groups = self.process_groups()
        return None if None in groups else max(groups, key=lambda group: (group.size(), group.group_name))

    def broadcast_group(self) -> Any:
        """The ranks that rank 0 tells a state: those that hold the model together. All, where each rank holds it by itself, and
        where the mesh of FSDP is a part of one of all ranks: the other dimensions hold it too."""
        group = self.process_group()
        if group is None or group.size() == 1:
            return None
        meshes = [getattr(module, "_device_mesh", None) for module in self.model.modules()]
        return None if any(_spans_all(mesh) for mesh in meshes if isinstance(mesh, DeviceMesh)) else group

    def flat_of(self, path: Sequence[Any], leaf: Any = None) -> Flat | None:
        """The flat parameter that a leaf of a state dict belongs to: a member, or a slot of one."""
        home = getattr(leaf, "home", None)
        if home is not None:
            return home  # type: ignore[no-any-return]
        name = self.parameter_of(path)
        part = self.parameters[name].flat if name is not None else None
        return self.flats[part.flat] if part is not None else None

    def parameter_of(self, path: Sequence[Any]) -> str | None:
        """The parameter whose value or slot has a path, in a model's state or an optimizer's, nested or flattened."""
        if len(path) > 1:
            return path[1] if path[0] == "state" and path[1] in self.parameters else None
        key = str(path[0])
        if key in self.parameters:
            return key
        for prefix in ("state.", GROUP_VALUES):
            name = key.removeprefix(prefix)
            while name != key and name and name not in self.parameters:
                name = name.rpartition(".")[0]
            if name != key and name:
                return name
        return None

    def in_model_order(self, tree: dict[Any, Any]) -> dict[Any, Any]:
        """A state dict with what belongs to parameters in the order of the unwrapped model, the same on every rank."""
        names = [
            entry.name for entry in self.in_order(self.inner.entries([], StateDictOptions(dsd_fqn_modifiers=self.modifiers)))
        ]
        places = {name: place for place, name in enumerate(names)}

        def place(key: Any, nested: bool) -> tuple[bool, int]:
            name = self.parameter_of(("state", key) if nested else (key,))
            of_group = not nested and key not in self.parameters and is_group_value(key)
            return of_group, len(names) if name is None else places.get(self.inner.primary(name), len(names))

        def ordered(below: dict[Any, Any], nested: bool) -> dict[Any, Any]:
            return {key: below[key] for key in sorted(below, key=lambda key: place(key, nested))}

        if isinstance(tree.get("state"), dict) and "state" not in self.parameters:
            return {**tree, "state": ordered(tree["state"], True)}
        return ordered(tree, False)

    # ---- describing ---------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, raw: str, manages: FlatDescription | None) -> ModuleDescription:
        prefix = f"{raw}." if raw else ""
        parameters = []
        for name, param in module._parameters.items():
            if param is None:
                continue
            identity = id(param)
            self.tensors[identity] = param
            flat = None
            if name == FLAT_PARAM and hasattr(param, "_fqns"):
                flat = self._flat(f"{prefix}{name}", param)
            facts = None if identity in self._managed or nn.parameter.is_lazy(param) else facts_of(param)
            dtype, shape = facts if facts is not None else (None, ())
            parameters.append(ParameterDescription(name, identity, param.requires_grad, dtype, shape, flat))
        buffers = []
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.tensors[id(buffer)] = buffer
                buffers.append(BufferDescription(name, id(buffer), name not in module._non_persistent_buffers_set))
        extra = getattr(type(module), "get_extra_state", nn.Module.get_extra_state) is not nn.Module.get_extra_state
        if extra:
            self.extra[f"{prefix}{EXTRA_STATE}"] = module
        below = None
        handle = _handle_of(module)
        if handle is not None and handle._use_orig_params:
            below = self._flat_description(f"{prefix}{FLAT_PARAM}", handle)
        children = []
        for name, child in module._modules.items():
            if child is not None:
                children.append(ChildDescription(name, self._module(child, f"{prefix}{name}", below)))
        return ModuleDescription(self._wrapper(module), parameters, buffers, extra, manages, children)

    def _wrapper(self, module: nn.Module) -> Any:
        if isinstance(module, DDP):
            return "ddp"
        if isinstance(module, FSDP):
            return "fsdp1"
        if isinstance(module, _COMPILED):
            return "compiled"
        if isinstance(module, ActivationWrapper):
            return "checkpoint"
        modifiers = getattr(module, self.modifiers, None)
        if callable(modifiers):
            return dict(modifiers())
        return "fsdp2" if isinstance(module, FSDP2) else None

    def _flat(self, name: str, param: Any) -> FlatDescription:
        handle = self._handles.get(id(param))
        if handle is not None:
            return self._flat_description(name, handle)
        raise StateError(f"{name!r} is a flat parameter of no FSDP module; is the model the root module?", keys=[name])

    def _flat_description(self, name: str, handle: Any) -> FlatDescription:
        param = handle.flat_param
        flat = Flat(name, handle)
        self.flats[name] = flat
        shared = getattr(param, "_shared_param_infos", None) or ()
        # Before torch 2.6 all of them were.
        contiguous = getattr(param, "_contiguities", None)
        members = []
        for index, info in enumerate(param._param_infos):
            fqn = param._fqns[index]
            if contiguous is not None and not contiguous[index]:
                raise StateError(
                    f"{fqn!r} is not contiguous in its flat parameter; reshard cannot cut it into regions", keys=[fqn]
                )
            shape = tuple(param._shapes[index])
            extension = param._param_extensions[index]
            slice_ = _slice_of(fqn, extension, shape) if extension is not None else None
            trained = param._params[index].requires_grad if param._params is not None else param.requires_grad
            aliases = [
                f"{other.module_name}.{other.param_name}" if other.module_name else other.param_name
                for other in shared
                if other.prim_module is info.module and other.prim_param_name == info.param_name
            ]
            members.append(MemberDescription(fqn, shape, trained, aliases, slice_))
            self.sliced = self.sliced or slice_ is not None
        extents: list[ExtentDescription] = []
        count = 0
        for numel, padding in zip(param._numels_with_padding, param._is_padding_mask):
            extents.append(ExtentDescription(None if padding else count, numel))
            count += not padding
        dtype = CODES[flat.shard.dtype]
        strategy = handle._sharding_strategy.name
        own = bool(handle._use_orig_params)
        return FlatDescription(name, dtype, members, extents, strategy, handle.rank, handle.world_size, own)

    # ---- names and values ---------------------------------------------------------------------------------------------

    def submodule_names(self, submodules: Iterable[nn.Module] | None) -> list[str]:
        """Names of submodules in the live model."""
        wanted = set(submodules or ())
        return [name for name, module in self.model.named_modules() if module in wanted]

    def in_order(self, entries: list[_reshard.ModelEntry]) -> list[_reshard.ModelEntry]:
        """Entries in the order of the unwrapped model: members of a flat parameter come where their modules come."""
        if not self.has_flats:
            return entries
        names = self.inner.canonical([name for name, _ in self.model.named_modules()])
        places: dict[str, int] = {}
        for place, name in enumerate(names):
            places.setdefault(name, place)
        kinds = {"parameter": 0, "buffer": 1, "extra": 2}
        return sorted(entries, key=lambda entry: (places.get(entry.name.rpartition(".")[0], len(names)), kinds[entry.kind]))

    def raw_state(self) -> dict[str, Any]:
        """The model's own state dict by names in the live model, hooks of modules included; FSDP's hooks, which gather,
        are left out."""
        if not self.has_flats:
            own = type(self.model).state_dict
            return dict(own(self.model))
        destination: Any = _Destination()
        destination._metadata = {}
        _collect(self.model, destination, "")
        return dict(destination)


class _Destination(dict):  # type: ignore[type-arg]
    """A dict with room for metadata, as modules expect it."""

    _metadata: dict[str, Any]


def _is_fsdp_hook(hook: Any) -> bool:
    for _ in range(3):
        if getattr(hook, "__module__", None) == _FSDP_HOOKS:
            return True
        inner = getattr(hook, "hook", None) or getattr(hook, "func", None) or getattr(hook, "__wrapped__", None)
        if inner is None:
            return False
        hook = inner
    return False


def _collect(module: nn.Module, destination: Any, prefix: str) -> None:
    """What ``nn.Module.state_dict`` does, without FSDP's hooks."""
    if type(module).state_dict is not nn.Module.state_dict and not any(isinstance(m, FSDP) for m in module.modules()):
        module.state_dict(destination=destination, prefix=prefix, keep_vars=False)
        return
    metadata = {"version": module._version}
    destination._metadata[prefix[:-1]] = metadata
    for hook in module._state_dict_pre_hooks.values():
        if not _is_fsdp_hook(hook):
            hook(module, prefix, False)
    module._save_to_state_dict(destination, prefix, False)
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, destination, f"{prefix}{name}.")
    for hook in module._state_dict_hooks.values():
        if _is_fsdp_hook(hook):
            continue
        result = hook(module, destination, prefix, metadata)
        if result is not None and not getattr(hook, "_from_public_api", False) and result is not destination:
            result = dict(result)
            destination.clear()
            destination.update(result)


def _slice_of(name: str, extension: Any, shape: tuple[int, ...]) -> SliceDescription:
    """The shape of a parameter of which tensor parallelism leaves this rank one slice, and where the slice begins. FSDP keeps
    how the DTensor was placed beside the flat parameter."""
    mesh, placements = getattr(extension, "mesh", None), getattr(extension, "placements", None)
    if mesh is None or placements is None:
        raise StateError(
            f"{name!r} is in a flat parameter by an extension ({type(extension).__name__}) that reshard does not know",
            keys=[name],
        )
    whole = torch.Size(extension.shape)
    regions = placed(name, mesh, tuple(placements), whole).regions
    if 0 in shape:
        return SliceDescription(tuple(whole), (0,) * len(whole))
    if len(regions) != 1 or regions[0].sizes != shape:
        raise StateError(
            f"{name!r} is cut by tensor parallelism into more than one part for a rank, inside of a flat parameter", keys=[name]
        )
    return SliceDescription(tuple(whole), regions[0].offsets)


def check_model(model: Any) -> nn.Module:
    """The model, or an error that says what was given instead."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the model is a {type(model).__name__}, not an nn.Module")
    return model
