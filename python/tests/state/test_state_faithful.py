"""What comes back is what was there: values of groups, shared rates, extra state, parameters without elements, nested slots."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
from models import assert_close, everything, fully_shard, here, make, optimizer, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

import reshard
import reshard.torch as rt

#: What people keep in groups beside numbers.
ODD = {
    "by_number": {1: "a", 2: {3: 4.5}},
    "empty": {},
    "below": {"x": {}, "y": [{}, {"z": 1}]},
    "listed": [{"a": 1}, {"b": (2, 3)}, {}],
    "emptied": [{}, {}],
    "none": None,
    "words": ["p", "q"],
    "pair": (1, [2]),
}


def with_odd_groups():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [
        {"params": list(model[0].parameters()), **copy.deepcopy(ODD)},
        {
            "params": list(model[1].parameters()),
            "by_number": {7: 1},
            **{key: copy.deepcopy(ODD[key]) for key in ("empty", "listed")},
        },
    ]
    optim = torch.optim.AdamW(groups, lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    return model, optim


@pytest.mark.parametrize("how", ["nested", "full", "own", "saved", "saved into another"])
def test_values_of_groups_stay_what_they_are(path, how):
    model, optim = with_odd_groups()
    before = [{key: value for key, value in group.items() if key != "params"} for group in copy.deepcopy(optim.param_groups)]
    state = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=how == "full"))
    target_model, target = with_odd_groups()
    if how == "saved into another":
        # An optimizer that knows nothing of these values yet.
        target = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in target_model], lr=0.5)
    if how.startswith("saved"):
        rt.save({"optim": state}, path)
        state = rt.get_optimizer_state_dict(target_model, target)
        rt.load({"optim": state}, path)
    elif how == "own":
        state = rt.optim_state_dict(model, optim)
    rt.set_optimizer_state_dict(target_model, target, state)
    for group, expected in zip(target.param_groups, before):
        for key, value in expected.items():
            assert group[key] == value and type(group[key]) is type(value), (how, key, group[key], value)


def test_groups_that_share_a_rate_get_each_its_own(path):
    def made(rates):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1))
        groups = [
            {"params": list(layer.parameters()), **({"lr": rate} if rate is not None else {})}
            for layer, rate in zip(model, rates)
        ]
        return model, torch.optim.AdamW(groups, lr=torch.tensor(0.5), foreach=False)

    model, optim = made((torch.tensor(0.125), torch.tensor(0.25), torch.tensor(0.125)))
    state = rt.get_optimizer_state_dict(model, optim)
    other, target = made((None, None, None))
    shared = target.param_groups[0]["lr"]
    assert all(group["lr"] is shared for group in target.param_groups)
    rt.set_optimizer_state_dict(other, target, state)
    assert [group["lr"].item() for group in target.param_groups] == [0.125, 0.25, 0.125]
    assert target.param_groups[0]["lr"] is shared, "compiled steps hold on to it"
    # Groups that are to have one rate go on sharing it.
    model, optim = made((torch.tensor(0.125),) * 3)
    other, target = made((None, None, None))
    shared = target.param_groups[0]["lr"]
    rt.set_optimizer_state_dict(other, target, rt.get_optimizer_state_dict(model, optim))
    assert all(group["lr"] is shared for group in target.param_groups) and shared.item() == 0.125


class Counting(nn.Module):
    """Extra state that is a tensor."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.count = torch.tensor(start)

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        assert isinstance(state, torch.Tensor), state
        self.count = state


def broadcast_extra(rank, size):
    full = rt.get_model_state_dict(nn.Sequential(Counting([3.0, 4.0])))
    model = nn.Sequential(Counting([0.0, 0.0]))
    options = rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    rt.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    assert model[0].count.tolist() == [3.0, 4.0]


def test_extra_state_that_is_a_tensor_is_broadcast(ranks):
    ranks(2, broadcast_extra)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.first(x) + self.nothing.sum()


def without_elements(rank, size):
    for orig in (True, False):
        torch.manual_seed(0)
        model = FSDP(Empty(), use_orig_params=orig, device_id=torch.device("cpu"))
        optim = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(2, 4)).sum().backward()
        if orig:
            # FSDP leaves it without a gradient.
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None and param.numel() == 0 else param.grad
        optim.step()
        own = rt.get_optimizer_state_dict(model, optim)["state"]
        full = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))["state"]
        names = set().union(*(state for state in gathered(list(own))))
        assert set(full) == names, (orig, sorted(full), sorted(names))
        for name, slots in full.items():
            assert slots["step"].item() == 1 and sorted(slots) == ["exp_avg", "exp_avg_sq", "step"], (orig, name, slots)


