"""Writes the safetensors samples beside this file: `python make_samples.py OUT`.

Every folder is what torch's HuggingFaceStorageWriter makes of the same state in one of its modes, `single` is what
the safetensors library itself writes, and expected.json has dtype, shape and sha256 of every full tensor.
"""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")
WORLD = 2


def state():
    generator = torch.Generator().manual_seed(7)

    def rand(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "embed.weight": rand(7, 4),
        "blocks.0.up.weight": rand(3, 5).to(torch.bfloat16),
        "blocks.0.scale": rand(),
        "blocks.0.steps": torch.arange(6),
        "head.bias": rand(2),
    }


PLACEMENTS = {"embed.weight": [Shard(0)], "blocks.0.up.weight": [Shard(1)], "head.bias": [Shard(0)]}
FILES = {"embed.weight": 1, "blocks.0.up.weight": 2, "blocks.0.scale": 2, "blocks.0.steps": 1, "head.bias": 2}


def every_dtype():
    """Every element type that safetensors has, with a zero-dim and an empty tensor."""
    raw = torch.arange(48, dtype=torch.uint8) % 2
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
        "float4_e2m1fn_x2 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64"
    ).split()
    tensors = {name: raw.clone().view(getattr(torch, name)).reshape(2, -1) for name in names}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(3, 0, dtype=torch.int16)
    return tensors


def describe(tensors):
    def digest(tensor):
        data = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        return hashlib.sha256(bytes(data.tolist())).hexdigest()

    return {
        key: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "sha256": digest(t)}
        for key, t in tensors.items()
    }


def rank_main(rank, out):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    sharded = {key: distribute_tensor(t, mesh, PLACEMENTS.get(key, [Replicate()])) for key, t in state().items()}
    modes = {
        "sharded": dict(save_distributed=True),
        "sharded_two_files": dict(save_distributed=True, fqn_to_index_mapping=FILES),
        "consolidated": dict(save_distributed=True, enable_consolidation=True, fqn_to_index_mapping=FILES),
    }
    for name, options in modes.items():
        if name == "consolidated":
            # Torch 2.13 fails to consolidate integers (it asks torch.finfo for the size of every type) and makes
            # zeros of zero-dim tensors.
            del sharded["blocks.0.steps"], sharded["blocks.0.scale"]
            options["fqn_to_index_mapping"] = {key: FILES[key] for key in sharded}
        dcp.save(dict(sharded), storage_writer=HuggingFaceStorageWriter(str(out / name), **options))
    if rank == 0:
        writer = HuggingFaceStorageWriter(str(out / "full"), fqn_to_index_mapping=FILES)
        dcp.save(state(), storage_writer=writer, no_dist=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    out = Path(sys.argv[1]).absolute()
    mp.spawn(rank_main, (out,), nprocs=WORLD)
    (out / "single").mkdir(exist_ok=True)
    save_file(every_dtype(), out / "single" / "model.safetensors", metadata={"format": "pt", "note": 'é"\n'})
    expected = {"state": describe(state()), "single": describe(every_dtype())}
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
