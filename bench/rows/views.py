"""15. Views: 64 experts in 16 layers unstacked and transposed into FSDP2 shards on 4 ranks, beside PyTorch in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ranks
import torch
from harness import Bench, Peak, Row, in_threads, remove, take_turns, timed
from torch import nn

#: From a stacked tensor of a layer's experts, [expert, in, out], to one of each, [out, in].
TRANSPOSED = {
    "from": "layers.{layer}.{what}",
    "to": "{layer}.{expert}.{what}.weight",
    "steps": [{"unstack": "expert"}, {"transpose": [0, 1]}],
}
#: The same where each expert's rows stay as they lie.
UNSTACKED = {**TRANSPOSED, "steps": [{"unstack": "expert"}]}


def sizes(quick: bool) -> tuple[int, int, int, int]:
    """Layers, experts, width, width between."""
    return (2, 4, 32, 16) if quick else (16, 64, 512, 256)


def stacked(quick: bool) -> dict[str, torch.Tensor]:
    layers, experts, width, inner = sizes(quick)
    torch.manual_seed(0)
    made = {}
    for layer in range(layers):
        made[f"layers.{layer}.up"] = torch.randn(experts, width, inner).to(torch.bfloat16)
        made[f"layers.{layer}.down"] = torch.randn(experts, inner, width).to(torch.bfloat16)
    return made


def make(_rank: int, _size: int, path: str, quick: bool) -> int:
    from safetensors.torch import save_file

    tensors = stacked(quick)
    save_file(tensors, path)
    return sum(tensor.nbytes for tensor in tensors.values())


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(inner, width, bias=False, dtype=torch.bfloat16)


class Stack(nn.ModuleList):
    """What fully_shard takes for a module: one that could be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def fsdp2(quick: bool, size: int) -> nn.Module:
    """Separate experts, sharded; every byte of them touched."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers, experts, width, inner = sizes(quick)
    with torch.device("meta"):
        model = Stack(Stack(Expert(width, inner) for _ in range(experts)) for _ in range(layers))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(1.0)
    return model


def in_memory(model: nn.Module, path: str) -> None:
    """As it is done by hand: the file into host memory, each expert cut out and turned round, then each rank its shard."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole = {}
    for key, tensor in load_file(path).items():
        _, layer, what = key.split(".")
        for expert, weight in enumerate(tensor.unbind()):
            whole[f"{layer}.{expert}.{what}.weight"] = weight.T.contiguous()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))


def load(_rank: int, size: int, path: str, quick: bool, rounds: int):
    import reshard
    import reshard.torch as rt

    model = fsdp2(quick, size)
    state = model.state_dict()
    rule = reshard.View(TRANSPOSED)
    peaks: dict[str, list[float]] = {"ours": [], "torch": []}

    def side(name: str, work) -> float:
        seconds: list[float] = []
        with Peak() as peak:
            seconds.append(ranks.together(work))
        peaks[name].append(peak.bytes / 1e6)
        return seconds[0]

    seconds = take_turns(
        rounds,
        {
            "torch": lambda: side("torch", lambda: in_memory(model, path)),
            "ours": lambda: side("ours", lambda: rt.load(state, path, view=rule)),
        },
    )
    found = [parameter.to_local().clone() for parameter in model.parameters()]
    in_memory(model, path)
    if not all(torch.equal(a, b.to_local()) for a, b in zip(found, model.parameters(), strict=True)):
        raise AssertionError("PyTorch and reshard loaded different content")
    return seconds, {name: found[-rounds:] for name, found in peaks.items()}


def make_separate(_rank: int, _size: int, path: str, quick: bool) -> None:
    """The same bytes under the names that UNSTACKED gives them."""
    from safetensors.torch import save_file

    made = {}
    for key, tensor in stacked(quick).items():
        _, layer, what = key.split(".")
        made |= {f"{layer}.{expert}.{what}.weight": weight.contiguous() for expert, weight in enumerate(tensor.unbind())}
    save_file(made, path)


