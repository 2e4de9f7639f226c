"""A checkpoint of Megatron core in its format `torch_dist`, small, and what was saved.

    python make_megatron.py OUT [common_state]

needs megatron-core (made with 0.14.0, 0.16.1 and 0.19.2) and a CPU: two tensor parallel and two data parallel ranks. `expected.json` has dtype,
shape and sha256 of every tensor. With `common_state`, what all ranks share is an object among the others, as releases from
0.19 on have it by themselves; before, it is `common.pt`.
"""

import argparse
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


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def digest(tensor: torch.Tensor) -> dict[str, object]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    name = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def run(out: Path) -> None:
    dist.init_process_group("gloo")
    # Megatron assumes CUDA in places.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tp, rank = 2, parallel_state.get_tensor_model_parallel_rank()
    dp, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    weight, embedding, bias, flat = made(1, 24, 12), made(2, 10, 8), made(3, 24), made(4, 24 * 12)

    def cut(key: str, tensor: torch.Tensor, dim: int) -> ShardedTensor:
        mine = tensor.chunk(tp, dim)[rank].contiguous()
        return ShardedTensor.from_rank_offsets(key, mine, (dim, rank, tp), replica_id=replica)

    slots = {name: cut(f"optimizer.state.{name}.linear.weight", weight * n, 0) for n, name in enumerate(("param", "exp_avg"), 2)}
    part = flat.chunk(tp * dp)[rank * dp + replica].contiguous()
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_fp32.bucket_idx_0.exp_avg"
    state = {
        "model": {
            "linear.weight": cut("linear.weight", weight, 0),
            "embedding.weight": cut("embedding.weight", embedding, 1),
            "linear.bias": ShardedTensor.from_rank_offsets("linear.bias", bias, replica_id=(0, rank, replica)),
            "linear._extra_state": ShardedObject("linear._extra_state", {"fp8": torch.ones(2)}, (tp,), (rank,), replica_id=replica),
        },
        "optimizer": {
            "slots": slots,
            "bucket": ShardedTensor.from_rank_offsets(bucket, part, (0, rank * dp + replica, tp * dp)),
            "param_groups": [{"lr": 0.5, "params": [0]}],
        },
        "rng_state": ShardedObject("rng_state", [{"python": (1, 2)}], (tp,), (rank,), replica_id=replica),
        "iteration": 7,
        "args": argparse.Namespace(hidden=12),
        "checkpoint_version": 3.0,
    }
    if "common_state" in sys.argv:
        common = {name: state.pop(name) for name in ("iteration", "args", "checkpoint_version")}
        common["optimizer"] = {"param_groups": state["optimizer"].pop("param_groups")}
        state["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=dist.get_rank())
    folder = out / "checkpoint" / "iter_0000007"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (out / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("7")
        expected = {
            "linear.weight": digest(weight),
            "embedding.weight": digest(embedding),
            "linear.bias": digest(bias),
            "optimizer.state.param.linear.weight": digest(weight * 2),
            "optimizer.state.exp_avg.linear.weight": digest(weight * 3),
            bucket: digest(flat),
        }
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy("torch_dist")
    dist_checkpointing.save(state, str(folder), strategy)
    dist.barrier()
    if "common_state" in sys.argv and dist.get_rank() == 0:
        (folder / "common.pt").unlink()


def main() -> None:
    out = Path(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            code = 0
            try:
                run(out)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
