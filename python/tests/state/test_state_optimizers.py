"""Every optimizer that torch has: steps, a checkpoint, a fresh optimizer, more steps; as if nothing had happened."""

import pytest
import torch
from torch import nn

import reshard.torch as rt

OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)


def build(name, seed):
    torch.manual_seed(seed)
    if name == "SparseAdam":
        model = nn.Embedding(10, 4, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.01)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    # Muon is for matrices alone.
    params = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    return model, getattr(torch.optim, name)(params, lr=0.01)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 + step)
        given = torch.randint(10, (3,)) if isinstance(model, nn.Embedding) else torch.randn(5, 8)

        def closure(given=given):
            optimizer.zero_grad()
            loss = (model(given) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on(path, name, flatten):
    options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build(name, 0)
    train(model, optimizer, range(3))
    weights, slots = rt.get_state_dict(model, optimizer, options=options)
    rt.save({"model": weights, "optim": slots}, path)

    other, fresh = build(name, 1)
    weights, slots = rt.get_state_dict(other, fresh, options=options)
    state = {"model": weights, "optim": slots}
    rt.load(state, path)
    rt.set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
