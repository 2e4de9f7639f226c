"""Traps from the field that show only with PyTorch itself, each under its number; the others are tests of the state crate."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from models import assert_close, make, optimizer, train
from torch import nn

import reshard
import reshard.torch as rt


def trained(kind="adamw", variant=""):
    model = make("single", variant)
    optim = optimizer(model, kind)
    train(model, optim, 2)
    return model, optim


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_t01_materialising_neither_steps_nor_decays(weight_decay):
    one, two = make("single"), make("single")
    a, b = (torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=weight_decay) for m in (one, two))
    rt.get_state_dict(one, a)
    assert not a.state
    train(one, a, 1)
    train(two, b, 1)
    assert_close(dict(one.named_parameters()), dict(two.named_parameters()))
    assert all(float(slots["step"]) == 1 for slots in a.state.values())


def test_t02_a_tensor_rate_stays_a_tensor_while_asking():
    model = make("single")
    optim = optimizer(model, "tensor_lr")
    rate = optim.param_groups[0]["lr"]
    state = rt.get_optimizer_state_dict(model, optim)
    assert optim.param_groups[0]["lr"] is rate and isinstance(state["param_groups"][0]["lr"], torch.Tensor)


def test_t03_gradients_do_not_make_state_empty(path):
    model, optim = trained()
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    other = make("single", seed=3)
    fresh = optimizer(other)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, fresh, target["optim"])
    assert_close(optim.state_dict(), fresh.state_dict())
    assert all(bool((p.grad == 1).all()) for p in other.parameters())


def test_t04_an_optimizer_with_some_state_gets_all_of_it(path):
    model, optim = trained()
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    other = make("single", seed=3)
    other.first.requires_grad_(False)
    partial = optimizer(other)
    train(other, partial, 1)
    assert 0 < len(partial.state) < len(optim.state)
    target = {"optim": rt.get_optimizer_state_dict(other, partial)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, partial, target["optim"])
    assert_close(optim.state_dict(), partial.state_dict())


def test_t05_a_stateless_optimizer_stays_without_state(path):
    model, optim = trained("plain_sgd")
    before = copy.deepcopy(optim.state_dict())
    rt.set_optimizer_state_dict(model, optim, rt.get_optimizer_state_dict(model, optim))
    assert_close(before, optim.state_dict())
    assert optim.state_dict()["state"] == {}


def test_t06_step_keeps_its_type_and_place(path):
    model, optim = trained()
    rt.save({"optim": rt.get_optimizer_state_dict(model.bfloat16(), optim)}, path)
    other = make("single", seed=3).bfloat16()
    fresh = optimizer(other)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, fresh, target["optim"])
    assert {(s["step"].dtype, s["step"].device.type, s["step"].dim()) for s in fresh.state.values()} == {
        (torch.float32, "cpu", 0)
    }


def test_t07_what_is_set_shares_no_memory_with_what_was_given():
    model, optim = trained()
    given = rt.get_optimizer_state_dict(model, optim)
    other = make("single", seed=3)
    second = optimizer(other)
    rt.set_optimizer_state_dict(other, second, given)
    before = copy.deepcopy(optim.state_dict())
    train(other, second, 1)
    assert_close(before, optim.state_dict())
    pointers = {t.data_ptr() for slots in optim.state.values() for t in slots.values()}
    assert not pointers & {t.data_ptr() for slots in second.state.values() for t in slots.values()}


def test_t07_two_optimizers_set_from_one_load_share_no_memory(path):
    model, optim = trained()
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    models = [make("single") for _ in range(2)]
    optims = [optimizer(m) for m in models]
    target = {"optim": rt.get_optimizer_state_dict(models[0], optims[0])}
    rt.load(target, path)
    for m, o in zip(models, optims):
        rt.set_optimizer_state_dict(m, o, target["optim"])
    train(models[0], optims[0], 1)
    assert_close(optim.state_dict(), optims[1].state_dict())


def test_t08_rates_and_other_values_are_set_too(path):
    model, optim = trained()
    optim.param_groups[0]["lr"] = 0.125
    optim.param_groups[0]["initial_lr"] = 0.5
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim), "epoch": 7}, path)
    other = make("single", seed=3)
    fresh = optimizer(other)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh), "epoch": 0}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, fresh, target["optim"])
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["initial_lr"], target["epoch"]) == (0.125, 0.5, 7)


@pytest.mark.parametrize("flatten", [False, True])
def test_t09_a_shared_parameter_has_its_state_once(path, flatten):
    options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optim = trained(variant="tied")
    state = rt.get_optimizer_state_dict(model, optim, options=options)
    rt.save({"optim": state}, path)
    other = make("single", "tied", seed=3)
    fresh = optimizer(other)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh, options=options)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, fresh, target["optim"], options=options)
    assert_close(optim.state_dict(), fresh.state_dict())


def test_t25_a_view_is_saved_without_the_memory_around_it(path):
    big = torch.zeros(1 << 20)
    report = rt.save({"bytes": big.view(torch.uint8)[:16], "floats": big[5:9]}, path)
    assert report.to_dict()["bytes"] < 4096


def test_t26_what_is_staged_is_what_there_was_when_it_was_asked_for(path):
    model, optim = trained()
    state = {"optim": rt.get_optimizer_state_dict(model, optim), "step": 2}
    before = copy.deepcopy(optim.state_dict())
    handle = rt.async_save(state, path)
    handle.staged.result()
    train(model, optim, 1)
    state["step"] = 3
    handle.result()
    other = make("single", seed=3)
    fresh = optimizer(other)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh), "step": 0}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, fresh, target["optim"])
    assert_close(before, fresh.state_dict())
    assert target["step"] == 2


def test_t27_a_plan_that_failed_is_not_used_again(path, tmp_path):
    saver = rt.AsyncSaver()
    shapes = {"a": torch.zeros(3), "b": torch.zeros(4)}
    saver.save(shapes, path).result()
    view = rt.ShardView(torch.float32, (8,), [((0,), torch.zeros(4))])
    with pytest.raises(reshard.ReshardError):
        saver.save({"a": view, "b": torch.zeros(4)}, str(tmp_path / "holes")).result()
    saver.save({"a": torch.ones(5), "b": torch.zeros(4)}, str(tmp_path / "after")).result()
    target = {"a": torch.zeros(5), "b": torch.ones(4)}
    rt.load(target, str(tmp_path / "after"))
    assert bool((target["a"] == 1).all()) and bool((target["b"] == 0).all())


def test_t28_errors_can_be_sent_between_processes():
    model, optim = trained()
    given = rt.get_model_state_dict(model)
    given["first.up.wieght"] = given.pop("first.up.weight")
    with pytest.raises(rt.StateMismatch) as caught:
        rt.set_model_state_dict(make("single"), given)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is type(caught.value) and str(copied) == str(caught.value)
    other = nn.Linear(2, 2)
    with pytest.raises(Exception) as caught:
        rt.get_optimizer_state_dict(other, optim)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
