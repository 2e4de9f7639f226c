"""Our state-dict calls under PyTorch's planners, over our storage: what was there comes back, or the save says no."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import ALONE, same
from models import here, make, optimizer, train
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as drop_in

FULL = rt.StateDictOptions(full_state_dict=True)
FLAT = rt.StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model, optim, options=None):
    return dict(zip(("model", "optim"), rt.get_state_dict(model, optim, options=options, as_torch=True)))


def give(model, optim, state, options=None):
    rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)


def assert_same(one, other):
    one, other = flatten_state_dict(one)[0], flatten_state_dict(other)[0]
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert same(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


def fresh_over(layout, kind, path, how):
    """An optimizer that has not run, saved and loaded."""
    model = make(layout)
    optim = optimizer(model, kind)
    optim.param_groups[0]["lr"] = 0.125
    dcp.save(state_of(model, optim), storage_writer=rt.StorageWriter(path), **how)
    assert not optim.state
    if not dist.is_initialized() or dist.get_rank() == 0:
        with reshard.open(path) as checkpoint:
            assert not [key for key in checkpoint if key.startswith("optim.state.")], (layout, kind)
        assert reshard.verify(path).sound
    for load in (rt.load, lambda state, path: dcp.load(state, storage_reader=rt.StorageReader(path), **how)):
        other = make(layout, seed=9)
        second = optimizer(other, kind)
        state = state_of(other, second)
        load(state, path)
        give(other, second, state)
        assert not any(second.state.values()) and second.param_groups[0]["lr"] == 0.125, (layout, kind)
        train(other, second, 1)
    train(model, optim, 1)
    assert any(optim.state.values())
    # The same planner, and slots that are there now.
    dcp.save(state_of(model, optim), storage_writer=rt.StorageWriter(path), **how)
    state = state_of(other, optimizer(other, kind))
    dcp.load(state, storage_reader=rt.StorageReader(path), **how)
    third = optimizer(other, kind)
    give(other, third, state)
    assert any(third.state.values())


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_that_has_not_run_has_no_slots_afterwards(kind, tmp_path):
    fresh_over("single", kind, tmp_path / "ck", ALONE)


def fresh_on_ranks(rank, size, base):
    for layout in here("fsdp1_flat", "fsdp1_orig", "fsdp2", "ddp"):
        for kind in ("adamw", "sgd"):
            fresh_over(layout, kind, f"{base}/{layout}-{kind}", {})


def test_an_optimizer_that_has_not_run_has_no_slots_afterwards_on_ranks(ranks, tmp_path):
    ranks(2, fresh_on_ranks, str(tmp_path))


def own_stager():
    """PyTorch's stager, as a program that names one passes it."""
    stager = getattr(staging, "DefaultStager", None)
    return {} if stager is None else {"async_stager": stager(staging.StagingOptions(False, False, False, False))}


def staged_on_ranks(rank, size, base):
    planner = drop_in.DefaultSavePlanner(flatten_sharded_tensors=False)
    ways = {
        "ours": lambda state, path: dcp.async_save(state, storage_writer=rt.StorageWriter(path)),
        "named": lambda state, path: dcp.async_save(state, storage_writer=rt.StorageWriter(path), **own_stager()),
        # A planner of the program's own: PyTorch saves, over our storage.
        "drop-in": lambda state, path: drop_in.async_save(state, checkpoint_id=path, planner=planner),
    }
    for layout in here("fsdp1_orig", "fsdp2", "ddp"):
        for way, save in ways.items():
            if way == "named" and layout == "fsdp1_orig":
                # PyTorch's stager knows no ShardedTensor.
                continue
            path = f"{base}/{layout}-{way}"
            model = make(layout)
            optim = optimizer(model)
            saved = save(state_of(model, optim), path)
            getattr(saved, "upload_completion", saved).result()
            with reshard.open(path) as checkpoint:
                assert not [key for key in checkpoint if key.startswith("optim.state.")], (layout, way)
            optim.param_groups[0]["odd"] = {1: "x"}
            with pytest.raises((reshard.InvalidInput, dcp.CheckpointException), match=r"param_groups\.[\w.]+\.odd"):
                saved = save(state_of(model, optim), path)
                getattr(saved, "upload_completion", saved).result()
            del optim.param_groups[0]["odd"]
            train(model, optim, 1)
            saved = save(state_of(model, optim), path)
            getattr(saved, "upload_completion", saved).result()
            other = make(layout, seed=9)
            second = optimizer(other)
            loaded = state_of(other, second)
            rt.load(loaded, path)
            give(other, second, loaded)
            assert_same(state_of(model, optim, FULL), state_of(other, second, FULL))


