"""StorageWriter and StorageReader under PyTorch's own save and load, with its planners and with users' own."""

import io
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import ALONE, assert_same_tree, global_tensor, same, zeroed
from test_cross import check, layouts, state_in, zoo
from torch.distributed.checkpoint.api import CheckpointException

import reshard
import reshard.torch as rt


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield


def test_writer_and_reader_are_those_of_torch(place):
    assert issubclass(rt.StorageWriter, dcp.StorageWriter) and issubclass(rt.StorageReader, dcp.StorageReader)
    for cls in (rt.StorageWriter, rt.StorageReader):
        assert cls.validate_checkpoint_id(place) and cls.validate_checkpoint_id(pathlib.Path(place))
        assert cls.validate_checkpoint_id("s3://bucket/x") and not cls.validate_checkpoint_id("nonsense://x")
    assert rt.StorageWriter(place).checkpoint_id == place


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("reader", ["ours", "theirs", "direct"])
def test_all_ways_through(place, writer, reader):
    state = zoo()
    storage = rt.StorageWriter(place) if writer == "ours" else dcp.FileSystemWriter(place)
    dcp.save(state, storage_writer=storage, **ALONE)
    loaded = zeroed(state)
    if reader == "direct":
        rt.load(loaded, place)
    else:
        dcp.load(loaded, storage_reader=rt.StorageReader(place) if reader == "ours" else dcp.FileSystemReader(place), **ALONE)
    assert_same_tree(state, loaded)


def test_checkpoints_through_the_writer_are_checked_and_described(place):
    dcp.save({"a": torch.arange(100)}, storage_writer=rt.StorageWriter(place), **ALONE)
    report = rt.load({"a": torch.zeros(100, dtype=torch.int64)}, place)
    assert report.verified == 1
    with reshard.open(place) as ck:
        assert "reshard" in ck.writer
    file = pathlib.Path(place) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(torch.arange(100).numpy().tobytes()) + 9] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"a": torch.zeros(100, dtype=torch.int64)}, storage_reader=rt.StorageReader(place), **ALONE)
    assert isinstance(raised.value.failures[0][0], reshard.Corrupt)


@pytest.mark.parametrize("save", ["torch", "ours"])
def test_the_metadata_names_the_version_that_was_written(place, save):
    if save == "torch":
        dcp.save({"w": torch.ones(2)}, checkpoint_id=place, **ALONE)
    else:
        rt.save({"w": torch.ones(2)}, place)
    theirs, ours = dcp.FileSystemReader(place).read_metadata(), rt.StorageReader(place).read_metadata()
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)


def test_overwriting_replaces_and_refusing_is_a_choice(place):
    dcp.save({"a": torch.zeros(3)}, storage_writer=rt.StorageWriter(place), **ALONE)
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.ones(3)}, storage_writer=rt.StorageWriter(place, overwrite=False), **ALONE)
    assert isinstance(raised.value.failures[0][0], reshard.AlreadyExists)
    dcp.save({"a": torch.ones(3)}, storage_writer=rt.StorageWriter(place), **ALONE)
    with reshard.open(place) as ck:
        assert ck["a"].numpy().tolist() == [1, 1, 1]
    assert len(list(pathlib.Path(place).glob("*.distcp"))) == 1


def test_a_save_that_fails_leaves_the_old_one(place):
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise RuntimeError("planner's own")

    dcp.save({"a": torch.zeros(3)}, storage_writer=rt.StorageWriter(place), **ALONE)
    with pytest.raises(CheckpointException, match="planner's own"):
        dcp.save({"a": torch.ones(3)}, storage_writer=rt.StorageWriter(place), planner=Failing(), **ALONE)
    with reshard.open(place) as ck:
        assert ck["a"].numpy().tolist() == [0, 0, 0]


class Doubling(dcp.DefaultSavePlanner):
    """A user's planner: changes what is written, and adds a key of its own."""

    def transform_object(self, write_item, object):
        found = super().transform_object(write_item, object)
        return found * 2 if isinstance(found, torch.Tensor) else found


class Renaming(dcp.DefaultLoadPlanner):
    """A user's planner: loads keys under other names, and keeps count."""

    def __init__(self):
        super().__init__()
        self.committed, self.bytes = [], []

    def create_local_plan(self):
        renamed = {key.removeprefix("new_"): value for key, value in self.state_dict.items()}
        kept, self.state_dict = self.state_dict, renamed
        try:
            return super().create_local_plan()
        finally:
            self.state_dict = kept

    def lookup_tensor(self, index):
        return self.state_dict[f"new_{index.fqn}"]

    def commit_tensor(self, read_item, tensor):
        self.committed.append(read_item.dest_index.fqn)

    def load_bytes(self, read_item, value):
        assert isinstance(value, io.BytesIO)
        self.bytes.append((read_item.dest_index.fqn, torch.load(value, weights_only=True)))


def test_planners_of_the_users_own(place):
    dcp.save({"w": torch.arange(4.0), "epoch": 3}, storage_writer=rt.StorageWriter(place), planner=Doubling(), **ALONE)
    planner = Renaming()
    state = {"new_w": torch.zeros(4), "new_epoch": None}
    dcp.load(state, storage_reader=rt.StorageReader(place), planner=planner, **ALONE)
    assert state["new_w"].tolist() == [0, 2, 4, 6] and planner.committed == ["w"] and planner.bytes == [("epoch", 3)]


