"""3. Metadata of 768,000 chunks: encode, decode and `reshard inspect`."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness import Bench, Row, cleared, memcpy, remove, take_turns, timed
from programs import Missing, program
from torch.distributed.checkpoint import FileSystemReader

RECORD = 132_000


def make(folder: Path, tensors: int, ranks: int):
    """Metadata as PyTorch would write it for so many tensors on so many ranks, with data files that are holes."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries, storage, names = {}, {}, {}
    for number in range(tensors):
        key = f"model.layers.{number // 10}.mlp.experts.{number % 10}.weight"
        chunks = []
        for rank in range(ranks):
            offsets = torch.Size((rank * 16, 0))
            chunks.append(ChunkStorageMetadata(offsets, torch.Size((16, 4096))))
            storage[MetadataIndex(key, offsets)] = _StorageInfo(f"__{rank}_0.distcp", number * RECORD, RECORD)
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size((ranks * 16, 4096)), chunks)
        names[key] = ("model", key.removeprefix("model."))
    metadata = Metadata(state_dict_metadata=entries, planner_data=names, storage_data=storage)
    os.makedirs(cleared(folder))
    for rank in range(ranks):
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(tensors * RECORD)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    return metadata


def rows(bench: Bench) -> Iterator[Row]:
    import numpy

    tensors, ranks = (30, 16) if bench.quick else (3000, 256)
    what = f"{tensors * ranks:,} chunks"
    folder = bench.place("metadata")
    metadata = make(folder, tensors, ranks)
    content = (folder / ".metadata").read_bytes()
    rounds = min(bench.rounds, 3)
    try:
        tool = program("metadata_scale", bench.build)
    except Missing as missing:
        tool, reason = None, str(missing)
    ours: dict[str, list[float]] = {"decode": [], "encode": []}

    def measure_ours() -> float:
        # The program decodes and encodes three times; its medians are one round.
        text = subprocess.run([tool, folder / ".metadata"], check=True, capture_output=True, text=True).stdout
        for kind in ours:
            ours[kind].append(sorted(durations(text, kind))[1])
        return 0.0

    source, target = numpy.frombuffer(content, dtype=numpy.uint8), numpy.ones(len(content), dtype=numpy.uint8)
    sides = {
        "limit": lambda: memcpy([source], [target], threads=1),
        "decode": lambda: timed(lambda: pickle.loads(content)),
        "encode": lambda: timed(lambda: pickle.dumps(metadata)),
    }
    if tool:
        sides["ours"] = measure_ours
    seconds = take_turns(rounds, sides, warm=False)
    for kind in ours:
        common = {"limit": seconds["limit"], "limit_name": "memcpy of the file", "bytes": len(content)}
        skipped = "" if tool else reason
        yield Row(f"metadata/{kind}", f"{kind} metadata of {what}", ours[kind], seconds[kind], skipped=skipped, **common)

    title = f"inspect {what}"
    try:
        tool = program("reshard", bench.build)
    except Missing as missing:
        yield Row("metadata/inspect", title, skipped=str(missing))
    else:
        del metadata
        command = [tool, "inspect", "--json", str(folder)]
        seconds = take_turns(
            rounds,
            {
                "ours": lambda: timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)),
                "torch": lambda: timed(lambda: FileSystemReader(str(folder)).read_metadata()),
                "limit": lambda: timed(lambda: (folder / ".metadata").read_bytes()),
            },
            warm=False,
        )
        note = "a whole process of ours; of PyTorch only read_metadata, without its import"
        yield Row(
            "metadata/inspect",
            title,
            seconds["ours"],
            seconds["torch"],
            seconds["limit"],
            limit_name="reading the file",
            note=note,
        )
    remove(folder)


def durations(text: str, kind: str) -> list[float]:
    """Seconds from lines such as `decode 301.2ms (…)`."""
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    return [float(value) * units[unit] for value, unit in re.findall(rf"^{kind} ([\d.]+)(s|ms|µs|ns) ", text, re.MULTILINE)]
