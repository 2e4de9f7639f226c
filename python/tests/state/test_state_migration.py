"""Programs written for ``torch.distributed.checkpoint.state_dict``, with the import changed.

Each part takes the calls to use. Those in one process run with PyTorch's own too; of those on ranks, PyTorch's own fail at some.
"""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed.checkpoint.state_dict as pt
from models import FSDP2, fully_shard, unsharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import reshard.torch as rt

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.scale = nn.Parameter(torch.linspace(0.0, 1.0, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.first(x) * self.scale)


def step(model, optimizers, seed=5):
    torch.manual_seed(seed)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(3, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def equal(a, b):
    """Whether two trees are the same, with tensors of any kind in them."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(*(unsharded(t) if isinstance(t, DTensor) else t for t in (a, b)))
    return a == b


def shards(**more):
    """The ways to shard a model that this torch can do on the CPU."""
    ways = [functools.partial(FSDP, device_id=CPU, use_orig_params=True, **more), functools.partial(FSDP, device_id=CPU, **more)]
    return ways + ([fully_shard] if FSDP2 else [])


# ---- on ranks -----------------------------------------------------------------------------------------------------------------


def strictness(rank, size, calls):
    for model in [DDP(Net()), *([fully_shard(Net())] if FSDP2 else [])]:
        state = calls.get_model_state_dict(model)
        state["abc"] = torch.zeros(10)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            calls.set_model_state_dict(model, model_state_dict=state)
        gone = next(iter(state))
        state.pop(gone)
        found = calls.set_model_state_dict(model, state, options=calls.StateDictOptions(strict=False))
        assert found.missing_keys == [gone] and found.unexpected_keys == ["abc"]
        state.pop("abc")
        with pytest.raises(RuntimeError, match="Missing key"):
            calls.set_model_state_dict(model, state)


def optimizer_in_backward(rank, size, calls):
    def build(seed):
        torch.manual_seed(seed)
        model = FSDP(Net(), device_id=CPU, use_orig_params=True)
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 1e-2})
        return model, [p._in_backward_optimizers[0] for p in model.parameters()]

    model, optimizers = build(1)
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(3, 6)).sum().backward()
    full = calls.StateDictOptions(full_state_dict=True)
    weights, slots = calls.get_state_dict(model, optimizers, options=full)
    other, fresh = build(2)
    calls.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=slots, options=full)
    for a, _ in ((model, optimizers), (other, fresh)):
        torch.manual_seed(9)
        a(torch.randn(3, 6)).sum().backward()
    again = calls.get_state_dict(model, optimizers, options=full), calls.get_state_dict(other, fresh, options=full)
    assert equal(again[0], again[1])
    assert not equal(weights, again[0][0])


def rank_0_has_it_all(rank, size, calls):
    plain = Net()
    optimizer = torch.optim.Adam(plain.parameters())
    step(plain, [optimizer])
    weights, slots = (copy.deepcopy(dict(part)) for part in calls.get_state_dict(plain, optimizer))
    mesh = init_device_mesh("cpu", (2, size // 2))
    hybrid = functools.partial(FSDP, device_id=CPU, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    full = calls.StateDictOptions(full_state_dict=True)
    spread = calls.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for shard in [*shards(), hybrid]:
        model = shard(Net())
        second = torch.optim.Adam(model.parameters())
        step(model, [second], seed=8)
        step(model, [second], seed=9)
        assert not equal(weights, dict(calls.get_model_state_dict(model, options=full)))
        mine = [copy.deepcopy(part) if rank == 0 else {} for part in (weights, slots)]
        calls.set_model_state_dict(model, mine[0], options=spread)
        calls.set_optimizer_state_dict(model, second, mine[1], options=spread)
        assert equal(weights, dict(calls.get_model_state_dict(model, options=full)))
        found = calls.get_optimizer_state_dict(model, second, options=full)
        assert equal(slots["state"], found["state"])
        assert equal(
            [{**g, "params": sorted(g["params"])} for g in slots["param_groups"]],
            [{**g, "params": sorted(g["params"])} for g in found["param_groups"]],
        )
        lacking = {key: value for key, value in weights.items() if key != "scale"} if rank == 0 else {}
        with pytest.raises(RuntimeError, match="Missing key"):
            calls.set_model_state_dict(model, lacking, options=spread)


def schedulers_leave_marks(rank, size, calls):
    for shard in shards():
        model = shard(Net())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=[lambda epoch: 0.95**epoch])
        state = calls.get_optimizer_state_dict(
            model, optimizer, options=calls.StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        assert bool(state) == (rank == 0)
        second = torch.optim.Adam(model.parameters(), lr=1e-2)
        assert "initial_lr" not in second.param_groups[0]
        spread = calls.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        calls.set_optimizer_state_dict(model, second, state, options=spread)
        assert second.param_groups[0]["initial_lr"] == 1e-2


def flattened_or_not(rank, size, calls):
    for shard in [shards()[0], shards()[-1]]:
        model = shard(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, [optimizer])
        nested = calls.get_optimizer_state_dict(model, optimizer)
        flat = calls.get_optimizer_state_dict(model, optimizer, options=calls.StateDictOptions(flatten_optimizer_state_dict=True))
        assert all(key.startswith(("state.", "param_groups.")) for key in flat)
        for state in (nested, flat):
            second = torch.optim.AdamW(model.parameters(), lr=0.5)
            calls.set_optimizer_state_dict(model, optimizers=second, optim_state_dict=state)
            assert equal(optimizer.state_dict(), second.state_dict())


def not_yet_initialized(rank, size, calls):
    model = FSDP(Net(), device_id=CPU)
    assert set(calls.get_model_state_dict(model)) == set(Net().state_dict())
    calls.get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))


def from_meta(rank, size, calls):
    whole = Net().state_dict()
    if FSDP2:
        for spread in (False, True):
            with torch.device("meta"):
                model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            torch.manual_seed(3)
            given = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)]).state_dict()
            options = calls.StateDictOptions(full_state_dict=True, broadcast_from_rank0=spread, strict=False)
            calls.set_model_state_dict(model, given if rank == 0 or not spread else {}, options=options)
            assert equal(dict(given), dict(model.state_dict()))
    # One part made on the meta device, the other with memory.
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    model.append(nn.Linear(8, 4))
    given = {
        "0.weight": whole["first.0.weight"],
        "0.bias": whole["first.0.bias"],
        "2.weight": whole["last.weight"],
        "2.bias": whole["last.bias"],
    }
    options = calls.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    calls.set_model_state_dict(model, given if rank == 0 else {}, options=options)
    assert equal(given, dict(model.state_dict()))


def several_groups(rank, size, calls):
    mesh = init_device_mesh("cpu", (size,))
    model = Net()
    plan = {"first.0": ColwiseParallel(use_local_output=False), "last": RowwiseParallel(use_local_output=False)}
    model.scale = None
    model.forward = lambda x: model.last(model.first(x))
    parallelize_module(model, mesh, plan)
    both = [model.first[0].weight, model.last.weight]
    for groups in ([{"params": both}, {"params": [], "lr": 0.2}], [{"params": both[:1]}, {"params": both[1:], "lr": 0.2}]):
        for full, spread in ((False, False), (True, False), (True, True)):
            optimizer = torch.optim.AdamW(copy.copy([dict(group) for group in groups]), lr=0.1)
            step(model, [optimizer])
            options = calls.StateDictOptions(full_state_dict=full, broadcast_from_rank0=spread)
            state = calls.get_optimizer_state_dict(model, optimizer, options=options)
            second = torch.optim.AdamW(copy.copy([dict(group) for group in groups]), lr=0.1)
            calls.set_optimizer_state_dict(model, second, state, options=options)
            rest = [
                [{key: value for key, value in group.items() if key != "params"} for group in o.param_groups]
                for o in (optimizer, second)
            ]
            assert rest[0] == rest[1]
            assert equal([optimizer.state[p] for p in both], [second.state[p] for p in both])


ON_RANKS = [
    strictness,
    optimizer_in_backward,
    rank_0_has_it_all,
    schedulers_leave_marks,
    flattened_or_not,
    not_yet_initialized,
    from_meta,
    several_groups,
]


def with_ours(rank, size, name):
    warnings.filterwarnings("ignore")
    globals()[name](rank, size, rt)


@pytest.mark.parametrize("part", ON_RANKS, ids=lambda part: part.__name__)
def test_on_ranks(ranks, part):
    ranks(4, with_ours, part.__name__)


# ---- in one process -----------------------------------------------------------------------------------------------------------


def alone(calls):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = calls.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = calls.get_model_state_dict(model, options=options)
    assert equal(dict(model.state_dict()), dict(weights))
    calls.set_model_state_dict(model, model.state_dict())
    calls.set_optimizer_state_dict(model, optimizer, calls.get_optimizer_state_dict(model, optimizer, options=options))
    calls.set_optimizer_state_dict(model, optimizer, optimizer.state_dict())


def nothing_for_the_model(calls):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, [optimizer])
    _, slots = calls.get_state_dict(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    second = torch.optim.Adam(model.parameters())
    calls.set_state_dict(model, optimizers=second, model_state_dict={}, optim_state_dict=slots)
    assert equal(optimizer.state_dict(), second.state_dict()) and equal(dict(before), dict(model.state_dict()))


def parts_of_the_model(calls):
    model = Net()
    whole = copy.deepcopy(dict(calls.get_model_state_dict(model)))
    with pytest.warns(FutureWarning, match="submodules"):
        named = copy.deepcopy(dict(calls.get_model_state_dict(model, submodules={model.last})))
    bare = calls.StateDictOptions(keep_submodule_prefixes=False)
    with pytest.warns(FutureWarning, match="submodules"):
        inner = copy.deepcopy(dict(calls.get_model_state_dict(model, submodules={model.last}, options=bare)))
    assert set(named) == {"last.weight", "last.bias"} and set(inner) == {"weight", "bias"}
    lenient = calls.StateDictOptions(strict=False)
    for given in (named, {model.last: inner}):
        model.load_state_dict({key: torch.zeros_like(value) for key, value in whole.items()})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            calls.set_model_state_dict(model, given, options=lenient)
        assert any(issubclass(w.category, FutureWarning) for w in seen) == (given is not named)
        assert equal(whole["last.weight"], model.last.weight) and not model.scale.any()


def hooks_change_names(calls):
    from torch.testing._internal.distributed import common_state_dict as common

    if not hasattr(common, "FusionEmbeddingWithHook"):
        pytest.skip("this torch has no such models to try")
    state = calls.get_model_state_dict(common.FusionEmbeddingWithHook(4, 4, 4))
    with pytest.raises(RuntimeError, match="Missing key"), torch.device("meta"):
        calls.set_model_state_dict(common.FusionEmbedding(4, 4, 4), state)
    with torch.device("meta"):
        modified = common.FusionEmbeddingWithModifier(4, 4, 4)
    calls.set_model_state_dict(modified, state)


def extras(calls):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return "mine"

        def set_extra_state(self, state):
            self.seen = state

    model = nn.Sequential(Extra(2, 2), nn.Linear(2, 2))
    model.register_buffer("left_out", torch.rand(3), persistent=False)
    other = copy.deepcopy(model)
    calls.set_model_state_dict(other, calls.get_model_state_dict(model))
    assert other[0].seen == "mine" and equal(dict(model.state_dict()), dict(calls.get_model_state_dict(other)))


@pytest.mark.parametrize("calls", [pt, rt], ids=["torch", "reshard"])
@pytest.mark.parametrize(
    "part", [alone, nothing_for_the_model, parts_of_the_model, hooks_change_names, extras], ids=lambda part: part.__name__
)
def test_alone(part, calls):
    part(calls)
