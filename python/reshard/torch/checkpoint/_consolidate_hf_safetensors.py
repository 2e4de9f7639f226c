"""Putting sharded safetensors files together, on one rank or on all: each output file is one conversion of the engine's.

The files are published as a set by their index, which comes last. Where a model is in the folder already, the new files get fresh
names, as the engine's conversion gives them: whatever stops it, the index names the old model whole, or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from typing import Any

from ... import _reshard, _tools
from ..._errors import InvalidInput
from ..._paths import path_text
from .. import _group

try:
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as _theirs
except ImportError:  # before 2.7
    _theirs = None  # type: ignore[assignment]

_INDEX = "model.safetensors.index.json"
#: The engine's name for a folder's whole model, which readers take before they look at an index.
_MODEL = "model.safetensors"
_FRESH = re.compile(r"model-[0-9a-f]{24}-\d{5}-of-\d{5}\.safetensors")


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int], num_threads: int = 1
) -> None:
    """Puts sharded safetensors files together on this rank; the index comes last.

    Args:
        input_dir: the sharded files.
        output_dir: where to.
        fqn_to_index_mapping: in which file each tensor goes, counted from 1.
        num_threads: taken as in PyTorch, and not needed.
    """
    files = _files(fqn_to_index_mapping)
    mark, old = _begin(output_dir, len(files))
    sizes = {index: _write(input_dir, output_dir, _name(index, len(files), mark), keys) for index, keys in files.items()}
    _publish(output_dir, files, sum(sizes.values()), mark, old)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: Any = None,
) -> None:
    """The same, with the output files shared between all ranks; the first rank publishes the index when all are there."""
    group = _group.group_for(process_group)
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    files = _files(fqn_to_index_mapping)
    doing = "consolidating safetensors files"
    mark, old = _group.together(group, doing, lambda: _begin(output_dir, len(files)) if rank == 0 else ("", []))[0]
    mine = [index for position, index in enumerate(files) if position % size == rank]
    written = _group.together(
        group, doing, lambda: sum(_write(input_dir, output_dir, _name(index, len(files), mark), files[index]) for index in mine)
    )
    _group.together(group, doing, lambda: _publish(output_dir, files, sum(written), mark, old) if rank == 0 else None)


def _files(mapping: dict[str, int]) -> dict[int, list[str]]:
    files: dict[int, list[str]] = {}
    for key, index in sorted(mapping.items(), key=lambda entry: entry[1]):
        files.setdefault(index, []).append(key)
    return files


def _name(index: int, count: int, mark: str = "") -> str:
    return f"model-{mark}{index:05d}-of-{count:05d}.safetensors"


def _begin(folder: str, count: int) -> tuple[str, list[str]]:
    """What sets the new files' names apart, where a model is there already, and the files of that model."""
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(os.path.join(folder, _MODEL)):
        raise InvalidInput(
            f"{folder} holds {_MODEL}, which would be found in place of what is written; choose another path, or remove it first"
        )
    there = set(os.listdir(folder))
    taken = _INDEX in there or any(_name(index, count) in there for index in range(1, count + 1))
    old = {name for name in there if _FRESH.fullmatch(name)}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        with open(os.path.join(folder, _INDEX), encoding="utf-8") as file:
            named = set(json.load(file)["weight_map"].values())
        old |= {name for name in named & there if str(name).endswith(".safetensors")}
    return (f"{secrets.token_hex(12)}-" if taken else "", sorted(old))


def _write(source: str, folder: str, name: str, keys: list[str]) -> int:
    return _tools.convert(source, os.path.join(folder, name), to="safetensors", keys=keys, overwrite=True).bytes


def _publish(folder: str, files: dict[int, list[str]], size: int, mark: str, old: list[str]) -> None:
    names = {key: _name(index, len(files), mark) for index, keys in files.items() for key in keys}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2)
    _reshard.publish_file(path_text(folder), _INDEX, text.encode())
    # What only the old index named is superseded; leftovers do no harm, so a failure here is none.
    for name in set(old) - set(names.values()):
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, name))
