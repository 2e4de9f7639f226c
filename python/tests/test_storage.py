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


def test_writer_and_reader_are_those_of_torch(path):
    assert issubclass(rt.StorageWriter, dcp.StorageWriter) and issubclass(rt.StorageReader, dcp.StorageReader)
    for cls in (rt.StorageWriter, rt.StorageReader):
        assert cls.validate_checkpoint_id(path) and cls.validate_checkpoint_id(pathlib.Path(path))
        assert cls.validate_checkpoint_id("s3://bucket/x") and not cls.validate_checkpoint_id("nonsense://x")
    assert rt.StorageWriter(path).checkpoint_id == path


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("reader", ["ours", "theirs", "direct"])
def test_all_ways_through(path, writer, reader):
    state = zoo()
    storage = rt.StorageWriter(path) if writer == "ours" else dcp.FileSystemWriter(path)
    dcp.save(state, storage_writer=storage, **ALONE)
    loaded = zeroed(state)
    if reader == "direct":
        rt.load(loaded, path)
    else:
        dcp.load(loaded, storage_reader=rt.StorageReader(path) if reader == "ours" else dcp.FileSystemReader(path), **ALONE)
    assert_same_tree(state, loaded)


def test_checkpoints_through_the_writer_are_checked_and_described(path):
    dcp.save({"a": torch.arange(100)}, storage_writer=rt.StorageWriter(path), **ALONE)
    report = rt.load({"a": torch.zeros(100, dtype=torch.int64)}, path)
    assert report.verified == 1
    with reshard.open(path) as ck:
        assert "reshard" in ck.writer
    file = pathlib.Path(path) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(torch.arange(100).numpy().tobytes()) + 9] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"a": torch.zeros(100, dtype=torch.int64)}, storage_reader=rt.StorageReader(path), **ALONE)
    assert isinstance(raised.value.failures[0][0], reshard.Corrupt)


@pytest.mark.parametrize("save", ["torch", "ours"])
def test_the_metadata_names_the_version_that_was_written(path, save):
    if save == "torch":
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path, **ALONE)
    else:
        rt.save({"w": torch.ones(2)}, path)
    theirs, ours = dcp.FileSystemReader(path).read_metadata(), rt.StorageReader(path).read_metadata()
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)


def test_overwriting_replaces_and_refusing_is_a_choice(path):
    dcp.save({"a": torch.zeros(3)}, storage_writer=rt.StorageWriter(path), **ALONE)
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.ones(3)}, storage_writer=rt.StorageWriter(path, overwrite=False), **ALONE)
    assert isinstance(raised.value.failures[0][0], reshard.AlreadyExists)
    dcp.save({"a": torch.ones(3)}, storage_writer=rt.StorageWriter(path), **ALONE)
    with reshard.open(path) as ck:
        assert ck["a"].numpy().tolist() == [1, 1, 1]
    assert len(list(pathlib.Path(path).glob("*.distcp"))) == 1


def test_a_save_that_fails_leaves_the_old_one(path):
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise RuntimeError("planner's own")

    dcp.save({"a": torch.zeros(3)}, storage_writer=rt.StorageWriter(path), **ALONE)
    with pytest.raises(CheckpointException, match="planner's own"):
        dcp.save({"a": torch.ones(3)}, storage_writer=rt.StorageWriter(path), planner=Failing(), **ALONE)
    with reshard.open(path) as ck:
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


def test_planners_of_the_users_own(path):
    dcp.save({"w": torch.arange(4.0), "epoch": 3}, storage_writer=rt.StorageWriter(path), planner=Doubling(), **ALONE)
    planner = Renaming()
    state = {"new_w": torch.zeros(4), "new_epoch": None}
    dcp.load(state, storage_reader=rt.StorageReader(path), planner=planner, **ALONE)
    assert state["new_w"].tolist() == [0, 2, 4, 6] and planner.committed == ["w"] and planner.bytes == [("epoch", 3)]


def test_the_empty_state_dict_planner(path):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"model": {"w": torch.randn(3, 3)}, "epoch": 2}
    rt.save(state, path)
    loaded = {}
    _load_state_dict(loaded, storage_reader=rt.StorageReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert_same_tree(state, loaded)


def test_reading_runs_no_code_unless_told(path, tmp_path):
    marker = tmp_path / "was-run"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    dcp.save({"bad": Payload(), "w": torch.ones(1)}, checkpoint_id=path, **ALONE)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"bad": None, "w": torch.zeros(1)}, storage_reader=rt.StorageReader(path), **ALONE)
    assert isinstance(raised.value.failures[0][0], reshard.UntrustedPickle) and not marker.exists()
    dcp.load({"bad": None, "w": torch.zeros(1)}, storage_reader=rt.StorageReader(path, allow_pickle=True), **ALONE)
    assert marker.exists()


