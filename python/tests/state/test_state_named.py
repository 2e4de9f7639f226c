"""Optimizers that go by names: PyTorch's ``_NamedOptimizer``, and one of the shape of torchrec's ``KeyedOptimizer``."""

from __future__ import annotations

import copy

import torch
from models import assert_close, everything, make, train
from torch.distributed.optim import _NamedOptimizer

import reshard.torch as rt


def named(model, **options):
    return _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, None, None, lr=0.01, **options)


def stepped(model, optim, steps):
    """``_NamedOptimizer`` has no ``zero_grad`` that works."""
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optim.step()


def test_a_named_optimizer_is_read_and_set_by_canonical_names(path):
    model = make("single")
    optim = named(model)
    stepped(model, optim, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain.load_state_dict(copy.deepcopy(optim._optimizer.state_dict()))
    state = rt.get_optimizer_state_dict(model, optim)
    assert_close(state, rt.get_optimizer_state_dict(model, plain))
    rt.save({"optim": state}, path)
    # One that has not run refuses to load by its own method; here it need not have run.
    other = make("single", seed=4)
    fresh = named(other)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, fresh, target["optim"])
    assert_close(optim.state_dict(), fresh.state_dict())
    # The groups that it shows are those that it steps with.
    assert fresh.param_groups is fresh._optimizer.param_groups
    rt.set_optimizer_state_dict(other, fresh, rt.get_optimizer_state_dict(model, plain))
    assert_close(optim.state_dict(), fresh.state_dict())


class Keyed(torch.optim.Optimizer):
    """As torchrec's: state by names, and a load that wants every parameter and every slot that it has."""

    def __init__(self, named_parameters, lr=0.1):
        self.params = dict(named_parameters)
        super().__init__(list(self.params.values()), {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params.values():
            slots = self.state[p]
            slots.setdefault("momentum", torch.zeros_like(p))
            slots.setdefault("step", torch.zeros(()))
            slots["step"] += 1
            if p.grad is not None:
                slots["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(0.1 * slots["momentum"])

    def state_dict(self):
        names = {p: name for name, p in self.params.items()}
        state = {names[p]: dict(slots) for p, slots in self.state.items()}
        groups = [{**g, "params": sorted(names[p] for p in g["params"])} for g in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state):
        given = state["state"]
        if len(self.state) != len(given):
            raise ValueError(f"Different parameter count: {len(self.state)} vs {len(given)}")
        for name, param in self.params.items():
            if param not in self.state:
                continue
            if name not in given or set(self.state[param]) != set(given[name]):
                raise ValueError(f"Parameter {name} lacks state")
            for slot, value in self.state[param].items():
                value.detach().copy_(given[name][slot])
        for group, theirs in zip(self.param_groups, state["param_groups"]):
            group.update({key: value for key, value in theirs.items() if key != "params"})


def test_a_keyed_optimizer_gets_its_state_by_its_own_names(path):
    model = torch.compile(make("single"))
    optim = Keyed(model.named_parameters())
    train(model, optim, 2)
    state = rt.get_optimizer_state_dict(model, optim)
    assert "first.up.weight" in state["state"] and not any(name.startswith("_orig_mod") for name in state["state"])
    rt.save({"optim": state}, path)
    other = torch.compile(make("single", seed=4))
    second = Keyed(other.named_parameters(), lr=0.5)
    train(other, second, 1)
    target = {"optim": rt.get_optimizer_state_dict(other, second)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, second, target["optim"])
    assert_close(optim.state_dict(), second.state_dict())
    # Beside one that goes by numbers.
    half = list(other.named_parameters())
    both = [Keyed(half[:3]), torch.optim.SGD([p for _, p in half[3:]], lr=0.1, momentum=0.9)]
    train(other, both, 1)
    combined = rt.get_optimizer_state_dict(other, both)
    before = copy.deepcopy([o.state_dict() for o in both])
    train(other, both, 1)
    rt.set_optimizer_state_dict(other, both, copy.deepcopy(combined))
    assert sorted(before[0]["state"]) == sorted(both[0].state_dict()["state"])


def keyed_over_flat(rank, size):
    """A rank that holds nothing of a parameter still has all of its slots, empty ones."""
    model = make("fsdp1_orig")
    optim = Keyed(model.named_parameters())
    train(model, optim, 2)
    assert any(p.numel() == 0 for p in model.parameters())
    whole = everything(rt.get_optimizer_state_dict(model, optim))
    other = make("fsdp1_orig", seed=3)
    second = Keyed(other.named_parameters())
    train(other, second, 1)
    full = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
    rt.set_optimizer_state_dict(other, second, full)
    assert_close(whole, everything(rt.get_optimizer_state_dict(other, second)))


def test_empty_parts_have_all_slots_for_a_keyed_optimizer(ranks):
    ranks(4, keyed_over_flat)
