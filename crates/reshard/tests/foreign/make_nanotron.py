"""Checkpoints of nanotron's own writers, small, and what was saved.

    python make_nanotron.py OUT

needs nanotron (made with 0.4) and a CPU; two tensor parallel and two data parallel ranks. Its trainer wants a GPU; its weights,
optimizers and the functions that save them do not. Writes OUT/zero1_dp2_tp2 (ZeRO-1) and OUT/zero0_dp2_tp2. Weights are cut along rows, along columns, and by chunks; one is not cut.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from common import digest, ranks
from torch import nn


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(out: Path, zero: bool) -> None:
    dist.init_process_group("gloo")
    # The package imports itself in a circle: its logging is given a stand-in for its configuration while it is imported.
    stand_ins = {name: types.ModuleType(name) for name in ("nanotron.config", "nanotron.config.config")}
    stand_ins["nanotron.config.config"].LoggingArgs = object
    sys.modules.update(stand_ins)
    import nanotron.logging

    for name in stand_ins:
        del sys.modules[name]
    importlib.import_module("nanotron.config")
    from nanotron.optim.named_optimizer import NamedOptimizer
    from nanotron.optim.zero import ZeroDistributedOptimizer
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.parameters import NanotronParameter
    from nanotron.parallel.sharded_parameters import SplitConfig, create_sharded_parameter_from_config
    from nanotron.serialize.metadata import save_meta
    from nanotron.serialize.optimizer import save_lr_scheduler, save_optimizer
    from nanotron.serialize.weights import save_weights

    class Context(ParallelContext):
        def set_device(self) -> None:
            pass

    context = Context(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=2)
    rank = dist.get_rank(context.tp_pg)
    whole = {
        "embedding.weight": (made(1, 8, 5), 0, None),
        "layer.up.weight": (made(2, 12, 5), 0, (8, 4)),
        "layer.down.weight": (made(3, 5, 6), 1, None),
        "norm.weight": (made(4, 5), None, None),
    }

    model = nn.Module()
    for name, (tensor, dim, chunks) in whole.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        if dim is None:
            parameter = NanotronParameter(tensor.clone())
        else:
            pieces = [tensor] if chunks is None else list(tensor.split(list(chunks), dim))
            mine = torch.cat([piece.chunk(2, dim)[rank] for piece in pieces], dim).contiguous()
            parameter = create_sharded_parameter_from_config(nn.Parameter(mine), context.tp_pg, SplitConfig(dim, chunks))
        module.register_parameter(last, parameter)

    def build(groups):
        return NamedOptimizer(groups, lambda params: torch.optim.AdamW(params, lr=1e-2))

    # One group each for weights that decay and those that do not.
    named = list(model.named_parameters())
    groups = [
        {"named_params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"named_params": [(n, p) for n, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    if zero:
        optimizer = ZeroDistributedOptimizer(groups, build, context.dp_pg)
    else:
        optimizer = build(groups)
    base = optimizer.get_base_optimizer() if hasattr(optimizer, "get_base_optimizer") else optimizer.optimizer
    # State as a function of the parameter, so that what all ranks hold together is known.
    expected = {f"model.{name}": digest(tensor) for name, (tensor, _, _) in whole.items()}
    names = optimizer.id_to_name
    data = dist.get_rank(context.dp_pg)
    for group in base.param_groups:
        for shard in group["params"]:
            name = names[id(shard)]
            parameter = dict(named)[name]
            state = {"step": torch.tensor(3.0)}
            for number, slot in enumerate(("exp_avg", "exp_avg_sq"), 1):
                local = parameter.detach().float().reshape(-1) * number
                if zero:
                    start, end = optimizer.param_name_to_dp_rank_offsets[name][data]
                    local = local[start:end].clone()
                else:
                    local = local.view(parameter.shape)
                state[slot] = local
            base.state[shard] = state
    for name, (tensor, _, _) in whole.items():
        for number, slot in enumerate(("exp_avg", "exp_avg_sq"), 1):
            expected[f"optim.state.{name}.{slot}"] = digest(tensor.float() * number)

    folder = out / "checkpoint" / "3"
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, context, folder)
    save_optimizer(optimizer, context, folder)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: 1.0)
    save_lr_scheduler(scheduler, context, folder)
    save_meta(context, folder, {"last_train_step": 3, "consumed_train_samples": 12})
    if dist.get_rank() == 0:
        (out / "checkpoint" / "latest.txt").write_text("3")
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for name, zero in (("zero1_dp2_tp2", True), ("zero0_dp2_tp2", False)):
        out = Path(sys.argv[1]) / name
        out.mkdir(parents=True)
        ranks(4, lambda out=out, zero=zero: run(out, zero))


if __name__ == "__main__":
    main()
