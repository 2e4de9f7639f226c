"""Per-rank files with DTensors in them, as verl and accelerate (without DCP) write them, by this torch.

    python make_ranks.py OUT

Writes OUT/verl_w4/checkpoint/{model,optim,extra_state}_world_size_4_rank_R.pt and OUT/accelerate_w2/checkpoint/…_rankR.bin,
and beside each an expected.json: dtype, shape and sha256 of every full tensor.
"""

import hashlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
except ImportError:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def digest(tensor: torch.Tensor) -> dict[str, object]:
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    name = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def made(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def verl(out: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = {
        "rows": (made(1, 10, 6), line, [Shard(0)]),
        "few": (made(2, 2, 3), line, [Shard(0)]),
        "grid": (made(3, 7, 9, dtype=torch.bfloat16), grid, [Shard(0), Shard(1)]),
        "copies": (made(4, 5, 4), grid, [Replicate(), Shard(0)]),
        "same": (made(5, 3), grid, [Replicate(), Replicate()]),
        "scalar": (made(6), line, [Replicate()]),
        "twice": (made(7, 9, 2), grid, [Shard(0), Shard(0)]),
    }
    model = {name: distribute_tensor(tensor, mesh, cut) for name, (tensor, mesh, cut) in whole.items()}
    model["plain"] = made(8, 4)
    expected = {f"model.{name}": digest(tensor) for name, (tensor, _, _) in whole.items()}
    expected["model.plain"] = digest(model["plain"])
    moments = {"exp_avg": distribute_tensor(made(9, 10, 6), line, [Shard(0)]), "step": torch.tensor(3.0)}
    optim = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    expected["optim.state.0.exp_avg"] = digest(made(9, 10, 6))
    extra = {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.tensor([rank], dtype=torch.uint8)}}
    for name, state in (("model", model), ("optim", optim), ("extra_state", extra)):
        torch.save(state, out / "checkpoint" / f"{name}_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
        (out / "checkpoint" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))


def accelerate(out: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = made(1, 5, 3)
    torch.save({"layer.weight": distribute_tensor(weight, mesh, [Shard(0)])}, out / "checkpoint" / f"pytorch_model_fsdp_0_rank{rank}.bin")
    state = {"state": {"layer.weight": {"exp_avg": distribute_tensor(weight * 2, mesh, [Shard(0)])}}, "param_groups": [{"lr": 0.5}]}
    torch.save(state, out / "checkpoint" / f"optimizer_0_rank{rank}.bin")
    if rank == 0:
        expected = {"model.layer.weight": digest(weight), "optim.state.layer.weight.exp_avg": digest(weight * 2)}
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def ranks(count: int, work, out: Path) -> None:
    (out / "checkpoint").mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            code = 0
            try:
                dist.init_process_group("gloo")
                work(out)
                dist.barrier()
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        sys.exit("a rank failed")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    ranks(4, verl, target / "verl_w4")
    ranks(2, accelerate, target / "accelerate_w2")
