"""14. DeepSpeed's folders: opening 64 ranks of 1 GB, and ZeRO-3 to safetensors beside DeepSpeed's own zero_to_fp32."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Bench, Row, cleared, remove, take_turns, timed
from programs import Missing, program

from rows.convert import measured

#: The shapes of a Llama model's parameters, by its width, the width between, its words and its layers.
LLAMA = (4096, 11008, 32000, 26)
SMALL = (1024, 2816, 32000, 8)
QUICK = (64, 176, 512, 2)


def shapes(width: int, between: int, words: int, layers: int) -> OrderedDict[str, tuple[int, ...]]:
    found: OrderedDict[str, tuple[int, ...]] = OrderedDict({"embed_tokens.weight": (words, width)})
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"layers.{layer}.self_attn.{name}.weight"] = (width, width)
        found[f"layers.{layer}.mlp.gate_proj.weight"] = found[f"layers.{layer}.mlp.up_proj.weight"] = (between, width)
        found[f"layers.{layer}.mlp.down_proj.weight"] = (width, between)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{layer}.{name}.weight"] = (width,)
    found["norm.weight"], found["lm_head.weight"] = (width,), (words, width)
    return found


def part(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a parameter that each rank has."""
    elements = 1
    for size in shape:
        elements *= size
    return -(-elements // ranks)


class Flat:
    """A flat float32 tensor of so many elements, which nothing is known of but its size."""

    def __init__(self, elements: int) -> None:
        self.elements = elements


class _Pickler(pickle.Pickler):
    """As torch.save pickles, with flat tensors that have no data."""

    def __init__(self, file: Any, storages: list[int]) -> None:
        super().__init__(file, protocol=2)
        self.storages = storages

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, _Storage):
            return None
        import torch

        self.storages.append(thing.elements)
        return ("storage", torch.FloatStorage, str(len(self.storages) - 1), "cpu", thing.elements)

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Flat):
            return NotImplemented
        import torch

        arguments = (_Storage(thing.elements), 0, (thing.elements,), (1,), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Storage:
    def __init__(self, elements: int) -> None:
        self.elements = elements


def sparse(path: Path, tree: Any) -> None:
    """A torch.save file whose tensors are holes."""
    buffer, storages = io.BytesIO(), []
    _Pickler(buffer, storages).dump(tree)
    entries = [("data.pkl", buffer.getvalue(), None), ("byteorder", b"little", None)]
    entries += [(f"data/{number}", b"", elements * 4) for number, elements in enumerate(storages)]
    entries.append(("version", b"3\n", None))
    import zlib

    directory = b""
    with open(path, "wb") as file:
        for name, data, hole in entries:
            full = f"archive/{name}".encode()
            at, size = file.tell(), len(data) if hole is None else hole
            head = (20, 0, 0, 0, 0, zlib.crc32(data), size, size, len(full))
            file.write(struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", *head, 0) + full + data)
            if hole is not None:
                file.seek(hole, os.SEEK_CUR)
            directory += struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 20, *head, 0, 0, 0, 0, 0, at) + full
        at = file.tell()
        file.write(directory)
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(directory), at, 0))


def trees(sizes: tuple[int, int, int, int], ranks: int, rank: int, tensor: Any) -> tuple[dict, dict]:
    """What ZeRO-3 saves on a rank: the optimizer's file and the model's."""
    import torch

    known = shapes(*sizes)
    elements = sum(part(shape, ranks) for shape in known.values())
    slots = {"exp_avg": tensor(elements), "exp_avg_sq": tensor(elements), "step": torch.tensor(10.0)}
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    state = {
        "zero_stage": 3,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": {0: slots}, "param_groups": [group]},
        "fp32_flat_groups": [tensor(elements)],
    }
    optimizer = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
    model = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in known.items())],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "ds_version": "0.19.8",
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "global_steps": 10,
        "skipped_steps": 0,
    }
    return optimizer, model


