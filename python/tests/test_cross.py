"""What PyTorch writes we load, what we write PyTorch loads: bit for bit, every layout into every other."""

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import ALONE, DTYPES_OF_TORCH, assert_same_tree, bits, global_tensor, random_bytes, same, zeroed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from versions import compare_metadata

import reshard
import reshard.torch as rt

CORPUS = Path(__file__).resolve().parents[2] / "crates" / "formats" / "tests" / "corpus"


def zoo():
    return {
        "model": {name: random_bytes((3, 5), getattr(torch, name)) for name in DTYPES_OF_TORCH},
        "odd": {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "view": torch.arange(12.0).reshape(3, 4).T},
        "list": [torch.arange(3), {"lr": 0.1}],
        "epoch": 4,
        "name": "run",
        "values": [1, (2, "x"), None],
        "config": {"size": torch.Size([2, 3]), "dtype": torch.float16, "nested": {"deep": True}},
    }


def test_torch_saves_we_load(path):
    state = zoo()
    dcp.save(state, checkpoint_id=path, **ALONE)
    loaded = zeroed(state)
    rt.load(loaded, path)
    assert_same_tree(state, loaded)


def test_we_save_torch_loads(path):
    state = zoo()
    rt.save(state, path)
    loaded = zeroed(state)
    dcp.load(loaded, checkpoint_id=path, **ALONE)
    assert_same_tree(state, loaded)


def test_torch_reads_our_metadata_as_its_own(path, tmp_path):
    state = zoo()
    rt.save(state, path)
    dcp.save(state, checkpoint_id=tmp_path / "theirs", **ALONE)
    compare_metadata(dcp.FileSystemReader(path).read_metadata(), dcp.FileSystemReader(tmp_path / "theirs").read_metadata())


def test_torch_converts_ours_to_one_file(path, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"model": {"w": torch.randn(4, 4)}, "epoch": 3}
    rt.save(state, path)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    assert_same_tree(state, torch.load(tmp_path / "one.pt", weights_only=True))


# ---- layouts on ranks ---------------------------------------------------------------------------------------------------

SHAPES = {"even": (8, 12), "uneven": (7, 5), "tiny": (3, 2), "row": (1, 9), "cube": (5, 4, 3)}


def layouts(size):
    """Meshes and placements for a number of ranks."""
    line = {"replicate": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}
    found = {name: ((size,), placements) for name, placements in line.items()}
    if size == 4:
        for name, placements in {
            "rows_columns": [Shard(0), Shard(1)],
            "rows_twice": [Shard(0), Shard(0)],
            "hybrid": [Replicate(), Shard(0)],
            "strided": [_StridedShard(0, split_factor=2), Shard(0)],
            "strided_columns": [_StridedShard(1, split_factor=2), Shard(1)],
        }.items():
            found[name] = ((2, 2), placements)
    return found


