"""A checkpoint in Megatron's format `fsdp_dtensor`, small, and what was saved.

    python make_megatron_fsdp.py OUT

needs torch alone: Megatron FSDP wants a GPU. The tree is what Megatron core 0.16 gives to PyTorch's own writer: DTensors below
`model` and `optimizer.state.<parameter>`, the groups' options by parameter in `param_to_group_meta`, the gated layer's weight as
its two halves, `_w` and `_v`. Two ranks. Writes OUT/fsdp_dtensor.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import digest, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(out: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    weights = {
        "module.decoder.layers.0.mlp.linear_fc1.weight_w": made(1, 6, 5),
        "module.decoder.layers.0.mlp.linear_fc1.weight_v": made(2, 6, 5),
        "module.decoder.layers.0.mlp.linear_fc2.weight": made(3, 5, 6),
        "module.decoder.final_layernorm.weight": made(4, 3),
    }
    cut = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    state = {"model": {}, "optimizer": {"state": {}, "param_to_group_meta": {}}, "iteration": 3, "checkpoint_version": 3.0}
    state["args"] = argparse.Namespace(swiglu=True)
    expected = {}
    for name, weight in weights.items():
        state["model"][name] = cut(weight.bfloat16())
        expected[f"model.{name}"] = digest(weight.bfloat16())
        slots = {"exp_avg": weight * 2, "exp_avg_sq": weight * 3, "master_param": weight}
        state["optimizer"]["state"][name] = {slot: cut(tensor) for slot, tensor in slots.items()}
        state["optimizer"]["param_to_group_meta"][name] = {"lr": 0.5, "weight_decay": 0.1, "step": 3}
        expected |= {f"optimizer.state.{name}.{slot}": digest(tensor) for slot, tensor in slots.items()}
    dcp.save(state, checkpoint_id=out / "checkpoint" / "iter_0000003")
    if dist.get_rank() == 0:
        (out / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    out = Path(sys.argv[1]) / "fsdp_dtensor"
    out.mkdir(parents=True)
    ranks(2, lambda: run(out))


if __name__ == "__main__":
    main()
