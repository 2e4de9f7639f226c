"""The model of the rows on several ranks: eight encoder layers, 101 million parameters; with Adam's state 1.2 GB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def layers(quick: bool) -> nn.Module:
    width, count = (64, 2) if quick else (1024, 8)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(count)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with its state filled, by a step with made-up gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def fsdp2(quick: bool, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = layers(quick)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(quick: bool, original: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    return FullyShardedDataParallel(
        layers(quick), device_id=torch.device("cpu"), use_orig_params=original, auto_wrap_policy=policy
    )


def locals_of(tree: Any) -> list[torch.Tensor]:
    """The memory of this rank behind the tensors of a state."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in locals_of(value)]
    if isinstance(tree, (list, tuple)):
        return [tensor for value in tree for tensor in locals_of(value)]
    if hasattr(tree, "to_local"):
        return [tree.to_local()]
    return [tree] if isinstance(tree, torch.Tensor) else []


def on_rank_0(rank: int, place: Path) -> str:
    """A place emptied by rank 0, when all ranks have left it."""
    import torch.distributed as dist
    from harness import cleared

    dist.barrier()
    if rank == 0:
        cleared(place)
    dist.barrier()
    return str(place)