def test_element_types_are_converted_as_torch_does(path):
    rt.save({"w": torch.tensor([1.5, 2.5])}, path)
    state = {"w": torch.zeros(2, dtype=torch.float64)}
    dcp.load(state, storage_reader=rt.StorageReader(path), **ALONE)
    assert state["w"].tolist() == [1.5, 2.5]


def test_safetensors_through_torchs_load(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.safetensors")
    state = {"w": torch.zeros(2, 3)}
    dcp.load(state, storage_reader=rt.StorageReader(tmp_path / "x.safetensors"), **ALONE)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_several_files_and_one_for_each_record(path):
    state = {str(i): torch.full((10,), float(i)) for i in range(6)}
    for suffix, options in {"threads": {"thread_count": 3}, "each": {"single_file_per_rank": False}}.items():
        dcp.save(state, storage_writer=rt.StorageWriter(path + suffix, **options), **ALONE)
        loaded = zeroed(state)
        dcp.load(loaded, checkpoint_id=path + suffix, **ALONE)
        assert_same_tree(state, loaded)
    assert len(list(pathlib.Path(path + "threads").glob("*.distcp"))) == 3
    assert len(list(pathlib.Path(path + "each").glob("*.distcp"))) == 6


# ---- on ranks -----------------------------------------------------------------------------------------------------------


def through_torch(rank, size, path):
    for layout in layouts(size):
        if layout.startswith("strided"):
            continue
        dcp.save(state_in(layout, size, True), storage_writer=rt.StorageWriter(f"{path}-{layout}"))
        for other in layouts(size):
            if other.startswith("strided"):
                continue
            state = state_in(other, size, False)
            dcp.load(state, storage_reader=rt.StorageReader(f"{path}-{layout}"))
            check(state, other, size)
        state = state_in(layout, size, False)
        rt.load(state, f"{path}-{layout}")
        check(state, layout, size)


@pytest.mark.parametrize("size", [2, 4])
def test_layouts_through_torch(ranks, path, size):
    ranks(size, through_torch, path)


def asynchronously(rank, size, path):
    state = state_in("rows", size, True)
    future = dcp.async_save(state, storage_writer=rt.StorageWriter(path))
    future = getattr(future, "upload_completion", future)
    future.result()
    loaded = state_in("columns", size, False)
    rt.load(loaded, path)
    check(loaded, "columns", size)


def test_torchs_async_save_on_top_of_ours(ranks, path):
    ranks(2, asynchronously, path)


def test_torchs_async_save_in_a_process_of_its_own(path, tmp_path):
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
    imports = os.pathsep.join([str(pathlib.Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, program, path, tmp_path / "store"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": imports}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    state = {"x": torch.zeros(9), "epoch": 0}
    rt.load(state, path)
    assert same(state["x"], torch.arange(9.0)) and state["epoch"] == 2


def with_cached_plans(rank, size, path):
    for step in range(3):
        tensor = global_tensor((4, 4), torch.float32, step)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": tensor, "step": step}, storage_writer=rt.StorageWriter(path), planner=planner)
        loaded = {"w": torch.zeros(4, 4), "step": None}
        rt.load(loaded, path)
        assert same(loaded["w"], tensor) and loaded["step"] == step


def test_plans_that_torch_caches(ranks, path):
    if "enable_plan_caching" not in dcp.DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch does not cache plans")
    ranks(2, with_cached_plans, path)


def without_collectives(rank, size, path):
    state = {"mine": torch.full((3,), float(rank)), "epoch": rank}
    dcp.save(state, storage_writer=rt.StorageWriter(path), use_collectives=False)
    dist.barrier()
    for reader in (rt.StorageReader(path), dcp.FileSystemReader(path)):
        loaded = {"mine": torch.zeros(3), "epoch": None}
        dcp.load(loaded, storage_reader=reader)
        assert loaded["mine"].tolist() == [rank] * 3 and loaded["epoch"] == rank


def test_without_rank_coordination(ranks, path):
    import inspect

    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("this torch always coordinates")
    ranks(2, without_collectives, path)
