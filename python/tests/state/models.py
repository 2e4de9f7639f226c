"""Models, the layouts they are trained in, and a way to read the whole state of any of them."""

from __future__ import annotations

import functools
import pickle
import unittest
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.torch import ShardView

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    # Before torch 2.6 it has another place, and works with CUDA only.
    def fully_shard(*_, **__):
        raise unittest.SkipTest("FSDP2 on the CPU needs torch 2.6 or later")

    FSDP2 = False
else:
    FSDP2 = True

warnings.filterwarnings("ignore")


#: Layouts that are made by FSDP2.
BY_FSDP2 = ("fsdp2", "hsdp", "tp_fsdp2")


def here(*layouts):
    """Those of some layouts that this torch can do."""
    return [layout for layout in layouts if FSDP2 or layout not in BY_FSDP2]


ALL = here("single", "ddp", "fsdp1_flat", "fsdp1_orig", "fsdp1_grad_op", "fsdp1_no_shard", "fsdp2")
#: Layouts that need an even number of ranks.
FOUR = here("fsdp1_hybrid", "hsdp", "tp_fsdp2")


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, n))
        self.register_buffer("scale", torch.tensor([0.25, 0.75]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.calls = 3

    def forward(self, x):
        return x * self.weight + self.scale.mean()


class ExtraNorm(Norm):
    """Extra state inside of an FSDP module is what PyTorch's own calls fail at, so not every model has it."""

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Block(nn.Module):
    def __init__(self, n, hidden):
        super().__init__()
        self.up = nn.Linear(n, hidden)
        self.down = nn.Linear(hidden, n, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, variant="", n=6, hidden=10):
        super().__init__()
        self.first = Block(n, hidden)
        self.second = Block(n, hidden)
        self.norm = ExtraNorm(n) if variant in ("extra", "norm") else Norm(n)
        self.head = nn.Linear(n, 5)
        if variant == "tied":
            self.tied = nn.Linear(n, hidden)
            self.tied.weight = self.first.up.weight
        if variant == "frozen":
            self.first.requires_grad_(False)
        if variant == "norm":
            self.batch = nn.BatchNorm1d(n)
        if variant == "unused":
            self.unused = Block(n, hidden)
        self.variant = variant

    def forward(self, x):
        if self.variant == "norm":
            x = self.batch(x)
        x = self.norm(self.second(self.first(x)))
        if self.variant == "tied":
            x = x + self.tied(x)[:, : x.shape[1]]
        return self.head(x)


def make(layout, variant="", seed=7, hidden=10, n=6):
    """A model in a layout, the same whatever the layout."""
    torch.manual_seed(seed)
    net = Net(variant, n, hidden)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "single":
        return net
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    if layout == "ddp_ac_compiled":
        net.first = checkpoint_wrapper(net.first)
        net.head = torch.compile(net.head)
        return nn.parallel.DistributedDataParallel(torch.compile(net))
    if layout == "compiled_ac":
        net.first = torch.compile(checkpoint_wrapper(net.first))
        net.second = checkpoint_wrapper(torch.compile(net.second))
        return torch.compile(net)
    if layout.startswith("fsdp1"):
        extra = {}
        if "hybrid" in layout:
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
            extra = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        if "no_shard" in layout:
            extra = {"sharding_strategy": ShardingStrategy.NO_SHARD}
        if "grad_op" in layout:
            extra = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        if "tp" in layout:
            both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            tensor_parallel(net, both["tp"])
            extra = {"device_mesh": both["dp"]}
        common = dict(device_id=torch.device("cpu"), use_orig_params="orig" in layout, **extra)
        if "ac" in layout.split("_"):
            net.second = checkpoint_wrapper(net.second)
        if variant != "tied":
            # A parameter can not be shared between two FSDP modules.
            net.first = FSDP(net.first, **common)
        net.norm = FSDP(net.norm, **common)
        return FSDP(net, **common)
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
    elif layout == "tp_fsdp2":
        both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(net, both["tp"])
        mesh = both["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for block in (net.first, net.second, net.norm) if variant != "tied" else (net.second, net.norm):
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def tensor_parallel(net, mesh):
    plan = {
        f"{block}.{name}": style()
        for block in ("first", "second")
        for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    parallelize_module(net, mesh, plan)


def optimizer(model, kind="adamw"):
    params = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if kind == "plain_sgd":
        return torch.optim.SGD(params, lr=0.1)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=0.1)
    if kind == "groups":
        named = list(model.named_parameters())
        heads = [p for name, p in named if "head" in name or ("flat" in name and "norm" in name)]
        rest = [p for name, p in named if not any(p is h for h in heads)]
        return torch.optim.AdamW(
            [{"params": rest, "initial_lr": 0.5}, {"params": heads, "lr": 0.03, "initial_lr": 0.25}], lr=0.01
        )
    if kind == "tensor_lr":
        return torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False)
    return torch.optim.AdamW(params, lr=0.01)


def train(model, optimizers, steps, start=0):
    """Steps on batches that depend on their number alone, the same on every rank."""
    optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for step in range(start, start + steps):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + step))
        for o in optimizers:
            o.zero_grad()
        if any("OptimizedModule" in type(m).__name__ for m in model.modules()):
            # Compiling takes longer than all else here, and says nothing about names.
            for index, p in enumerate(p for p in model.parameters() if p.requires_grad):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 100 + index))
        else:
            model(batch).square().mean().backward()
        for o in optimizers:
            o.step()