def test_what_torch_stages_for_a_save_in_the_background_has_no_slots_that_wait(ranks, tmp_path):
    ranks(2, staged_on_ranks, str(tmp_path))


def test_a_deep_copy_of_a_state_is_what_the_state_is(tmp_path):
    model = make("single")
    optim = optimizer(model)
    twin = copy.deepcopy(state_of(model, optim))
    dcp.save(twin, storage_writer=rt.StorageWriter(tmp_path / "fresh"), **ALONE)
    with reshard.open(tmp_path / "fresh") as checkpoint:
        assert not [key for key in checkpoint if key.startswith("optim.state.")]
    give(model, optim, twin)
    assert not any(optim.state.values())
    train(model, optim, 1)
    rt.save(state_of(model, optim), tmp_path / "run")
    for load in (rt.load, lambda state, path: dcp.load(state, storage_reader=rt.StorageReader(path), **ALONE)):
        second = optimizer(model)
        twin = copy.deepcopy(state_of(model, second))
        load(twin, tmp_path / "run")
        give(model, second, twin)
        assert_same(optim.state_dict(), second.state_dict())


def test_plans_that_are_used_again_have_the_slots_that_came_since(tmp_path):
    try:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    except TypeError:
        pytest.skip("planners of this torch use no plan again")
    model = make("single")
    optim = optimizer(model)
    for step in range(3):
        path = tmp_path / str(step)
        dcp.save(state_of(model, optim), storage_writer=rt.StorageWriter(path), planner=planner, **ALONE)
        with reshard.open(path) as checkpoint:
            assert bool([key for key in checkpoint if key.startswith("optim.state.")]) is (step > 0)
        assert reshard.verify(path).sound
        train(model, optim, 1)


def test_a_slot_that_is_missing_of_an_optimizer_that_has_run_is_an_error(tmp_path):
    model = make("single")
    dcp.save(state_of(model, optimizer(model)), storage_writer=rt.StorageWriter(tmp_path), **ALONE)
    optim = optimizer(model)
    train(model, optim, 1)
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        dcp.load(state_of(model, optim), storage_reader=rt.StorageReader(tmp_path), **ALONE)


#: An empty dict inside of a list PyTorch's load planner takes for a key of its own, which it misses: an error, not a loss.
ODD = {1: "x", "e": {}, (2, "y"): 3, "l": [{"k": 1.5}, []]}


def odd(model, value):
    optim = optimizer(model)
    optim.param_groups[0]["odd"] = value
    return optim


@pytest.mark.parametrize("options", [None, FLAT])
@pytest.mark.parametrize("planner", [True, False])
def test_values_of_groups_keep_their_keys_and_their_empty_dicts(options, planner, tmp_path):
    model = make("single")
    optim = odd(model, ODD)
    train(model, optim, 1)
    rt.save(state_of(model, optim, options), tmp_path)
    for live in (ODD, {1: "y", "e": {}, (2, "y"): 4, "l": [{"k": 2.5}, []]}):
        second = odd(model, live)
        state = state_of(model, second, options)
        if planner:
            dcp.load(state, storage_reader=rt.StorageReader(tmp_path), **ALONE)
        else:
            rt.load(state, tmp_path)
        give(model, second, state, options)
        assert second.param_groups[0]["odd"] == ODD


@pytest.mark.parametrize("options", [None, FLAT])
def test_what_a_planner_would_lose_of_groups_is_refused_by_name(options, tmp_path):
    model = make("single")
    for value in ({1: "x"}, {"e": {}}, [{"k": {}}]):
        optim = odd(model, value)
        for _ in range(2):
            with pytest.raises(dcp.CheckpointException, match=r"param_groups\.[\w.]+\.odd") as refused:
                dcp.save(state_of(model, optim, options), storage_writer=rt.StorageWriter(tmp_path / "ck"), **ALONE)
            assert "reshard.torch.save" in str(refused.value)
            train(model, optim, 1)
    # Another optimizer's dict that somebody still has is not what is saved.
    kept = state_of(model, optim, options)
    dcp.save(state_of(model, odd(model, {"a": 1}), options), storage_writer=rt.StorageWriter(tmp_path / "ck"), **ALONE)
    assert kept
