"""Checkpoints of DeepSpeed, small, and what DeepSpeed itself says is in them.

    python make_deepspeed.py OUT CASE...

needs deepspeed (made with 0.19.8, 0.16.9 and 0.14.5) and a CPU; each case forks its ranks. A case is `zero{1,2,3}_w{ranks}[_bf16][_sub][_tp][_offload]`:
the stage, the number of ranks, weights in bfloat16, sub-groups of a few elements (stage 3), two tensor parallel ranks, the optimizer
(and in stage 3 the weights) offloaded to the CPU. The
model has a tied, a frozen and an empty weight, buffers and sizes that no number of ranks divides; the optimizer has two
groups. `expected.json` has, for each key, dtype, shape and sha256 of what DeepSpeed's own functions return for the
parameter. `_universal` beside a case is what `ds_to_universal` made of it.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import traceback
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_IGNORE_CUDA_DETECTION="1")

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

# Shared memory between ranks would be compiled on the spot, and is not needed.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

STEPS = 2


class Sum(torch.autograd.Function):
    """The sum over tensor parallel ranks; its gradient is the same on all of them."""

    @staticmethod
    def forward(_, x, group):
        if group is not None:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient, None


class Spread(torch.autograd.Function):
    """The same on all tensor parallel ranks; its gradient is their sum."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return Sum.apply(gradient, context.group), None


class Tiny(nn.Module):
    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 14 // tp)
        self.down = nn.Linear(14 // tp, 5)
        self.frozen = nn.Linear(5, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, group=None) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.down(torch.relu(self.up(Spread.apply(hidden, group))))
        hidden = self.frozen(Sum.apply(hidden, group))
        self.count += 1
        self.mean += 0.5
        return self.head(self.norm(hidden) * self.scale)


def digest(tensor: torch.Tensor) -> dict[str, object]:
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


class Grid:
    """Ranks as (data parallel, tensor parallel), the way DeepSpeed asks for it."""

    def __init__(self, tp: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp, self.dp = tp, world // tp
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        for i in range(self.dp):
            group = dist.new_group([i * tp + j for j in range(tp)])
            if i == self.dp_rank:
                self.tp_group = group
        for j in range(tp):
            group = dist.new_group([i * tp + j for i in range(self.dp)])
            if j == self.tp_rank:
                self.dp_group = group

    def get_model_parallel_rank(self):
        return self.tp_rank

    def get_model_parallel_world_size(self):
        return self.tp

    def get_model_parallel_group(self):
        return self.tp_group

    def get_data_parallel_rank(self):
        return self.dp_rank

    def get_data_parallel_world_size(self):
        return self.dp

    def get_data_parallel_group(self):
        return self.dp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


PATTERNS = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"embedding\.weight", r"down\.bias", r"norm\..*", r"scale", r"head\.weight", r"frozen\..*"],
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
    "parameter_to_average_patterns": [],
    "vocabulary_parameter_patterns": [],
}


def full(name: str, tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The tensor of all tensor parallel ranks."""
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    if grid.tp == 1 or dim is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(grid.tp)]
    dist.all_gather(parts, tensor.contiguous(), group=grid.tp_group)
    return torch.cat(parts, dim)


def run(out: Path, stage: int, flags: list[str]) -> None:
    deepspeed.init_distributed("gloo")
    grid = Grid(2 if "tp" in flags else 1)
    torch.manual_seed(grid.tp_rank if grid.tp > 1 else 0)
    model = Tiny(grid.tp)
    if grid.tp > 1:
        torch.manual_seed(99)
        for name, parameter in model.named_parameters():
            if not name.startswith(("up.", "down.weight")):
                nn.init.normal_(parameter)
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    config = {
        "train_batch_size": 12 * grid.dp // grid.dp,
        "zero_optimization": {
            "stage": stage,
            **({"sub_group_size": 40} if "sub" in flags else {}),
            **({"offload_optimizer": {"device": "cpu"}} if "offload" in flags else {}),
            **({"offload_param": {"device": "cpu"}} if "offload" in flags and stage == 3 else {}),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if "bf16" in flags:
        config["bf16"] = {"enabled": True}
        model = model.bfloat16()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, mpu=grid if grid.tp > 1 else None
    )
    for step in range(STEPS):
        seed = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (12,), generator=seed).chunk(grid.dp)[grid.dp_rank]
        logits = engine(tokens, grid.tp_group if grid.tp > 1 else None)
        engine.backward(nn.functional.cross_entropy(logits.float(), tokens))
        engine.step()
    if stage < 3 and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected: dict[str, object] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            weight = safe_get_full_fp32_param(parameter)
            for slot in ("exp_avg", "exp_avg_sq"):
                state = safe_get_full_optimizer_state(parameter, slot)
                if name != "head.weight":
                    expected[f"optim.state.{name}.{slot}"] = digest(full(name, state.reshape(weight.shape), grid))
        elif stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                weight = parameter.detach().clone()
        else:
            weight = parameter.detach()
        expected[f"model.{name}"] = digest(full(name, weight, grid))
    for name, buffer in model.named_buffers():
        expected[f"model.{name}"] = digest(buffer)
    client = {"step": STEPS, "note": "kept"}
    if grid.tp > 1:
        client["universal_checkpoint_info"] = PATTERNS
    engine.save_checkpoint(out / "checkpoint", tag=f"global_step{STEPS}", client_state=client)
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
        for script in (out / "checkpoint").glob("*.py"):
            script.unlink()
    dist.barrier()
    dist.destroy_process_group()


def ranks(count: int, work) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            code = 0
            try:
                work()
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        sys.exit("a rank failed")


def universal(case: Path) -> None:
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    tag = f"global_step{STEPS}"
    target = case.with_name(case.name + "_universal")
    shutil.rmtree(target, ignore_errors=True)
    output = target / "checkpoint" / f"{tag}_universal"
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(case / "checkpoint" / tag),
            output_folder=str(output),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    (target / "checkpoint" / "latest_universal").write_text(f"{tag}_universal")
    shutil.copy(case / "expected.json", target / "expected.json")


def main() -> None:
    out = Path(sys.argv[1])
    for case in sys.argv[2:]:
        stage, world, *flags = case.split("_")
        folder = out / case
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if "universal" in flags:
            shutil.rmtree(folder)
            universal(out / case.removesuffix("_universal"))
            continue
        ranks(int(world[1:]), lambda: run(folder, int(stage[4:]), flags))


if __name__ == "__main__":
    main()