def gathered(value):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def test_a_parameter_without_elements_keeps_its_step(ranks):
    ranks(2, without_elements)


def loaded_without_elements(rank, size, path):
    for orig in (True, False):
        for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
            for kind in (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam):
                model = FSDP(Empty(), use_orig_params=orig, sharding_strategy=strategy, device_id=torch.device("cpu"))
                optim = kind(model.parameters(), foreach=False)
                wanted = f"{path}-{type(optim).__name__}"
                state = {"optim": rt.get_optimizer_state_dict(model, optim)}
                rt.load(state, wanted)
                rt.set_optimizer_state_dict(model, optim, state["optim"])
                full = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))["state"]
                with reshard.open(wanted) as checkpoint:
                    slots = {f"optim.state.{name}.{slot}" for name, below in full.items() for slot in below}
                    assert slots == {key for key in checkpoint if key.startswith("optim.state.")}, (orig, strategy, kind)


def test_slots_of_a_parameter_without_elements_are_loaded(ranks, path):
    for kind in (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam):
        model = Empty()
        optim = kind(model.parameters(), foreach=False)
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        assert len(optim.state) == 3
        rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, f"{path}-{type(optim).__name__}")
    ranks(2, loaded_without_elements, path)


class Nesting(torch.optim.SGD):
    """Keeps slots side by side and nests them in its state dict, as bitsandbytes does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    value = param.detach()
                    local = value.to_local() if hasattr(value, "to_local") else value
                    self.state[param]["state1"] = local * 2 + dist.get_rank() + 1

    def state_dict(self):
        state = super().state_dict()
        state["state"] = {key: {"wrapped": dict(slots)} for key, slots in state["state"].items()}
        return state

    def load_state_dict(self, state):
        super().load_state_dict({**state, "state": {key: slots["wrapped"] for key, slots in state["state"].items()}})


def nested(rank, size, path):
    for layout in here("fsdp1_flat", "fsdp1_orig", "fsdp1_grad_op", "fsdp2"):
        model = make(layout)
        optim = Nesting(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optim.step()
        before = everything(rt.get_optimizer_state_dict(model, optim))["state"]
        assert all(set(slots) == {"wrapped"} for slots in before.values())
        for flatten, fresh in ((False, False), (True, True)):
            options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)
            state = {"optim": rt.get_optimizer_state_dict(model, optim, options=options)}
            assert state["optim"].unplaced == (), layout
            rt.save(state, f"{path}-{layout}-{flatten}")
            for slots in optim.state.values():
                slots["state1"].fill_(-1)
            if fresh:
                optim.state.clear()
            state = {"optim": rt.get_optimizer_state_dict(model, optim, options=options)}
            rt.load(state, f"{path}-{layout}-{flatten}")
            rt.set_optimizer_state_dict(model, optim, state["optim"], options=options)
            after = everything(rt.get_optimizer_state_dict(model, optim))["state"]
            assert_close(before, after, f"{layout}, {flatten}, {fresh}")


def test_nested_slots_are_placed_as_their_parameters_are(ranks, path):
    ranks(2, nested, path)


def nested_blocks(rank, size, path):
    for layout in here("fsdp1_flat", "fsdp1_orig", "fsdp1_grad_op", "fsdp2"):
        model = make(layout)
        optim = Nesting(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optim.step()
        for slots in optim.state.values():
            # What a block is scaled with: neither as the parameter, nor the same on all ranks.
            slots["absmax"] = torch.full((3,), float(rank))
        full = rt.StateDictOptions(full_state_dict=True)
        for call in (
            lambda: rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path),
            lambda: rt.get_optimizer_state_dict(model, optim, options=full),
        ):
            try:
                call()
            except (reshard.ReshardError, RuntimeError) as error:
                assert "wrapped.absmax" in str(error), (layout, error)
            else:
                raise AssertionError(f"{layout}: one rank's slots were taken for everybody's")
        assert not rt.exists(path)


def test_nested_slots_that_differ_between_ranks_are_not_taken_for_replicas(ranks, path):
    ranks(2, nested_blocks, path)


def test_torch_load_reads_what_torch_save_wrote_of_a_state_dict():
    model = nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    full = rt.StateDictOptions(full_state_dict=True, cpu_offload=True)
    for state in (
        rt.get_optimizer_state_dict(model, optim),
        rt.get_optimizer_state_dict(model, optim, options=full),
        rt.optim_state_dict(model, optim),
        rt.optim_state_dict(model, optim, full=True),
    ):
        file = io.BytesIO()
        torch.save({"optim": state}, file)
        file.seek(0)
        back = torch.load(file, weights_only=True)["optim"]
        assert isinstance(back, dict) and back["param_groups"] == state["param_groups"]
        assert torch.equal(back["state"]["weight"]["exp_avg"], state["state"]["weight"]["exp_avg"])


def views_compared(rank, size):
    model = make("fsdp1_flat")
    optim = optimizer(model)
    train(model, optim, 1)
    a, b = rt.get_state_dict(model, optim), rt.get_state_dict(model, optim)
    views = [key for key, value in a[0].items() if isinstance(value, rt.ShardView)]
    assert views and all(a[0][key] == b[0][key] for key in views)
    assert all(a[1]["state"][name]["exp_avg"] == b[1]["state"][name]["exp_avg"] for name in a[1]["state"])
    kept = {key: copy.deepcopy(a[0][key]) for key in views}
    assert all(kept[key] == a[0][key] for key in views)
    train(model, optim, 1, start=1)
    assert any(kept[key] != a[0][key] for key in views)


def test_views_are_equal_when_they_hold_the_same(ranks):
    ranks(2, views_compared)
    view = rt.ShardView(torch.float32, (4,), [((0,), torch.ones(2))])
    assert view == rt.ShardView(torch.float32, (4,), [((0,), torch.ones(2))])
    assert view != rt.ShardView(torch.float32, (4,), [((2,), torch.ones(2))])
    assert view != rt.ShardView(torch.float32, (5,), [((0,), torch.ones(2))])
    assert view != 3


class Expert(nn.Module):
    """Some ranks train one expert, others the other."""

    def __init__(self, rank):
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8) if rank % 2 == index else nn.Identity() for index in range(2)])

    def forward(self, x):
        for expert in self.experts:
            x = expert(x)
        return self.dense(x)


def two_groups(rank, mesh, part, orig):
    torch.manual_seed(rank % 2)
    model = Expert(rank)
    common = dict(use_orig_params=orig, device_id=torch.device("cpu"))
    for index, expert in enumerate(model.experts):
        if isinstance(expert, nn.Linear):
            model.experts[index] = FSDP(expert, process_group=part, **common)
    torch.manual_seed(9)
    nn.init.normal_(model.dense.weight)
    model = FSDP(model, process_group=mesh, **common)
    return model, torch.optim.Adam(model.parameters())


def experts(rank, size, path):
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    everyone = dist.new_group(list(range(size)))
    for orig in (True, False):
        model, optim = two_groups(rank, everyone, parts[rank % 2], orig)
        model(torch.ones(1, 8)).sum().backward()
        optim.step()
        own = [f"experts.{rank % 2}.{kind}" for kind in ("weight", "bias")]
        expected = sorted(["dense.weight", "dense.bias", *own])
        full = rt.StateDictOptions(full_state_dict=True)
        whole = rt.get_model_state_dict(model, options=full)
        assert sorted(whole) == expected
        assert sorted(rt.get_model_state_dict(model, as_torch=True)) == expected
        assert sorted(rt.get_optimizer_state_dict(model, optim, as_torch=True)["state"]) == expected
        slots = rt.get_optimizer_state_dict(model, optim, options=full)["state"]
        assert sorted(slots) == expected and slots[own[0]]["exp_avg"].shape == (8, 8)
        # On one rank of each group alone.
        offered = rt.get_model_state_dict(model, options=rt.StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert sorted(offered) == (expected if rank == 0 else sorted(own) if rank == 1 else []), (rank, sorted(offered))
        m, o = rt.get_state_dict(model, optim)
        rt.save({"m": m, "o": o}, path, overwrite=True)
        other, other_optim = two_groups(rank, everyone, parts[rank % 2], orig)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        m, o = rt.get_state_dict(other, other_optim)
        state = {"m": m, "o": o}
        rt.load(state, path)
        rt.set_state_dict(other, other_optim, model_state_dict=state["m"], optim_state_dict=state["o"])
        back = rt.get_model_state_dict(other, options=full)
        assert all(torch.equal(back[key], whole[key]) for key in whole)
        slots_back = rt.get_optimizer_state_dict(other, other_optim, options=full)["state"]
        assert all(torch.equal(slots_back[key]["exp_avg"], slots[key]["exp_avg"]) for key in slots)


def test_modules_of_one_model_over_different_process_groups(ranks, path):
    ranks(4, experts, path)


def test_a_mesh_is_no_process_group(ranks, path):
    ranks(2, meshed, path)


def meshed(rank, size, path):
    mesh = init_device_mesh("cpu", (size,))
    fully = nn.Linear(2, 2)
    fully_shard(fully, mesh=mesh)
    try:
        rt.save(fully.state_dict(), path, process_group=mesh)
    except reshard.InvalidInput as error:
        assert "DeviceMesh" in str(error) and "get_group" in error.hint
    else:
        raise AssertionError("a mesh was taken for a process group")
