"""PyTorch's own ``load`` between our get and set, into an optimizer that has not run: what changing the import alone gives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as pt
from models import assert_close, everything, make, optimizer, train
from torch import nn

import reshard.torch as rt

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "plain_sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "plain_rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


class Counting(torch.optim.Optimizer):
    """An optimizer that nobody knows, with slots that it makes in its first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slots = self.state[p]
                    slots["count"] = slots.get("count", 0) + 1
                    slots["sum"] = slots.get("sum", torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] * slots["sum"])


def reader(how, path):
    return rt.StorageReader(path) if how == "ours" else dcp.FileSystemReader(path)


def restored(model, optim, path, how, options=None):
    model_state, optim_state = rt.get_state_dict(model, optim, options=options)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, storage_reader=reader(how, path))
    rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slots_to_come_are_those_that_the_optimizer_makes(kind):
    """Same slots, same element types, same shapes, and the values from which the optimizer itself starts."""
    model, other = make("single"), make("single")
    fresh, stepped = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](other.parameters())
    before = copy.deepcopy(fresh.state_dict())
    listed = rt.get_optimizer_state_dict(model, fresh)["state"]
    assert_close(before, fresh.state_dict())
    train(other, stepped, 1)
    made = rt.get_optimizer_state_dict(other, stepped)["state"]
    assert {name: list(slots) for name, slots in listed.items()} == {name: list(slots) for name, slots in made.items()}
    for name, slots in made.items():
        for slot, tensor in slots.items():
            twin = listed[name][slot]
            assert (twin.dtype, twin.shape, twin.device) == (tensor.dtype, tensor.shape, tensor.device), f"{name}.{slot}"
    # Given to an optimizer as state, they change nothing about its first update.
    if kind != "sgd":
        third = make("single")
        given = OPTIMIZERS[kind](third.parameters())
        for p, (_, slots) in zip(third.parameters(), listed.items()):
            given.state[p] = {slot: tensor.clone() for slot, tensor in slots.items()}
        train(third, given, 1)
        assert_close(dict(third.named_parameters()), dict(other.named_parameters()), kind)


