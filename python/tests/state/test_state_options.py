"""Options against PyTorch's own results, and what they promise on top of that."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as pt
from models import Net, assert_close, everything, fully_shard, here, make, optimizer, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import reshard
import reshard.torch as rt


def options(**fields):
    return rt.StateDictOptions(**fields), pt.StateDictOptions(**fields)


def trained(layout, variant="", kind="adamw", steps=2, seed=7):
    model = make(layout, variant, seed=seed)
    optim = optimizer(model, kind)
    train(model, optim, steps)
    return model, optim


# ---- on ranks ---------------------------------------------------------------------------------------------------------------


def full_as_pytorch(rank, size):
    for layout in here("ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"):
        for fields in ({}, {"flatten_optimizer_state_dict": True}, {"cpu_offload": True}):
            ours, theirs = options(full_state_dict=True, **fields)
            model, optim = trained(layout)
            a = rt.get_state_dict(model, optim, options=ours)
            if layout.startswith("fsdp1") and "cpu_offload" in fields:
                # PyTorch frees the storage it copies from when that is on the CPU already, so it can not be asked.
                b = pt.get_state_dict(model, optim, options=pt.StateDictOptions(full_state_dict=True))
                b = b if rank == 0 else ({}, {})
            else:
                b = pt.get_state_dict(model, optim, options=theirs)
            if rank and "cpu_offload" in fields:
                assert a == ({}, {}), f"{layout} {fields}"
                continue
            assert list(a[0]) == list(b[0])
            assert_close(b[0], a[0], f"{layout} {fields} model")
            part = lambda state: state["state"] if "state" in state else state
            assert_close(part(b[1]), part(a[1]), f"{layout} {fields} optimizer")


def full_to_chosen_ranks(rank, size):
    for layout in here("fsdp1_flat", "fsdp2"):
        model, optim = trained(layout)
        reference = rt.get_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
        chosen = rt.get_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True, full_state_dict_ranks=(1,)))
        if rank == 1:
            assert_close(reference[0], chosen[0])
            assert_close(reference[1]["state"], chosen[1]["state"])
        else:
            assert chosen == ({}, {})


def full_is_set_on_every_layout(rank, size):
    model, optim = trained(here("fsdp2", "fsdp1_orig")[0], seed=5)
    full = rt.StateDictOptions(full_state_dict=True)
    reference = rt.get_state_dict(model, optim, options=full)
    for layout in here("single", "ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"):
        for flat in (False, True):
            state = (
                reference[1]
                if not flat
                else rt.get_optimizer_state_dict(
                    model, optim, options=rt.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
                )
            )
            other = make(layout, seed=1)
            second = optimizer(other)
            rt.set_state_dict(other, second, model_state_dict=reference[0], optim_state_dict=state, options=full)
            found = rt.get_state_dict(other, second, options=full)
            assert_close(reference[0], found[0], layout)
            assert_close(reference[1]["state"], found[1]["state"], layout)


def broadcast_from_rank0(rank, size):
    model, optim = trained(here("fsdp2", "fsdp1_orig")[0], seed=5)
    full = rt.StateDictOptions(full_state_dict=True)
    reference = rt.get_state_dict(model, optim, options=full)
    both = rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for layout in here("ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"):
        other = make(layout, seed=1)
        second = optimizer(other)
        mine = reference if rank == 0 else ({}, {})
        rt.set_state_dict(other, second, model_state_dict=mine[0], optim_state_dict=mine[1], options=both)
        found = rt.get_state_dict(other, second, options=full)
        assert_close(reference[0], found[0], layout)
        assert_close(reference[1]["state"], found[1]["state"], layout)
    missing = {key: value for key, value in reference[0].items() if key != "head.bias"} if rank == 0 else {}
    with pytest.raises(rt.StateMismatch) as error:
        rt.set_model_state_dict(make(here("fsdp2", "fsdp1_orig")[0]), missing, options=both)
    assert "head.bias" in error.value.keys


def broadcast_into_meta(rank, size):
    """A model without memory gets it when its state arrives."""
    full = rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch.manual_seed(0)
    reference = Net("tied").state_dict()
    with torch.device("meta"):
        net = Net("tied")
    for block in (net.second, net.norm):
        fully_shard(block)
    fully_shard(net)
    state = dict(reference.items()) if rank == 0 else {}
    rt.set_model_state_dict(net, state, options=full)
    assert net.tied.weight is net.first.up.weight
    assert_close(everything(dict(reference.items())), everything(rt.get_model_state_dict(net)))


def state_of_pytorch_is_set(rank, size):
    """ShardedTensors and DTensors, as PyTorch gives them, into any layout."""
    for layout in here("fsdp1_flat", "fsdp1_orig", "fsdp2"):
        model, optim = trained(layout, seed=5)
        theirs = pt.get_state_dict(model, optim)
        reference = rt.get_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
        for target in here("ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"):
            other = make(target, seed=1)
            second = optimizer(other)
            rt.set_state_dict(other, second, model_state_dict=dict(theirs[0]), optim_state_dict=theirs[1])
            found = rt.get_state_dict(other, second, options=rt.StateDictOptions(full_state_dict=True))
            assert_close(reference[0], found[0], f"{layout} into {target}")
            assert_close(reference[1]["state"], found[1]["state"], f"{layout} into {target}")


def our_state_is_set_by_pytorch(rank, size):
    """as_torch gives what PyTorch's own calls take."""
    for layout in ("fsdp1_flat", "fsdp1_orig"):
        model, optim = trained(layout, seed=5)
        ours = rt.get_state_dict(model, optim, as_torch=True)
        theirs = pt.get_state_dict(model, optim)
        for name, value in theirs[0].items():
            assert type(ours[0][name]) is type(value), (name, type(ours[0][name]), type(value))
        assert_close(everything(theirs[0]), everything(dict(ours[0])))
        for name, slots in theirs[1]["state"].items():
            for slot, value in slots.items():
                mine = ours[1]["state"][name][slot]
                assert type(mine) is type(value), (name, slot)
                if hasattr(value, "local_shards"):
                    pairs = list(zip(value.local_shards(), mine.local_shards(), strict=True))
                    assert all(a.metadata == b.metadata and torch.equal(a.tensor, b.tensor) for a, b in pairs)
        other = make(layout, seed=1)
        second = optimizer(other)
        pt.set_state_dict(other, second, model_state_dict=dict(ours[0]), optim_state_dict=dict(ours[1]))
        full = rt.StateDictOptions(full_state_dict=True)
        assert_close(rt.get_state_dict(model, optim, options=full)[0], rt.get_state_dict(other, second, options=full)[0])


