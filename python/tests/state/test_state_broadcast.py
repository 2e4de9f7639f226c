"""``broadcast_from_rank0``: one tensor at a time, each rank its own part, and no rank left waiting."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import Net, assert_close, everything, here, make, optimizer, train
from torch import nn

import reshard.torch as rt

FULL = rt.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_ZERO = rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Traffic:
    """Bytes of every message that tensors travel by."""

    def __init__(self):
        self.sizes = []
        self._kept = {name: getattr(dist, name) for name in ("broadcast", "send", "recv")}

    def __enter__(self):
        for name, call in self._kept.items():

            def counted(tensor, *args, _call=call, **kwargs):
                self.sizes.append(tensor.numel() * tensor.element_size())
                return _call(tensor, *args, **kwargs)

            setattr(dist, name, counted)
        return self

    def __exit__(self, *error):
        for name, call in self._kept.items():
            setattr(dist, name, call)


def every_layout(rank, size, layouts):
    for layout in layouts:
        model = make(layout)
        optim = optimizer(model)
        train(model, optim, 2)
        whole = everything({"model": rt.get_model_state_dict(model), "optim": rt.get_optimizer_state_dict(model, optim)})
        state = rt.get_state_dict(model, optim, options=FULL)
        assert bool(state[0]) == (rank == 0)
        largest = max(t.numel() * t.element_size() for t in model.parameters())
        other = make(layout, seed=6)
        fresh = optimizer(other)
        with Traffic() as traffic:
            rt.set_state_dict(other, fresh, model_state_dict=state[0], optim_state_dict=state[1], options=FROM_ZERO)
        assert_close(whole["model"], everything(rt.get_model_state_dict(other)), layout)
        assert_close(whole["optim"], everything(rt.get_optimizer_state_dict(other, fresh)), layout)
        # Never two tensors in one message; and of what is cut, a rank gets its own part alone.
        single = [p.numel() * p.element_size() for p in make("single").parameters()]
        assert max(traffic.sizes) <= max(single), (layout, traffic.sizes, largest)
        if layout == "fsdp2" and rank:
            assert sum(traffic.sizes) <= 3 * sum(single) // size + 1024 * len(single), layout


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rank_0_gives_each_rank_its_part(ranks, size):
    layouts = ["ddp", "fsdp2", "fsdp1_flat", "fsdp1_orig", *(["tp_fsdp2", "hsdp"] if size == 4 else [])]
    ranks(size, every_layout, layouts)


class Stage(nn.Module):
    """Ranks with different parts of a model, as in a pipeline."""

    def __init__(self, rank):
        super().__init__()
        self.common = nn.Linear(3, 3)
        self.add_module(f"stage_{rank}", nn.Linear(3, 2))


def unequal(rank, size):
    torch.manual_seed(0)
    full = {}
    for stage in range(size):
        full.update(Stage(stage).state_dict())
    full["nobody.wants"] = torch.zeros(5)
    model = Stage(rank)
    options = rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    result = rt.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    assert "nobody.wants" in result.unexpected_keys and not result.missing_keys
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, full[name]), name


def test_ranks_may_want_different_keys(ranks):
    """Every rank goes through the same steps, whatever it wants of them."""
    ranks(3, unequal)


def refused(rank, size):
    # A rank whose model has a parameter that is not given: all ranks fail, none waits.
    model = Net("tied" if rank == 1 else "")
    given = Net().state_dict() if rank == 0 else {}
    try:
        rt.set_model_state_dict(model, given, options=FROM_ZERO)
        raise AssertionError("a missing key was accepted")
    except Exception as error:
        assert "tied" in str(error), error
    # Rank 0 has to have tensors whole.
    model = make("fsdp2")
    optim = optimizer(model)
    train(model, optim, 1)
    for setter, state in (
        (lambda s: rt.set_model_state_dict(model, s, options=FROM_ZERO), rt.get_model_state_dict(model)),
        (lambda s: rt.set_optimizer_state_dict(model, optim, s, options=FROM_ZERO), rt.get_optimizer_state_dict(model, optim)),
    ):
        try:
            setter(state if rank == 0 else {})
            raise AssertionError("a sharded tensor was distributed")
        except Exception as error:
            assert "has whole" in str(error), error


def test_what_one_rank_refuses_is_an_error_on_all(ranks):
    ranks(2, refused)


def replicas_of_one(rank, size):
    """FSDP1's hybrid strategy where each rank is a replica of its own: FSDP takes it for no sharding then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def built(seed):
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
        hybrid = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=True, **hybrid)
        return model, torch.optim.AdamW(model.parameters(), lr=0.5 + seed)

    for steps in (0, 1):
        model, optim = built(3)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optim.step()
        state = rt.get_state_dict(model, optim, options=FULL)
        other, fresh = built(4 + rank)
        given = state if rank == 0 else ({}, {})
        rt.set_state_dict(other, fresh, model_state_dict=given[0], optim_state_dict=given[1], options=FROM_ZERO)
        assert fresh.param_groups[0]["lr"] == 3.5 and bool(fresh.state) is bool(steps)
        for mine, theirs in zip(model.parameters(), other.parameters()):
            assert torch.equal(mine, theirs)
            for slot, value in optim.state.get(mine, {}).items():
                assert torch.equal(value, fresh.state[theirs][slot]), slot