def alike(_rank: int, size: int, path: str, separate: str, quick: bool, rounds: int):
    """Seconds of a load through a view whose rows stay contiguous; of the same load of a file that needs no view, as it has the
    tensors that are wanted; and of as many bytes as few large tensors, stacked as the first file has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    import reshard
    import reshard.torch as rt

    mesh = init_device_mesh("cpu", (size,))
    layers, experts, width, inner = sizes(quick)
    shapes = {"up": (width, inner), "down": (inner, width)}
    make = lambda shape: zeros(*shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(len(shape) - 2)])
    plain = {f"layers.{layer}.{what}": make((experts, *shape)) for layer in range(layers) for what, shape in shapes.items()}
    single = {
        f"{layer}.{expert}.{what}.weight": make(shape)
        for layer in range(layers)
        for expert in range(experts)
        for what, shape in shapes.items()
    }
    rule = reshard.View(UNSTACKED)
    return take_turns(
        rounds,
        {
            "plain": lambda: ranks.together(lambda: rt.load(single, separate)),
            "stacked": lambda: ranks.together(lambda: rt.load(plain, path)),
            "ours": lambda: ranks.together(lambda: rt.load(single, path, view=rule)),
        },
    )


def turned(_rank: int, _size: int, path: str, quick: bool, rounds: int):
    """A load of transposed tensors by one process, and a copy in memory that transposes."""
    import reshard
    import reshard.torch as rt

    torch.set_num_threads(1)
    sources = stacked(quick)
    rule = reshard.View({"from": "layers.{layer}.{what}", "to": "{layer}.{what}", "steps": [{"transpose": [1, 2]}]})
    state = {
        key.removeprefix("layers."): torch.ones(source.shape[0], source.shape[2], source.shape[1], dtype=source.dtype)
        for key, source in sources.items()
    }
    copies = {key: torch.ones_like(tensor) for key, tensor in state.items()}
    pairs = [(copies[key.removeprefix("layers.")], source) for key, source in sources.items()]

    def copy() -> None:
        def part(number: int) -> None:
            for to, source in pairs[number::2]:
                for one, other in zip(to, source):
                    one.copy_(other.T)

        in_threads(part, 2)

    seconds = take_turns(
        rounds, {"limit": lambda: timed(copy), "ours": lambda: timed(lambda: rt.load(state, path, view=rule, verify="never"))}
    )
    if not all(torch.equal(state[key], copies[key]) for key in state):
        raise AssertionError("a transposed load differs from a transposed copy")
    return seconds


def rows(bench: Bench) -> Iterator[Row]:
    folder = bench.place("views")
    folder.mkdir(parents=True, exist_ok=True)
    path = str(Path(folder) / "model.safetensors")
    (total,) = ranks.run(1, make, path, bench.quick)
    layers, experts, _, _ = sizes(bench.quick)
    what = f"{experts} experts × {layers} layers"
    results = ranks.run(4, load, path, bench.quick, min(bench.rounds, 3))
    seconds = ranks.slowest([result[0] for result in results])
    yield Row(
        "views/load",
        f"{what}, unstacked and transposed into FSDP2 shards on 4 ranks",
        seconds["ours"],
        seconds["torch"],
        bytes=total,
        note="PyTorch: the file in host memory, experts cut and turned there, then set_model_state_dict",
    )
    ours, theirs = ([max(values) for values in zip(*(result[1][side] for result in results))] for side in ("ours", "torch"))
    yield Row("views/load-peak", "memory above the model's, the most of any rank", ours, theirs, unit="MB")
    separate = str(Path(folder) / "separate.safetensors")
    ranks.run(1, make_separate, separate, bench.quick)
    seconds = ranks.slowest(ranks.run(4, alike, path, separate, bench.quick, bench.rounds))
    yield Row(
        "views/contiguous",
        "unstacked, rows as they lie: seconds over those of the same tensors from a file that has them so",
        [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)],
        unit="×",
        limit=[1.0],
        limit_name="the load without a view",
    )
    yield Row(
        "views/contiguous-stacked",
        f"the same over a load of {2 * layers} stacked tensors instead of {2 * layers * experts}: what tensors cost in Python, too",
        [a / b for a, b in zip(seconds["ours"], seconds["stacked"], strict=True)],
        unit="×",
        limit=[1.0],
        limit_name="the load of stacked tensors",
    )
    (seconds,) = ranks.run(1, turned, path, bench.quick, bench.rounds)
    yield Row(
        "views/transposed",
        "transposed, one process",
        seconds["ours"],
        limit=seconds["limit"],
        limit_name="copying in memory with a transpose, by two threads",
        bytes=total,
    )
    remove(folder)
