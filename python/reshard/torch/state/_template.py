"""The optimizer state dict, and how it takes its structure from a checkpoint.

Which slots there are is known to the optimizer only once it has run, and to the checkpoint always. So the dict that
``get_optimizer_state_dict`` gives remembers how its parameters are laid out, and when something is loaded into it, it first
takes over the checkpoint's own structure: slots it has stay where they are, slots it lacks are made with the layout of their
parameter, slots the checkpoint lacks go. Nothing of this ever steps an optimizer.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from ... import _reshard
from .._leaf import ShardView
from .._tensor import DTYPES, FlatPiece, FlatView, device_of, is_tensor
from ._memory import SlotMemory, leaves_in
from ._options import is_group_value


class Entry(NamedTuple):
    """An entry of a checkpoint below an optimizer: its path from there on, the code of its dtype (None for a value), its shape."""

    path: tuple[Any, ...]
    dtype: int | None
    shape: tuple[int, ...]


#: The entry of a saved optimizer that says which keys of its state are not text.
SLOT_KEYS = "slot_keys"
#: The entry of a saved optimizer in the flattened form that says what flattening takes from values of groups.
VALUE_KEYS = "value_keys"


class _Before(NamedTuple):
    """What a dict was before it took over a checkpoint's structure."""

    items: dict[Any, Any]
    unknown: tuple[str, ...]
    waiting: list[Any]


class OptimizerStateDict(dict):  # type: ignore[type-arg]
    """A dict with the optimizer's state that knows its parameters' layouts. A shallow copy is a plain dict; a pickle has an
    ``OrderedDict``, which ``torch.load`` reads by default."""

    slots: Slots | None = None
    #: Classes of optimizers without state whose slots nobody knows before a checkpoint is loaded.
    unknown: tuple[str, ...] = ()
    #: Slots of sharded parameters that say neither by shape nor by type which part they are: the same on all ranks, or else
    #: nobody knows what. Saving compares them between ranks.
    unplaced: tuple[str, ...] = ()
    #: What a checkpoint that is being loaded calls the parameters it has under other names.
    names: dict[str, str] = {}
    #: Slots that wait on, since the checkpoint that is being loaded is of an optimizer that had not run either.
    kept: dict[Any, Any] = {}
    _before: _Before | None = None
    _values: tuple[Any, ...] = ()

    def watch(self) -> None:
        """Remembers the values of the groups, to tell whether something was loaded into the dict, and that the dict is in use."""
        self._values = self._group_values()
        _in_use[id(self)] = self

    def was_loaded_into(self) -> bool:
        """Whether every value of the groups is another object than it was: a load replaces them all, a person hardly."""
        now = self._group_values()
        return bool(now) and not any(value is before for value, before in zip(now, self._values))

    def _group_values(self) -> tuple[Any, ...]:
        if "param_groups" in self:
            return tuple(group.get("params") for group in self["param_groups"])
        shared = (int, str, bool, type(None))
        return tuple(v for k, v in self.items() if is_group_value(k) and not isinstance(v, (torch.Tensor, *shared)))

    def take_structure(self, nested: Mapping[Any, Any]) -> None:
        """Takes over a checkpoint's structure, for its content to be loaded."""
        before = {key: value for key, value in self._slots().items() if all(map(SlotMemory.waits, leaves_in(value)))}
        self._before = _Before(dict(self), self.unknown, [leaf for leaf in leaves_in(self) if SlotMemory.waits(leaf)])
        self.clear()
        self.update(nested)
        self.unknown = ()
        self.kept = {} if self._slots() else before
        SlotMemory.loaded(self)

    def settle(self) -> None:
        """All is loaded: parameters that groups list by the checkpoint's names get the names that they have here."""
        groups = self.get("param_groups")
        for group in groups if isinstance(groups, list) and self.names else ():
            if isinstance(group, dict) and isinstance(group.get("params"), list):
                group["params"] = [self.names.get(name, name) for name in group["params"]]
        (self["state"] if "state" in self else self).update(self.kept)
        self._before, self.names, self.kept = None, {}, {}

    def give_back(self) -> None:
        """Nothing came of loading: the dict is what it was, and what waited for content still does."""
        before = self._before
        if before is not None:
            self.clear()
            self.update(before.items)
            self.unknown = before.unknown
            for leaf in before.waiting:
                SlotMemory.wait(leaf)
        self._before, self.names, self.kept = None, {}, {}

    def _slots(self) -> dict[Any, Any]:
        if "state" in self:
            return dict(self["state"])
        return {key: value for key, value in self.items() if str(key).startswith("state.")}

    def __reduce__(self) -> tuple[Any, ...]:
        # The only class of dicts that torch's restricted unpickler makes from a pickle of another class.
        return (OrderedDict, (), None, None, iter(self.items()))

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerStateDict:
        import copy

        twin = OptimizerStateDict({copy.deepcopy(key, memo): copy.deepcopy(value, memo) for key, value in self.items()})
        twin.slots, twin.unknown, twin.unplaced, twin.names = self.slots, self.unknown, self.unplaced, self.names
        for own, copied in zip(leaves_in(self), leaves_in(twin)):
            # A copy of nothing has no content either.
            if SlotMemory.waits(own):
                SlotMemory.wait(copied)
        twin.watch()
        return twin


