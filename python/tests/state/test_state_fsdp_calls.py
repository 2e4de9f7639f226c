"""FSDP's own calls for optimizer state: rank 0 alone has it, no groups are given, and the older names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import everything, make, optimizer, train
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import reshard.torch as rt


def trained(layout="fsdp1_orig", seed=7, steps=2):
    model = make(layout, seed=seed)
    optim = optimizer(model)
    train(model, optim, steps)
    return model, optim


def state_of(model, optim):
    return everything(rt.optim_state_dict(model, optim))["state"]


def assert_same_state(a, b, at):
    assert sorted(a) == sorted(b), (at, sorted(a), sorted(b))
    for name in a:
        assert sorted(a[name]) == sorted(b[name]) and all(torch.equal(a[name][slot], b[name][slot]) for slot in a[name]), (
            at,
            name,
        )


def loaded(optim, state):
    optim.load_state_dict(state)


def old_names(rank, size):
    for layout in ("fsdp1_orig", "fsdp1_flat"):
        model, optim = trained(layout)
        expected = state_of(model, optim)
        full = rt.full_optim_state_dict(model, optim)
        assert bool(full) == (rank == 0)
        whole = rt.full_optim_state_dict(model, optim, rank0_only=False)
        if rank == 0:
            assert_same_state(full["state"], whole["state"], layout)
        assert_same_state(whole["state"], expected, layout)
        sharded = rt.sharded_optim_state_dict(model, optim)
        for how in ("shard", "scatter", "flatten", "without an optimizer"):
            other, target = trained(layout, seed=3, steps=1)
            if how == "shard":
                state = rt.shard_full_optim_state_dict(whole, other, optim=target)
            elif how == "scatter":
                state = rt.scatter_full_optim_state_dict(full if rank == 0 else None, other, optim=target)
            elif how == "flatten":
                state = rt.flatten_sharded_optim_state_dict(sharded, other, target)
            else:
                state = rt.shard_full_optim_state_dict(whole, other, optim_input=list(other.parameters()))
            loaded(target, state)
            assert_same_state(state_of(other, target), expected, f"{layout}, {how}")


def test_the_older_names_do_what_they_did(ranks):
    ranks(2, old_names)


class Partly(nn.Module):
    """A model of which FSDP holds a part."""

    def __init__(self, extra=""):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 2)
        if extra:
            holder = self.inner if extra == "inner" else self
            holder.extra = nn.Parameter(torch.ones(5, 5))
        self.inner = FSDP(self.inner, device_id=torch.device("cpu"))

    def forward(self, x):
        return self.outer(self.inner(x))


def unmanaged(rank, size):
    model = Partly()
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    whole = rt.full_optim_state_dict(model, optim, rank0_only=False)
    sharded = rt.sharded_optim_state_dict(model, optim)

    def calls(extra):
        other = Partly(extra)
        target = torch.optim.Adam(other.parameters())
        yield other, target, lambda: rt.shard_full_optim_state_dict(whole, other, optim=target)
        yield other, target, lambda: rt.flatten_sharded_optim_state_dict(sharded, other, target)
        yield other, target, lambda: rt.scatter_full_optim_state_dict(whole if rank == 0 else None, other, optim=target)

    for other, target, call in calls("model"):
        state = call()
        ids = {id(param): index for index, param in enumerate(p for g in target.param_groups for p in g["params"])}
        own = ids[id(other.extra)]
        assert state["param_groups"][0]["params"] == sorted(set(ids.values()) - {own}), "it is in no group"
        # Whoever manages it adds it.
        step = {"step": torch.tensor(1.0), "exp_avg": torch.ones(5, 5), "exp_avg_sq": torch.ones(5, 5)}
        state["state"][own] = step
        state["param_groups"][0]["params"] = sorted(ids.values())
        target.load_state_dict(state)
        expected, found = state_of(model, optim), state_of(other, target)
        assert_same_state({name: found[name] for name in expected}, expected, "unmanaged")
    for _, _, call in calls("inner"):
        with pytest.raises(ValueError, match="^All unflattened parameters comprising a single flat parameter must have scalar"):
            call()
    # What FSDP holds is never left out, and without FSDP nothing is.
    other = Partly()
    target = torch.optim.Adam(other.parameters())
    known = {name: slots for name, slots in whole["state"].items() if not name.startswith("inner")}
    group = {**whole["param_groups"][0], "params": list(known)}
    with pytest.raises(rt.StateMismatch, match=r"Missing.*inner"):
        rt.shard_full_optim_state_dict({"state": known, "param_groups": [group]}, other, optim=target)
    plain = nn.Linear(2, 2)
    with pytest.raises(rt.StateMismatch, match="Missing"):
        known = {"state": {"weight": {"step": torch.tensor(1.0)}}, "param_groups": [{"params": ["weight"]}]}
        rt.shard_full_optim_state_dict(known, plain, optim=torch.optim.Adam(plain.parameters()))


def test_the_older_names_leave_to_others_what_fsdp_does_not_hold(ranks):
    ranks(2, unmanaged)


def incomplete(rank, size):
    torch.manual_seed(0)
    model = nn.Sequential(*(FSDP(nn.Linear(4, 4), device_id=torch.device("cpu")) for _ in range(2)))
    params = list(model.parameters())
    optim = torch.optim.Adam(params if rank == 0 else params[:-1])
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    with pytest.raises(
        RuntimeError, match=r"some ranks are missing some of those states: '1\.\w+\.exp_avg' is incomplete"
    ) as raised:
        rt.full_optim_state_dict(model, optim)
    assert all(key.startswith("1.") for key in raised.value.keys) and raised.value.keys


def test_state_that_some_ranks_lack_is_named(ranks):
    ranks(2, incomplete)


def in_a_smaller_group(rank, size):
    """The group that is given are the ranks that take part, also where that is one of several."""
    group = dist.new_group([0])
    if rank == 0:
        states = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = FSDP(nn.Linear(3, 2), process_group=group, device_id=torch.device("cpu"))
            optim = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 3)).sum().backward()
            optim.step()
            states.append((model, optim, rt.full_optim_state_dict(model, optim, group=group)))
        model, optim, _ = states[1]
        whole = states[0][2]
        loaded(optim, rt.scatter_full_optim_state_dict(whole, model, optim=optim, group=group))
        assert_same_state(rt.full_optim_state_dict(model, optim)["state"], whole["state"], "one rank")
    dist.barrier()


def test_ranks_outside_of_the_given_group_take_no_part(ranks):
    ranks(2, in_a_smaller_group)


def test_the_older_argument_is_deprecated():
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        rt.full_optim_state_dict(model, optim, list(model.parameters()))


def from_rank0(rank, size):
    for layout in ("fsdp1_orig", "fsdp1_flat"):
        model, optim = trained(layout)
        expected = state_of(model, optim)
        full = rt.optim_state_dict(model, optim, full=True, rank0_only=True)
        other, target = trained(layout, seed=3, steps=1)
        loaded(target, rt.optim_state_dict_to_load(other, target, full, rank0_only=True))
        assert_same_state(state_of(other, target), expected, layout)
        # As FSDP is told once for all.
        other, target = trained(layout, seed=3, steps=1)
        kind = StateDictType.FULL_STATE_DICT
        with FSDP.state_dict_type(other, kind, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)):
            loaded(target, rt.optim_state_dict_to_load(other, target, full))
        assert_same_state(state_of(other, target), expected, layout)


def test_rank_0_alone_has_the_state_to_load(ranks):
    ranks(2, from_rank0)


def alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optim = torch.optim.Adam([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}])
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    return model, optim


def test_a_state_without_groups_gives_one_without_groups():
    model, optim = alone()
    own = optim.state_dict()
    del own["param_groups"]
    state = rt.optim_state_dict(model, optim, own)
    assert list(state) == ["state"] and sorted(state["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert torch.equal(state["state"]["1.weight"]["exp_avg"], optim.state[model[1].weight]["exp_avg"])
    other, target = alone()
    target.state.clear()
    rt.optim_state_dict_to_load(other, target, state, load_directly=True)
    assert torch.equal(target.state[other[1].weight]["exp_avg"], optim.state[model[1].weight]["exp_avg"])


def test_state_goes_by_names_or_by_ids():
    model, optim = alone()
    by_id = optim.state_dict()
    by_name = rt.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    theirs = FSDP.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    assert by_name["param_groups"] == theirs["param_groups"] and sorted(by_name["state"]) == sorted(theirs["state"])
    assert all(torch.equal(by_name["state"][n]["exp_avg"], theirs["state"][n]["exp_avg"]) for n in theirs["state"])
    back = rt.rekey_optim_state_dict(by_name, OptimStateKeyType.PARAM_ID, model, optim=optim)
    assert back["param_groups"] == by_id["param_groups"] and list(back["state"]) == list(by_id["state"])
    assert all(torch.equal(back["state"][i]["exp_avg"], by_id["state"][i]["exp_avg"]) for i in by_id["state"])
