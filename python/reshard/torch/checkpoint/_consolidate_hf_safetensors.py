"""Putting sharded safetensors files together, on one rank or on all: each output file is one conversion of the engine's."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist

from ... import _tools
from .. import _group

try:
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as _theirs
except ImportError:  # before 2.7
    _theirs = None  # type: ignore[assignment]

_INDEX = "model.safetensors.index.json"


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
    sizes = {index: _write(input_dir, output_dir, index, len(files), keys) for index, keys in files.items()}
    _write_index(output_dir, files, sum(sizes.values()))


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: Any = None,
) -> None:
    """The same, with the output files shared between all ranks; the first rank writes the index when all are there."""
    group = _group.group_for(process_group)
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    files = _files(fqn_to_index_mapping)
    mine = [index for position, index in enumerate(files) if position % size == rank]
    failure: BaseException | None = None
    written = 0
    try:
        written = sum(_write(input_dir, output_dir, index, len(files), files[index]) for index in mine)
    except Exception as error:
        failure = error
    told = json.dumps([written, None if failure is None else _group.described_failure(failure)]).encode()
    answers = [json.loads(part) for part in (group.all_gather(told) if group is not None else [told])]
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
    if failed:
        raise _group.GroupError(
            f"rank {failed[0][0]} could not consolidate its files: {failed[0][1]}", ranks=[rank for rank, _ in failed]
        )
    if rank == 0:
        _write_index(output_dir, files, sum(size for size, _ in answers))
    if dist.is_available() and dist.is_initialized() and group is not None:
        group.all_gather(b"")


def _files(mapping: dict[str, int]) -> dict[int, list[str]]:
    files: dict[int, list[str]] = {}
    for key, index in sorted(mapping.items(), key=lambda entry: entry[1]):
        files.setdefault(index, []).append(key)
    return files


def _name(index: int, count: int) -> str:
    return f"model-{index:05d}-of-{count:05d}.safetensors"


def _write(source: str, folder: str, index: int, count: int, keys: list[str]) -> int:
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, _name(index, count))
    return _tools.convert(source, target, to="safetensors", keys=keys, overwrite=True).bytes


def _write_index(folder: str, files: dict[int, list[str]], size: int) -> None:
    names = {key: _name(index, len(files)) for index, keys in files.items() for key in keys}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=2)
    path = os.path.join(folder, _INDEX)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
