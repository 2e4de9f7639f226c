"""Per-rank files with DTensors in them, as verl and accelerate (without DCP) write them, by this torch.

    python make_ranks.py OUT

Writes OUT/verl_w4/checkpoint/{model,optim,extra_state}_world_size_4_rank_R.pt and OUT/accelerate_w2/checkpoint/…_rankR.bin,
and beside each an expected.json: dtype, shape and sha256 of every full tensor.

    python make_ranks.py OUT fsdp

writes what training with FSDP itself leaves: OUT/{hsdp,tp_fsdp2}_w4 (FSDP2 on meshes of two dimensions, where this torch has it on the
CPU), OUT/fsdp1_sharded_w3 and OUT/fsdp1_local_w3 (FSDP1 without a mesh: ShardedTensors, by name and flat).
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


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, a bias of one element, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 5, bias=False)
        self.last = torch.nn.Linear(5, 1)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(torch.tanh(self.up(x))))


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The same data on all ranks, so that the whole state is that of a model that is trained alone."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optim.zero_grad()
        model(made(20 + step, 4, 6)).square().mean().backward()
        optim.step()
    return optim


def whole(value: object) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if hasattr(value, "local_shards"):
        # Each rank fills in its own, and the sum is the whole.
        out = torch.zeros(value.size(), dtype=value.dtype)
        for shard in value.local_shards():
            places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
            out[tuple(slice(o, o + s) for o, s in places)] = shard.tensor
        dist.all_reduce(out)
        return out
    return value


def written(out: Path, model: dict[str, object], optim: dict[str, object] | None) -> None:
    """As verl names the files; what is expected is what the ranks together say."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = {"model": model} | ({"optim": optim} if optim else {})
    for name, state in parts.items():
        torch.save(state, out / "checkpoint" / f"{name}_world_size_{world}_rank_{rank}.pt")
    full = {f"model.{key}": digest(whole(tensor)) for key, tensor in model.items()}
    for key, slots in (optim or {"state": {}})["state"].items():
        full |= {f"optim.state.{key}.{slot}": digest(whole(tensor)) for slot, tensor in slots.items()}
    if rank == 0:
        (out / "expected.json").write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")


def hsdp(out: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optim = trained(model)
    named = dict(zip(range(99), dict(model.named_parameters())))
    state = {named[number]: slots for number, slots in optim.state_dict()["state"].items()}
    written(out, model.state_dict(), {"state": state, "param_groups": [{"lr": 0.1}]})


def tp_fsdp2(out: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = fully_shard(model, mesh=mesh["dp"])
    optim = trained(model)
    named = dict(zip(range(99), dict(model.named_parameters())))
    state = {named[number]: slots for number, slots in optim.state_dict()["state"].items()}
    kinds = {type(placement).__name__ for tensor in model.parameters() for placement in tensor.placements}
    assert "_StridedShard" in kinds, kinds
    written(out, model.state_dict(), {"state": state, "param_groups": [{"lr": 0.1}]})


def fsdp1(out: Path, kind: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=False)
    optim = trained(model)
    with FSDP.state_dict_type(model, StateDictType[kind]):
        state = model.state_dict()
        assert any(hasattr(tensor, "local_shards") for tensor in state.values()), [type(t) for t in state.values()]
        written(out, state, FSDP.optim_state_dict(model, optim) if kind == "SHARDED_STATE_DICT" else None)


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
    if sys.argv[2:] == ["fsdp"]:
        if not torch.__version__.startswith("2.5"):
            ranks(4, hsdp, target / "hsdp_w4")
            ranks(4, tp_fsdp2, target / "tp_fsdp2_w4")
        ranks(3, lambda out: fsdp1(out, "SHARDED_STATE_DICT"), target / "fsdp1_sharded_w3")
        ranks(3, lambda out: fsdp1(out, "LOCAL_STATE_DICT"), target / "fsdp1_local_w3")
    else:
        ranks(4, verl, target / "verl_w4")
        ranks(2, accelerate, target / "accelerate_w2")
