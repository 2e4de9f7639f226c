"""An optimizer that has not run: asking for its state changes nothing, and a checkpoint is loaded into it all the same."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
from models import Net, assert_close, everything, here, make, optimizer, train

import reshard
import reshard.torch as rt


def snapshot(model, optim):
    return (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        copy.deepcopy(optim.state_dict()),
    )


def test_asking_changes_nothing():
    for kind in ("adamw", "sgd", "plain_sgd", "adagrad", "tensor_lr"):
        for gradients in (False, True):
            one, two = make("single"), make("single")
            a, b = optimizer(one, kind), optimizer(two, kind)
            if gradients:
                batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
                for model in (one, two):
                    model(batch).square().mean().backward()
            before = snapshot(one, a)
            rt.get_state_dict(one, a)
            rt.get_optimizer_state_dict(one, a, options=rt.StateDictOptions(flatten_optimizer_state_dict=True))
            assert_close(before, snapshot(one, a), kind)
            train(one, a, 3)
            train(two, b, 3)
            assert_close(snapshot(one, a), snapshot(two, b), kind)


def asking_on_ranks(rank, size):
    for layout in here("fsdp1_flat", "fsdp1_orig", "fsdp2", "ddp"):
        one, two = make(layout), make(layout)
        a, b = optimizer(one), optimizer(two)
        rt.get_state_dict(one, a)
        assert not a.state, layout
        assert all(p.grad is None for p in one.parameters())
        train(one, a, 2)
        train(two, b, 2)
        x, y = rt.get_state_dict(one, a), rt.get_state_dict(two, b)
        assert_close(everything(dict(x[0])), everything(dict(y[0])), layout)
        assert_close(everything(x[1]), everything(y[1]), layout)


def test_asking_changes_nothing_on_ranks(ranks):
    ranks(2, asking_on_ranks)


def test_presence_is_restored_exactly(path):
    """A parameter that never got a gradient has no state, before and after."""
    model = make("single", "unused")
    optim = optimizer(model)
    train(model, optim, 2)
    state = rt.get_optimizer_state_dict(model, optim)
    assert not any("unused" in name for name in state["state"])
    assert any("unused" in name for name in state["param_groups"][0]["params"])
    rt.save({"optim": state}, path)
    for used in (False, True):
        other = make("single", "unused", seed=2)
        second = optimizer(other)
        if used:
            for p in other.parameters():
                p.grad = torch.ones_like(p)
            second.step()
        target = {"optim": rt.get_optimizer_state_dict(other, second)}
        rt.load(target, path)
        rt.set_optimizer_state_dict(other, second, target["optim"])
        assert_close(everything_local(state), everything_local(rt.get_optimizer_state_dict(other, second)))


def test_slots_of_a_fresh_optimizer_come_from_keys_of_other_names(tmp_path):
    """What a wrapper called `module.…`, below an entry of another name, into an optimizer that has not run."""
    model = make("single")
    optim = optimizer(model)
    train(model, optim, 2)
    for flat in (False, True):
        options = rt.StateDictOptions(flatten_optimizer_state_dict=flat)
        wanted = everything_local(rt.get_optimizer_state_dict(model, optim, options=options))
        wrapped = torch.nn.ModuleDict({"module": model})
        stored = rt.get_optimizer_state_dict(wrapped, optim, options=options)
        path = tmp_path / f"flat-{flat}"
        rt.save({"old": stored, "lr": 1.0}, path)
        other = make("single", seed=2)
        second = optimizer(other)
        target = {"optim": rt.get_optimizer_state_dict(other, second, options=options)}

        def old_name(key):
            name = key.replace("optim.", "old.", 1).replace("state.", "state.module.", 1)
            return name.replace("param_groups.", "param_groups.module.", 1) if flat else name

        report = rt.load(target, path, rename=old_name)
        assert report.differences == ()
        rt.set_optimizer_state_dict(other, second, target["optim"], options=options)
        assert_close(wanted, everything_local(rt.get_optimizer_state_dict(other, second, options=options)))
        # The same by a dict of keys.
        third = optimizer(other)
        target = {"optim": rt.get_optimizer_state_dict(other, third, options=options)}
        with reshard.open(path) as ck:
            names = {key.replace("old.", "optim.", 1).replace("module.", "", 1): key for key in ck.keys() if key != "lr"}
        rt.load(target, path, rename=names)
        rt.set_optimizer_state_dict(other, third, target["optim"], options=options)
        assert_close(wanted, everything_local(rt.get_optimizer_state_dict(other, third, options=options)))


def test_what_is_renamed_to_none_stays_as_it_is(path):
    model = make("single")
    optim = optimizer(model)
    train(model, optim, 2)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    second = optimizer(model)
    second.param_groups[0]["lr"] = 0.625
    target = {"optim": rt.get_optimizer_state_dict(model, second)}
    first = next(iter(dict(model.named_parameters())))
    left = {"optim.param_groups.0.lr": None, f"optim.state.{first}.exp_avg": None}
    rt.load(target, path, rename=left, strict=False)
    assert target["optim"]["param_groups"][0]["lr"] == 0.625
    assert first in target["optim"]["param_groups"][0]["params"]
    assert "exp_avg" not in target["optim"]["state"][first] and "exp_avg_sq" in target["optim"]["state"][first]


def everything_local(tree):
    if isinstance(tree, dict):
        return {key: everything_local(value) for key, value in tree.items()}
    return [everything_local(v) for v in tree] if isinstance(tree, (list, tuple)) else tree


def test_slots_wait_on_when_the_checkpoint_has_none_either(path):
    """What was loaded is what the optimizer says of itself afterwards, in both forms; and nothing was invented."""
    for flattened in (False, True):
        options = rt.StateDictOptions(flatten_optimizer_state_dict=flattened)
        model = make("single")
        rt.save({"optim": rt.get_optimizer_state_dict(model, optimizer(model), options=options)}, path, overwrite=True)
        assert not [key for key in reshard.Checkpoint(path).keys() if "exp_avg" in key]
        other = make("single", seed=2)
        second = torch.optim.AdamW(other.parameters(), lr=0.7)
        state = rt.get_optimizer_state_dict(other, second, options=options)
        rt.load({"optim": state}, path)
        rt.set_optimizer_state_dict(other, second, state, options=options)
        assert not second.state and second.param_groups[0]["lr"] == optimizer(make("single")).param_groups[0]["lr"]
        assert_close(dict(state), dict(rt.get_optimizer_state_dict(other, second, options=options)), path)
        # What waits is stored by nobody, also not now.
        rt.save({"optim": state}, path, overwrite=True)
        assert not [key for key in reshard.Checkpoint(path).keys() if "exp_avg" in key]


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("why", ["missing", "damaged"])
def test_a_load_that_fails_leaves_the_dict_as_it_was(path, flattened, why):
    """Slots that nothing was loaded into are not taken for loaded ones afterwards."""
    options = rt.StateDictOptions(flatten_optimizer_state_dict=flattened)
    model = make("single")
    optim = optimizer(model)
    train(model, optim, 2)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim, options=options), "w": torch.arange(1000)}, path)
    other = make("single", seed=2)
    second = torch.optim.SGD(other.parameters(), lr=0.7, momentum=0.9)
    state = {"optim": rt.get_optimizer_state_dict(other, second, options=options), "w": torch.zeros(1000, dtype=torch.int64)}
    before = [*leaves(state["optim"])]
    if why == "missing":
        state["nowhere"] = torch.zeros(3)
    else:
        (file,) = pathlib.Path(path).glob("*.distcp")
        content = file.read_bytes()
        place = content.index(torch.arange(1000).numpy().tobytes())
        file.write_bytes(content[: place + 8] + b"\x77" + content[place + 9 :])
    with pytest.raises(reshard.Mismatch if why == "missing" else reshard.Corrupt):
        rt.load(state, path)
    after = [*leaves(state["optim"])]
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(one is two for (_, one), (_, two) in zip(before, after))
    rt.set_optimizer_state_dict(other, second, state["optim"], options=options)
    assert not second.state and second.param_groups[0]["lr"] == 0.7


def leaves(tree, path=()):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, (dict, list)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def stages(rank, size, path):
    """Stages of a pipeline save their groups under one key; one of them is what the checkpoint has."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[rank].to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model[rank].parameters():
            parameter.fill_(rank)
    optim = torch.optim.Adam(model[rank].parameters(), lr=0.25)
    own = {key: value for key, value in rt.get_model_state_dict(model).items() if not value.is_meta}
    rt.save({"model": own, "optim": rt.get_optimizer_state_dict(model, optim)}, path)
    whole = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    target = torch.optim.Adam(whole.parameters())
    state = {"model": rt.get_model_state_dict(whole), "optim": rt.get_optimizer_state_dict(whole, target)}
    rt.load(state, path)
    rt.set_optimizer_state_dict(whole, target, state["optim"])
    assert target.param_groups[0]["lr"] == 0.25 and not target.state
    assert [float(layer.weight.detach()[0, 0]) for layer in whole] == [0.0, 1.0]