class Parts(list):
    """Pieces of a tensor on their way to other ranks."""

    def __init__(self, dtype, shape, pieces):
        super().__init__(pieces)
        self.dtype, self.shape = dtype, shape

    def __reduce__(self):
        return (Parts, (self.dtype, self.shape, list(self)))


@functools.cache
def fsdp2_averages():
    """Whether FSDP2 averages gradients over ranks, as everything else does; over gloo, torch 2.8 sums them. A collective."""
    if not FSDP2:
        return False
    # A row for each rank, whose gradient is one on every rank.
    linear = nn.Linear(1, dist.get_world_size(), bias=False)
    fully_shard(linear)
    linear(torch.ones(1, 1)).sum().backward()
    return linear.weight.grad.to_local().item() == 1


def unsharded(tensor):
    """A DTensor whole, put together from what the ranks hold: the full_tensor() of torch 2.8 mixes up uneven strided shards."""
    whole, mesh = tensor.to_local().detach().clone(), tensor.device_mesh
    sharded = [
        dim for dim, placement in enumerate(tensor.placements) if placement.is_shard() or "Strided" in type(placement).__name__
    ]
    strided = [dim for dim in sharded if "Strided" in type(tensor.placements[dim]).__name__]
    # What was cut last is put together first: strided shards were cut after all others, of those the last dimension was.
    for dim in strided + [dim for dim in reversed(sharded) if dim not in strided]:
        parts = [None] * mesh.size(dim)
        dist.all_gather_object(parts, whole, group=mesh.get_group(dim))
        whole = torch.cat(parts, tensor.placements[dim].dim)
    return whole


def _packed(tree):
    if isinstance(tree, dict):
        return {key: _packed(tree[key]) for key in sorted(tree, key=str)}
    if isinstance(tree, (list, tuple)):
        return [_packed(value) for value in tree]
    if isinstance(tree, ShardView):
        return Parts(tree.dtype, tuple(tree.shape), [(offsets, tensor.detach().clone()) for offsets, tensor in tree.pieces])
    if isinstance(tree, DTensor):
        return unsharded(tree)
    if isinstance(tree, ShardedTensor):
        return Parts(
            tree.dtype,
            tuple(tree.size()),
            [(tuple(s.metadata.shard_offsets), s.tensor.detach().clone()) for s in tree.local_shards()],
        )
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def _merged(trees):
    first = trees[0]
    if isinstance(first, dict):
        keys = {key: None for tree in trees for key in tree}
        return {key: _merged([tree[key] for tree in trees if key in tree]) for key in keys}
    if isinstance(first, Parts):
        full, seen = torch.empty(first.shape, dtype=first.dtype), torch.zeros(first.shape, dtype=torch.bool)
        for offsets, tensor in (piece for parts in trees for piece in parts):
            at = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape))
            full[at] = tensor
            seen[at] = True
        assert bool(seen.all()), "no rank holds a part of it"
        return full
    if isinstance(first, list):
        return [_merged(list(values)) for values in zip(*trees)]
    return first


def everything(tree):
    """A state dict with every tensor whole, and with the keys of all ranks, by a collective of the test's own."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, pickle.dumps(_packed(tree)))
    return _merged([pickle.loads(data) for data in told])


def assert_close(a, b, at="state", exact=True):
    """Equal structure and values; tensors bit for bit, or nearly where summation differs."""
    if isinstance(a, dict):
        assert isinstance(b, dict) and sorted(map(str, a)) == sorted(map(str, b)), (
            f"{at}: {sorted(map(str, a))} and {sorted(map(str, b))}"
        )
        for key in a:
            assert_close(a[key], b[key], f"{at}.{key}", exact)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{at}: {a} and {b}"
        for index, (x, y) in enumerate(zip(a, b)):
            assert_close(x, y, f"{at}.{index}", exact)
    elif isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), f"{at}: {type(b)}"
        assert a.shape == b.shape and a.dtype == b.dtype, f"{at}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        if exact:
            assert torch.equal(a, b), f"{at} differs by {(a.double() - b.double()).abs().max()}"
        else:
            assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6), (
                f"{at} differs by {(a.double() - b.double()).abs().max()}"
            )
    else:
        assert type(a) is type(b) and a == b, f"{at}: {a!r} and {b!r}"
