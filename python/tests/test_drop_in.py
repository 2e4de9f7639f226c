"""`reshard.torch.checkpoint` has the names, signatures, results and exceptions of `torch.distributed.checkpoint`."""

import importlib
import inspect
import io
import json
import pathlib
import pickle
import pkgutil
import warnings
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from helpers import ALONE, assert_same_tree, global_tensor, same, zeroed
from test_cross import zoo
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as ours

#: torch 2.5 fills what overlaps of a tensor of another shape, and says nothing.
COMPARES_SHAPES = "mismatch" in inspect.getsource(theirs.default_planner.create_default_local_load_plan)
SUBMODULES = [found.name for found in pkgutil.iter_modules(theirs.__path__) if not found.name.startswith("_")]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield


def public(module):
    """What a module offers: its `__all__`, and what is defined there or imported from its siblings."""
    names = set(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        where = getattr(value, "__module__", None) or getattr(value, "__name__", "")
        if not name.startswith("_") and isinstance(where, str) and where.startswith("torch.distributed.checkpoint"):
            names.add(name)
    return sorted(names)


@pytest.mark.parametrize("name", ["", *SUBMODULES])
def test_every_public_name_of_torch_exists_with_its_signature(name):
    module = importlib.import_module(f"torch.distributed.checkpoint.{name}" if name else "torch.distributed.checkpoint")
    mine = importlib.import_module(f"reshard.torch.checkpoint.{name}" if name else "reshard.torch.checkpoint")
    assert public(module) or name
    for each in public(module):
        original, replacement = getattr(module, each), getattr(mine, each)
        if original is replacement or inspect.ismodule(original):
            continue
        if inspect.isclass(original):
            assert issubclass(replacement, original), each
            check_signature(each, original.__init__, replacement.__init__)
        else:
            check_signature(each, original, replacement)


def check_signature(name, original, replacement):
    wanted, found = inspect.signature(original).parameters, inspect.signature(replacement).parameters
    assert list(wanted) == list(found)[: len(wanted)], f"{name}: {list(wanted)} and {list(found)}"
    for each, parameter in wanted.items():
        assert found[each].kind == parameter.kind and found[each].default == parameter.default, f"{name}: {each}"
    for each in list(found)[len(wanted) :]:
        assert found[each].default is not inspect.Parameter.empty, f"{name}: {each}"


def test_what_is_replaced_is_what_saves_and_loads():
    replaced = {name for name in public(theirs) if getattr(ours, name) is not getattr(theirs, name)}
    assert {
        "save",
        "async_save",
        "load",
        "FileSystemWriter",
        "FileSystemReader",
        "save_state_dict",
        "load_state_dict",
    } <= replaced
    for name in ("save", "async_save", "save_state_dict"):
        assert getattr(ours.state_dict_saver, name) is getattr(ours, name)
    for name in ("load", "load_state_dict"):
        assert getattr(ours.state_dict_loader, name) is getattr(ours, name)
    assert ours.planner is theirs.planner and ours.DefaultSavePlanner is theirs.DefaultSavePlanner


@pytest.mark.parametrize("how", ["id", "their writer", "our writer", "positional"])
def test_defaults_go_to_the_engine_and_return_metadata(path, how):
    state = zoo()
    if how == "id":
        metadata = ours.save(state, checkpoint_id=path, storage_writer=None, planner=None, process_group=None)
    elif how == "positional":
        with pytest.warns(UserWarning, match="argument order"):
            metadata = ours.save(state, ours.FileSystemWriter(path))
    else:
        writer = (theirs if how == "their writer" else ours).FileSystemWriter(path)
        metadata = ours.save(state, storage_writer=writer, planner=ours.DefaultSavePlanner(), no_dist=True)
    assert isinstance(metadata, theirs.Metadata)
    with reshard.open(path) as ck:
        assert "reshard" in ck.writer
        assert set(metadata.state_dict_metadata) == set(ck.keys())
    again = pickle.loads(pickle.dumps(metadata))
    assert type(again) is theirs.Metadata and again.state_dict_metadata == metadata.state_dict_metadata
    for load in (ours.load, theirs.load):
        loaded = zeroed(state)
        assert load(loaded, checkpoint_id=path) is None
        assert_same_tree(state, loaded)
    loaded = zeroed(state)
    ours.load(loaded, storage_reader=theirs.FileSystemReader(path), planner=theirs.DefaultLoadPlanner())
    assert_same_tree(state, loaded)


def test_metadata_of_a_checkpoint_that_is_gone_is_an_error(path):
    first = ours.save({"a": torch.zeros(3)}, checkpoint_id=path)
    second = ours.save({"a": torch.ones(3)}, checkpoint_id=path)
    assert second.storage_meta.save_id and second.state_dict_metadata["a"].size == (3,)
    with pytest.raises(reshard.NotFound, match="no longer"):
        print(first.state_dict_metadata)


def test_a_planner_of_the_programs_own_uses_our_storage(path):
    class Doubling(theirs.DefaultSavePlanner):
        def resolve_data(self, item):
            data = super().resolve_data(item)
            return data if isinstance(data, io.BytesIO) else data * 2

    for given in (
        {"checkpoint_id": path},
        {"storage_writer": theirs.FileSystemWriter(path)},
        {"storage_writer": ours.FileSystemWriter(path)},
    ):
        metadata = ours.save({"a": torch.arange(4.0), "n": 3}, planner=Doubling(), **given, **ALONE)
        assert isinstance(metadata, theirs.Metadata)
        with reshard.open(path) as ck:
            assert "reshard" in ck.writer and ck["a"].numpy().tolist() == [0, 2, 4, 6]
        assert reshard.verify(path).checked == reshard.verify(path).records

    class Skipping(theirs.DefaultLoadPlanner):
        def load_bytes(self, item, value):
            self.state_dict[item.dest_index.fqn] = "skipped"
            self.original_state_dict["n"] = "skipped"

    state = {"a": torch.zeros(4), "n": 0}
    ours.load(state, checkpoint_id=path, planner=Skipping(), **ALONE)
    assert state["a"].tolist() == [0, 2, 4, 6] and state["n"] == "skipped"


def test_a_planner_that_cannot_be_served_is_one_clear_error_and_the_checkpoint_stays(path):
    class Texts(theirs.DefaultSavePlanner):
        def resolve_data(self, item):
            return "no tensor"

    class Longer(theirs.DefaultSavePlanner):
        def resolve_data(self, item):
            return torch.zeros(7)

    ours.save({"a": torch.arange(4.0)}, checkpoint_id=path, **ALONE)
    for planner, message in ((Texts(), "the planner gave a str for 'a', not a tensor"), (Longer(), r"shape \(7,\) for 'a'")):
        with pytest.raises(CheckpointException, match=message):
            ours.save({"a": torch.zeros(4)}, checkpoint_id=path, planner=planner, **ALONE)
        assert reshard.verify(path).sound
        with reshard.open(path) as checkpoint:
            assert checkpoint["a"].numpy().tolist() == [0, 1, 2, 3]


def test_a_storage_of_the_programs_own_is_used(path):
    used = []

    class Own(theirs.FileSystemWriter):
        def write_data(self, plan, planner):
            used.append("write")
            return super().write_data(plan, planner)

    class OwnReader(ours.FileSystemReader):
        def read_data(self, plan, planner):
            used.append("read")
            return super().read_data(plan, planner)

    ours.save({"a": torch.arange(4.0)}, storage_writer=Own(path), **ALONE)
    state = {"a": torch.zeros(4)}
    ours.load(state, storage_reader=OwnReader(path), **ALONE)
    assert used == ["write", "read"] and state["a"].tolist() == [0, 1, 2, 3]


def test_our_classes_work_under_torchs_own_calls_and_subclasses_get_torchs_steps(path):
    class Renamed(ours.FileSystemWriter):
        def finish(self, metadata, results):
            super().finish(metadata, results)

    for writer, engine in ((ours.FileSystemWriter(path), True), (Renamed(path), False)):
        theirs.save({"a": torch.arange(4.0)}, storage_writer=writer, **ALONE)
        with reshard.open(path) as ck:
            assert ("reshard" in ck.writer) == engine
        state = {"a": torch.zeros(4)}
        theirs.load(state, storage_reader=ours.FileSystemReader(path), **ALONE)
        assert state["a"].tolist() == [0, 1, 2, 3]


def test_loads_are_torchs_in_what_they_take(path):
    ours.save({"a": torch.arange(4.0), "more": torch.zeros(2), "n": 5}, checkpoint_id=path)
    state = {"a": torch.zeros(4, dtype=torch.float64)}
    ours.load(state, checkpoint_id=path)
    assert state["a"].tolist() == [0, 1, 2, 3]
    # Missing keys, other shapes: nothing is read.
    for load in (ours.load, theirs.load):
        state = {"a": torch.zeros(4), "b": torch.zeros(2)}
        with pytest.raises(CheckpointException) as raised:
            load(state, checkpoint_id=path, **ALONE)
        error = raised.value.failures[0][0]
        assert isinstance(error, RuntimeError) and "Missing key in checkpoint state_dict" in str(error) and "b" in str(error)
        assert state["a"].tolist() == [0, 0, 0, 0]
        if load is ours.load or COMPARES_SHAPES:
            with pytest.raises(CheckpointException) as raised:
                load({"a": torch.zeros(5)}, checkpoint_id=path, **ALONE)
            error = raised.value.failures[0][0]
            assert isinstance(error, ValueError) and str(error).startswith("Size mismatch between saved")
        with pytest.raises(CheckpointException):
            load({"a": torch.zeros(5)}, checkpoint_id=path + "-nowhere", **ALONE)
        state = {"a": torch.zeros(4), "b": torch.full((2,), 7.0)}
        load(state, checkpoint_id=path, planner=theirs.DefaultLoadPlanner(allow_partial_load=True), **ALONE)
        assert state["a"].tolist() == [0, 1, 2, 3] and state["b"].tolist() == [7, 7]
        with pytest.raises(RuntimeError, match="checkpoint_id"):
            load({})
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        ours.save({})


class Odd:
    """A class that the program may declare safe."""

    def __init__(self, value):
        self.value = value


def test_objects_load_where_the_programs_class_list_allows(path):
    ours.save({"odd": Odd(3), "a": torch.zeros(1)}, checkpoint_id=path)
    with pytest.raises(CheckpointException) as raised:
        ours.load({"odd": None}, checkpoint_id=path)
    assert isinstance(raised.value.failures[0][0], reshard.UntrustedPickle)
    state = {"odd": None}
    with torch.serialization.safe_globals([Odd]):
        ours.load(state, checkpoint_id=path)
    assert state["odd"].value == 3


class Counter:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "t": torch.full((2,), float(self.value))}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_stateful_objects_and_modules_are_asked_as_by_torch(path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ours.save({"model": model, "optimizer": optimizer, "counter": Counter(4)}, checkpoint_id=path)
    other = path + "-theirs"
    theirs.save({"model": model, "optimizer": optimizer, "counter": Counter(4)}, checkpoint_id=other)
    assert reshard.diff(path, other).equal
    fresh, counter = torch.nn.Linear(3, 2), Counter(0)
    state = {"model": fresh, "counter": counter}
    ours.load(state, checkpoint_id=path)
    assert same(fresh.weight, model.weight) and counter.value == 4 and state["counter"] is counter


@pytest.mark.parametrize("kind", ["future", "writer", "stager"])
def test_saves_in_the_background_return_what_torch_returns(path, kind):
    staging = importlib.import_module("torch.distributed.checkpoint.staging")
    arguments = {"checkpoint_id": path}
    if kind == "writer":
        arguments = {"storage_writer": ours.FileSystemWriter(path)}
    if kind == "stager":
        if not hasattr(staging, "DefaultStager"):
            pytest.skip("no DefaultStager in this torch")
        options = staging.StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
        )
        arguments |= {"async_stager": staging.DefaultStager(options)}
        arguments |= {"async_checkpointer_type": ours.state_dict_saver.AsyncCheckpointerType.PROCESS}
    tensor = torch.arange(1000.0)
    response = ours.async_save({"a": tensor}, **arguments)
    if kind == "stager":
        assert isinstance(response, ours.state_dict_saver.AsyncSaveResponse)
        response.staging_completion.result()
        arguments["async_stager"].close()
        future = response.upload_completion
    else:
        future = response
    tensor.zero_()
    assert isinstance(future, Future)
    assert isinstance(future.result(30), theirs.Metadata)
    state = {"a": torch.zeros(1000)}
    theirs.load(state, checkpoint_id=path, **ALONE)
    assert torch.equal(state["a"], torch.arange(1000.0))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_writer_has_the_identity_of_what_it_saved(path, in_background):
    writer = ours.FileSystemWriter(path)
    if in_background:
        ours.async_save({"a": torch.zeros(3)}, storage_writer=writer).result(60)
    else:
        ours.save({"a": torch.zeros(3)}, storage_writer=writer)
    reader = ours.FileSystemReader(path)
    found = reader.read_metadata().storage_meta
    assert (found.save_id, found.load_id) == (writer.save_id, reader.load_id)


