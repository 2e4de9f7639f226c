"""Slots that keep their content in other tensors: codes, a scale for each block of them, a table, as low-bit optimizers have them.

In a state dict such a slot is a dict of those tensors, each cut as its parameter is, so that they are saved, resharded and loaded like
any others. Where a rank's part of the parameter begins or ends inside of a block, nothing can be cut: that is an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._leaf import ShardView
from .._tensor import layout_of
from ._errors import StateMismatch

#: The entry of such a dict that says what it was: the class, what else it is made of, and what each tensor is to the whole.
MADE_OF = "tensor_class"
_LOCAL_SHAPE = "<shape>"
#: Elements as the parameter has them, one for each block of elements, or the same for all.
_ELEMENTS, _BLOCKS, _TABLE = "elements", "blocks", "table"


class Part(NamedTuple):
    """What this rank holds of a parameter: the whole shape, the local one, and how they lie in each other."""

    key: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    spec: DTensor | None

    @classmethod
    def of(cls, key: str, tensor: torch.Tensor) -> Part:
        if isinstance(tensor, DTensor):
            return cls(key, tuple(tensor.shape), tuple(tensor._local_tensor.shape), tensor)
        return cls(key, tuple(tensor.shape), tuple(tensor.shape), None)

    def view(self, inner: torch.Tensor, form: str) -> Any:
        """One of a slot's own tensors as a tensor of the whole, in the same memory."""
        inner = inner.detach()
        if form == _TABLE:
            return inner
        if form == _ELEMENTS:
            return inner if self.spec is None else self._placed(inner, self.whole)
        count, row = math.prod(self.local), math.prod(self.whole[1:])
        block = count // inner.numel() if inner.numel() else 0
        if not block or block * inner.numel() != count:
            raise self.refused(f"{inner.numel()} blocks do not divide the {count} elements that this rank holds")
        if row % block == 0 and self.whole:
            # Whole blocks in every row: they are cut where rows are.
            self._check_rows()
            shape = (self.whole[0], row // block)
            rows = inner.view(self.local[0], row // block)
            return rows if self.spec is None else self._placed(rows, shape)
        total, rest = divmod(math.prod(self.whole), block)
        if rest:
            raise self.refused(f"blocks of {block} do not divide its {math.prod(self.whole)} elements")
        if self.spec is None:
            return inner.view(-1)
        begin, rest = divmod(self._begin(), block)
        if rest:
            raise self.refused(f"this rank's part begins inside of a block of {block}")
        return ShardView(inner.dtype, (total,), [((begin,), inner.view(-1))])

    def zeros(self, whole: Sequence[int], dtype: torch.dtype, form: str, device: Any) -> torch.Tensor:
        """Memory for one of a slot's own tensors, of which this is the whole shape."""
        if form == _TABLE:
            return torch.zeros(tuple(whole), dtype=dtype, device=device)
        if form == _ELEMENTS:
            return torch.zeros(self.local, dtype=dtype, device=device)
        block, rest = divmod(math.prod(self.whole), max(math.prod(whole), 1))
        count = math.prod(self.local)
        if rest or not block or count % block:
            raise self.refused(f"the {count} elements that this rank holds are not whole blocks of {block}")
        return torch.zeros(count // block, dtype=dtype, device=device)

    def _placed(self, local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
        assert self.spec is not None
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.spec.device_mesh, self.spec.placements, run_check=False, shape=torch.Size(shape), stride=strides
        )

    def _check_rows(self) -> None:
        cut = [p for p in (self.spec.placements if self.spec is not None else ()) if not p.is_replicate()]
        if any(getattr(placement, "dim", None) != 0 for placement in cut):
            raise self.refused(f"it is cut as {cut}, and its blocks can be cut along the first dimension alone")

    def _begin(self) -> int:
        """Where this rank's elements begin in the whole, where they are one stretch of it."""
        assert self.spec is not None
        layout = layout_of(self.key, self.spec)
        regions = layout.regions if layout is not None else []
        whole_rows = all(tuple(region.sizes[1:]) == self.whole[1:] for region in regions)
        if len(regions) != 1 or not whole_rows:
            raise self.refused("this rank's part is not one stretch of it, and its blocks go over the ends of rows")
        return int(regions[0].offsets[0]) * math.prod(self.whole[1:])

    def refused(self, why: str) -> StateMismatch:
        return StateMismatch(
            f"{self.key!r} is kept in blocks that cannot be cut as its parameter is: {why}",
            keys=[self.key],
            hint="use as many ranks as saved it, or an optimizer whose blocks divide every rank's part",
        )


def is_made_of_tensors(value: Any) -> bool:
    """Whether a slot, or this rank's part of it, keeps its content in other tensors."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if not isinstance(local, torch.Tensor) or type(local) in (torch.Tensor, torch.nn.Parameter) or isinstance(local, DTensor):
        return False
    return is_traceable_wrapper_subclass(local)


def taken_apart(key: str, slot: Any, tables: frozenset[str]) -> dict[str, Any]:
    """A slot as the tensors it is made of, in their own memory, and what it takes to make it again."""
    part = Part.of(key, slot)
    local: Any = slot._local_tensor if isinstance(slot, DTensor) else slot
    names, context = local.__tensor_flatten__()
    forms: list[list[str]] = []
    made: dict[str, Any] = {}
    for name in names:
        inner = getattr(local, name)
        form = _TABLE if name in tables else _ELEMENTS if tuple(inner.shape) == part.local else _BLOCKS
        forms.append([name, form])
        made[name] = part.view(inner, form)
    plain = [_LOCAL_SHAPE if _is_shape(entry, part.local) else entry for entry in context or ()]
    made[MADE_OF] = [f"{type(local).__module__}.{type(local).__qualname__}", plain, forms]
    return made


def _is_shape(entry: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(entry, (tuple, list)) and tuple(entry) == shape and bool(shape)


class Tables:
    """Which of their own tensors are the same for all slots of a kind, whatever their size: they are no part of the elements."""

    def __init__(self, slots: Iterable[Any]) -> None:
        kinds: dict[Any, list[tuple[int, Any]]] = {}
        for slot in slots:
            local = slot._local_tensor if isinstance(slot, DTensor) else slot
            kinds.setdefault(_kind(local), []).append((local.numel(), local))
        self._names: dict[Any, frozenset[str]] = {}
        for kind, members in kinds.items():
            names, _ = members[0][1].__tensor_flatten__()
            self._names[kind] = frozenset(name for name in names if _is_table(name, members))

    def of(self, slot: Any) -> frozenset[str]:
        """Those of one slot."""
        return self._names.get(_kind(slot._local_tensor if isinstance(slot, DTensor) else slot), frozenset())


def _kind(local: Any) -> tuple[Any, ...]:
    """What slots have in common that share a table: the class, and whatever else they are made with."""
    _, context = local.__tensor_flatten__()
    return type(local), repr([entry for entry in context or () if not _is_shape(entry, tuple(local.shape))])


def _is_table(name: str, members: Sequence[tuple[int, Any]]) -> bool:
    sizes = {(count, int(getattr(local, name).numel())) for count, local in members}
    if len({count for count, _ in sizes}) > 1:
        return len({inner for _, inner in sizes}) == 1
    if len(sizes) > 1:
        return False
    # All slots are of one size: what is the same in all of them, and says something, says nothing of any.
    ((count, inner),) = sizes
    if inner == count or count % max(inner, 1):
        return inner != count
    first: torch.Tensor = getattr(members[0][1], name)
    if bool((first == first.reshape(-1)[0]).all()):
        return False
    return len(members) > 1 and all(torch.equal(first, getattr(local, name)) for _, local in members[1:])


def put_together(key: str, optimizer: Any, param: torch.Tensor, now: Any, parts: Mapping[str, Any]) -> Any:
    """The slot that parts are of: the one that is there with their content, or a new one."""
    from ._optimizer import fill

    made_of = parts[MADE_OF]
    try:
        name, context, forms = made_of
        forms = {str(attribute): str(form) for attribute, form in forms}
    except (TypeError, ValueError):
        raise StateMismatch(f"{key!r}: its {MADE_OF} is {made_of!r}, which says no class", keys=[key]) from None
    tables = frozenset(attribute for attribute, form in forms.items() if form == _TABLE)
    local = now._local_tensor if isinstance(now, DTensor) else now
    if is_made_of_tensors(now) and f"{type(local).__module__}.{type(local).__qualname__}" == name:
        for attribute, target in taken_apart(key, now, tables).items():
            if attribute != MADE_OF:
                _fill(f"{key}.{attribute}", target, parts[attribute], fill)
        return now
    part = Part.of(key, param)
    inner: dict[str, torch.Tensor] = {}
    for attribute, form in forms.items():
        value = parts[attribute]
        device = param._local_tensor.device if isinstance(param, DTensor) else param.device
        inner[attribute] = part.zeros(value.shape, value.dtype, form, device)
        _fill(f"{key}.{attribute}", part.view(inner[attribute], form), value, fill)
    cls: Any = _class_of(key, optimizer, name)
    entries = [torch.Size(part.local) if entry == _LOCAL_SHAPE else entry for entry in context]
    strides = torch.empty(part.local, device="meta").stride()
    made = cls.__tensor_unflatten__(inner, entries, torch.Size(part.local), strides)
    if not isinstance(param, DTensor):
        return made
    return DTensor.from_local(
        made, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _fill(key: str, target: Any, value: Any, fill: Any) -> None:
    if tuple(target.shape) != tuple(value.shape) or target.dtype != value.dtype:
        raise StateMismatch(
            f"{key!r} is {value.dtype} of shape {tuple(value.shape)}, and the optimizer's own is {target.dtype} of shape "
            f"{tuple(target.shape)}: their blocks differ",
            keys=[key],
        )
    if value is not target:
        fill(key, target, value)


def _class_of(key: str, optimizer: Any, name: str) -> type:
    """A class by its name, from the modules that the optimizer itself is from: a file can name no other."""
    for base in type(optimizer).__mro__:
        module = sys.modules.get(base.__module__)
        for candidate in vars(module).values() if module is not None else ():
            if isinstance(candidate, type) and issubclass(candidate, torch.Tensor):
                if f"{candidate.__module__}.{candidate.__qualname__}" == name and hasattr(candidate, "__tensor_unflatten__"):
                    return candidate
    raise StateMismatch(
        f"{key!r} was saved as a {name}, which {type(optimizer).__module__}.{type(optimizer).__qualname__} does not use",
        keys=[key],
        hint="load into the kind of optimizer that was saved",
    )


# ---- inside of state dicts ------------------------------------------------------------------------------------------------


class Blocks:
    """Slots that are made of other tensors, on their way past the engine's plans: each is a dict of its own."""

    def __init__(self, live: Any, flattened: bool) -> None:
        self._live, self._flattened = live, flattened
        self._slots: dict[tuple[str, str], dict[str, Any]] = {}
        self.tables: tuple[str, ...] = ()

    def taken_from(self, optimizer: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """An optimizer's own state dict without them."""
        made = [
            s for slots in own["state"].values() if isinstance(slots, Mapping) for s in slots.values() if is_made_of_tensors(s)
        ]
        if not made:
            return own
        tables, names = Tables(made), self._names()
        state = dict(own["state"])
        groups = own["param_groups"] if "param_groups" in own else type(optimizer).state_dict(optimizer)["param_groups"]
        for theirs, group in zip(groups, optimizer.param_groups):
            for key, param in zip(theirs["params"], group["params"]):
                slots, name = state.get(key), names.get(id(param))
                if not isinstance(slots, Mapping) or name is None or self._live.is_sharded_flat(param):
                    continue
                apart = {slot for slot, value in slots.items() if is_made_of_tensors(value)}
                for slot in apart:
                    parts = taken_apart(f"state.{name}.{slot}", slots[slot], tables.of(slots[slot]))
                    self._slots[name, slot] = parts
                    self.tables += tuple(f"{slot}.{table}" for table in tables.of(slots[slot]))
                state[key] = {slot: value for slot, value in slots.items() if slot not in apart}
        return {**own, "state": state}

    def put_into(self, result: dict[str, Any]) -> None:
        """Gives them their places by name."""
        for (name, slot), parts in self._slots.items():
            if self._flattened:
                result.update({f"state.{name}.{slot}.{part}": value for part, value in parts.items()})
            else:
                result["state"].setdefault(name, {})[slot] = parts

    def _names(self) -> dict[int, str]:
        named = self._live.parameters.items()
        return {p.identity: name for name, p in named if p.identity is not None and self._live.inner.primary(name) == name}


def given_parts(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[tuple[str, str], Mapping[str, Any]]]:
    """A given state without the slots that are dicts of parts, and those, by parameter and slot."""
    parts: dict[tuple[str, str], Mapping[str, Any]] = {}
    if "state" in state:
        rest: dict[Any, Any] = {}
        for name, slots in state["state"].items():
            if isinstance(slots, Mapping):
                found = {slot: value for slot, value in slots.items() if isinstance(value, Mapping) and MADE_OF in value}
                parts.update({(str(name), str(slot)): value for slot, value in found.items()})
                slots = {slot: value for slot, value in slots.items() if slot not in found} if found else slots
            rest[name] = slots
        return ({**state, "state": rest} if parts else dict(state)), parts
    ends = [key[: -len(MADE_OF) - 1] for key in state if isinstance(key, str) and key.endswith(f".{MADE_OF}")]
    flat: dict[str, dict[str, Any]] = {end: {} for end in ends}
    left: dict[Any, Any] = {}
    for key, value in state.items():
        end, _, attribute = key.rpartition(".") if isinstance(key, str) else ("", "", "")
        if end in flat:
            flat[end][attribute] = value
        else:
            left[key] = value
    for end, found in flat.items():
        name, _, slot = end.removeprefix("state.").rpartition(".")
        parts[name, slot] = found
    return left, parts
