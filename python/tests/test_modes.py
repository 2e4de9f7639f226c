"""Modes of PyTorch that are on around a call: the default device and dtype, inference, autocast. What comes back is what went in."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard.torch as rt
import reshard.torch.checkpoint as drop_in


@contextlib.contextmanager
def double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    # Stands for an accelerator: memory that is made there by mistake has no content.
    "meta": lambda: torch.device("meta"),
    "double": double_by_default,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}

ROADS = {
    "ours": (lambda state, path: rt.save(state, path), lambda state, path: rt.load(state, path)),
    "background": (lambda state, path: rt.async_save(state, path).result(), lambda state, path: rt.load(state, path)),
    "drop_in": (
        lambda state, path: drop_in.save(state, checkpoint_id=path, no_dist=True),
        lambda state, path: drop_in.load(state, checkpoint_id=path, no_dist=True),
    ),
    "planner": (
        lambda state, path: dcp.save(state, storage_writer=rt.StorageWriter(path)),
        lambda state, path: dcp.load(state, storage_reader=rt.StorageReader(path)),
    ),
}


def made(seed, rate):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def trained():
    model, optim = made(0, 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    return model, optim


def state_of(model, optim, options, fill):
    state = {"model": rt.get_model_state_dict(model), "optim": rt.get_optimizer_state_dict(model, optim, options=options)}
    return {**state, **fill}


def assert_same(model, optim, other, second):
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    assert second.param_groups[0]["lr"] == 0.1
    for index, slots in optim.state_dict()["state"].items():
        for name, slot in slots.items():
            found = second.state_dict()["state"][index][name]
            assert found.device.type == "cpu" and found.dtype == slot.dtype and torch.equal(slot, found), (index, name)
    # The next step is one that can be taken.
    for each, steps in ((model, optim), (other, second)):
        steps.zero_grad()
        each(torch.ones(2, 4)).sum().backward()
        steps.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_a_call_changes_nothing(path, mode, road, flattened):
    options = rt.StateDictOptions(flatten_optimizer_state_dict=flattened)
    save, load = ROADS[road]
    number = {"number": 3}
    # PyTorch's planner loads into the slots that an optimizer would make in that mode, and steps are doubles then.
    for where in ("save", "load") if (mode, road) != ("double", "planner") else ("save",):
        model, optim = trained()
        with MODES[mode]() if where == "save" else contextlib.nullcontext():
            save(
                state_of(
                    model,
                    optim,
                    options,
                    {**number, "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64, device="cpu").conj()},
                ),
                path + where,
            )
        other, second = made(1, 0.5)
        number["number"] = 0
        conjugate = torch.zeros(1, dtype=torch.complex64).conj()
        with MODES[mode]() if where == "load" else contextlib.nullcontext():
            state = state_of(other, second, options, {**number, "conjugate": conjugate})
            load(state, path + where)
            rt.set_model_state_dict(other, state["model"])
            rt.set_optimizer_state_dict(other, second, state["optim"], options=options)
        assert state["number"] == 3 and conjugate.resolve_conj().tolist() == [1 - 2j]
        assert_same(model, optim, other, second)
        number["number"] = 3


def on_ranks(rank, size, path):
    torch.set_default_device("meta")
    part = torch.full((4,), float(rank), device="cpu")
    rt.save({"w": rt.ShardView.of_range(part, (4 * size,), 4 * rank), "long": "x" * 100_000, "rank": rt.PerRank(rank)}, path)
    whole = torch.zeros(4 * size, device="cpu")
    state = {"w": whole, "long": "", "rank": rt.PerRank(None)}
    rt.load(state, path)
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4 and len(state["long"]) == 100_000 and state["rank"].value == rank


def test_ranks_talk_whatever_the_default_device_is(ranks, path):
    ranks(2, on_ranks, path)
