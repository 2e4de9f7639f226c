"""Models of parts, and the layouts they are put into."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .case import Case, Part, Side
from .oracle import placed_index

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None

warnings.filterwarnings("ignore")
logging.getLogger("torch.distributed").setLevel(logging.ERROR)

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "hybrid_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class WithExtra(nn.Module):
    """Extra state as modules have it: a dict, a tensor, or none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.told: Any = {"dict": {"calls": 3, "names": ["a", None]}, "tensor": torch.arange(3)}.get(kind)
        self.kind = kind


class DictExtra(WithExtra):
    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


class Block(nn.Module):
    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.up = nn.Linear(width, part.size, bias=part.bias)
        self.down = nn.Linear(part.size, width, bias=part.bias)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.extra = DictExtra(part.extra) if part.extra else nn.Identity()
        for index, dtype in enumerate(("float32", "int64", "bool", "bfloat16", "complex64")[: part.size]):
            self.register_buffer(f"b{index}", torch.randn(index, 3).to(getattr(torch, dtype)))
        self.register_buffer("cache", torch.randn(3), persistent=False)

    def forward(self, x: Any) -> Any:
        return x * self.weight


class Bag(nn.Module):
    """Parameters of odd shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.some = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Any) -> Any:
        return x * sum((p * p).sum() for p in self.some)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts = case.parts
        self.tied_to: int | None = None
        for index, part in enumerate(case.parts):
            module = self._made(case, index, part)
            if part.kind != "tied":
                module = module.to(getattr(torch, part.dtype))
                module.requires_grad_(not part.frozen)
            self.add_module(f"p{index}", module)
        self.head = nn.Linear(case.width, 3)

    def _made(self, case: Case, index: int, part: Part) -> nn.Module:
        if part.kind == "block":
            return Block(case.width, part)
        if part.kind == "norm":
            return Norm(case.width, part)
        if part.kind == "batch":
            return nn.BatchNorm1d(case.width)
        if part.kind in ("bag", "empty", "scalars"):
            odd: dict[str, list[tuple[int, ...]]] = {"empty": [(0, 4), (part.size, 0)], "scalars": [()]}
            return Bag([(part.size,), (3, 1, 2), *odd.get(part.kind, []), (1, part.size, 2)])
        linear = nn.Linear(case.width, 3, bias=part.bias)
        free = [i for i, p in enumerate(case.parts[:index]) if p.kind == "block" and not p.unit and not p.inner]
        if free and not case.parts[free[0]].frozen and case.parts[free[0]].dtype == "float32":
            self.tied_to = free[0]
            block = self.get_submodule(f"p{free[0]}")
            linear = nn.Linear(case.width, case.parts[free[0]].size, bias=part.bias)
            linear.weight = block.up.weight  # type: ignore[union-attr]
        return linear

    def forward(self, x: Any) -> Any:
        for index, part in enumerate(self.parts):
            if part.unused:
                continue
            y = getattr(self, f"p{index}")(x.to(getattr(torch, part.dtype))).to(torch.float32)
            x = x + 0.1 * (y[:, :1] if part.kind == "tied" else y)
        return self.head(x)


def compiled(module: nn.Module) -> nn.Module:
    """The wrapper of a compiled module around one that is called as it is: names matter here, not what compilers make of them."""
    made: Any = torch.compile(module, backend="eager")
    made.__dict__["forward"] = module.__call__
    return made  # type: ignore[no-any-return]


class Laid:
    """A model in its layout, with what the oracle needs to know of how it was cut."""

    def __init__(self, case: Case, side: Side, seed: int) -> None:
        torch.manual_seed(seed)
        net = Net(case)
        self.case, self.side = case, side
        self.shapes = {name: tuple(p.shape) for name, p in net.named_parameters(remove_duplicate=False)}
        #: For a parameter that tensor parallelism has cut: where its elements here are in the whole.
        self.base: dict[str, torch.Tensor] = {}
        self.synthetic = case.optimizer == "SparseAdam"
        self.model = self._wrapped(net)

    def _wrapped(self, net: Net) -> nn.Module:
        side, world = self.side, dist.get_world_size()
        name = side.wrapper
        dp = None
        if name in ("tp", "tp_fsdp2", "fsdp1_tp"):
            shape = (1, world) if name == "tp" else (world // 2, 2)
            both = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            self._tensor_parallel(net, both["tp"], shape[1])
            dp = both["dp"]
        self._inner(net)
        model: nn.Module = net
        if name == "ddp":
            model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False, find_unused_parameters=True)
        elif name.startswith("fsdp1"):
            model = self._fsdp1(net, dp)
        elif name in ("fsdp2", "hsdp", "tp_fsdp2"):
            self._fsdp2(net, dp)
        if side.outer == "compiled":
            model = compiled(model)
        elif side.outer == "traced":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        return model

    def _tensor_parallel(self, net: Net, mesh: Any, size: int) -> None:
        for index, part in enumerate(self.case.parts):
            if part.kind == "block" and index != net.tied_to:
                plan = {f"p{index}.up": ColwiseParallel(), f"p{index}.down": RowwiseParallel()}
                parallelize_module(net, mesh, plan)
                # Layers of uneven shards do not compute: gradients are made by hand then.
                self.synthetic |= part.size % size != 0
        for name, param in net.named_parameters(remove_duplicate=False):
            if hasattr(param, "placements"):
                self.base[name] = placed_index(param)

    def _inner(self, net: Net) -> None:
        for index, part in enumerate(self.case.parts):
            module = net.get_submodule(f"p{index}")
            for layer in part.inner.split("_") if part.inner else ():
                module = checkpoint_wrapper(module) if layer == "checkpointed" else compiled(module)
            setattr(net, f"p{index}", module)

    def _units(self, net: Net) -> list[tuple[str, nn.Module]]:
        return [(f"p{i}", getattr(net, f"p{i}")) for i, part in enumerate(self.case.parts) if part.unit]

    def _fsdp1(self, net: Net, dp: Any) -> nn.Module:
        strategy, world = self.side.strategy, dist.get_world_size()
        extra: dict[str, Any] = {"sharding_strategy": STRATEGIES[strategy]}
        if "hybrid" in strategy:
            extra["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
        elif dp is not None:
            extra["device_mesh"] = dp
        wrap = functools.partial(FSDP, device_id=torch.device("cpu"), use_orig_params=self.side.wrapper == "fsdp1_orig", **extra)
        for name, unit in self._units(net):
            if any(True for _ in unit.parameters()):
                setattr(net, name, wrap(unit))
        return wrap(net)

    def _fsdp2(self, net: Net, mesh: Any) -> None:
        world = dist.get_world_size()
        if self.side.wrapper == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
        elif mesh is None:
            mesh = init_device_mesh("cpu", (world,))
        after = self.side.strategy != "grad_op"
        for _, unit in self._units(net):
            fully_shard(unit, mesh=mesh, reshard_after_forward=after)
        fully_shard(net, mesh=mesh, reshard_after_forward=after)
