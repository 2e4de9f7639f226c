"""Checkpoints of DeepSpeed with optimizers other than Adam, small, and what DeepSpeed itself says is in them.

    python make_deepspeed_optimizers.py OUT CASE...

needs deepspeed (made with 0.19.8) and a CPU; each case forks three ranks. A case is `zero{1,2,3}_{sgd,plain,lion,few}`: SGD with
momentum, SGD without, a Lion of its own, and Adam of which all but two small parameters are frozen. The model is that of
`make_deepspeed.py`.
"""

import json
import shutil
import sys
from pathlib import Path

import make_deepspeed
import torch
import torch.distributed as dist
from common import digest, ranks
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.add_(average.mul(0.9).add(parameter.grad, alpha=0.1).sign(), alpha=-group["lr"])
                average.mul_(0.99).add_(parameter.grad, alpha=0.01)


OPTIMIZERS = {
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), ["momentum_buffer"]),
    "plain": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), []),
    "lion": (Lion, ["exp_avg"]),
    "few": (lambda parameters: torch.optim.Adam(parameters, lr=0.1), ["exp_avg", "exp_avg_sq"]),
}


def run(out: Path, stage: int, name: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = make_deepspeed.Tiny()
    if name == "few":
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key.startswith("norm"))
    make, slots = OPTIMIZERS[name]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_batch_size": 12,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(parameters), config=config, model_parameters=parameters)
    for step in range(make_deepspeed.STEPS):
        tokens = torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(step)).chunk(3)[dist.get_rank()]
        engine.backward(nn.functional.cross_entropy(engine(tokens).float(), tokens))
        engine.step()
    expected = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        weight = safe_get_full_fp32_param(parameter)
        expected[f"model.{key}"] = digest(weight)
        # The tied weight's state is under its first name.
        for slot in slots if key != "head.weight" else []:
            expected[f"optim.state.{key}.{slot}"] = digest(safe_get_full_optimizer_state(parameter, slot).reshape(weight.shape))
    engine.save_checkpoint(out / "checkpoint", tag=f"global_step{make_deepspeed.STEPS}")
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
        for script in (out / "checkpoint").glob("*.py"):
            script.unlink()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for case in sys.argv[2:]:
        stage, name = case.split("_")
        out = Path(sys.argv[1]) / case
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        ranks(3, lambda out=out, stage=stage, name=name: run(out, int(stage[4:]), name))


if __name__ == "__main__":
    main()