def sharded(whole, mesh, placements):
    """A DTensor made by cutting a whole tensor, strided shards included."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: F401

    if not any(isinstance(p, _StridedShard) for p in placements):
        return distribute_tensor(whole, mesh, placements)
    dim = placements[0].dim
    split = placements[0].split_factor
    first, second = mesh.get_coordinate()
    # Cut by the second mesh dimension first, then each part by the first: that is what strided means.
    part = torch.chunk(whole, split, dim)
    part = part[second] if second < len(part) else whole.narrow(dim, 0, 0)
    cut = torch.chunk(part, mesh.size(0), dim) if part.shape[dim] else ()
    local = cut[first] if first < len(cut) else whole.narrow(dim, 0, 0)
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@functools.cache
def mesh_of(shape):
    """Made once for each rank: every mesh makes process groups of its own."""
    return init_device_mesh("cpu", shape)


def state_in(layout, size, fill):
    mesh_shape, placements = layouts(size)[layout]
    mesh = mesh_of(mesh_shape)
    state = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        whole = global_tensor(shape, torch.float32, seed) if fill else torch.zeros(shape)
        state[name] = sharded(whole, mesh, placements)
    state["plain"] = global_tensor((4, 3), torch.int64, 99) if fill else torch.zeros(4, 3, dtype=torch.int64)
    state["epoch"] = 7 if fill else 0
    return {"model": state}


def check(state, layout, size):
    wanted = state_in(layout, size, True)["model"]
    for name, tensor in state["model"].items():
        if isinstance(tensor, DTensor):
            assert same(tensor.to_local(), wanted[name].to_local()), f"{name} in {layout} on rank {dist.get_rank()}"
        elif isinstance(tensor, torch.Tensor):
            assert same(tensor, wanted[name]), name
        else:
            assert tensor == wanted[name], name


def save_all(rank, size, root):
    """A checkpoint for each writer and layout; returns their places."""
    made = {"torch": [], "reshard": []}
    for layout in layouts(size):
        path = f"{root}/reshard-{size}-{layout}"
        rt.save(state_in(layout, size, True), path)
        made["reshard"].append(path)
        # PyTorch itself cannot save shards that are not one box.
        if not layout.startswith("strided"):
            path = f"{root}/torch-{size}-{layout}"
            dcp.save(state_in(layout, size, True), checkpoint_id=path)
            made["torch"].append(path)
    return made


def load_with(rank, size, who, places):
    for layout in layouts(size):
        for path in places:
            state = state_in(layout, size, False)
            if who == "torch":
                dcp.load(state, checkpoint_id=path)
            else:
                rt.load(state, path)
            check(state, layout, size)


@pytest.fixture(scope="module")
def saved_in_all_layouts(tmp_path_factory, _ranks):
    """One checkpoint for each writer, number of ranks and layout that the writer can do."""
    root = str(tmp_path_factory.mktemp("layouts"))
    made = {"torch": [], "reshard": []}
    for size in (1, 3, 4):
        for who, places in _ranks.run(size, save_all, root)[0].items():
            made[who] += places
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_of_torch_loads_into_every_other(ranks, saved_in_all_layouts, size):
    ranks(size, load_with, "reshard", saved_in_all_layouts["torch"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_of_ours_loads_into_every_other(ranks, saved_in_all_layouts, size):
    ranks(size, load_with, "reshard", saved_in_all_layouts["reshard"])


def load_what_torch_can(rank, size, places):
    for layout in layouts(size):
        if layout.startswith("strided"):
            continue
        for path in places:
            state = state_in(layout, size, False)
            dcp.load(state, checkpoint_id=path)
            check(state, layout, size)


@pytest.mark.parametrize("size", [1, 3])
def test_torch_loads_every_layout_of_ours(ranks, saved_in_all_layouts, size):
    ranks(size, load_what_torch_can, saved_in_all_layouts["reshard"])


def test_replicas_are_written_once(saved_in_all_layouts):
    path = next(p for p in saved_in_all_layouts["reshard"] if p.endswith("4-replicate"))
    with reshard.open(path) as ck:
        assert len(ck["model.even"].chunks) == 1
        assert same(torch.from_numpy(ck["model.even"].numpy()), global_tensor(SHAPES["even"], torch.float32, 0))


# ---- sharded tensors ------------------------------------------------------------------------------------------------------


def sharded_tensor_round_trip(rank, size, path):
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    def make(fill):
        whole = global_tensor((7, 6), torch.float32, 3)
        rows = -(-7 // size)
        begin, end = min(rank * rows, 7), min((rank + 1) * rows, 7)
        local = whole[begin:end].clone() if fill else torch.zeros(end - begin, 6)
        shards = [LocalShard.from_tensor_and_offsets(local, [begin, 0], rank)] if end > begin else []
        return init_from_local_shards(shards, 7, 6)

    rt.save({"st": make(True)}, path + "-ours")
    dcp.save({"st": make(True)}, checkpoint_id=path + "-theirs")
    for source in ("-ours", "-theirs"):
        for loader in (rt.load, lambda state, where: dcp.load(state, checkpoint_id=where)):
            state = {"st": make(False)}
            loader(state, path + source)
            for mine, right in zip(state["st"].local_shards(), make(True).local_shards()):
                assert same(mine.tensor, right.tensor)


def test_sharded_tensors_both_ways(ranks, path):
    ranks(3, sharded_tensor_round_trip, path)


# ---- per rank ---------------------------------------------------------------------------------------------------------


def per_rank_save(rank, size, path):
    rt.save({"rng": rt.PerRank(torch.full((2,), rank)), "seen": rt.PerRank({"n": rank * 10}), "shared": torch.ones(1)}, path)
    own, seen = rt.PerRank(torch.zeros(2, dtype=torch.int64)), rt.PerRank({"n": None})
    rt.load({"rng": own, "seen": seen}, path)
    assert own.value.tolist() == [rank, rank] and seen.value["n"] == rank * 10


def test_every_rank_gets_its_own_back(ranks, path):
    ranks(3, per_rank_save, path)
    with reshard.open(path) as ck:
        assert [ck[f"seen.n.rank_{r}"] for r in range(3)] == [0, 10, 20]


def replicas_that_differ(rank, size, path):
    try:
        rt.save({"x": torch.full((4,), rank)}, path, check_replicas=True)
    except reshard.ReshardError as error:
        return type(error).__name__, str(error)
    return None


def test_replicas_that_differ_are_found_when_asked(ranks, path):
    results = ranks(2, replicas_that_differ, path)
    assert all(result is not None and "x" in result[1] for result in results)


# ---- the corpus -------------------------------------------------------------------------------------------------------

CASES = sorted(path.parent for path in CORPUS.glob("torch-*/*/expected.json"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_the_corpus_loads(case):
    expected = json.loads((case / "expected.json").read_text())["entries"]
    with reshard.open(case / "checkpoint") as ck:
        tensors = ck.tensors()
        state = {key: "another" for key in ck if key not in tensors}
    state |= {key: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for key, t in tensors.items()}
    rt.load(state, case / "checkpoint", allow_pickle=True)
    for key, entry in expected.items():
        if "sha256" in entry:
            tensor = state[key]
            assert str(tensor.dtype) == f"torch.{entry['dtype']}" and list(tensor.shape) == entry["shape"]
            assert hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest() == entry["sha256"], key
        elif "value" in entry:
            assert json.loads(json.dumps(found(state, key))) == entry["value"], key
        else:
            assert repr(found(state, key)) == entry["repr"], key


def found(state, key):
    """A value by its key; the corpus names the elements of lists that DCP stores as one value."""
    if key in state:
        return state[key]
    above, _, index = key.rpartition(".")
    return found(state, above)[int(index)]
