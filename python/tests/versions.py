"""One state, and what a torch without reshard makes of a checkpoint of it. A script, so that any interpreter can run it:

python versions.py write PLACE RANKS     saves the state with torch.distributed.checkpoint
python versions.py check PLACE RANKS     loads what RANKS ranks saved, and compares its metadata with torch's own
"""

import dataclasses
import multiprocessing
import pickle
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore")

#: Element types that every supported torch saves.
DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int64", "int8", "uint8", "bool"]


def whole(name, shape, dtype="float32"):
    """A tensor of any bits, the same everywhere."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel() * torch.empty((), dtype=kind).element_size()
    limit = 2 if kind == torch.bool else 256
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(0, limit, (count,), generator=generator, dtype=torch.uint8).view(kind).reshape(shape)


def state(ranks, fill=True):
    """What is saved, and with `fill=False` what it is loaded into: on four ranks sharded in several ways."""
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    square = init_device_mesh("cpu", (2, 2)) if ranks == 4 else None

    def tensor(name, shape, placements=None, dtype="float32"):
        full = whole(name, shape, dtype) if fill else torch.zeros(shape, dtype=getattr(torch, dtype))
        if mesh is None or placements is None:
            return full
        return distribute_tensor(full, mesh if len(placements) == 1 or square is None else square, placements)

    model = {
        "rows": tensor("rows", (8, 3), [Shard(0)]),
        "columns": tensor("columns", (3, 10), [Shard(1)]),
        "uneven": tensor("uneven", (6, 2), [Shard(0)]),
        "few": tensor("few", (1, 5), [Shard(0)]),
        "copies": tensor("copies", (4,), [Replicate()]),
        "both": tensor("both", (4, 6), [Shard(0), Shard(1)] if ranks == 4 else [Shard(0)]),
        "hybrid": tensor("hybrid", (4, 4), [Replicate(), Shard(0)] if ranks == 4 else [Shard(0)], "bfloat16"),
        "plain": tensor("plain", (5,), None, "int64"),
        "scalar": torch.tensor(2.5 if fill else 0.0),
        "empty": torch.zeros(0, 3),
    }
    moment = {"step": torch.tensor(3.0 if fill else 0.0), "exp_avg": tensor("exp_avg", (8, 3), [Shard(0)])}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": ["rows"], "foreach": None, "amsgrad": False}
    values = {
        "epoch": 7,
        "name": "run ✓",
        "nothing": None,
        "mixed": [1, (2, "x"), None, 2**70],
        "kept": {"a": 1.5, "deep": {"b": True}},
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
    }
    return {
        "model": model,
        "dtypes": {name: tensor(name, (3, 5), None, name) for name in DTYPES},
        "optim": {"state": {"rows": moment}, "param_groups": [group if fill else dict.fromkeys(group)]},
        **(values if fill else {key: {"a": None, "deep": {"b": None}} if key == "kept" else None for key in values}),
    }


def bits(tensor):
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_equal(wanted, found, path=""):
    assert type(wanted) is type(found), f"{path}: {type(wanted)} and {type(found)}"
    if isinstance(wanted, torch.Tensor):
        assert bits(wanted) == bits(found), path
    elif isinstance(wanted, dict):
        assert wanted.keys() == found.keys(), path
        for key in wanted:
            assert_equal(wanted[key], found[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(wanted) == len(found), path
        for index, pair in enumerate(zip(wanted, found)):
            assert_equal(*pair, f"{path}.{index}")
    else:
        assert wanted == found, f"{path}: {wanted!r} and {found!r}"


def run(ranks, function, *arguments):
    """Runs a function on ranks, each a process of its own."""
    if ranks == 1:
        function(0, 1, *arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_rank, args=(rank, ranks, f"{folder}/store", function, arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * ranks


def _rank(rank, ranks, store, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    function(rank, ranks, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def save(rank, ranks, path):
    dcp.save(state(ranks), checkpoint_id=path)


def load(rank, ranks, path):
    found = state(ranks, fill=False)
    dcp.load(found, checkpoint_id=path)
    assert_equal(state(ranks), found)


def metadata(path):
    with open(Path(path) / ".metadata", "rb") as file:
        return pickle.load(file)


def comparable(entry):
    """Without what is left out on purpose: strides, which torch 2.15 adds and earlier ones cannot read."""
    if isinstance(entry, BytesStorageMetadata):
        return entry
    assert isinstance(entry, TensorStorageMetadata)
    properties = entry.properties
    if hasattr(properties, "strides"):
        properties = dataclasses.replace(properties, strides=None)
    chunks = sorted(entry.chunks, key=lambda chunk: (tuple(chunk.offsets), tuple(chunk.sizes)))
    return dataclasses.replace(entry, properties=properties, chunks=chunks)


def compare_metadata(ours, theirs):
    assert type(ours) is type(theirs)
    for field in dataclasses.fields(theirs):
        assert type(getattr(ours, field.name)) is type(getattr(theirs, field.name)), field.name
    found = {key: comparable(entry) for key, entry in ours.state_dict_metadata.items()}
    wanted = {key: comparable(entry) for key, entry in theirs.state_dict_metadata.items()}
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for key in wanted:
        assert found[key] == wanted[key], f"{key}: {found[key]} and {wanted[key]}"
    assert ours.planner_data == theirs.planner_data
    for metadata in (ours, theirs):
        assert all(type(info) is _StorageInfo for info in metadata.storage_data.values())
    places = set()
    for key, entry in wanted.items():
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        places.update((key, offset) for offset in offsets)
    assert places <= {(index.fqn, index.offset) for index in ours.storage_data}
    assert set(ours.storage_data) == set(theirs.storage_data)
    if hasattr(theirs, "version"):
        assert ours.version == theirs.version


def check(path, ranks):
    for layout in {1, ranks}:
        run(layout, load, path)
    with tempfile.TemporaryDirectory() as folder:
        run(ranks, save, f"{folder}/own")
        compare_metadata(metadata(path), metadata(f"{folder}/own"))


if __name__ == "__main__":
    verb, path, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if verb == "write":
        run(ranks, save, path)
    else:
        check(path, ranks)
    print(f"fine with torch {torch.__version__}")