class OwnWriter(ours.FileSystemWriter):
    """A step of its own makes it a storage that PyTorch's orchestration serves."""

    def finish(self, metadata, results):
        self.finished = True
        super().finish(metadata, results)


class OwnReader(ours.FileSystemReader):
    def read_data(self, plan, planner):
        self.read = True
        return super().read_data(plan, planner)


def test_the_older_names_take_storage_of_the_programs_own_without_other_ranks(path):
    writer, reader = OwnWriter(path), OwnReader(path)
    state = {"a": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ours.save_state_dict({"a": torch.ones(3)}, writer, no_dist=True)
        ours.load_state_dict(state, reader, no_dist=True)
    assert writer.finished and reader.read and same(state["a"], torch.ones(3))


def test_a_stager_of_the_programs_own_stages(path):
    class Own(importlib.import_module("torch.distributed.checkpoint.staging").BlockingAsyncStager):
        def stage(self, state_dict):
            return {key: value + 1 for key, value in state_dict.items()}

    if "async_stager" not in inspect.signature(theirs.async_save).parameters:
        pytest.skip("no async_stager in this torch")
    ours.async_save({"a": torch.zeros(3)}, checkpoint_id=path, async_stager=Own()).result(60)
    with reshard.open(path) as ck:
        assert ck["a"].numpy().tolist() == [1, 1, 1] and "reshard" in ck.writer


def test_a_failure_in_the_background_is_the_futures_alone(path):
    pathlib.Path(path).write_text("a file")
    future = ours.async_save({"a": torch.zeros(3)}, checkpoint_id=path + "/below")
    with pytest.raises(CheckpointException):
        future.result(30)
    ours.async_save({"a": torch.zeros(3)}, checkpoint_id=path + "-other").result(30)


def test_overwriting_is_torchs_default_and_refusing_a_choice(path, monkeypatch):
    ours.save({"a": torch.zeros(3)}, checkpoint_id=path)
    ours.save({"a": torch.ones(3)}, checkpoint_id=path)
    with pytest.raises(CheckpointException) as raised:
        ours.save({"a": torch.zeros(3)}, storage_writer=ours.FileSystemWriter(path, overwrite=False))
    assert isinstance(raised.value.failures[0][0], reshard.AlreadyExists)
    monkeypatch.setattr(ours.options, "overwrite", False)
    with pytest.raises(CheckpointException):
        ours.save({"a": torch.zeros(3)}, checkpoint_id=path)
    monkeypatch.setattr(ours.options, "strict", True)
    ours.load({"a": torch.zeros(3)}, checkpoint_id=path)


def on_ranks(rank, size, path):
    mesh = init_device_mesh("cpu", (size,))
    whole = global_tensor((7, 5), seed=3)
    model = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": distribute_tensor(whole[0], mesh, [Replicate()])}
    metadata = ours.save({"model": model, "step": 3}, checkpoint_id=path)
    theirs.save({"model": model, "step": 3}, checkpoint_id=path + "-theirs")
    assert isinstance(metadata, theirs.Metadata) and len(metadata.state_dict_metadata["model.w"].chunks) >= size - 1
    for saved in (path, path + "-theirs"):
        wanted = {"model": {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])}, "step": 0}
        ours.load(wanted, checkpoint_id=saved)
        assert same(wanted["model"]["w"].full_tensor(), whole) and wanted["step"] == 3
    # One rank alone asks for what is not there: all fail, and the failure says where.
    with pytest.raises(CheckpointException) as raised:
        ours.load({"model": {"w" if rank else "absent": torch.zeros(7, 5)}}, checkpoint_id=path)
    assert 0 in raised.value.failures
    future = ours.async_save({"model": model}, checkpoint_id=path + "-later", process_group=dist.group.WORLD)
    assert isinstance(future.result(60), theirs.Metadata)
    if "use_collectives" in inspect.signature(theirs.save).parameters:
        ours.save({"w": torch.full((3,), float(rank))}, checkpoint_id=path + "-alone", use_collectives=False)
        wanted = {"w": torch.zeros(3)}
        ours.load(wanted, checkpoint_id=path + "-alone")
        assert wanted["w"].tolist() == [rank] * 3
    return True


