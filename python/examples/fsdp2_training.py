"""A training loop with FSDP2 that saves in the background and resumes on any number of ranks.

torchrun --nproc-per-node 4 fsdp2_training.py --folder run --steps 20
torchrun --nproc-per-node 3 fsdp2_training.py --folder run --steps 40
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard.torch as rt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Training:
    """Model and optimizer as one thing that can be saved: PyTorch's Stateful."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def build(width: int = 16, depth: int = 2) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(depth)])
    mesh = init_device_mesh("cpu" if not torch.cuda.is_available() else "cuda", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def batch(step: int, width: int = 16) -> torch.Tensor:
    """The same data on every rank, so that the result does not depend on how many there are."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step))


def train(folder: str, steps: int, every: int = 5) -> float:
    training = build()
    loss = torch.zeros(())
    with rt.CheckpointManager(folder, keep_last=2) as manager:
        manager.restore({"training": training})
        while training.step < steps:
            loss = training.model(batch(training.step)).square().mean()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.step += 1
            if training.step % every == 0:
                manager.save(training.step, {"training": training}, metrics={"loss": loss.item()})
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
    loss = train(options.folder, options.steps)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