def test_groups_of_one_pipeline_stage_stand_for_all_before_the_first_step(ranks, path):
    ranks(2, stages, path)


def test_stateless_optimizer_stays_stateless(path):
    model = make("single")
    optim = optimizer(model, "plain_sgd")
    train(model, optim, 2)
    state = rt.get_optimizer_state_dict(model, optim)
    assert state["state"] == {}
    rt.save({"optim": state}, path)
    target = {"optim": rt.get_optimizer_state_dict(model, optim)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(model, optim, target["optim"])
    assert rt.get_optimizer_state_dict(model, optim)["state"] == {}


def test_frozen_after_training_keeps_its_state(path):
    model = make("single")
    optim = optimizer(model)
    train(model, optim, 2)
    model.first.requires_grad_(False)
    state = rt.get_optimizer_state_dict(model, optim)
    assert "first.up.weight" in state["state"]
    rt.save({"optim": state}, path)
    other = make("single", seed=3)
    other.first.requires_grad_(False)
    second = optimizer(other)
    target = {"optim": rt.get_optimizer_state_dict(other, second)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, second, target["optim"])
    assert_close(everything_local(state), everything_local(rt.get_optimizer_state_dict(other, second)))


def test_loading_writes_into_live_slots_in_place(path):
    model = make("single")
    optim = optimizer(model)
    train(model, optim, 2)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    slots = {id(p): {k: v.data_ptr() for k, v in s.items()} for p, s in optim.state.items()}
    train(model, optim, 1)
    target = {"optim": rt.get_optimizer_state_dict(model, optim)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(model, optim, target["optim"])
    assert slots == {id(p): {k: v.data_ptr() for k, v in s.items()} for p, s in optim.state.items()}
    assert all(float(s["step"]) == 2 for s in optim.state.values())


def test_low_precision_parameters_keep_slots_of_their_own_dtype(path):
    model = Net().bfloat16()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for p in model.parameters():
        optim.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.randn(p.shape), "exp_avg_sq": torch.rand(p.shape)}
    state = rt.get_optimizer_state_dict(model, optim)
    rt.save({"optim": state}, path)
    other = Net().bfloat16()
    second = torch.optim.AdamW(other.parameters(), lr=0.01)
    target = {"optim": rt.get_optimizer_state_dict(other, second)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, second, target["optim"])
    assert all(s["exp_avg"].dtype == torch.float32 for s in second.state.values())
    assert_close(everything_local(state), everything_local(rt.get_optimizer_state_dict(other, second)))


def test_a_tensor_rate_stays_the_tensor_it_is(path):
    model = make("single")
    optim = optimizer(model, "tensor_lr")
    train(model, optim, 1)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    rate = optim.param_groups[0]["lr"]
    rate.fill_(0.5)
    target = {"optim": rt.get_optimizer_state_dict(model, optim)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(model, optim, target["optim"])
    assert optim.param_groups[0]["lr"] is rate and float(rate) == float(torch.tensor(0.01))
