"""What the calls cost: no collective for flat parameters, no whole tensor in memory, streaming one tensor at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import assert_close, everything, make, optimizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import reshard.torch as rt
from reshard.torch import _group


class Largest(TorchDispatchMode):
    """The most bytes that one new tensor took."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        # A DTensor has no memory of its own; its local tensor comes by here too.
        plain = lambda value: isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        given = {t.untyped_storage().data_ptr() for t in tree_iter((arguments, options)) if plain(t)}
        result = function(*arguments, **(options or {}))
        for tensor in tree_iter(result):
            if plain(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


class Messages:
    """Every call that would send something, and how many bytes the engine's own messages have."""

    def __enter__(self):
        self.calls, self.bytes = [], 0
        self._kept = []
        for name in (
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_object",
            "broadcast",
            "broadcast_object_list",
            "gather",
            "gather_object",
            "scatter",
            "all_reduce",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "send",
            "recv",
            "all_to_all",
            "all_to_all_single",
            "barrier",
        ):
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):
                    self._patch(module, name, self._counted(name, getattr(module, name)))
        for name in ("all_gather", "gather", "broadcast"):
            self._patch(_group.GlooGroup, name, self._measured(getattr(_group.GlooGroup, name)))
        return self

    def _patch(self, owner, name, function):
        self._kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def _counted(self, name, original):
        def counted(*arguments, **options):
            self.calls.append(name)
            return original(*arguments, **options)

        return counted

    def _measured(self, original):
        def measured(group, *arguments):
            self.bytes += sum(len(a) for a in arguments if isinstance(a, bytes))
            return original(group, *arguments)

        return measured

    def __exit__(self, *_):
        for owner, name, original in reversed(self._kept):
            setattr(owner, name, original)


def costs(rank, size, path, layout):
    hidden = 500
    model = make(layout, hidden=hidden, n=300)
    optim = optimizer(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5) if p.numel() else None
    optim.step()
    whole = 300 * hidden * 4
    with Messages() as quiet, Largest() as small:
        states = rt.get_state_dict(model, optim)
    assert quiet.calls == [] and quiet.bytes == 0, quiet.calls
    assert small.bytes < whole, small.bytes
    data = sum(t.numel() * 4 for v in states[0].values() if isinstance(v, rt.ShardView) for _, t in v.pieces)
    with Messages() as saving:
        rt.save({"model": states[0], "optim": states[1]}, path)
    assert saving.calls == [] and saving.bytes < data / 20, (saving.calls, saving.bytes, data)
    reference = everything({"model": dict(states[0]), "optim": states[1]["state"]})
    other = make(layout, hidden=hidden, n=300, seed=1)
    second = optimizer(other)
    shard = max(p.numel() for p in other.parameters()) * 4
    with Messages() as loading, Largest() as largest:
        found = rt.get_state_dict(other, second)
        state = {"model": found[0], "optim": found[1]}
        rt.load(state, path)
        rt.set_state_dict(other, second, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert loading.calls == [] and loading.bytes < data / 20, (loading.calls, loading.bytes)
    # What was loaded into is what the optimizer has now.
    loaded = {
        v.base.data_ptr() for slots in state["optim"]["state"].values() for v in slots.values() if isinstance(v, rt.ShardView)
    }
    taken = {v.data_ptr() for slots in second.state.values() for v in slots.values() if v.dim()}
    assert taken and taken <= loaded
    # The largest memory that was made is a slot of the rank's own shard.
    assert largest.bytes <= shard, (largest.bytes, shard)
    found = rt.get_state_dict(other, second)
    assert_close(reference, everything({"model": dict(found[0]), "optim": found[1]["state"]}))


def test_flat_parameters_cost_no_collective_and_no_whole_tensor(ranks, tmp_path):
    for layout in ("fsdp1_flat", "fsdp1_orig"):
        ranks(4, costs, str(tmp_path / layout), layout)


def streams(rank, size):
    model = make("fsdp2", hidden=500, n=300)
    optim = optimizer(model)
    largest = 300 * 500 * 4
    with Largest() as mode:
        full = rt.get_model_state_dict(model, options=rt.StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (rank == 0)
    assert mode.bytes <= largest
    with Largest() as mode:
        rt.set_model_state_dict(model, full, options=rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert mode.bytes <= largest
    assert not optim.state


def test_full_state_is_streamed(ranks):
    ranks(2, streams)