def fsdp_pair(rank, size):
    """optim_state_dict and optim_state_dict_to_load against FSDP's own."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

    for layout in ("fsdp1_flat", "fsdp1_orig"):
        for kind in ("adamw", "sgd"):
            model, optim = trained(layout, kind=kind, seed=5)
            # FSDP's own call gives one slot's content under another's name here (its gathered buffer is used again), so
            # the reference is what PyTorch's get_state_dict makes of it.
            theirs = pt.get_optimizer_state_dict(model, optim, options=pt.StateDictOptions(full_state_dict=True))
            with FSDP.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)
            ):
                # What it loads it takes out of what it is given.
                expected = FSDP.optim_state_dict_to_load(model, optim, copy.deepcopy(theirs))
            ours = rt.optim_state_dict(model, optim, full=True)
            assert_close(theirs["state"], ours["state"], f"{layout} {kind} full")
            for given in (theirs, ours, rt.optim_state_dict(model, optim), rt.optim_state_dict(model, optim, as_torch=True)):
                fresh = optimizer(model, kind)
                loaded = rt.optim_state_dict_to_load(model, fresh, given)
                assert_close(expected["state"], loaded["state"], f"{layout} {kind} to load")
                fresh.load_state_dict(loaded)
            alone = rt.optim_state_dict(model, optim, full=True, rank0_only=True, cpu_offload=True)
            assert bool(alone) == (rank == 0)


def strict_or_not(rank, size):
    for layout in here("ddp", "fsdp1_flat", "fsdp2"):
        model, _ = trained(layout)
        state = rt.get_model_state_dict(model)
        state["head.bais"] = state.pop("head.bias")
        with pytest.raises(RuntimeError) as error:
            rt.set_model_state_dict(model, state)
        assert isinstance(error.value, reshard.Mismatch)
        assert {d["key"] for d in error.value.differences} == {"head.bias", "head.bais"}
        assert "there is 'head.bais'" in str(error.value)
        found = rt.set_model_state_dict(model, state, options=rt.StateDictOptions(strict=False))
        assert list(found.missing_keys) == ["head.bias"] and list(found.unexpected_keys) == ["head.bais"]


def flattened(rank, size, folder=None):
    ours, theirs = options(flatten_optimizer_state_dict=True)
    for layout in here("ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"):
        for kind in ("adamw", "groups"):
            model, optim = trained(layout, kind=kind)
            a = rt.get_optimizer_state_dict(model, optim, options=ours)
            b = pt.get_optimizer_state_dict(model, optim, options=theirs)
            assert_close(everything(b), everything(dict(a)), f"{layout} {kind}")
            other = make(layout, seed=1)
            second = optimizer(other, kind)
            rt.set_optimizer_state_dict(other, second, a, options=ours)
            c = rt.get_optimizer_state_dict(other, second, options=ours)
            assert_close(everything(dict(a)), everything(dict(c)), f"{layout} {kind}")


def mixed_frozen_members(rank, size):
    """Original parameters, some of a flat parameter's members frozen."""
    model = make("fsdp1_orig", "frozen")
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train(model, optim, 2)
    state = rt.get_state_dict(model, optim)
    assert not any(name.startswith("first") for name in state[1]["state"])
    left_out = rt.get_model_state_dict(model, options=rt.StateDictOptions(ignore_frozen_params=True))
    assert not any(name.startswith("first") for name in left_out) and "head.weight" in left_out


