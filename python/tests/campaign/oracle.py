"""Every element that this rank holds, with its position in the whole, read from the live objects by hand.

Neither reshard nor PyTorch's state-dict calls have a part in it: only tensors, the ranges of flat parameters and the coordinates of
meshes.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

WRAPPINGS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def canonical(name: str) -> str:
    """A name without the wrappers; no part of a model here is called `module`."""
    for wrapping in WRAPPINGS:
        name = name.replace(wrapping, "")
    return name.removeprefix("module.").replace(".module.", ".")


def placed_index(tensor: Any) -> torch.Tensor:
    """The positions in the whole of the elements that a DTensor has here, in its local shape."""
    index = torch.arange(math.prod(tensor.shape)).reshape(tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    strided = [d for d, p in enumerate(placements) if "Strided" in type(p).__name__]
    # What tensor parallelism cut is cut again by FSDP, which is the mesh's outer dimension.
    for dim in [d for d in range(len(placements)) if d not in strided] + strided:
        placement = placements[dim]
        if placement.is_shard() or dim in strided:
            cut = torch.chunk(index, mesh.size(dim), placement.dim)
            mine = coordinate[dim]
            index = cut[mine] if mine < len(cut) else index.narrow(placement.dim, 0, 0)
    return index


def content(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's elements as rows of bytes."""
    # A copy, because NumPy would take the memory as its own: FSDP could not free it any more.
    flat = tensor.detach().clone().contiguous().reshape(-1)
    return (
        flat.view(torch.uint8).reshape(len(flat), flat.element_size()).numpy().copy()
        if len(flat)
        else np.zeros((0, flat.element_size()), np.uint8)
    )


class Piece:
    """Elements of a tensor and where they are in it."""

    def __init__(self, shape: Any, dtype: torch.dtype, index: torch.Tensor, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(shape), str(dtype)
        self.index, self.rows = index.reshape(-1).numpy().copy(), content(tensor)
        assert len(self.index) == len(self.rows), f"{tuple(shape)}: {len(self.index)} positions, {len(self.rows)} elements"


class Holder:
    """One parameter as it is held here: the key it has in an optimizer, its names, its shape, and where its elements are."""

    def __init__(self, param: Any, names: list[str], shape: Any, index: torch.Tensor, cut: slice | None, local: Any) -> None:
        self.param, self.names, self.shape, self.index = param, names, tuple(shape), index.reshape(-1)
        #: Of a flat parameter: which elements of the shard are this one's.
        self.cut, self.local = cut, local

    def piece(self, tensor: torch.Tensor) -> Piece:
        whole = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if self.cut is not None:
            whole = whole.reshape(-1)[self.cut]
        return Piece(self.shape, tensor.dtype, self.index, whole)


def holders(laid: Any) -> Iterator[Holder]:
    """All parameters of a model, once each."""
    model = laid.model
    handled: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FSDP) and id(module) not in handled and module._handle is not None:
            handled.add(id(module))
            yield from _flat(laid, path, module._handle)
    flats = {id(m._handle.flat_param) for m in model.modules() if isinstance(m, FSDP) and m._handle is not None}
    original = {
        id(p)
        for m in model.modules()
        if isinstance(m, FSDP) and m._handle is not None and m._handle.flat_param._params is not None
        for p in [*m._handle.flat_param._params, *(m._handle.flat_param._shared_params or ())]
    }
    live: dict[int, tuple[Any, list[str]]] = {}
    for name, param in _live_params(model):
        if id(param) not in flats and id(param) not in original:
            live.setdefault(id(param), (param, []))[1].append(canonical(name))
    for param, names in live.values():
        if isinstance(param, DTensor):
            yield Holder(param, names, param.shape, placed_index(param), None, param)
        else:
            yield Holder(param, names, param.shape, torch.arange(param.numel()), None, param)