def make(folder: Path, sizes: tuple[int, int, int, int], ranks: int, sparsely: bool) -> int:
    """A ZeRO-3 checkpoint; how many bytes its weights have."""
    import torch

    tag = folder / "global_step10"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    for rank in range(ranks):
        optimizer, model = trees(sizes, ranks, rank, Flat if sparsely else torch.rand)
        save = (lambda tree, path: sparse(path, tree)) if sparsely else torch.save
        if sparsely:
            # Tensors that are no holes have data.
            optimizer["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"] = 10
        save(optimizer, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    total = 0
    for shape in shapes(*sizes).values():
        total += part(shape, 1) * 4
    return total


DEEPSPEED = """
import os, sys, time
os.environ["DS_ACCELERATOR"] = "cpu"
import logging
logging.disable(logging.INFO)
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
start = time.perf_counter()
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True, max_shard_size="1TB")
print("seconds", time.perf_counter() - start)
"""


def deepspeed(python: str, source: Path, target: str) -> float:
    """Seconds of DeepSpeed's own conversion, without its import."""
    answer = subprocess.run([python, "-c", DEEPSPEED, str(source), target], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise RuntimeError(answer.stderr[-2000:])
    return float(answer.stdout.split("seconds")[-1])


def rows(bench: Bench) -> Iterator[Row]:
    try:
        tool = program("reshard", bench.build)
    except Missing as missing:
        yield Row("zero/open", "open a ZeRO folder of 64 ranks", skipped=str(missing))
        yield Row("zero/safetensors", "ZeRO-3 to safetensors", skipped=str(missing))
        return
    yield from opening(bench, tool)
    yield from converting(bench, tool)


def opening(bench: Bench, tool: Path) -> Iterator[Row]:
    ranks = 4 if bench.quick else 64
    source = bench.place("zero-sparse")
    remove(source)
    make(source, QUICK if bench.quick else LLAMA, ranks, sparsely=True)
    size = sum(file.stat().st_size for file in source.rglob("*.pt"))
    command = [str(tool), "ls", "--quiet", "--json", str(source)]
    samples = [measured(command) for _ in range(bench.rounds)]
    what = f"open a ZeRO-3 folder of {ranks} ranks, {size / 1e9:.0f} GB"
    note = "a whole process that lists every key; the files are sparse"
    yield Row("zero/open", what, [seconds for seconds, _ in samples], note=note)
    yield Row("zero/open-peak", f"peak memory: {what}", [peak for _, peak in samples], unit="MB", note=note)
    remove(source)


def converting(bench: Bench, tool: Path) -> Iterator[Row]:
    source, target = bench.place("zero-source"), bench.place("zero-model")
    remove(source)
    total = make(source, QUICK if bench.quick else SMALL, 4, sparsely=False)
    # The trainers' own environment, where `make test-integrations` has made it.
    trainers = Path(__file__).parents[2] / ".venv-integrations/bin/python"
    python = os.environ.get("RESHARD_DEEPSPEED_PYTHON") or str(trainers if trainers.exists() else sys.executable)
    found = subprocess.run([python, "-c", "import deepspeed"], capture_output=True, check=False).returncode == 0
    peaks: list[float] = []

    def ours() -> float:
        command = [str(tool), "convert", "--quiet", "--model-only", "--no-sync", str(source)]
        seconds, peak = measured([*command, f"{cleared(target)}/model.safetensors"])
        peaks.append(peak)
        return seconds

    def copy() -> float:
        place = Path(cleared(target))
        place.mkdir()
        pieces = sorted(source.rglob("*optim_states.pt"))

        def work() -> None:
            left = total
            with open(place / "copy", "wb") as file:
                for piece in pieces:
                    with open(piece, "rb") as stored:
                        length = min(left, total // len(pieces) + 1)
                        while length > 0 and (block := stored.read(min(length, 16 << 20))):
                            file.write(block)
                            length, left = length - len(block), left - len(block)

        return timed(work)

    sides = {"limit": copy, "ours": ours}
    if found:
        sides["theirs"] = lambda: deepspeed(python, source, cleared(target))
    seconds = take_turns(min(bench.rounds, 3), sides)
    note = "ours: a whole process; DeepSpeed without its import"
    if not found:
        note += "; DeepSpeed is not installed (`make test-integrations` installs it, or RESHARD_DEEPSPEED_PYTHON names a Python that has it)"
    yield Row(
        "zero/safetensors",
        f"{total / 1e9:.1f} GB of ZeRO-3 weights to safetensors, not synced",
        seconds["ours"],
        seconds.get("theirs", []),
        seconds["limit"],
        beside="DeepSpeed",
        limit_name="copying the bytes",
        bytes=total,
        note=note,
    )
    yield Row("zero/safetensors-peak", "peak memory of ZeRO-3 to safetensors", peaks, unit="MB", note="all that the process held")
    shutil.rmtree(source)
    remove(target)
