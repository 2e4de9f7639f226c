"""State of unusual shape: nested slots with keys of every kind, state that belongs to no parameter, low-bit slots."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import assert_close, make, train
from torch.distributed.tensor import DTensor

import reshard
import reshard.torch as rt


class Shampoo(torch.optim.Optimizer):
    """Keeps blocks by number, by pair and by name, and a history that belongs to no parameter."""

    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, {"lr": lr})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slots = self.state[p]
                blocks = slots.setdefault("blocks", {0: {}, (0, 1): {}, "0.5": {}, 0.25: {}, None: {}, True: {}})
                for number, block in enumerate(blocks.values()):
                    block.setdefault("factor", torch.zeros(2, 2)).add_(p.grad.sum() * (number + 1))
                    block["count"] = block.get("count", 0) + 1
                slots["step"] = slots.get("step", torch.zeros(())) + 1
        own = self.state.setdefault("history", {"scales": {}, "best": {"at": torch.zeros(3)}})
        own["scales"][len(own["scales"])] = self.scale
        own["best"]["at"] += self.scale


def typed(tree):
    """The types of all keys, which comparing by equality would not see: 1 equals True, and 1.0."""
    if isinstance(tree, dict):
        return {(type(key), key): typed(value) for key, value in tree.items()}
    return [typed(value) for value in tree] if isinstance(tree, (list, tuple)) else None


def same(a, b):
    assert typed(a) == typed(b)
    assert_close(a, b)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("by", ["rt", "reader"])
def test_keys_of_nested_slots_keep_their_types(path, flatten, by):
    options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = make("single")
    optim = Shampoo(model.parameters())
    train(model, optim, 2)
    state = {"a": [{"optim": rt.get_optimizer_state_dict(model, optim, options=options)}]}
    rt.save(state, path)
    other = make("single", seed=3)
    fresh = Shampoo(other.parameters(), lr=0.5)
    target = {"a": [{"optim": rt.get_optimizer_state_dict(other, fresh, options=options)}]}
    if by == "rt":
        rt.load(target, path)
    else:
        dcp.load(target, storage_reader=rt.StorageReader(path))
    rt.set_optimizer_state_dict(other, fresh, target["a"][0]["optim"], options=options)
    same(optim.state_dict(), fresh.state_dict())
    # And again, from what was loaded.
    rt.save({"a": [{"optim": rt.get_optimizer_state_dict(other, fresh, options=options)}]}, path, overwrite=True)
    third = Shampoo(other.parameters())
    target = {"a": [{"optim": rt.get_optimizer_state_dict(other, third, options=options)}]}
    rt.load(target, path)
    rt.set_optimizer_state_dict(other, third, target["a"][0]["optim"], options=options)
    same(optim.state_dict(), third.state_dict())


def test_keys_keep_their_types_without_any_optimizer(path):
    model = make("single")
    optim = Shampoo(model.parameters())
    train(model, optim, 1)
    state = rt.get_optimizer_state_dict(model, optim)
    rt.save({"optim": state}, path)
    loaded = rt.load_sharded_optimizer_state_dict(rt.get_model_state_dict(model), "optim", path)["optim"]
    same(dict(state["state"]), loaded["state"])


def test_a_checkpoint_without_the_note_takes_types_from_the_live_state(path):
    model = make("single")
    optim = Shampoo(model.parameters())
    train(model, optim, 1)
    dcp.save({"optim": dict(rt.get_optimizer_state_dict(model, optim))}, checkpoint_id=path)
    before = copy.deepcopy(optim.state_dict())
    train(model, optim, 1)
    target = {"optim": rt.get_optimizer_state_dict(model, optim)}
    rt.load(target, path)
    rt.set_optimizer_state_dict(model, optim, target["optim"])
    del before["state"]["history"], (after := optim.state_dict())["state"]["history"]
    same(before, after)


@pytest.mark.parametrize("flatten", [False, True])
def test_every_optimizer_gets_its_own_user_defined_state(path, flatten):
    options = rt.StateDictOptions(flatten_optimizer_state_dict=flatten)

    def pair(model, *scales):
        params = list(model.parameters())
        return [Shampoo(params[:3], scale=scales[0]), Shampoo(params[3:], scale=scales[1])]

    model = make("single")
    optims = pair(model, 2.0, 3.0)
    train(model, optims, 2)
    rt.save({"optim": rt.get_optimizer_state_dict(model, optims, options=options)}, path)
    other = make("single", seed=5)
    fresh = pair(other, 0.0, 0.0)
    target = {"optim": rt.get_optimizer_state_dict(other, fresh, options=options)}
    rt.load(target, path)
    # In another order, too.
    rt.set_optimizer_state_dict(other, fresh[::-1], target["optim"], options=options)
    for one, two in zip(optims, fresh):
        same(one.state_dict(), two.state_dict())
        same(one.state["history"], two.state["history"])


# ---- low-bit slots ----------------------------------------------------------------------------------------------------------


class EightBit(torch.optim.Optimizer):
    """Codes of a rank's own part, a scale for each block of them, and a table that is the same everywhere."""

    def __init__(self, params, block, drift=True):
        super().__init__(params, {"lr": 0.1})
        self.block, self.drift = block, drift

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                local = p._local_tensor if isinstance(p, DTensor) else p
                own = float(dist.get_rank()) if self.drift and dist.is_initialized() else 1.0
                blocks = -(-local.numel() // self.block)
                self.state[p] = {
                    "codes": torch.randint(0, 255, local.shape, dtype=torch.uint8),
                    "scales": torch.arange(blocks, dtype=torch.float32) + own,
                    "table": torch.arange(256.0),
                }


def low_bit(rank, size, folder):
    model = make("fsdp2")
    optim = EightBit(model.parameters(), block=2)
    optim.step()
    state = rt.get_optimizer_state_dict(model, optim)
    # Codes are this rank's part of the parameter; scales only look like the same on all ranks.
    assert isinstance(state["state"]["first.up.weight"]["codes"], rt.ShardView)
    try:
        rt.save({"optim": state}, f"{folder}/drifted")
        raise AssertionError("scales of one rank were kept for all")
    except reshard.ReshardError as error:
        assert "scales" in str(error) and ("differs between rank" in str(error) or "ranks disagree" in str(error)), error
    # As many blocks on every rank, and other scales all the same.
    optim = EightBit(model.parameters(), block=4)
    for group in optim.param_groups:
        group["params"] = [p for p in group["params"] if tuple(p.shape) == (10, 6)]
    optim.step()
    try:
        rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, f"{folder}/drifted")
        raise AssertionError("scales of one rank were kept for all")
    except reshard.ReshardError as error:
        assert "scales" in str(error) and "differs between rank" in str(error), error
    same_everywhere = EightBit(model.parameters(), block=10**6, drift=False)
    same_everywhere.step()
    state = rt.get_optimizer_state_dict(model, same_everywhere)
    rt.save({"optim": state}, f"{folder}/same")
    expected = {p: {k: v.clone() for k, v in s.items()} for p, s in same_everywhere.state.items()}
    same_everywhere.state.clear()
    target = {"optim": rt.get_optimizer_state_dict(model, same_everywhere)}
    rt.load(target, f"{folder}/same")
    rt.set_optimizer_state_dict(model, same_everywhere, target["optim"])
    for p, slots in same_everywhere.state.items():
        local = slots["codes"]._local_tensor if isinstance(slots["codes"], DTensor) else slots["codes"]
        assert torch.equal(local, expected[p]["codes"]) and torch.equal(slots["table"], expected[p]["table"])

    flat = make("fsdp1_flat")
    optim = EightBit(flat.parameters(), block=2)
    optim.step()
    try:
        rt.get_optimizer_state_dict(flat, optim)
        raise AssertionError("slots of a flat parameter that do not fit were taken")
    except (reshard.ReshardError, ValueError, RuntimeError) as error:
        assert "scales" in str(error), error


