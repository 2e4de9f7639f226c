"""FSDP1 over tensor parallelism: members of a flat parameter that are slices of their parameters."""

from __future__ import annotations

import torch.distributed as dist
from models import assert_close, everything, make, optimizer, train

import reshard.torch as rt


def whole_state(model, optim):
    model_state, optim_state = rt.get_state_dict(model, optim)
    return everything({"model": dict(model_state), "state": optim_state["state"]})


def both_ways(rank, size, folder):
    for layout in ("fsdp1_tp_flat", "fsdp1_tp_orig"):
        model = make(layout)
        optim = optimizer(model)
        # The same model and the same batches, without any of it.
        plain = make("single")
        reference = optimizer(plain)
        state = whole_state(model, optim)
        for name, tensor in plain.state_dict().items():
            assert state["model"][name].equal(tensor), f"{layout} {name}"
        train(model, optim, 2)
        train(plain, reference, 2)
        state = whole_state(model, optim)
        expected = rt.get_state_dict(plain, reference)
        assert_close(state["model"], dict(expected[0]), layout, exact=False)
        assert_close(state["state"], expected[1]["state"], layout, exact=False)

        path = f"{folder}/{layout}"
        model_state, optim_state = rt.get_state_dict(model, optim)
        rt.save({"model": model_state, "optim": optim_state}, path)
        for target in ("fsdp1_tp_flat", "fsdp1_tp_orig", "fsdp2", "tp_fsdp2", "fsdp1_flat", "ddp"):
            other = make(target, seed=5)
            fresh = optimizer(other)
            model_state, optim_state = rt.get_state_dict(other, fresh)
            loaded = {"model": model_state, "optim": optim_state}
            rt.load(loaded, path)
            rt.set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
            assert_close(state, whole_state(other, fresh), f"{layout} to {target}")
            back = f"{folder}/{layout}-{target}"
            model_state, optim_state = rt.get_state_dict(other, fresh)
            rt.save({"model": model_state, "optim": optim_state}, back)
            again = make(layout, seed=6)
            second = optimizer(again)
            model_state, optim_state = rt.get_state_dict(again, second)
            loaded = {"model": model_state, "optim": optim_state}
            rt.load(loaded, back)
            rt.set_state_dict(again, second, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
            assert_close(state, whole_state(again, second), f"{layout} from {target}")
        full = rt.get_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
        assert_close(state["model"], dict(full[0]), layout)
        assert_close(state["state"], full[1]["state"], layout)
        again = make(layout, seed=7)
        second = optimizer(again)
        rt.set_state_dict(again, second, model_state_dict=full[0], optim_state_dict=full[1])
        assert_close(state, whole_state(again, second), layout)
        train(again, second, 1, start=2)
        train(model, optim, 1, start=2)
        assert_close(whole_state(model, optim), whole_state(again, second), layout)
        try:
            rt.get_model_state_dict(model, as_torch=True)
            raise AssertionError("as_torch gave something")
        except rt.StateError as error:
            assert "tensor parallelism" in str(error)
        dist.barrier()


def test_slices_in_flat_parameters_are_saved_and_loaded_by_every_layout(ranks, tmp_path):
    ranks(4, both_ways, str(tmp_path))