#: PyTorch's planners have a state without its dicts: whoever serves them looks here for what the leaves belong to.
_in_use: weakref.WeakValueDictionary[int, OptimizerStateDict] = weakref.WeakValueDictionary()


def dicts_in_use() -> list[OptimizerStateDict]:
    """The state dicts that were given out and that somebody still has."""
    return list(_in_use.values())


class Slots:
    """Makes slots in the layout of the parameters they belong to."""

    def __init__(self, layouts: Mapping[str, Any]) -> None:
        """
        Args:
            layouts: what stands for each parameter: a tensor of any kind, a :class:`ShardView`, or a function that makes the
                slot from its name, dtype and shape.
        """
        self.layouts = layouts
        self._shapes = {name: _shape(layout) for name, layout in layouts.items()}
        #: One flat slot for each flat parameter and slot name.
        self._flat: dict[tuple[int, str, torch.dtype], torch.Tensor] = {}

    def whole(self) -> Slots:
        """The same for whole tensors."""
        return Slots({name: _whole_layout(layout) for name, layout in self.layouts.items()})

    def tree(
        self,
        entries: Sequence[Entry],
        live: Mapping[Any, Any],
        *,
        foreign: Callable[[Sequence[str]], set[str]] | None = None,
        key_types: Any = None,
    ) -> dict[Any, Any]:
        """A nested dict for a checkpoint's entries, with the leaves of `live` where they fit and new ones elsewhere.

        Args:
            entries: what the checkpoint has.
            live: what there is.
            foreign: of names that are no parameters here, those that are parameters elsewhere; their slots are left out.
            key_types: what the checkpoint says of keys that are not text.
        """
        self._flat.clear()
        plan = _reshard.plan_slots(self._shapes, entries)
        strangers = foreign(plan.unknown) if foreign is not None and plan.unknown else set()
        leaves = []
        for planned in plan.slots:
            key, path = planned.key, planned.path
            if planned.parameter in strangers:
                # Left to the load, which reports what nobody wants.
                continue
            there = _at(live, path)
            if planned.dtype is not None and not _fits(there, DTYPES[planned.dtype], planned.shape):
                slot = ".".join(map(str, path[2:])) if len(path) > 2 else key
                name = planned.parameter if planned.by_parameter else None
                there = self.make(name, slot, DTYPES[planned.dtype], planned.shape)
            leaves.append((key, path, there))
        nested: dict[Any, Any] = _typed_like(_reshard.unflatten(leaves, key_types), live)
        return nested

    @torch.inference_mode(False)
    def make(self, name: str | None, slot: str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """A new slot of zeros: laid out as its parameter, or whole. An optimizer steps on it, whatever the mode is just now."""
        layout = self.layouts.get(name) if name is not None else None
        if layout is None:
            return SlotMemory.made(torch.zeros(tuple(shape), dtype=dtype, device="cpu"))
        if isinstance(layout, FlatView):
            base = self._base(layout, slot, dtype)
            offset = 0 if base.numel() == layout.base.numel() else _first(layout)
            places = [FlatPiece(begin, tensor.shape, _start(layout, tensor) - offset) for begin, tensor in layout.pieces]
            view = FlatView(base, shape, places, layout.home)
            for _, tensor in view.pieces:
                SlotMemory.part(tensor, base)
            return view
        if isinstance(layout, ShardView):
            pieces = [
                (offsets, torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)) for offsets, tensor in layout.pieces
            ]
            return ShardView(dtype, shape, pieces)
        if isinstance(layout, DTensor):
            local = torch.zeros(layout._local_tensor.shape, dtype=dtype, device=device_of(layout))
            return SlotMemory.made(
                DTensor.from_local(
                    local, layout.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
                )
            )
        if isinstance(layout, ShardedTensor):
            return _sharded_like(layout, dtype)
        return SlotMemory.made(torch.zeros(tuple(shape), dtype=dtype, device=device_of(layout)))

    def _base(self, layout: FlatView, slot: str, dtype: torch.dtype) -> torch.Tensor:
        """The memory of a flat slot: one for the whole flat parameter, or one for an original parameter's part."""
        home = layout.home
        if home is None or home.handle._use_orig_params:
            length = sum(tensor.numel() for _, tensor in layout.pieces)
            shape: tuple[int, ...] = (length,)
            if home is not None and not home.sharded and len(layout.pieces) == 1:
                shape = tuple(layout.pieces[0][1].shape)
            return SlotMemory.made(torch.zeros(shape, dtype=dtype, device=layout.base.device))
        key = (id(home), slot, dtype)
        if key not in self._flat:
            self._flat[key] = SlotMemory.made(torch.zeros(home.shard.shape, dtype=dtype, device=layout.base.device))
        return self._flat[key]