@pytest.mark.parametrize("how", ["ours", "theirs"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pytorchs_load_restores_a_fresh_optimizer(path, kind, how):
    model = make("single")
    optim = OPTIMIZERS[kind](model.parameters())
    train(model, optim, 2)
    model_state, optim_state = pt.get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)
    for flatten in (False, True):
        if flatten:
            options = rt.StateDictOptions(flatten_optimizer_state_dict=True)
            dcp.save(
                {"model": model_state, "optim": rt.get_optimizer_state_dict(model, optim, options=options)}, checkpoint_id=path
            )
        other = make("single", seed=9)
        fresh = OPTIMIZERS[kind](other.parameters())
        restored(other, fresh, path, how, rt.StateDictOptions(flatten_optimizer_state_dict=flatten))
        assert_close(optim.state_dict(), fresh.state_dict(), kind)
        both = [copy.deepcopy((m, o.state_dict())) for m, o in ((model, optim), (other, fresh))]
        for m, o in ((both[0][0], optim), (both[1][0], fresh)):
            again = OPTIMIZERS[kind](m.parameters())
            again.load_state_dict(copy.deepcopy(o.state_dict()))
            train(m, again, 1, start=2)
        assert_close(dict(both[0][0].named_parameters()), dict(both[1][0].named_parameters()), kind)


def test_parameters_without_state_in_the_checkpoint_have_none_afterwards(path):
    model = make("single", "unused")
    optim = optimizer(model)
    train(model, optim, 2)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    for how in ("ours", "theirs"):
        other = make("single", "unused", seed=2)
        fresh = optimizer(other)
        state = {"optim": rt.get_optimizer_state_dict(other, fresh)}
        if how == "theirs":
            # PyTorch's storage knows nothing of slots that wait.
            with pytest.raises(dcp.CheckpointException, match="unused"):
                dcp.load(state, storage_reader=reader(how, path))
        for planner in (None, dcp.DefaultLoadPlanner(allow_partial_load=True))[how == "theirs" :]:
            fresh = optimizer(other)
            state = {"optim": rt.get_optimizer_state_dict(other, fresh)}
            dcp.load(state, storage_reader=reader(how, path), planner=planner)
            rt.set_optimizer_state_dict(other, fresh, state["optim"])
            assert_close(optim.state_dict(), fresh.state_dict(), how)


def test_slots_that_nothing_was_loaded_into_are_none(path):
    """Getting and setting a fresh optimizer's state leaves it fresh; saving it saves none."""
    model = make("single")
    optim = optimizer(model)
    state = rt.get_optimizer_state_dict(model, optim)
    assert set(state["state"]["head.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    rt.set_optimizer_state_dict(model, optim, state)
    assert not optim.state
    for flatten in (False, True):
        options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)
        rt.save({"deep": [{"optim": rt.get_optimizer_state_dict(model, optim, options=options)}]}, path, overwrite=True)
        keys = list(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        assert keys and not [key for key in keys if ".state." in key]


@pytest.mark.parametrize("how", ["ours", "theirs"])
def test_an_unknown_optimizer_is_restored_or_refused(path, how):
    model = make("single")
    optim = Counting(model.parameters())
    train(model, optim, 2)
    model_state, optim_state = rt.get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)
    for flatten in (False, True):
        options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)
        if flatten:
            dcp.save(
                {"model": model_state, "optim": rt.get_optimizer_state_dict(model, optim, options=options)}, checkpoint_id=path
            )
        other = make("single", seed=3)
        fresh = Counting(other.parameters(), lr=0.5)
        if how == "ours":
            restored(other, fresh, path, how, options)
            assert_close(optim.state_dict(), fresh.state_dict())
        else:
            with pytest.raises(rt.StateError, match="Counting.*reshard.torch.load"):
                restored(other, fresh, path, how, options)
            assert not fresh.state
    # Nothing was loaded: nothing is refused.
    state = rt.get_optimizer_state_dict(other, fresh)
    state["param_groups"][0]["lr"] = 0.25
    rt.set_optimizer_state_dict(other, fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.25


def test_state_of_a_parameter_that_is_frozen_now_is_restored(path):
    """PyTorch leaves it behind; through our reader it comes back."""
    model = make("single")
    optim = optimizer(model)
    train(model, optim, 2)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    other = make("single", seed=3)
    other.first.requires_grad_(False)
    fresh = optimizer(other)
    state = {"optim": rt.get_optimizer_state_dict(other, fresh)}
    dcp.load(state, storage_reader=rt.StorageReader(path))
    rt.set_optimizer_state_dict(other, fresh, state["optim"])
    assert_close(optim.state_dict(), fresh.state_dict())


class App(nn.Module):
    """The object of PyTorch's own tutorial."""

    def __init__(self, model, optim):
        super().__init__()
        self.both = (model, optim)

    def state_dict(self):
        model_state, optim_state = rt.get_state_dict(*self.both)
        return {"model": model_state, "optim": optim_state}

    def load_state_dict(self, state):
        rt.set_state_dict(*self.both, model_state_dict=state["model"], optim_state_dict=state["optim"])


def on_ranks(rank, size, folder):
    for layout in ("ddp", "fsdp2", *(("tp_fsdp2", "hsdp") if size == 4 else ())):
        path = f"{folder}/{layout}"
        model = make(layout)
        optim = optimizer(model)
        train(model, optim, 2)
        dcp.save({"app": App(model, optim)}, checkpoint_id=path)
        whole = everything(rt.get_optimizer_state_dict(model, optim))
        for how in ("ours", "theirs"):
            # One tensor has fewer rows than there are ranks: some ranks hold nothing of its slots.
            other = make(layout, seed=8)
            fresh = optimizer(other)
            dcp.load({"app": App(other, fresh)}, storage_reader=reader(how, path))
            assert_close(whole, everything(rt.get_optimizer_state_dict(other, fresh)), f"{layout} {how}")
            assert all(set(slots) == {"step", "exp_avg", "exp_avg_sq"} for slots in fresh.state.values()), layout
            assert len(fresh.state) == len(optim.state)
            train(other, fresh, 1, start=2)
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_pytorchs_load_restores_a_fresh_optimizer_on_ranks(ranks, tmp_path, size):
    ranks(size, on_ranks, str(tmp_path))


def flat_on_ranks(rank, size, folder):
    for layout in ("fsdp1_flat", "fsdp1_orig"):
        path = f"{folder}/{layout}"
        model = make(layout)
        optim = optimizer(model)
        train(model, optim, 2)
        state = rt.get_state_dict(model, optim)
        whole = everything(state[1])
        rt.save({"model": state[0], "optim": state[1]}, path)
        for how in ("ours", "theirs"):
            other = make(layout, seed=8)
            fresh = optimizer(other)
            model_state, optim_state = rt.get_state_dict(other, fresh, as_torch=True)
            target = {"model": model_state, "optim": optim_state}
            dcp.load(target, storage_reader=reader(how, path))
            rt.set_state_dict(other, fresh, model_state_dict=target["model"], optim_state_dict=target["optim"])
            assert_close(whole, everything(rt.get_optimizer_state_dict(other, fresh)), f"{layout} {how}")


def test_flat_parameters_as_pytorch_has_them_are_restored_too(ranks, tmp_path):
    ranks(2, flat_on_ranks, str(tmp_path))


def test_views_are_not_pickled_by_whoever_does_not_know_them(path):
    """PyTorch's ``save`` would keep one rank's part of a view and forget the others'."""
    view = rt.ShardView(torch.float32, (4,), [((0,), torch.zeros(2))])
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"x": view}, checkpoint_id=path)
    assert "as_torch=True" in str(caught.value.failures)
    with pytest.raises(TypeError, match="as_torch=True"):
        pickle.dumps(view)
    twin = copy.deepcopy(view)
    twin.pieces[0][1].fill_(1)
    assert float(view.pieces[0][1].sum()) == 0 and twin.shape == view.shape
