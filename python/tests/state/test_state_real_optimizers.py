"""Optimizers of other packages themselves, where they are installed: trained, saved, loaded into a run that goes on as if nothing had
happened."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
import torch.distributed as dist
from models import FSDP2, fully_shard, make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import reshard
import reshard.torch as rt

needs_fsdp2 = pytest.mark.skipif(not FSDP2, reason="FSDP2 on the CPU needs torch 2.6 or later")


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def batch(step, width):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(step))


def train(model, optim, steps, start, width):
    for step in range(start, start + steps):
        optim.zero_grad()
        model(batch(step, width)).square().mean().backward()
        optim.step()


def parts_of(value):
    """What a slot is made of here, all the way down."""
    if isinstance(value, DTensor):
        return parts_of(value._local_tensor)
    if isinstance(value, dict):
        return [part for key in sorted(value, key=str) for part in parts_of(value[key])]
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(value, name))]
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value]


def content(model, optim):
    params = [p for group in optim.param_groups for p in group["params"]]
    weights = [parts_of(p.detach()) for p in params]
    return weights, [{slot: parts_of(value) for slot, value in optim.state.get(p, {}).items()} for p in params]


def same(a, b, where):
    assert len(a[0]) == len(b[0])
    for number, (one, other) in enumerate(zip(a[1], b[1])):
        assert one.keys() == other.keys(), (where, number, one.keys(), other.keys())
    for one, other in zip(pieces(a), pieces(b), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), (where, one, other)
        else:
            assert one == other and type(one) is type(other), (where, one, other)


def pieces(found):
    weights, slots = found
    return [part for parts in weights for part in parts] + [
        part for each in slots for slot in sorted(each) for part in each[slot]
    ]


def bitsandbytes_made(layout, kind, width, **how):
    import bitsandbytes

    model = make(layout, n=width, hidden=16 * width)
    return model, getattr(bitsandbytes.optim, kind)(model.parameters(), lr=0.01, **how)


def went_on(made, path, width, where):
    """Saves, loads into one that has run and one that has not, and trains all further."""
    model, optim = made()
    train(model, optim, 2, 0, width)
    before = content(model, optim)
    rt.save(dict(zip(("model", "optim"), rt.get_state_dict(model, optim))), path)
    same(before, content(model, optim), f"{where}: the save changed it")
    train(model, optim, 2, 2, width)
    expected = content(model, optim)
    for steps in (0, 1):
        other, second = made()
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(-2)
        train(other, second, steps, 50, width)
        state = dict(zip(("model", "optim"), rt.get_state_dict(other, second)))
        rt.load(state, path)
        rt.set_state_dict(other, second, model_state_dict=state["model"], optim_state_dict=state["optim"])
        same(before, content(other, second), f"{where}: after {steps} steps of its own")
        train(other, second, 2, 2, width)
        same(expected, content(other, second), f"{where}: trained further")


def bitsandbytes_on_ranks(rank, size, base):
    for layout in ("fsdp1_flat", "fsdp1_orig"):
        went_on(lambda layout=layout: bitsandbytes_made(layout, "AdamW", 6), f"{base}/{layout}", 6, layout)


@needs("bitsandbytes")
def test_bitsandbytes_adamw_with_fsdp1(ranks, tmp_path):
    ranks(2, bitsandbytes_on_ranks, str(tmp_path))


def eight_bits_on_ranks(rank, size, base):
    """The scales of blocks are neither as their parameter nor the same on all ranks: refused by name, on all ranks, and nothing is there."""
    for layout in ("fsdp1_flat", "fsdp1_orig"):
        model, optim = bitsandbytes_made(layout, "AdamW8bit", 64, min_8bit_size=256)
        train(model, optim, 2, 0, 64)
        dtypes = {part.dtype for slots in optim.state.values() for part in slots.values() if isinstance(part, torch.Tensor)}
        assert torch.uint8 in dtypes, dtypes
        before = content(model, optim)
        try:
            rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, f"{base}/{layout}")
        except (reshard.ReshardError, RuntimeError) as error:
            assert "__bnb_optimizer_quant_state__" in str(error), error
        else:
            raise AssertionError("one rank's scales were taken for everybody's")
        assert not rt.exists(f"{base}/{layout}")
        same(before, content(model, optim), layout)


@needs("bitsandbytes")
def test_bitsandbytes_adamw8bit_with_fsdp1(ranks, tmp_path):
    ranks(2, eight_bits_on_ranks, str(tmp_path))


@needs("bitsandbytes")
@pytest.mark.parametrize("kind", ["AdamW", "AdamW8bit", "Lion8bit"])
def test_bitsandbytes_alone(kind, tmp_path):
    how = {"min_8bit_size": 256} if "8bit" in kind else {}
    went_on(lambda: bitsandbytes_made("single", kind, 64, **how), tmp_path / "ck", 64, kind)


def torchao_made(layout, kind):
    import torchao.optim

    # Its steps are compiled, which takes minutes; they compute the same when they are not.
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64))
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, getattr(torchao.optim, kind)(model.parameters(), lr=0.01, block_size=64)


def torchao_on_ranks(rank, size, base):
    for kind in ("AdamW8bit", "AdamW4bit"):
        went_on(lambda kind=kind: torchao_made("fsdp2", kind), f"{base}/{kind}", 64, kind)


@needs("torchao")
@needs_fsdp2
def test_torchao_with_fsdp2(ranks, tmp_path):
    ranks(2, torchao_on_ranks, str(tmp_path))


def torchao_saved(rank, size, path):
    model, optim = torchao_made("fsdp2", "AdamW8bit")
    train(model, optim, 2, 0, 64)
    rt.save(dict(zip(("model", "optim"), rt.get_state_dict(model, optim))), path)
    return whole_state(model, optim)


def torchao_loaded(rank, size, path):
    model, optim = torchao_made("fsdp2", "AdamW8bit")
    state = dict(zip(("model", "optim"), rt.get_state_dict(model, optim)))
    rt.load(state, path)
    rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    found = whole_state(model, optim)
    train(model, optim, 1, 2, 64)
    return found


def whole_state(model, optim):
    """The values of every slot, put together from what each rank has, without anything of ours."""
    found = {}
    for number, param in enumerate(p for group in optim.param_groups for p in group["params"]):
        for slot, value in optim.state[param].items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            local = local.dequantize() if hasattr(local, "dequantize") and type(local) is not torch.Tensor else local
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, local.detach().clone())
            found[number, slot] = torch.cat(told) if isinstance(value, DTensor) and value.dim() else told[0]
    return found


@needs("torchao")
@needs_fsdp2
def test_torchao_on_other_ranks(ranks, tmp_path):
    """Four ranks' blocks are whole on two and on one."""
    saved = ranks(4, torchao_saved, str(tmp_path / "ck"))[0]
    for size in (2, 1):
        loaded = ranks(size, torchao_loaded, str(tmp_path / "ck"))[0]
        assert saved.keys() == loaded.keys()
        for key, value in saved.items():
            assert torch.equal(value, loaded[key]), key