def test_ranks_save_and_load_as_with_torch(path, ranks):
    assert ranks(3, on_ranks, path) == [True] * 3
    assert reshard.diff(path, path + "-theirs").equal


class Talking:
    """Asks and tells the other ranks, in state_dict and in load_state_dict; ranks in another order would mix up the answers."""

    def __init__(self, name):
        self.name = name

    def _together(self):
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, self.name)
        assert set(names) == {self.name}, names

    def state_dict(self):
        self._together()
        return {"name": self.name}

    def load_state_dict(self, state):
        self._together()
        assert state["name"] == self.name


def in_another_order_on_ranks(rank, size, path):
    names = ["a", "b", "c"][:: -1 if rank else 1]
    for module in (ours, rt):
        module.save({name: Talking(name) for name in names}, checkpoint_id=f"{path}-{module.__name__}")
        module.load({name: Talking(name) for name in names}, checkpoint_id=f"{path}-{module.__name__}")
    return True


def test_objects_are_asked_in_one_order_on_all_ranks(path, ranks):
    assert ranks(2, in_another_order_on_ranks, path) == [True] * 2


def test_a_checkpoint_in_the_way_is_told_as_by_torch(path):
    for module in (ours, theirs):
        module.save({"a": torch.zeros(3)}, checkpoint_id=path)
        with pytest.raises(CheckpointException, match="Checkpoint already exists") as raised:
            module.save({"a": torch.ones(3)}, storage_writer=module.FileSystemWriter(path, overwrite=False), **ALONE)
        assert isinstance(raised.value.failures[0][0], RuntimeError)