def sharded_load(rank, size, path=None):
    """The optimizer by the model's own layout, from the checkpoint alone."""
    folder = [None]
    if rank == 0:
        import tempfile

        folder[0] = tempfile.mkdtemp()
    dist.broadcast_object_list(folder)
    model, optim = trained(here("fsdp2", "fsdp1_orig")[0], seed=5)
    states = rt.get_state_dict(model, optim)
    path = f"{folder[0]}/checkpoint"
    rt.save({"model": states[0], "optim": states[1]}, path)
    reference = everything(states[1]["state"])
    for layout in here("ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"):
        other = make(layout, seed=1)
        loaded = rt.load_sharded_optimizer_state_dict(rt.get_model_state_dict(other), "optim", path)
        assert_close(reference, everything(loaded["optim"]["state"]), layout)
        second = optimizer(other)
        rt.set_optimizer_state_dict(other, second, loaded["optim"])
        assert_close(reference, everything(rt.get_optimizer_state_dict(other, second)["state"]), layout)
    theirs = dcp.optimizer.load_sharded_optimizer_state_dict(pt.get_model_state_dict(model), "optim", dcp.FileSystemReader(path))
    ours = rt.load_sharded_optimizer_state_dict(pt.get_model_state_dict(model), "optim", path)
    assert_close(everything(theirs["optim"]["state"]), everything(ours["optim"]["state"]))


def different_steps_of_members(rank, size):
    """Members of a flat parameter that were trained for different numbers of steps can not share one."""
    model, optim = trained("fsdp1_flat")
    state = rt.get_optimizer_state_dict(model, optim)
    state["state"]["first.up.weight"]["step"] = torch.tensor(9.0)
    with pytest.raises(rt.StateMismatch, match="first.up.weight"):
        rt.set_optimizer_state_dict(model, optim, state)


