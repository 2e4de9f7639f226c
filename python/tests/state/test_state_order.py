"""One order on all ranks: of an optimizer's entries, and in which Stateful objects are asked and given."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import make, optimizer, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import reshard.torch as rt


def gathered(rank, size, with_mesh):
    """Parameters of one shape, each on another rank: whatever is gathered in the order of a dict mixes them up otherwise."""
    extra = {"device_mesh": init_device_mesh("cpu", (size,))} if with_mesh else {}
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    model = FSDP(layers, use_orig_params=True, device_id=torch.device("cpu"), **extra)
    optim = torch.optim.Adam(model.parameters())
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    optim.step()
    names = [f"{index}.weight" for index in range(4)]
    truth = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))["state"]
    assert list(truth) == names
    for flattened in (False, True):
        options = rt.StateDictOptions(flatten_optimizer_state_dict=flattened)
        state = rt.get_optimizer_state_dict(model, optim, options=options, as_torch=True)
        if flattened:
            keys = [key for key in state if key.startswith("state.")]
            assert keys == [f"state.{name}.{slot}" for name in names for slot in ("step", "exp_avg", "exp_avg_sq")], keys
            continue
        assert list(state["state"]) == names and all(
            list(slots) == ["step", "exp_avg", "exp_avg_sq"] for slots in state["state"].values()
        )
        if with_mesh:
            for name, slots in state["state"].items():
                assert torch.equal(slots["exp_avg"].full_tensor(), truth[name]["exp_avg"]), name


def test_entries_of_an_optimizer_come_in_the_order_of_the_model_on_every_rank(ranks):
    ranks(4, gathered, True)
    ranks(3, gathered, False)


def same_order(rank, size):
    """Keys of all layouts are those of the unwrapped model, in its order, on every rank."""
    expected = [name for name, _ in make("single").named_parameters()]
    for layout in ("fsdp1_flat", "fsdp1_orig", "fsdp1_grad_op"):
        model = make(layout)
        optim = optimizer(model)
        train(model, optim, 1)
        state = rt.get_optimizer_state_dict(model, optim, as_torch=True)
        assert list(state["state"]) == expected, (layout, list(state["state"]))
        full = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
        assert list(full["state"]) == expected, (layout, list(full["state"]))


def test_every_layout_gives_the_order_of_the_unwrapped_model(ranks):
    ranks(2, same_order)


class Talking:
    """Talks to other ranks whenever it is asked or given something."""

    def __init__(self, length):
        self.tensor = torch.ones(length)

    def _talk(self):
        out = [torch.zeros_like(self.tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(out, self.tensor)
        assert all(torch.equal(tensor, self.tensor) for tensor in out), "ranks speak of different things"

    def state_dict(self):
        self._talk()
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self._talk()


def listed_differently(rank, size, path):
    a, b, c = Talking(2), Talking(3), Talking(4)
    state = {"a": a, "b": b, "c": c} if rank == 0 else {"c": c, "a": a, "b": b}
    rt.save(state, path)
    rt.load(state, path)
    rt.async_save(state, f"{path}-2").result()
    assert list(state) == (["a", "b", "c"] if rank == 0 else ["c", "a", "b"])


def test_stateful_objects_are_asked_and_given_in_one_order(ranks, path):
    ranks(2, listed_differently, path)