def consolidate_on_ranks(rank, size, path):
    from reshard.torch.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank

    mesh = init_device_mesh("cpu", (size,))
    state = {f"layer.{i}": distribute_tensor(global_tensor((6, 4), seed=i), mesh, [Shard(0)]) for i in range(5)}
    files = {key: 1 + i % 3 for i, key in enumerate(state)}
    writer = ours.HuggingFaceStorageWriter(path, fqn_to_index_mapping=files, save_distributed=True)
    ours.save(state, storage_writer=writer)
    dist.barrier()
    consolidate_safetensors_files_on_every_rank(path, path + "-whole", files)
    return True


def test_every_rank_consolidates_its_share(path, ranks):
    if not hasattr(theirs, "HuggingFaceStorageWriter"):
        pytest.skip("no Hugging Face storage in this torch")
    pytest.importorskip("safetensors")
    assert ranks(2, consolidate_on_ranks, path) == [True] * 2
    wanted = {f"layer.{i}": torch.zeros(6, 4) for i in range(5)}
    theirs.load(wanted, storage_reader=theirs.HuggingFaceStorageReader(path + "-whole"), **ALONE)
    assert all(same(wanted[f"layer.{i}"], global_tensor((6, 4), seed=i)) for i in range(5))
    assert len(list(pathlib.Path(path + "-whole").glob("*.safetensors"))) == 3