def _live_params(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters by name; FSDP2's as sharded ones, whatever is registered at the moment."""
    sharded = {(id(owner), name): param for (owner, name), param in _fsdp2_params(model).items()}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            # FSDP1 puts views of the whole there for a forward: they are no parameters.
            if isinstance(param, nn.Parameter):
                yield f"{path}.{name}" if path else name, sharded.get((id(module), name), param)


def _fsdp2_params(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """The sharded parameters of FSDP2, by the module and the name that they are registered under."""
    sharded: dict[tuple[nn.Module, str], Any] = {}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            for param in group.fsdp_params:
                info = param._module_info
                owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
                sharded.update(dict.fromkeys(owners, param.sharded_param))
    return sharded


def _flat(laid: Any, path: str, handle: Any) -> Iterator[Holder]:
    """The parameters inside of a flat one."""
    flat = handle.flat_param
    prefix = f"{path}." if path else ""
    aliases: dict[str, list[str]] = {}
    for info in flat._shared_param_infos:
        first = f"{info.prim_module_name}.{info.prim_param_name}".lstrip(".")
        aliases.setdefault(canonical(prefix + first), []).append(
            canonical(prefix + f"{info.module_name}.{info.param_name}".lstrip("."))
        )
    local = getattr(flat, "_local_shard", flat) if handle.uses_sharded_strategy else flat
    size = local.numel() if handle.uses_sharded_strategy else sum(flat._numels_with_padding)
    begin = handle.rank * size if handle.uses_sharded_strategy else 0
    end = begin + size
    at, number = 0, 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not padding:
            name = canonical(prefix + flat._fqns[number])
            base = laid.base.get(name)
            base = torch.arange(numel) if base is None else base.reshape(-1)
            first, last = max(begin, at), min(end, at + numel)
            here = last > first
            index = base[first - at : last - at] if here else base[:0]
            cut = slice(first - begin, last - begin) if here else slice(0, 0)
            names, shape = [name, *aliases.get(name, [])], laid.shapes[name]
            if flat._params is not None:
                yield Holder(flat._params[number], names, shape, index, None, local.detach().reshape(-1)[cut])
            else:
                yield Holder(flat, names, shape, index, cut, local.detach())
            number += 1
        at += numel


def gathered(laid: Any, optimizers: list[Any]) -> dict[Any, Any]:
    """All that this rank holds: pieces of tensors, and values."""
    found: dict[Any, Any] = {}
    names_of: dict[int, list[str]] = {}
    with torch.no_grad():
        for holder in holders(laid):
            key = min(holder.names)
            for name in holder.names:
                found["param", name] = holder.piece(holder.local)
            names_of.setdefault(id(holder.param), []).append(key)
            for number, optimizer in enumerate(optimizers):
                for slot, value in optimizer.state.get(holder.param, {}).items():
                    if _is_nobodys(holder, value):
                        continue
                    found["slot", number, key, slot] = _slot(holder, value)
        for path, module in laid.model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    kind = "cache" if name in module._non_persistent_buffers_set else "buffer"
                    found[kind, canonical(f"{path}.{name}")] = Piece(
                        buffer.shape, buffer.dtype, torch.arange(buffer.numel()), buffer
                    )
            if hasattr(module, "told"):
                found["extra", canonical(path)] = frozen_value(module.told)
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            members = sorted({name for p in group["params"] for name in names_of.get(id(p), ["?"])})
            found["members", number, place] = members
            for key, value in group.items():
                if key != "params":
                    found["group", number, place, key] = frozen_value(value)
    return found


def _is_nobodys(holder: Holder, value: Any) -> bool:
    """Whether a slot is one number for a parameter of which this rank holds nothing: it stands still here, and the ranks that hold
    something know better."""
    elsewhere = not len(holder.index) and 0 not in holder.shape
    return elsewhere and not isinstance(value, DTensor) and isinstance(value, torch.Tensor) and not value.dim()


def _slot(holder: Holder, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return frozen_value(value)
    if isinstance(value, DTensor):
        return Piece(value.shape, value.dtype, placed_index(value), value.to_local())
    here = holder.param.to_local().shape if isinstance(holder.param, DTensor) else holder.param.shape
    if value.dim() and (holder.cut is not None or value.shape == here or value.numel() == len(holder.index)):
        return holder.piece(value)
    return Piece(value.shape, value.dtype, torch.arange(value.numel()), value)


def frozen_value(value: Any) -> Any:
    """A value with its types, comparable: tensors by their bits."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), content(value).tobytes())
    if isinstance(value, dict):
        # Equal dicts may differ in their order.
        entries = ((type(k).__name__, repr(k), frozen_value(v)) for k, v in value.items())
        return (type(value).__name__, tuple(sorted(entries, key=lambda entry: entry[:2])))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(frozen_value(v) for v in value))
    return (type(value).__name__, repr(value))


def merged(ranks: list[dict[Any, Any]]) -> dict[Any, Any]:
    """What all ranks hold together: whole tensors, and values that all agree on."""
    whole: dict[Any, Any] = {}
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        parts = [rank[key] for rank in ranks if key in rank]
        if not isinstance(parts[0], Piece):
            assert all(part == parts[0] for part in parts), f"{key}: ranks differ: {parts}"
            whole[key] = parts[0]
            continue
        first = parts[0]
        size = math.prod(first.shape)
        rows, seen = np.zeros((size, first.rows.shape[1]), np.uint8), np.zeros(size, bool)
        for part in parts:
            assert (part.shape, part.dtype) == (first.shape, first.dtype), f"{key}: ranks differ in shape or dtype"
            again = seen[part.index]
            assert (rows[part.index[again]] == part.rows[again]).all(), f"{key}: replicas differ"
            rows[part.index] = part.rows
            seen[part.index] = True
        assert seen.all(), f"{key}: no rank holds {int((~seen).sum())} of {size} elements"
        whole[key] = (first.dtype, first.shape, rows.tobytes())
    return whole


def surroundings(laid: Any, optimizers: list[Any]) -> dict[str, Any]:
    """What no save and no load may change."""
    model = laid.model
    found: dict[str, Any] = {
        "torch's generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "Python's generator": hash(random.getstate()),
        "NumPy's generator": hash(pickle.dumps(np.random.get_state())),
        "modules": [(id(m), m.training) for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "gradients enabled": torch.is_grad_enabled(),
    }
    for number, optimizer in enumerate(optimizers):
        found[f"members of optimizer {number}"] = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        found[f"kind of lr in optimizer {number}"] = [type(group["lr"]).__name__ for group in optimizer.param_groups]
    for holder in holders(laid):
        key = min(holder.names)
        found[f"{key} itself"] = id(holder.param)
        grad = getattr(holder.param, "grad", None)
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            found[f"gradient of {key}"] = (
                id(grad),
                hashlib.sha256(content(local).tobytes()).hexdigest() if local.layout is torch.strided else "",
            )
    return found


def slots_by_identity(optimizers: list[Any]) -> list[dict[Any, int]]:
    """The tensors of optimizers' slots: a load writes into them."""
    return [
        {
            (id(p), slot): id(value)
            for p, slots in o.state.items()
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        for o in optimizers
    ]


def unsharded_copies(laid: Any) -> Iterator[tuple[str, Any]]:
    """Parameters that a wrapper keeps whole at the moment, by name: what the next forward uses."""
    for path, module in laid.model.named_modules(remove_duplicate=False):
        if isinstance(module, FSDP) and module._handle is not None and module._handle.uses_sharded_strategy:
            handle = module._handle
            flat = handle.flat_param
            local = getattr(flat, "_local_shard", None)
            if local is not None and flat.data_ptr() != local.data_ptr() and flat.numel() == sum(flat._numels_with_padding):
                at, number = 0, 0
                for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask):
                    if not padding:
                        name = canonical(f"{path}.{flat._fqns[number]}" if path else flat._fqns[number])
                        if name not in laid.base:
                            yield name, flat.detach()[at : at + numel]
                        number += 1
                    at += numel
    paths = {id(module): path for path, module in laid.model.named_modules()}
    for owner, name in _fsdp2_params(laid.model):
        whole = owner._parameters.get(name)
        if whole is not None and not isinstance(whole, DTensor):
            path = paths[id(owner)]
            yield canonical(f"{path}.{name}" if path else name), whole