def _shape(layout: Any) -> tuple[int, ...]:
    return tuple(layout.metadata().size if isinstance(layout, ShardedTensor) else layout.shape)


def _whole_layout(layout: Any) -> torch.Tensor:
    """A tensor of the whole shape on the layout's device that takes no memory."""
    return torch.empty((), dtype=layout.dtype, device=device_of(layout)).expand(_shape(layout))


def _start(layout: FlatView, tensor: torch.Tensor) -> int:
    """Where a piece starts in its memory."""
    return int(tensor.storage_offset()) - int(layout.base.storage_offset())


def _first(layout: FlatView) -> int:
    """Where the first piece starts in its memory."""
    return min((_start(layout, tensor) for _, tensor in layout.pieces), default=0)


def _sharded_like(layout: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    import copy

    metadata = copy.deepcopy(layout.metadata())
    metadata.tensor_properties.dtype = dtype
    metadata.tensor_properties.requires_grad = False
    shards = [
        Shard(torch.zeros(shard.tensor.shape, dtype=dtype, device=shard.tensor.device), copy.deepcopy(shard.metadata))
        for shard in layout.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=layout._process_group)


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for step in path:
        if isinstance(tree, Mapping):
            if step in tree:
                tree = tree[step]
                continue
            # Keys of any type are text in a checkpoint.
            tree = next((value for key, value in tree.items() if str(key) == str(step)), None)
        elif isinstance(tree, (list, tuple)) and isinstance(step, int) and 0 <= step < len(tree):
            tree = tree[step]
        else:
            return None
    return tree


def _fits(leaf: Any, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    if not is_tensor(leaf) or leaf.dtype != dtype:
        return False
    return _shape(leaf) == tuple(shape)


def _typed_like(tree: Any, live: Any) -> Any:
    """Gives keys the types that they have in the live state: PyTorch's checkpoints know only text."""
    if not isinstance(tree, dict) or not isinstance(live, Mapping):
        return tree
    typed = {str(key): key for key in live}
    return {typed.get(str(key), key): _typed_like(value, live.get(typed.get(str(key), key))) for key, value in tree.items()}