def test_hugging_face_files_are_written_consolidated_and_read(path):
    if not hasattr(theirs, "HuggingFaceStorageWriter"):
        pytest.skip("no Hugging Face storage in this torch")
    pytest.importorskip("safetensors")
    state = {"a.weight": torch.arange(12.0).reshape(3, 4), "b[0].bias": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(2)}
    files = {"a.weight": 1, "b[0].bias": 2, "c": 2}
    writer = ours.HuggingFaceStorageWriter(path, fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True)
    ours.save(state, storage_writer=writer, **ALONE)
    names = sorted(file.name for file in pathlib.Path(path).glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for reader in (ours.HuggingFaceStorageReader(path), theirs.HuggingFaceStorageReader(path)):
        for load in (ours.load, theirs.load):
            loaded = {key: torch.zeros_like(value) for key, value in state.items()}
            load(loaded, storage_reader=reader, **ALONE)
            assert all(same(loaded[key], value) for key, value in state.items())
    index = json.loads((pathlib.Path(path) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state) and set(index["weight_map"].values()) == set(names)


def test_files_are_converted_as_by_torch(path, tmp_path):
    from reshard.torch.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    state = {"model": {"w": torch.arange(6.0)}, "step": 3}
    ours.save(state, checkpoint_id=path)
    file = tmp_path / "all.pt"
    dcp_to_torch_save(path, file)
    assert_same_tree(torch.load(file, weights_only=True), state)
    torch_save_to_dcp(file, tmp_path / "again")
    loaded = zeroed(state)
    theirs.load(loaded, checkpoint_id=str(tmp_path / "again"), **ALONE)
    assert_same_tree(loaded, state)


def _sharded(folder, seed):
    """A model in two files, as ranks write them."""
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    state = {f"w{number}": torch.randn(300, generator=generator) for number in range(4)}
    for part in range(2):
        save_file({key: state[key] for key in sorted(state)[2 * part : 2 * part + 2]}, folder / f"shard-{part}.safetensors")
    return state


def _whole(folder):
    """What a reader of the index finds."""
    import json

    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {key: load_file(folder / name)[key] for key, name in index.items()}


def test_a_consolidation_over_another_is_old_or_new_whatever_stops_it(tmp_path, monkeypatch):
    from reshard import _tools
    from reshard.torch.checkpoint import _consolidate_hf_safetensors as consolidation

    old, new = _sharded(tmp_path / "old", 1), _sharded(tmp_path / "new", 2)
    mapping = {"w0": 1, "w1": 2, "w2": 2, "w3": 3}
    out = tmp_path / "out"

    def same(state):
        return all(torch.equal(state[key], tensor) for key, tensor in _whole(out).items())

    def run(source):
        consolidation.consolidate_safetensors_files(str(tmp_path / source), str(out), mapping)

    class Stop(BaseException):
        pass

    def stopping(at, function):
        calls = iter(range(100))

        def stopped(*args, **kwargs):
            if next(calls) == at:
                raise Stop
            return function(*args, **kwargs)

        return stopped

    run("old")
    beside = out / "config.json"
    beside.write_text("{}")
    assert same(old) and len(list(out.glob("*.safetensors"))) == 3
    for name, owner, times in (("convert", _tools, 3), ("publish_file", consolidation._reshard, 1)):
        for at in range(times):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, stopping(at, getattr(owner, name)))
                with pytest.raises(Stop):
                    run("new")
            assert same(old) or same(new), (name, at)
            run("old")
            assert same(old) and len(list(out.glob("*.safetensors"))) == 3, "and what it left is swept"
    run("new")
    assert same(new) and len(list(out.glob("*.safetensors"))) == 3 and beside.exists()
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(reshard.InvalidInput, match="would be found in place"):
        run("old")
    assert (out / "model.safetensors").read_bytes() == b"mine" and same(new)