def test_slots_in_blocks_of_their_own_are_saved_only_if_all_ranks_agree(ranks, tmp_path):
    ranks(2, low_bit, str(tmp_path))


class Quantised(torch.Tensor):
    """A tensor whose content is in two others, as low-bit optimizers have them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.view.default):
            return Quantised(args[0].codes, args[0].scale)
        raise NotImplementedError(str(func))


def sharded_subclass(rank, size, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (size,))
    part = Quantised(torch.zeros(4, dtype=torch.uint8), torch.ones(2))
    whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size((4 * size,)), stride=(1,))
    for attempt in (lambda: rt.save({"x": whole}, f"{folder}/x"),):
        try:
            attempt()
            raise AssertionError("a tensor without memory of its own was saved")
        except reshard.ReshardError as error:
            assert "Quantised" in str(error) and "'x'" in str(error), error


def test_a_sharded_tensor_of_a_subclass_is_refused_by_name(ranks, tmp_path):
    ranks(2, sharded_subclass, str(tmp_path))


def over_all_parameters(rank, size, base):
    """LBFGS keeps one direction for all parameters, in the state of the first of them."""
    states = []
    for layout in ("fsdp1_no_shard_orig", "single"):
        model = make(layout)
        optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        def closure(model=model, optim=optim):
            optim.zero_grad()
            loss = model(torch.ones(2, 6)).square().sum()
            loss.backward()
            return loss

        optim.step(closure)
        path = f"{base}/{layout}-{size}"
        rt.save({"optim": rt.get_optimizer_state_dict(model, optim)}, path)
        states.append((layout, path, optim.state_dict()["state"]))
    for layout, path, expected in states:
        for other in ("fsdp1_no_shard_orig", "single"):
            model = make(other, seed=9)
            fresh = torch.optim.LBFGS(model.parameters())
            state = {"optim": rt.get_optimizer_state_dict(model, fresh)}
            rt.load(state, path)
            rt.set_optimizer_state_dict(model, fresh, state["optim"])
            assert_close(expected, fresh.state_dict()["state"], f"{layout} as {other}")


def test_slots_over_all_parameters_are_kept_where_parameters_are_whole(ranks, tmp_path):
    ranks(1, over_all_parameters, str(tmp_path))
    ranks(2, over_all_parameters, str(tmp_path))