def test_the_empty_state_dict_planner(place):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"model": {"w": torch.randn(3, 3)}, "epoch": 2}
    rt.save(state, place)
    loaded = {}
    _load_state_dict(loaded, storage_reader=rt.StorageReader(place), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert_same_tree(state, loaded)


def test_reading_runs_no_code_unless_told(place, tmp_path):
    marker = tmp_path / "was-run"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    dcp.save({"bad": Payload(), "w": torch.ones(1)}, checkpoint_id=place, **ALONE)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"bad": None, "w": torch.zeros(1)}, storage_reader=rt.StorageReader(place), **ALONE)
    assert isinstance(raised.value.failures[0][0], reshard.UntrustedPickle) and not marker.exists()
    dcp.load({"bad": None, "w": torch.zeros(1)}, storage_reader=rt.StorageReader(place, allow_pickle=True), **ALONE)
    assert marker.exists()


def test_element_types_are_converted_as_torch_does(place):
    rt.save({"w": torch.tensor([1.5, 2.5])}, place)
    state = {"w": torch.zeros(2, dtype=torch.float64)}
    dcp.load(state, storage_reader=rt.StorageReader(place), **ALONE)
    assert state["w"].tolist() == [1.5, 2.5]


def test_safetensors_through_torchs_load(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.safetensors")
    state = {"w": torch.zeros(2, 3)}
    dcp.load(state, storage_reader=rt.StorageReader(tmp_path / "x.safetensors"), **ALONE)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_several_files_and_one_for_each_record(place):
    state = {str(i): torch.full((10,), float(i)) for i in range(6)}
    for suffix, options in {"threads": {"thread_count": 3}, "each": {"single_file_per_rank": False}}.items():
        dcp.save(state, storage_writer=rt.StorageWriter(place + suffix, **options), **ALONE)
        loaded = zeroed(state)
        dcp.load(loaded, checkpoint_id=place + suffix, **ALONE)
        assert_same_tree(state, loaded)
    assert len(list(pathlib.Path(place + "threads").glob("*.distcp"))) == 3
    assert len(list(pathlib.Path(place + "each").glob("*.distcp"))) == 6


# ---- on ranks -----------------------------------------------------------------------------------------------------------


def through_torch(rank, size, place):
    for layout in layouts(size):
        if layout.startswith("strided"):
            continue
        dcp.save(state_in(layout, size, True), storage_writer=rt.StorageWriter(f"{place}-{layout}"))
        for other in layouts(size):
            if other.startswith("strided"):
                continue
            state = state_in(other, size, False)
            dcp.load(state, storage_reader=rt.StorageReader(f"{place}-{layout}"))
            check(state, other, size)
        state = state_in(layout, size, False)
        rt.load(state, f"{place}-{layout}")
        check(state, layout, size)


@pytest.mark.parametrize("size", [2, 4])
def test_layouts_through_torch(ranks, place, size):
    ranks(size, through_torch, place)


def asynchronously(rank, size, place):
    state = state_in("rows", size, True)
    future = dcp.async_save(state, storage_writer=rt.StorageWriter(place))
    future = getattr(future, "upload_completion", future)
    future.result()
    loaded = state_in("columns", size, False)
    rt.load(loaded, place)
    check(loaded, "columns", size)


def test_torchs_async_save_on_top_of_ours(ranks, place):
    ranks(2, asynchronously, place)


def test_torchs_async_save_in_a_process_of_its_own(place, tmp_path):
    """The writer crosses to another process, which torch starts and which saves there."""
    saver = pytest.importorskip("torch.distributed.checkpoint.state_dict_saver")
    if not hasattr(saver, "AsyncCheckpointerType"):
        pytest.skip("this torch saves asynchronously in threads only")
    program = tmp_path / "program.py"
    program.write_text(
        """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import reshard.torch as rt
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
    writer = rt.StorageWriter(sys.argv[1])
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save({"x": torch.arange(9.0), "epoch": 2}, storage_writer=writer, async_checkpointer_type=kind).result(240)
    dist.destroy_process_group()
"""
    )
    path = os.pathsep.join([str(pathlib.Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, program, place, tmp_path / "store"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    state = {"x": torch.zeros(9), "epoch": 0}
    rt.load(state, place)
    assert same(state["x"], torch.arange(9.0)) and state["epoch"] == 2


def with_cached_plans(rank, size, place):
    for step in range(3):
        tensor = global_tensor((4, 4), torch.float32, step)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": tensor, "step": step}, storage_writer=rt.StorageWriter(place), planner=planner)
        loaded = {"w": torch.zeros(4, 4), "step": None}
        rt.load(loaded, place)
        assert same(loaded["w"], tensor) and loaded["step"] == step


def test_plans_that_torch_caches(ranks, place):
    if "enable_plan_caching" not in dcp.DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch does not cache plans")
    ranks(2, with_cached_plans, place)


def without_collectives(rank, size, place):
    state = {"mine": torch.full((3,), float(rank)), "epoch": rank}
    dcp.save(state, storage_writer=rt.StorageWriter(place), use_collectives=False)
    dist.barrier()
    for reader in (rt.StorageReader(place), dcp.FileSystemReader(place)):
        loaded = {"mine": torch.zeros(3), "epoch": None}
        dcp.load(loaded, storage_reader=reader)
        assert loaded["mine"].tolist() == [rank] * 3 and loaded["epoch"] == rank


def test_without_rank_coordination(ranks, place):
    import inspect

    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("this torch always coordinates")
    ranks(2, without_collectives, place)