ON_RANKS = [
    full_as_pytorch,
    full_to_chosen_ranks,
    full_is_set_on_every_layout,
    broadcast_from_rank0,
    broadcast_into_meta,
    state_of_pytorch_is_set,
    our_state_is_set_by_pytorch,
    fsdp_pair,
    strict_or_not,
    flattened,
    mixed_frozen_members,
    sharded_load,
    different_steps_of_members,
]


@pytest.mark.parametrize("part", ON_RANKS, ids=lambda part: part.__name__)
def test_options_on_ranks(ranks, part):
    ranks(2, part, timeout=100)


# ---- in one process -----------------------------------------------------------------------------------------------------------


def test_options_exclude_each_other():
    model = make("single")
    with pytest.raises(ValueError):
        rt.get_model_state_dict(model, options=rt.StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(ValueError):
        rt.get_model_state_dict(model, options=rt.StateDictOptions(full_state_dict_ranks=(0,)))
    with pytest.raises(RuntimeError):
        rt.get_optimizer_state_dict(model, ())


def test_options_of_pytorch_are_taken():
    model = make("single", "frozen")
    ours = rt.get_model_state_dict(model, options=pt.StateDictOptions(ignore_frozen_params=True))
    theirs = pt.get_model_state_dict(model, options=pt.StateDictOptions(ignore_frozen_params=True))
    assert list(ours) == list(theirs)


def test_submodules():
    model, _optim = trained("single")
    for keep in (True, False):
        a, b = options(keep_submodule_prefixes=keep)
        with pytest.warns(FutureWarning):
            ours = rt.get_model_state_dict(model, submodules={model.first}, options=a)
        theirs = pt.get_model_state_dict(model, submodules={model.first}, options=b)
        assert_close(theirs, ours)
        assert list(theirs) == list(ours)
    other = make("single", seed=1)
    with pytest.warns(FutureWarning):
        found = rt.set_model_state_dict(other, {other.first: ours}, options=rt.StateDictOptions(strict=False))
    assert not found.unexpected_keys and torch.equal(other.first.up.weight, model.first.up.weight)


def test_two_optimizers():
    model = make("single")
    optims = [
        torch.optim.AdamW(model.first.parameters(), lr=0.01),
        torch.optim.SGD([*model.second.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9),
    ]
    train(model, optims, 2)
    ours, theirs = rt.get_optimizer_state_dict(model, optims), pt.get_optimizer_state_dict(model, optims)
    assert_close(theirs, dict(ours))
    other = make("single", seed=1)
    second = [
        torch.optim.SGD([*other.second.parameters(), *other.head.parameters()], lr=0.7, momentum=0.9),
        torch.optim.AdamW(other.first.parameters(), lr=0.7),
    ]
    rt.set_optimizer_state_dict(other, second, ours)
    assert_close(ours["state"], rt.get_optimizer_state_dict(other, second)["state"])
    assert [g["lr"] for o in second for g in o.param_groups] == [0.1, 0.01]


def test_groups_are_matched_by_members_and_unknown_keys_kept():
    model, optim = trained("single", kind="groups")
    state = rt.get_optimizer_state_dict(model, optim)
    state["param_groups"][0]["mine"] = {"anything": [1, 2]}
    other = make("single", seed=1)
    heads, rest = list(other.head.parameters()), [p for n, p in other.named_parameters() if "head" not in n]
    second = torch.optim.AdamW([{"params": heads}, {"params": rest}], lr=0.9)
    rt.set_optimizer_state_dict(other, second, state)
    assert second.param_groups[0]["lr"] == 0.03 and second.param_groups[1]["lr"] == 0.01
    assert second.param_groups[1]["mine"] == {"anything": [1, 2]} and second.param_groups[1]["initial_lr"] == 0.5
    assert_close(state["state"], rt.get_optimizer_state_dict(other, second)["state"])


def test_tied_parameters_stay_tied():
    model = make("single", "tied")
    optim = optimizer(model)
    train(model, optim, 2)
    a, b = rt.get_state_dict(model, optim), pt.get_state_dict(model, optim)
    assert list(a[0]) == list(b[0]) and "tied.weight" in a[0]
    assert_close(b[0], a[0])
    assert_close(b[1], dict(a[1]))
    other = make("single", "tied", seed=1)
    second = optimizer(other)
    state = {k: v for k, v in a[0].items() if k != "first.up.weight"}
    rt.set_state_dict(other, second, model_state_dict=state, optim_state_dict=a[1])
    assert other.tied.weight is other.first.up.weight and torch.equal(other.tied.weight, model.tied.weight)


def test_extra_state_and_buffers():
    model = make("single", "norm")
    train(model, optimizer(model), 2)
    model.norm.calls = 17
    state = rt.get_model_state_dict(model)
    assert state["norm._extra_state"] == {"calls": 17} and "norm.cache" not in state
    other = make("single", "norm", seed=1)
    rt.set_model_state_dict(other, state)
    assert other.norm.calls == 17
    assert_close(dict(model.state_dict()), dict(other.state_dict()))


def test_name_modifiers():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def _fqn_modifiers(self):
            return {"inner": "inner"}

        def other_modifiers(self):
            return {"inner": "inner"}

    net = nn.Sequential(Wrapped(nn.Linear(2, 3)))
    assert list(rt.get_model_state_dict(net)) == ["0.weight", "0.bias"]
    state = {name: torch.ones_like(value) for name, value in rt.get_model_state_dict(net).items()}
    rt.set_model_state_dict(net, state)
    assert bool((net[0].inner.weight == 1).all())


def test_hooks_of_modules_are_heeded():
    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "packed"] = torch.arange(3)

        def _load_from_state_dict(self, state, prefix, *rest):
            self.packed = state.pop(prefix + "packed")
            super()._load_from_state_dict(state, prefix, *rest)

    net = nn.Sequential(nn.Linear(2, 2), Packed(2, 3))
    state = rt.get_model_state_dict(net)
    assert list(state) == list(net.state_dict())
    other = nn.Sequential(nn.Linear(2, 2), Packed(2, 3))
    rt.set_model_state_dict(other, state)
    assert torch.equal(other[1].packed, torch.arange(3)) and torch.equal(other[1].weight, net[1].weight)


def test_state_by_ids_is_taken():
    model, optim = trained("single")
    other = make("single", seed=1)
    second = optimizer(other)
    rt.set_optimizer_state_dict(other, second, optim.state_dict())
    assert_close(rt.get_optimizer_state_dict(model, optim)["state"], rt.get_optimizer_state_dict(other, second)["state"])


def test_setting_copies_and_does_not_share_memory():
    model, optim = trained("single")
    other = make("single", seed=1)
    second = optimizer(other)
    rt.set_state_dict(
        other, second, model_state_dict=rt.get_model_state_dict(model), optim_state_dict=rt.get_optimizer_state_dict(model, optim)
    )
    before = rt.get_optimizer_state_dict(model, optim)["state"]["head.weight"]["exp_avg"].clone()
    train(other, second, 2)
    assert torch.equal(before, rt.get_optimizer_state_dict(model, optim)["state"]["head.weight"]["exp_avg"])


def test_nested_slots_and_state_of_no_parameter(path):
    model = nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight] = {
        "factors": {0: torch.randn(2, 2), 1: torch.randn(3, 3)},
        "note": "x",
        "momentum_buffer": torch.randn(3, 2),
    }
    state = rt.get_optimizer_state_dict(model, optim)
    rt.save({"optim": state}, path)
    second = torch.optim.SGD(model.parameters(), lr=0.5)
    target = {"optim": rt.get_optimizer_state_dict(model, second)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(model, second, target["optim"])
    found = second.state[model.weight]
    assert torch.equal(found["factors"][0], optim.state[model.weight]["factors"][0]) and found["note"] == "x"