def test_replicas_of_one_rank_hear_from_rank_0(ranks):
    ranks(2, replicas_of_one)


def one_dimension_of_a_mesh(rank, size):
    """FSDP1 over one dimension of a mesh: the ranks of the other dimension hear from rank 0, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    common = {"device_mesh": mesh["dp"], "device_id": torch.device("cpu"), "use_orig_params": True}
    torch.manual_seed(5 + rank)
    model = FullyShardedDataParallel(nn.Linear(3, 2), **common)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5 + rank)
    weight = torch.arange(6.0).reshape(2, 3)
    group = {**optim.defaults, "lr": 0.25, "params": ["weight", "bias"]}
    states = ({"weight": weight, "bias": torch.ones(2)}, {"state": {}, "param_groups": [group]}) if rank == 0 else ({}, {})
    rt.set_state_dict(model, optim, model_state_dict=states[0], optim_state_dict=states[1], options=FROM_ZERO)
    whole = rt.get_model_state_dict(model, options=rt.StateDictOptions(full_state_dict=True))
    assert torch.equal(whole["weight"], weight) and optim.param_groups[0]["lr"] == 0.25


def test_all_dimensions_of_a_mesh_hear_from_rank_0(ranks):
    ranks(4, one_dimension_of_a_mesh)


def in_flattened_form(rank, size):
    """Values of groups are values: none of them is taken apart on its way."""
    odd = {1: "x", "empty": {}, "nested": [{"k": 1.5}, []]}
    flat = {"flatten_optimizer_state_dict": True, "full_state_dict": True}
    for layout in here("fsdp1_flat", "fsdp1_orig", "fsdp2"):
        model = make(layout)
        optim = optimizer(model)
        optim.param_groups[0]["odd"] = odd
        train(model, optim, 1)
        for more in ({}, {"cpu_offload": True}):
            state = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(**flat, **more))
            values = [value for key, value in state.items() if key.endswith(".odd")]
            assert bool(values) is (not more or rank == 0) and all(value == odd for value in values), layout
        other = make(layout, seed=9)
        fresh = optimizer(other)
        fresh.param_groups[0]["odd"] = None
        rt.set_optimizer_state_dict(other, fresh, state, options=rt.StateDictOptions(**flat, broadcast_from_rank0=True))
        assert fresh.param_groups[0]["odd"] == odd, layout


def test_values_of_groups_arrive_as_they_are_in_the_flattened_form(ranks):
    ranks(2, in_flattened_form)
