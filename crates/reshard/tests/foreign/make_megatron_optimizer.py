"""Checkpoints of Megatron core's distributed optimizer, small, in each of its layouts, and what it holds.

    python make_megatron_optimizer.py OUT LAYOUT...

needs megatron-core and a CPU: two tensor parallel and two data parallel ranks, a bfloat16 model, Adam. LAYOUT is a
`distrib_optim_sharding_type` (`dp_reshardable` made with 0.16.1 and 0.19.2, `fully_reshardable` with 0.15 to 0.19, `fully_sharded_model_space` and
`dp_zero_gather_scatter` with 0.14.0; its `fully_sharded_bucket_space` fails in an assertion of its own), or `torch`: one file a rank, and `distrib_optim.pt`.
`expected.json` has dtype, shape and sha256 of the weights and of each parameter's state, gathered from the optimizer's own
shards; `parameters.json` is the map that `reshard.integrations.megatron` makes.
"""

import json
import os
import queue
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

import numpy
import torch
import torch.distributed as dist
from common import digest, on_cpu, ranks

ROOT = Path(__file__).resolve().parents[4]
STEPS = 3


def without_cuda() -> Callable[[], None]:
    """Megatron assumes CUDA in places. Its writers, which are processes of their own, do not: they are given torch as it is."""
    torch.cuda.current_device = lambda: "cpu"
    # Of Megatron core 0.14, which is older than NumPy 2.
    numpy.product = numpy.prod
    torch.cuda.synchronize = lambda *_, **__: None
    typed = torch.Tensor.type

    def as_cuda(tensor, *args, **kwargs):
        name = typed(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    kept = {name: getattr(torch, name) for name in ("zeros", "tensor", "empty", "ones")}
    torch.Tensor.type = as_cuda
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    for name, make in kept.items():
        setattr(torch, name, on_cpu(make))

    def undo() -> None:
        torch.Tensor.type = typed
        for name, make in kept.items():
            setattr(torch, name, make)

    return undo


def write_here(transforms, *rest) -> None:
    """Writes what a rank saves in this process: processes of its own hang where this one was forked."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    buckets, results = rest[-2:]
    written = {}
    for number, bucket in enumerate(buckets):
        done, counted = queue.Queue(), queue.Queue()
        counted.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, done, counted, True)
        written[number] = done.get()[1]
    results.put(written)


def make_model(config):
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Tiny(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            init = torch.nn.init.normal_
            self.up = tensor_parallel.ColumnParallelLinear(6, 10, config=config, init_method=init, bias=True, gather_output=False)
            self.down = tensor_parallel.RowParallelLinear(
                10, 7, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
            )
            self.scale = torch.nn.Parameter(torch.randn(5))

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = {}
            for name in ("up", "down"):
                state |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
            return state | make_sharded_tensors_for_checkpoint({"scale": self.scale}, prefix, {}, sharded_offsets)

    torch.manual_seed(5 + dist.get_rank() % 2)
    model = Tiny()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in (model.down.bias, model.scale):
            parameter.normal_()
    return model.bfloat16()


def gathered(inner, sharded, tp_group) -> dict[str, torch.Tensor]:
    """The state of each parameter, put together from all ranks' shards."""
    from megatron.core import parallel_state

    dp_group = parallel_state.get_data_parallel_group()
    found = {}
    cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for key, tensor in sharded.items():
        if not hasattr(tensor, "local_shape"):
            continue
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            mine = torch.zeros(tensor.data.numel())
            for ranges in inner.gbuf_ranges:
                for buckets in ranges.values():
                    for bucket in buckets:
                        for parameter, where in bucket["param_map"].items():
                            if parameter.data_ptr() == tensor.data.data_ptr():
                                states = inner._get_main_param_and_optimizer_states(parameter)
                                mine[where["param"].start : where["param"].end] = states[slot].float()
            dist.all_reduce(mine, group=dp_group)
            mine = mine.view(tensor.local_shape)
            if key in cut:
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(tp_group))]
                dist.all_gather(parts, mine, group=tp_group)
                mine = torch.cat(parts, cut[key])
            found[f"{slot}.{key}"] = mine
    return found


