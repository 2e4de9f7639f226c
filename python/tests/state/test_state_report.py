"""What setting an optimizer's state returns."""

from __future__ import annotations

import torch
from models import make, optimizer, train
from torch import nn

import reshard.torch as rt


def trained(bias=True):
    model = nn.Linear(4, 3, bias=bias)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    return model, optim


def test_what_fits_is_reported_as_nothing():
    model, optim = trained()
    report = rt.set_optimizer_state_dict(*trained(), rt.get_optimizer_state_dict(model, optim))
    assert report == rt.OptimizerReport() and "missing" in dir(report)


def test_what_is_absent_missing_and_unexpected_is_named():
    model, optim = trained()
    state = rt.get_optimizer_state_dict(model, optim)
    unwanted = rt.set_optimizer_state_dict(*trained(bias=False), state)
    assert unwanted.unexpected == ("bias",) and not unwanted.missing
    del state["state"]["bias"]
    assert rt.set_optimizer_state_dict(model, optim, state).absent == ("bias",)
    lenient = rt.StateDictOptions(strict=False)
    small, small_optim = trained(bias=False)
    report = rt.set_optimizer_state_dict(model, optim, rt.get_optimizer_state_dict(small, small_optim), options=lenient)
    assert report.missing == ("bias",)


def zero_filled(rank, size):
    model = make("fsdp1_flat")
    # One slot alone, and no number that members would have to share.
    optim = optimizer(model, "sgd")
    train(model, optim, 1)
    state = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
    name = sorted(state["state"])[0]
    del state["state"][name]
    return name, rt.set_optimizer_state_dict(model, optim, state).zero_filled


def test_zeros_in_a_flat_slot_are_reported(ranks):
    for name, filled in ranks(2, zero_filled):
        assert filled == (f"{name}.momentum_buffer",)
