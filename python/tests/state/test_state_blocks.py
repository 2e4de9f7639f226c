"""Slots that are made of other tensors (codes, scales of blocks, a table), as low-bit optimizers have them: saved on some ranks, loaded on
others, into optimizers that have run and into ones that have not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as drop_in

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None

needs_fsdp2 = pytest.mark.skipif(fully_shard is None, reason="this torch has no fully_shard")


class Coded(torch.Tensor):
    """Eight bits an element, a scale for each block, and a table that all share; with `packed`, two elements a byte."""

    @staticmethod
    def __new__(cls, codes, scale, table, signed, shape):
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale, table, signed, shape):
        self.codes, self.scale, self.table, self.signed = codes, scale, table, signed

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], [self.signed, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size=None, outer_stride=None):
        return cls(inner["codes"], inner["scale"], inner["table"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.view.default, aten._to_copy.default):
            given = args[0]
            return Coded(given.codes, given.scale, given.table, given.signed, given.shape)
        raise NotImplementedError(str(func))


class LowBit(torch.optim.Optimizer):
    """Keeps what says where it was made: every element of every part is told from all others."""

    def __init__(self, params, block=4, packed=False):
        super().__init__(params, {"lr": 0.1})
        self.block, self.packed = block, packed

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                slots["step"] = slots.get("step", torch.zeros(())) + 1
                for signed in (True, False):
                    slots["avg" if signed else "square"] = self._made(p, signed)

    def _made(self, p, signed):
        whole = torch.arange(p.numel()).reshape(p.shape)
        local = whole
        if isinstance(p, DTensor):
            cut = torch.chunk(whole, p.device_mesh.size(), 0)
            mine = p.device_mesh.get_local_rank()
            local = cut[mine] if mine < len(cut) else whole[:0]
        flat = local.reshape(-1)
        if flat.numel() % self.block:
            return DTensor.from_local(
                local.float(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        codes = (flat[::2] if self.packed else local).remainder(251).to(torch.uint8)
        table = torch.arange(16.0) + signed
        made = Coded(codes, flat[:: self.block].float() + signed, table, signed, local.shape)
        if not isinstance(p, DTensor):
            return made
        return DTensor.from_local(made, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def built(size, rows=12, columns=8, **how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows), nn.Linear(rows, 2 * columns, bias=False))
    if size:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, LowBit(model.parameters(), **how)


def content(optim):
    """Every part of every slot on this rank."""
    found = []
    for group in optim.param_groups:
        for p in group["params"]:
            for slot, value in sorted(optim.state[p].items()):
                local = value._local_tensor if isinstance(value, DTensor) else value
                parts = [local.codes, local.scale, local.table] if isinstance(local, Coded) else [local]
                found.append((slot, type(local).__name__, tuple(value.shape), [part.clone() for part in parts]))
    return found


def same(a, b):
    assert len(a) == len(b)
    for (slot, kind, shape, parts), (slot2, kind2, shape2, parts2) in zip(a, b):
        assert (slot, kind, shape) == (slot2, kind2, shape2)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(parts, parts2, strict=True)), (slot, parts, parts2)


def cleared(optim):
    for slots in optim.state.values():
        for value in slots.values():
            local = value._local_tensor if isinstance(value, DTensor) else value
            for part in (local.codes, local.scale) if isinstance(local, Coded) else (local,):
                part.zero_()


def saved(rank, size, path, how, options):
    model, optim = built(size, **how)
    optim.step()
    before = content(optim)
    state = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(**options))
    rt.save({"optim": state}, path)
    same(before, content(optim))


def loaded(rank, size, path, how, options, by, fresh):
    model, optim = built(size, **how)
    _, expected = built(size, **how)
    expected.step()
    if not fresh:
        optim.step()
        cleared(optim)
    given = rt.StateDictOptions(**options)
    if by == "rt":
        state = {"optim": rt.get_optimizer_state_dict(model, optim, options=given)}
        rt.load(state, path)
    else:
        state = {"optim": drop_in.state_dict.get_optimizer_state_dict(model, optim, options=given)}
        drop_in.load(state, checkpoint_id=path)
    rt.set_optimizer_state_dict(model, optim, state["optim"], options=given)
    same(content(expected), content(optim))
    if fresh:
        # What was put together is what the optimizer goes on with.
        assert any(isinstance(getattr(v, "_local_tensor", v), Coded) for s in optim.state.values() for v in s.values())


@needs_fsdp2
@pytest.mark.parametrize("how", [{}, {"packed": True}, {"block": 12, "rows": 12, "columns": 8}], ids=["rows", "packed", "flat"])
@pytest.mark.parametrize("flatten", [False, True])
def test_blocks_go_to_other_ranks(ranks, path, how, flatten):
    options = {"flatten_optimizer_state_dict": True} if flatten else {}
    ranks(2, saved, path, how, options)
    for fresh in (True, False):
        ranks(2, loaded, path, how, options, "rt", fresh)
    worlds = (4,) if how.get("block") != 12 else ()
    for world in worlds:
        ranks(world, loaded, path, how, options, "rt", True)
        ranks(world, loaded, path, how, options, "rt", False)


@needs_fsdp2
def test_blocks_go_through_the_drop_in_module(ranks, path):
    ranks(2, saved, path, {}, {})
    ranks(2, loaded, path, {}, {}, "drop_in", False)


def between(rank, size, path):
    model, optim = built(size, rows=12, columns=6, block=18)
    state = {"optim": rt.get_optimizer_state_dict(model, optim)}
    rt.load(state, path)
    try:
        rt.set_optimizer_state_dict(model, optim, state["optim"])
        raise AssertionError("a block was cut")
    except rt.StateMismatch as error:
        assert "block" in str(error) and "'state." in str(error) and error.keys, error


@needs_fsdp2
def test_a_rank_whose_part_ends_inside_of_a_block_is_told_so(ranks, path):
    ranks(2, saved, path, {"rows": 12, "columns": 6, "block": 18}, {})
    ranks(3, between, path)


def test_blocks_of_one_process_load_without_trusting_the_file(path):
    model, optim = built(0)
    optim.step()
    rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
    with reshard.open(path) as checkpoint:
        assert checkpoint["optim.state.0.weight.avg.codes"].shape == (12, 8)
        assert checkpoint["optim.state.0.weight.avg.scale"].shape == (12, 2)
    for fresh in (True, False):
        other_model, other = built(0)
        if not fresh:
            other.step()
            cleared(other)
        state = {"optim": rt.get_optimizer_state_dict(other_model, other)}
        rt.load(state, path)
        rt.set_optimizer_state_dict(other_model, other, state["optim"])
        same(content(optim), content(other))


def test_a_class_that_the_optimizer_does_not_use_is_refused(path):
    model, optim = built(0)
    optim.step()
    state = rt.get_optimizer_state_dict(model, optim)
    for slots in state["state"].values():
        slots["avg"]["tensor_class"][0] = "os.system"
    other_model, other = built(0)
    with pytest.raises(rt.StateMismatch, match="os.system"):
        rt.set_optimizer_state_dict(other_model, other, state)


def whole(rank, size, path):
    model, optim = built(size)
    optim.step()
    full = rt.get_optimizer_state_dict(model, optim, options=rt.StateDictOptions(full_state_dict=True))
    assert full["state"]["0.weight"]["avg"]["codes"].shape == (12, 8)
    before = content(optim)
    full = copy.deepcopy(full)
    cleared(optim)
    rt.set_optimizer_state_dict(model, optim, full, options=rt.StateDictOptions(full_state_dict=True))
    same(before, content(optim))
    dist.barrier()


@needs_fsdp2
def test_blocks_are_gathered_and_set_whole(ranks, path):
    ranks(2, whole, path)
