"""Exports the model of a sharded checkpoint as safetensors files with an index, as Hugging Face's hub expects it.

    python hf_export.py run/step-20 exported --prefix training.model. --shard-size 100000

Reads one shard's worth of tensors at a time, on one process, without building the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import reshard


def export(source: str, target: str, prefix: str = "model.", shard_size: int = 5_000_000_000) -> list[str]:
    """Writes the tensors whose keys start with `prefix`; returns the names of the files."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    with reshard.open(source) as checkpoint:
        tensors = {key.removeprefix(prefix): tensor for key, tensor in checkpoint.tensors().items() if key.startswith(prefix)}
        shards: list[list[str]] = [[]]
        size = 0
        for name, tensor in tensors.items():
            if shards[-1] and size + tensor.nbytes > shard_size:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += tensor.nbytes
        index: dict[str, str] = {}
        files = []
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            arrays = {name: np.ascontiguousarray(tensors[name].numpy()) for name in names}
            save_file(arrays, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(names, file)
            files.append(file)
        total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    )
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--prefix", default="model.")
    parser.add_argument("--shard-size", type=int, default=5_000_000_000)
    options = parser.parse_args()
    for file in export(options.source, options.target, options.prefix, options.shard_size):
        print(file)


if __name__ == "__main__":
    main()
