"""Checkpoints of torch_checkpointing, small, and what was saved.

    python make_torch_checkpointing.py OUT

needs torch_checkpointing (made with 0.1.1) and a CPU; two ranks. Writes OUT/fsdp2_w2, `torch.save` files and a JSON file, and
OUT/safetensors_w2, whose model lies in safetensors files.
"""

import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from common import digest, on_cpu, ranks
from torch import nn


def run(out: Path, safetensors: bool) -> None:
    dist.init_process_group("gloo")
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    for step in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "loader": {"rank": dist.get_rank()}}
    full = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    expected = {f"model.{name}": digest(full(tensor)) for name, tensor in state["model"].items()}
    for number, slots in state["optimizer"]["state"].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            expected[f"optimizer.state.{number}.{slot}"] = digest(full(slots[slot]))
    save(str(out / "checkpoint"), state, safetensors)
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def save(path: str, state, safetensors: bool) -> None:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.builder import SyncCheckpointSaverConfig
    from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    layout = LayoutInfo("weights/model_{rank}.safetensors", SafetensorsSerialization()) if safetensors else None
    items = {
        "model": ItemSpec(resharder=DefaultResharder(), layout=layout),
        "optimizer": ItemSpec(resharder=DefaultResharder()),
        "step": ItemSpec(layout=LayoutInfo("step_{rank}.json", JsonSerialization())),
    }
    # Small files have no blocks that direct I/O could write.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage))
    manager.save(path, state)
    manager.close()


def main() -> None:
    for name, safetensors in (("fsdp2_w2", False), ("safetensors_w2", True)):
        out = Path(sys.argv[1]) / name
        out.mkdir(parents=True)
        ranks(2, lambda out=out, safetensors=safetensors: run(out, safetensors))


if __name__ == "__main__":
    main()
