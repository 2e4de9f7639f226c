"""Shards without elements, whatever shape a wrapper leaves them: saved, loaded, and no difference."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import FSDP2, fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as checkpoint
from reshard.torch.checkpoint.state_dict import get_model_state_dict

needs_fsdp2 = pytest.mark.skipif(not FSDP2, reason="FSDP2 on the CPU needs torch 2.6 or later")


class Odd(nn.Module):
    """Parameters of which most ranks have nothing, and some of which nobody has anything."""

    def __init__(self, value, trainable):
        super().__init__()
        self.row = nn.Parameter(torch.full((1, 3), value))
        self.nothing = nn.Parameter(torch.empty(5, 0), requires_grad=False)
        self.unused = nn.Parameter(torch.full((2, 2), value), requires_grad=trainable)

    def forward(self, x):
        return x * self.row


def emptied(rank, size, path):
    """A shard of an empty shard, as tensor parallelism and FSDP2 together leave it, and tensors without elements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(3.0).reshape(1, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    if not sharded.to_local().numel():
        # What FSDP2 makes of it.
        local = torch.empty(0, 0)
        sharded = DTensor.from_local(local, mesh, sharded.placements, run_check=False, shape=whole.shape, stride=whole.stride())
    nothing = DTensor.from_local(
        torch.empty(0, 0), mesh, [Shard(0), Replicate()], run_check=False, shape=torch.Size((5, 0)), stride=(1, 1)
    )
    state = {"w": sharded, "nothing": nothing}
    for number, save in enumerate(
        (lambda path: rt.save(state, path), lambda path: dcp.save(state, storage_writer=rt.StorageWriter(path)))
    ):
        saved = f"{path}-{number}"
        save(saved)
        for load in (lambda: rt.load(state, saved), lambda: dcp.load(state, storage_reader=rt.StorageReader(saved))):
            sharded.to_local().zero_()
            load()
            assert torch.equal(sharded.to_local().flatten(), _mine(mesh, whole)), (number, sharded.to_local())
        full = {"w": torch.zeros(1, 3), "nothing": torch.empty(5, 0)}
        rt.load(full, saved)
        assert torch.equal(full["w"], whole)


def _mine(mesh, whole):
    row, column = mesh.get_coordinate()
    return torch.chunk(whole, 2, 1)[column].flatten() if row == 0 else torch.empty(0)


def test_an_empty_shard_of_an_empty_shard_is_saved_and_loaded(ranks, path):
    ranks(4, emptied, path)


def never_stepped(rank, size, path, ours, trainable):
    """PyTorch's own load of a flattened state dict, with parameters that never got a gradient, and ranks that hold nothing."""
    options = rt.StateDictOptions(flatten_optimizer_state_dict=True)
    states = []
    for value in (1.0, 2.0):
        model = Odd(value, trainable)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        optim = torch.optim.AdamW(list(model.parameters()), lr=0.1 * value)
        if value == 1.0:
            model(torch.ones(2, 3)).sum().backward()
            optim.step()
        model_state, optim_state = rt.get_state_dict(model, optim, options=options)
        states.append((model, optim, {"model": model_state, "optim": optim_state}))
    dcp.save(states[0][2], storage_writer=rt.StorageWriter(path))
    model, optim, state = states[1]
    reader = {"storage_reader": rt.StorageReader(path)} if ours else {"checkpoint_id": path}
    # Of a parameter that could step, a fresh optimizer lists the slots to come, which PyTorch's planner takes for wanted.
    dcp.load(state, planner=dcp.DefaultLoadPlanner(allow_partial_load=trainable), **reader)
    rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    for (name, a), b in zip(states[0][0].named_parameters(), model.parameters()):
        assert torch.equal(a.to_local(), b.to_local()), name
    first, second = states[0][1].state, optim.state
    assert optim.param_groups[0]["lr"] == 0.1
    told = [None] * size
    dist.all_gather_object(told, (len(first), len(second)))
    for a, b in zip(states[0][0].parameters(), model.parameters()):
        assert sorted(first.get(a, ())) == sorted(second.get(b, ())), told
        for slot, value in first.get(a, {}).items():
            mine, theirs = (v.to_local() if isinstance(v, DTensor) else v for v in (value, second[b][slot]))
            assert torch.equal(mine, theirs), slot


@needs_fsdp2
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("reader", ["ours", "theirs"])
def test_torch_loads_a_flattened_state_with_parameters_that_never_stepped(ranks, path, reader, trainable):
    ranks(3, never_stepped, path, reader == "ours", trainable)


def fresh_with_tensors_in_groups(rank, size, path):
    """Learning rates that are tensors, an optimizer that has not run, and ranks that hold nothing of a parameter."""
    options = rt.StateDictOptions(flatten_optimizer_state_dict=True)
    model = Odd(1.0, True)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optim = torch.optim.SGD(list(model.parameters()), lr=torch.tensor(0.25), momentum=0.5, foreach=False)
    state = dict(zip(("model", "optim"), rt.get_state_dict(model, optim, options=options)))
    rt.save(state, path)
    with reshard.open(path) as checkpoint:
        assert not [key for key in checkpoint if key.startswith("optim.state.")]
        assert checkpoint["optim.param_groups.row.lr"].numpy() == 0.25


@needs_fsdp2
def test_tensors_of_groups_are_no_slots_that_were_filled(ranks, path):
    ranks(3, fresh_with_tensors_in_groups, path)


def fresh_where_a_rank_holds_nothing(rank, size, base):
    """An optimizer that has not run, as PyTorch's ShardedTensors, of which some ranks have no shard; and parameters without elements."""
    mesh = init_device_mesh("cpu", (size,))
    for steps, how in ((0, {}), (1, {}), (0, {"device_mesh": mesh}), (1, {"device_mesh": mesh})):
        model = FullyShardedDataParallel(Odd(1.0, True), use_orig_params=True, device_id=torch.device("cpu"), **how)
        optim = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
            optim.step()
        state = dict(zip(("model", "optim"), rt.get_state_dict(model, optim, as_torch=True)))
        for number, save in enumerate((rt.save, lambda state, path: dcp.save(state, storage_writer=rt.StorageWriter(path)))):
            path = f"{base}/{steps}-{number}-{len(how)}"
            save(state, path)
            with reshard.open(path) as checkpoint:
                assert bool([key for key in checkpoint if key.startswith("optim.state.")]) is bool(steps)
                assert checkpoint["model.nothing"].shape == (5, 0)
        rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


def test_slots_of_which_a_rank_holds_no_shard_wait_like_the_others(ranks, tmp_path):
    ranks(4, fresh_where_a_rank_holds_nothing, str(tmp_path))


class Adapted(nn.Module):
    """A frozen base that fills the flat parameter's parts on the first ranks: their optimizers have no state at all."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.base.requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.base(x))


def ranks_without_state(rank, size, path, meshed, form):
    torch.manual_seed(0)
    mesh = {"device_mesh": init_device_mesh("cpu", (size,))} if meshed else {}
    model = FullyShardedDataParallel(Adapted(), use_orig_params=True, device_id=torch.device("cpu"), **mesh)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 16)).sum().backward()
        optim.step()
        optim.zero_grad()
    held = [None] * size
    dist.all_gather_object(held, sum(len(slots) for slots in optim.state.values()))
    assert 0 in held and any(held), held
    # What each rank's optimizer has, put together by hand.
    parts = [None] * size
    mine = {name: optim.state[p]["exp_avg"].flatten() for name, p in model.named_parameters() if optim.state.get(p)}
    dist.all_gather_object(parts, {name.replace("_fsdp_wrapped_module.", ""): part for name, part in mine.items()})
    whole = torch.cat([part["head.weight"] for part in parts if "head.weight" in part]).reshape(3, 16)
    options = rt.StateDictOptions(full_state_dict=form == "full", flatten_optimizer_state_dict=form == "flattened")
    state = rt.get_optimizer_state_dict(model, optim, options=options, as_torch=form != "full")
    step = state["state.head.weight.step"] if form == "flattened" else state["state"]["head.weight"]["step"]
    assert float(step) == 2, step
    if form == "full":
        assert torch.equal(state["state"]["head.weight"]["exp_avg"], whole)
    rt.save({"optim": state}, path)
    dist.barrier()
    with reshard.open(path) as saved:
        assert torch.equal(torch.from_numpy(saved["optim.state.head.weight.exp_avg"].numpy()), whole)
        assert float(saved["optim.state.head.bias.step"].numpy()) == 2


@pytest.mark.parametrize("form", ["nested", "flattened", "full"])
@pytest.mark.parametrize("meshed", [False, True])
def test_ranks_whose_optimizers_have_nothing_to_do_await_nothing(ranks, path, meshed, form):
    ranks(3, ranks_without_state, path, meshed, form)


def stage_of_a_pipeline(rank, size, path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    model[rank].to_empty(device="cpu")
    nn.init.constant_(model[rank].weight, float(rank + 1))
    nn.init.zeros_(model[rank].bias)
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    checkpoint.load({"model": get_model_state_dict(whole)}, checkpoint_id=path)
    assert (whole[0].weight == 1).all() and (whole[1].weight == 2).all()


def test_stages_on_the_meta_device_are_other_ranks_in_pytorchs_calls(ranks, path):
    ranks(2, stage_of_a_pipeline, path)
