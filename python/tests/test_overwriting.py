"""What lies at a path is replaced only when asked, and then only what is a checkpoint's own."""

import pathlib
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE
from torch.distributed.checkpoint.api import CheckpointException

import reshard
import reshard.torch as rt


@pytest.fixture
def source(tmp_path):
    rt.save({"w": torch.full((50,), 2.0), "n": 2}, tmp_path / "source")
    return tmp_path / "source"


def snapshot(path):
    """Every file below a path, and what is in it."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def save_old(kind, path):
    """Something that lies at a path already: checkpoints of each format, and what is none."""
    state = {"w": torch.ones(50), "n": 1}
    if kind == "dcp":
        rt.save(state, path)
    elif kind in ("safetensors", "shards"):
        rt.save(state, path.parent / "tmp")
        size = 100 if kind == "shards" else None
        reshard.convert(path.parent / "tmp", path, to="safetensors", **({"max_shard_size": size} if size else {}))
        shutil.rmtree(path.parent / "tmp")
    elif kind == "torch folder":
        path.mkdir()
        torch.save(state, path / "checkpoint.pt")
    elif kind == "a file":
        path.write_bytes(b"not a checkpoint at all")
    elif kind == "a folder":
        (path / "below").mkdir(parents=True)
        (path / "below" / "results.csv").write_text("mine")
        (path / "notes.txt").write_text("mine")
    elif kind == "a .pt file":
        torch.save(state, path)


WRITERS = {
    "convert to dcp": lambda source, path, **o: reshard.convert(source, path, to="dcp", **o),
    "convert to safetensors": lambda source, path, **o: reshard.convert(source, path, to="safetensors", **o),
    "convert to torch": lambda source, path, **o: reshard.convert(source, path, to="torch", **o),
    "relayout": lambda source, path, **o: reshard.relayout(source, path, mesh="2", **o),
    "merge": lambda source, path, **o: reshard.merge([source, source], path, **o),
    "rt.save": lambda source, path, **o: rt.save({"w": torch.full((50,), 2.0), "n": 2}, path, **o),
}
CHECKPOINTS = ("dcp", "safetensors", "shards", "torch folder")


@pytest.mark.parametrize("kind", [*CHECKPOINTS, "a file"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_there_is_refused_unless_asked(writer, kind, source, tmp_path, caplog):
    path = tmp_path / "path"
    save_old(kind, path)
    before = snapshot(path)
    if writer == "rt.save" and kind == "torch folder":
        # A save writes beside files that programs put into its folder, takes nothing of them, and says so.
        with caplog.at_level("WARNING", "reshard"):
            WRITERS[writer](source, path)
        after = snapshot(path)
        assert {name: after[name] for name in before} == before and reshard.open(path)["n"] == 2
        assert "checkpoint.pt" in caplog.text
        return
    with pytest.raises(reshard.ReshardError) as caught:
        WRITERS[writer](source, path)
    assert isinstance(caught.value, (reshard.AlreadyExists, reshard.StorageError, reshard.InvalidInput)), caught.value
    assert snapshot(path) == before


@pytest.mark.parametrize("kind", [*CHECKPOINTS, "a file", "a folder"])
@pytest.mark.parametrize("writer", WRITERS)
def test_overwriting_never_takes_what_is_not_a_checkpoints_own(writer, kind, source, tmp_path):
    path = tmp_path / "path"
    save_old(kind, path)
    if path.is_dir():
        for name in ("config.json", "tokenizer.bin.txt", "README.md"):
            (path / name).write_text("mine")
        (path / "sub").mkdir()
        (path / "sub" / "model.safetensors").write_text("mine")
        (path / "sub" / "__0_0.distcp").write_text("mine")
    before = snapshot(path)
    try:
        WRITERS[writer](source, path, overwrite=True)
    except reshard.ReshardError:
        assert snapshot(path) == before, "a refusal changes nothing"
        return
    after = snapshot(path)
    mine = {name: data for name, data in before.items() if data == b"mine"}
    assert {name: after.get(name) for name in mine} == mine
    # What was written is what is found, whichever format lay there before; or both are listed, and neither is taken for granted.
    try:
        found = reshard.open(path)
    except reshard.InvalidInput as several:
        assert "holds several checkpoints" in str(several)
        found = reshard.open(path / ("model.safetensors" if "safetensors" in writer else "checkpoint.pt"))
    with found as checkpoint:
        assert (checkpoint["w"].numpy() == 2).all() and checkpoint["n"] == 2
    # Of another format's checkpoint nothing goes: nobody can tell who else needs it.
    format_of = {"safetensors": ".safetensors", "shards": ".safetensors", "torch folder": ".pt"}
    ending = format_of.get(kind)
    target = ".safetensors" if "safetensors" in writer else ".pt" if "torch" in writer else ".distcp"
    if ending is not None and ending != target:
        assert all(name in after for name in before if name.endswith(ending)), (sorted(before), sorted(after))


FOREIGN = pathlib.Path(__file__).parents[2] / "crates/reshard/tests/foreign"


@pytest.mark.parametrize("save", ["rt.save", "rt.async_save", "StorageWriter"])
@pytest.mark.parametrize("kind", ["safetensors", "shards", "deepspeed", "megatron"])
def test_a_save_never_hides_a_model_of_another_format_unasked(kind, save, tmp_path, caplog):
    path = tmp_path / "path"
    match kind:
        case "deepspeed":
            shutil.copytree(FOREIGN / "deepspeed-0.19/zero1_w2/checkpoint", path)
        case "megatron":
            path.mkdir()
            (path / "latest_checkpointed_iteration.txt").write_text("3")
        case _:
            save_old(kind, path)
    before = snapshot(path)
    saves = {
        "rt.save": lambda **o: rt.save({"n": 2}, path, **o),
        "rt.async_save": lambda **o: rt.async_save({"n": 2}, path, **o).result(),
        "StorageWriter": lambda **o: dcp.save({"n": 2}, storage_writer=rt.StorageWriter(path, **o), **ALONE),
    }
    with pytest.raises((reshard.ReshardError, CheckpointException), match="a model of another format") as caught:
        saves[save](overwrite=False)
    if save != "StorageWriter":
        assert isinstance(caught.value, reshard.AlreadyExists) and "write beside it" in caught.value.hint
    assert snapshot(path) == before
    with caplog.at_level("WARNING", "reshard"):
        saves[save](overwrite=True)
    after = snapshot(path)
    assert {name: after[name] for name in before} == before and reshard.open(path)["n"] == 2
    assert "lies in the same folder and stays" in caplog.text


def test_an_old_metadata_costs_no_file_in_folders_below(tmp_path):
    """Whatever a foreign `.metadata` names, a save that replaces it takes data files of its own folder alone."""
    path = tmp_path / "path"
    rt.save({"w": torch.ones(50)}, path / "sub")
    good = snapshot(path / "sub")
    (path / "__0_0.distcp").write_bytes(good["__0_0.distcp"])
    named = pickle.loads(good[".metadata"])
    named.storage_data = {
        index: type(place)("sub/__0_0.distcp", place.offset, place.length) for index, place in named.storage_data.items()
    }
    (path / ".metadata").write_bytes(pickle.dumps(named))
    rt.save({"w": torch.zeros(50)}, path, overwrite=True)
    assert snapshot(path / "sub") == good


@pytest.mark.parametrize("kind", ["a .pt file", "a file", "a folder", "dcp"])
def test_one_file_replaces_one_file_and_nothing_else(kind, source, tmp_path):
    path = tmp_path / "model.pt"
    save_old(kind, path)
    beside = tmp_path / "beside.pt"
    beside.write_bytes(b"mine")
    before = snapshot(path)
    for name in ("model.pt", "model.safetensors"):
        target = tmp_path / name
        if name == "model.safetensors":
            shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
            before = snapshot(target)
        with pytest.raises(reshard.ReshardError):
            reshard.convert(source, target)
        assert snapshot(target) == before
        if target.is_dir():
            with pytest.raises(reshard.ReshardError):
                reshard.convert(source, target, overwrite=True)
            assert snapshot(target) == before
        else:
            reshard.convert(source, target, overwrite=True)
            assert reshard.open(target)["n"] == 2
    assert beside.read_bytes() == b"mine"


def test_an_edit_and_a_recovery_take_no_path_that_is_taken(source, tmp_path):
    for kind in (*CHECKPOINTS, "a file", "a folder"):
        path = tmp_path / kind.replace(" ", "-")
        save_old(kind, path)
        before = snapshot(path)
        with pytest.raises(reshard.ReshardError):
            reshard.edit(source, path, drop=["n"])
        assert snapshot(path) == before
        with pytest.raises(reshard.ReshardError):
            reshard.recover(path)
        assert snapshot(path) == before