def adafactor_on_ranks(rank, size, path):
    """PyTorch's own: slots of rows and columns are DTensors where parameters are."""
    for layout in ("fsdp2", "tp_fsdp2") if size == 4 else ("fsdp2",):
        model = make(layout)
        optim = torch.optim.Adafactor(model.parameters(), lr=0.01)
        state = dict(zip(("model", "optim"), rt.get_state_dict(model, optim)))
        rt.load(state, path)
        rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        live = make(layout)
        other = torch.optim.Adafactor(live.parameters(), lr=0.01)
        # It makes its slots, and then some releases of torch cannot compute with DTensors.
        with contextlib.suppress(RuntimeError):
            train(live, other, 1, 50, 6)
        for ours, theirs in zip(optim.param_groups[0]["params"], other.param_groups[0]["params"]):
            a, b = optim.state[ours], other.state[theirs]
            assert b and a.keys() == b.keys()
            for slot in a:
                kinds = [(type(value), getattr(value, "placements", None)) for value in (a[slot], b[slot])]
                assert kinds[0] == kinds[1], (layout, slot, kinds)
        with reshard.open(path) as checkpoint:
            for name, param in model.named_parameters():
                for slot, value in optim.state[param].items():
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    assert torch.equal(whole, torch.as_tensor(checkpoint[f"optim.state.{name}.{slot}"].numpy())), (name, slot)
        # Loading into one that has run writes into the slots that it has.
        slots = {id(value) for each in other.state.values() for value in each.values()}
        state = dict(zip(("model", "optim"), rt.get_state_dict(live, other)))
        rt.load(state, path)
        rt.set_state_dict(live, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert slots == {id(value) for each in other.state.values() for value in each.values()}


@needs_fsdp2
@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
@pytest.mark.parametrize("size", [2, 4])
def test_slots_of_rows_and_columns_are_as_the_optimizer_makes_them(ranks, tmp_path, size):
    model = make("single")
    optim = torch.optim.Adafactor(model.parameters(), lr=0.01)
    train(model, optim, 2, 0, 6)
    rt.save(dict(zip(("model", "optim"), rt.get_state_dict(model, optim))), tmp_path / "ck")
    ranks(size, adafactor_on_ranks, str(tmp_path / "ck"))