def run(out: Path, layout: str) -> None:
    dist.init_process_group("gloo")
    undo = without_cuda()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=2,
    )
    model = make_model(config)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=60), model)
    settings = OptimizerConfig(
        bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, lr=0.1, clip_grad=0.0, optimizer="adam"
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    # Steps of the real Adam on gradients that are made up: no kernel of a GPU is needed for that.
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for group in inner.optimizer.param_groups:
            for shard in group["params"]:
                shard.grad = torch.randn(shard.shape, generator=generator)
        inner.optimizer.step()
    inner._copy_main_params_to_model_params()
    for buffer in inner.buffers:
        for bucket in buffer.buckets:
            part = bucket.param_data.numel() // parallel_state.get_data_parallel_world_size()
            rank = parallel_state.get_data_parallel_rank()
            mine = bucket.param_data[rank * part : (rank + 1) * part].clone()
            parts = [torch.empty_like(mine) for _ in range(parallel_state.get_data_parallel_world_size())]
            dist.all_gather(parts, mine, group=parallel_state.get_data_parallel_group())
            bucket.param_data.copy_(torch.cat(parts))
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded = model.sharded_state_dict(metadata=metadata)
    sharded = {key: value for key, value in sharded.items() if value is not None}
    tp_group = parallel_state.get_tensor_model_parallel_group()
    states = gathered(inner, sharded, tp_group)
    weights = {}
    for key, tensor in sharded.items():
        if hasattr(tensor, "local_shape"):
            weights[key] = states[f"param.{key}"].bfloat16()
    folder = out / "checkpoint" / "iter_0000003"
    rank = dist.get_rank()
    # As a file: the package need not be built where Megatron is.
    source = (ROOT / "python/reshard/integrations/_parameter_map.py").read_text()
    source = source.replace("from .._errors import InvalidInput", "InvalidInput = ValueError")
    source = source.replace("from .._paths import StrPath, path_text", "StrPath, path_text = str, str")
    made = {"__name__": "parameter_map"}
    exec(compile(source, "_parameter_map.py", "exec"), made)
    folder.mkdir(parents=True, exist_ok=True)
    made["save_parameter_map"](str(out / "parameters.json"), optimizer, sharded)
    name = "fp32_param" if layout == "fully_sharded_model_space" else "param"
    if rank == 0:
        (out / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
        expected = {} if layout == "torch" else {key: digest(tensor) for key, tensor in weights.items()}
        for key, tensor in states.items():
            slot, key = key.split(".", 1)
            expected[f"optimizer.state.{name if slot == 'param' else slot}.{key}"] = digest(tensor)
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    if layout == "torch":
        state = {"iteration": 3, "checkpoint_version": 3.0, "model": model.state_dict(), "optimizer": inner.state_dict()}
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        below = folder / f"mp_rank_{tensor_rank:02d}"
        below.mkdir(exist_ok=True)
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(state, below / "model_optim_rng.pt")
        inner.save_parameter_state(str(below / "distrib_optim.pt"))
    else:
        state = {"model": sharded, "iteration": 3, "checkpoint_version": 3.0}
        metadata = {"distrib_optim_sharding_type": layout}
        state["optimizer"] = optimizer.sharded_state_dict(dict(sharded), metadata=metadata)
        undo()
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write_here)
        strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy("torch_dist")
        dist_checkpointing.save(state, str(folder), strategy)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for layout in sys.argv[2:]:
        out = Path(sys.argv[1]) / layout
        out.mkdir(parents=True, exist_ok=True)
        ranks(4, lambda out=out, layout=layout: run(out, layout))


if __name__ == "__main__":
    main()
