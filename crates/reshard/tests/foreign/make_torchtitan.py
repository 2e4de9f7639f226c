"""A checkpoint of torchtitan's checkpoint manager, small, and what was trained.

    python make_torchtitan.py OUT

needs torchtitan (made with 0.3.0) and a CPU; two ranks. Its trainer wants a GPU, its manager and containers of optimizers do
not. Writes OUT/fsdp2_w2.
"""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from common import digest, ranks
from torch import nn


class Counter:
    step = 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.step * 8}

    def load_state_dict(self, _):
        pass


class Loader:
    def state_dict(self):
        return {f"dp_rank_{dist.get_rank()}": pickle.dumps({"position": 2}), "world_size": 2}

    def load_state_dict(self, _):
        pass


def run(out: Path) -> None:
    dist.init_process_group("gloo")
    import torchtitan.components.checkpointer.dcp as checkpointer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    adam = default_adamw(lr=1e-2)
    adam.implementation = "for-loop"
    optimizers = OptimizersContainer(adam, model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (1 + step))
    counter = Counter()
    config = checkpointer.CheckpointManager.Config(enable=True, folder=str(out / "steps"), interval=2)
    manager = config.build(
        dataloader=Loader(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": counter},
        sd_adapter=None,
        base_folder="",
    )
    for step in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        counter.step += 1
    manager.save(2, last_step=False)
    full = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    expected = {name: digest(full(tensor)) for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers.optimizers:
        for parameter, slots in optimizer.state.items():
            for slot in ("exp_avg", "exp_avg_sq"):
                expected[f"optimizer.state.{names[parameter]}.{slot}"] = digest(full(slots[slot]))
    manager.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.move(out / "steps" / "step-2", out / "checkpoint")
        shutil.rmtree(out / "steps")
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    out = Path(sys.argv[1]) / "fsdp2_w2"
    out.mkdir(parents=True)
    ranks(2, lambda: run(out))


if __name__ == "__main__":
    main()
