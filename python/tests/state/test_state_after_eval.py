"""After a forward without backward wrappers keep parameters whole; what is loaded then is what is used, now and later."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import ALL, FOUR, FSDP2, everything, make, optimizer, train

import reshard.torch as rt


def batch():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


def evaluated(model, grad):
    """A forward without backward."""
    with torch.set_grad_enabled(grad):
        model(batch())


def output(model):
    with torch.no_grad():
        return model(batch())


def resharded(model):
    for module in model.modules():
        if FSDP2 and isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()


def whole(model):
    return everything({"model": dict(rt.get_model_state_dict(model))})["model"]


def loaded_after_evaluation(rank, size, layouts, path):
    for layout in layouts:
        other = make("single", seed=11)
        full = {key: value.clone() for key, value in other.state_dict().items()}
        expected = output(other)
        rt.save({"model": full}, f"{path}-{layout}")
        for grad in (False, True):
            for how in ("set", "broadcast", "views", "storage"):
                if how == "storage" and layout.startswith("fsdp1"):
                    # Views are not for PyTorch's planners.
                    continue
                model = make(layout)
                state = {"model": rt.get_model_state_dict(model)}
                evaluated(model, grad)
                if how == "set":
                    rt.set_model_state_dict(model, full)
                elif how == "broadcast":
                    options = rt.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    rt.set_model_state_dict(model, full if rank == 0 else {}, options=options)
                elif how == "views":
                    rt.load(state, f"{path}-{layout}")
                else:
                    dcp.load(state, storage_reader=rt.StorageReader(f"{path}-{layout}"))
                at = f"{layout}, {how}, {'with' if grad else 'without'} gradients"
                assert torch.allclose(output(model), expected, atol=1e-6), f"{at}: what was loaded is not used"
                resharded(model)
                assert torch.allclose(output(model), expected, atol=1e-6), f"{at}: what was loaded is lost"
                found = whole(model)
                assert all(torch.equal(found[key], full[key]) for key in full), at


def test_what_is_loaded_after_an_evaluation_is_used(ranks, path):
    ranks(2, loaded_after_evaluation, ALL, path, timeout=300)


def test_what_is_loaded_after_an_evaluation_is_used_on_two_dimensions(ranks, path):
    ranks(4, loaded_after_evaluation, FOUR, path, timeout=300)


def saved_after_evaluation(rank, size, layouts, path):
    for layout in layouts:
        model = make(layout)
        optim = optimizer(model)
        train(model, optim, 1)
        before = everything(dict(zip(("model", "optim"), rt.get_state_dict(model, optim))))
        for grad in (False, True):
            evaluated(model, grad)
            state = dict(zip(("model", "optim"), rt.get_state_dict(model, optim)))
            rt.save(state, path, overwrite=True)
            after = everything(state)
            for key, value in before["model"].items():
                assert torch.equal(value, after["model"][key]), (layout, key)
            assert list(after["optim"]["state"]) and sorted(before["optim"]["state"]) == sorted(after["optim"]["state"])
            for name, slots in before["optim"]["state"].items():
                assert all(torch.equal(value, after["optim"]["state"][name][slot]) for slot, value in slots.items()), (
                    layout,
                    name,
                )


def test_a_model_is_saved_after_an_evaluation(ranks, path):
    ranks(2, saved_after_evaluation, ALL, path, timeout=300)


def read_between_forward_and_backward(rank, size, layouts):
    for layout in layouts:
        results = []
        for read in (False, True):
            model = make(layout)
            optim = optimizer(model, "sgd")
            loss = model(batch()).square().mean()
            if read:
                rt.get_state_dict(model, optim)
            loss.backward()
            optim.step()
            results.append(whole(model))
        assert all(torch.equal(results[0][key], results[1][key]) for key in results[0]), layout


def test_reading_between_forward_and_backward_changes_nothing(ranks):
    ranks(2, read_between_forward_and_backward, ALL, timeout=300)


def one_rank_loads_something_else(rank, size, path):
    model = make("fsdp2")
    expected = output(model)
    evaluated(model, False)
    state = {"own": torch.full((3,), float(rank))}
    if rank == 0:
        rt.save(state, path, no_dist=True)
        rt.load(state, path, no_dist=True)
    dist.barrier()
    # A rank that had resharded alone would wait here for the others.
    assert torch.equal(output(model), expected)


@pytest.mark.skipif(not FSDP2, reason="FSDP2 on the CPU needs torch 2.6 or later")
def test_a_load_of_something_else_reshards_nothing(ranks, path):
    ranks(2, one_rank_loads_something_else, path)
