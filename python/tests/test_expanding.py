"""Files whose keys name far more than they store: refused by name, in memory that the file's size bounds."""

import pathlib
import pickle
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import measured
from helpers import ALONE
from torch.distributed.checkpoint.metadata import MetadataIndex

import reshard
import reshard.torch as rt
from reshard import _reshard

KEYS = 500
#: A process without torch starts at about 30 MB; a value of 1 MB becomes 32 MB when decoded.
MOST_MEMORY = 400e6


def aliased(folder, key, count=KEYS):
    """Makes `count` more keys name the record of one."""
    path = pathlib.Path(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    index = next(index for index in metadata.storage_data if index.fqn == key)
    for number in range(count):
        name = f"{key}{number}"
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[key]
        metadata.storage_data[MetadataIndex(name, index.offset, index.index)] = info
        metadata.planner_data[name] = (name,)
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def many_values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values") / "ck"
    dcp.save({"v": (True,) * 1_000_000, "w": torch.ones(2)}, checkpoint_id=folder, **ALONE)
    aliased(folder, "v")
    return folder


@pytest.fixture(scope="module")
def many_tensors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensors") / "ck"
    dcp.save({"t": torch.ones(2_500_000)}, checkpoint_id=folder, **ALONE)
    aliased(folder, "t")
    return folder


@pytest.fixture(scope="module")
def many_views(tmp_path_factory):
    file = tmp_path_factory.mktemp("views") / "views.pt"
    tensor = torch.ones(2_500_000)
    torch.save({f"t{number}": tensor for number in range(KEYS)}, file)
    return file


READERS = {
    "digest": lambda source, out: ["digest", source],
    "diff": lambda source, out: ["diff", source, source],
    "convert to dcp": lambda source, out: ["convert", source, out / "d", "--to", "dcp"],
    "convert to safetensors": lambda source, out: ["convert", source, out / "m.safetensors"],
    "convert to torch": lambda source, out: ["convert", source, out / "m.pt"],
    "relayout": lambda source, out: ["relayout", source, out / "r", "--mesh", "2"],
    "merge": lambda source, out: ["merge", source, source, "--output", out / "m"],
}


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("which", ["many_values", "many_tensors", "many_views"])
def test_what_expands_is_refused_in_little_memory(which, verb, request, tmp_path):
    source = request.getfixturevalue(which)
    start = time.monotonic()
    code, _, memory, said = measured(*READERS[verb](source, tmp_path))
    assert code == 2, said
    assert "expands beyond what it stores" in said and "other keys take" in said, said
    assert "--expanded-limit" in said and "RESHARD_EXPANDED_LIMIT" in said
    assert memory < MOST_MEMORY and time.monotonic() - start < 60, (memory, time.monotonic() - start)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("which", ["many_values", "many_tensors", "many_views"])
def test_what_only_looks_works_in_little_memory(which, request, tmp_path):
    source = request.getfixturevalue(which)
    key = "t3" if which != "many_values" else "v3"
    for arguments in (["verify", source], ["inspect", source], ["ls", source], ["show", source, key]):
        start = time.monotonic()
        code, _, memory, said = measured(*arguments)
        assert code == 0, (arguments, said)
        assert memory < MOST_MEMORY and time.monotonic() - start < 60, (arguments, memory, time.monotonic() - start)
    report = reshard.verify(source)
    assert report.sound
    if which != "many_views":
        assert sum("is that of" in finding.what for finding in report.findings) == KEYS
        code, _, memory, said = measured("edit", source, tmp_path / "edited", "--drop", f"{key[0]}1*")
        assert code == 0 and memory < MOST_MEMORY, said


def test_the_limit_can_be_raised_and_lowered(tmp_path, monkeypatch):
    file = tmp_path / "t.pt"
    tensor = torch.arange(1000.0)
    torch.save({f"t{number}": tensor for number in range(100)}, file)
    assert len(reshard.digest(file)) == 100
    monkeypatch.setenv("RESHARD_EXPANDED_LIMIT", "100000")
    with pytest.raises(reshard.ResourceExhausted, match=r"RESHARD_EXPANDED_LIMIT") as caught:
        reshard.digest(file)
    assert "twice that and 100000 bytes" in str(caught.value)
    assert len(reshard.digest(file, include=["t1*"])) == 11
    monkeypatch.delenv("RESHARD_EXPANDED_LIMIT")
    assert measured("digest", file, "--expanded-limit", "100kB")[0] == 2
    assert measured("digest", file, "--expanded-limit", "400kB")[0] == 0
    assert measured("digest", file, "--expanded-limit", "many")[0] == 2


def test_values_that_were_not_asked_for_cost_nothing(many_values):
    state = {"w": torch.zeros(2)}
    rt.load(state, many_values, strict=False)
    assert state["w"].tolist() == [1, 1]
    with pytest.raises(reshard.ResourceExhausted, match="expands"):
        rt.load({f"v{number}": None for number in range(KEYS)}, many_values, strict=False)
    with reshard.open(many_values) as checkpoint:
        assert len(checkpoint["v7"]) == 1_000_000


def test_an_expanded_tensor_is_seen_in_part_and_never_whole(tmp_path):
    file, folder = tmp_path / "t.pt", tmp_path / "ck"
    huge = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save({"huge": huge, "w": torch.ones(2), "fine": torch.ones(1).expand(1000)}, file)
    # The same as a record of DCP, which PyTorch would have written contiguous.
    dcp.save({"huge": torch.ones(2, 2), "w": torch.ones(2)}, checkpoint_id=folder, **ALONE)
    record = tmp_path / "record"
    torch.save(huge, record)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "huge")
    data = folder / info.relative_path
    offset = data.stat().st_size
    data.write_bytes(data.read_bytes() + record.read_bytes())
    metadata.storage_data[index] = type(info)(info.relative_path, offset, record.stat().st_size)
    stored = metadata.state_dict_metadata["huge"]
    stored.size = stored.chunks[0].sizes = huge.shape
    path.write_bytes(pickle.dumps(metadata))
    for source in (file, folder):
        with reshard.open(source) as checkpoint:
            assert checkpoint["w"].numpy().tolist() == [1, 1]
            assert checkpoint["huge"][5:7, 3:4].tolist() == [[1], [1]]
            with pytest.raises(reshard.ResourceExhausted, match="expands"):
                checkpoint["huge"].numpy()
        with pytest.raises(reshard.ResourceExhausted, match="expands"):
            reshard.stats(source, "huge")
        with pytest.raises(reshard.ResourceExhausted, match="expands"):
            reshard.digest(source)
        assert reshard.verify(source).sound
        assert measured("show", source, "huge", "--slice", "0:2,0:2", "--values-only")[0] == 0
        assert measured("show", source, "huge")[0] == 2
    with reshard.open(file) as checkpoint:
        assert checkpoint["fine"].numpy().sum() == 1000


def test_verifying_many_tensors_is_not_quadratic(tmp_path):
    def seconds(count):
        file = tmp_path / f"{count}.pt"
        torch.save({f"t{number}": torch.empty(1) for number in range(count)}, file)
        start = time.monotonic()
        report = _reshard.verify(str(file), True)
        assert report.sound and report.keys == count
        return time.monotonic() - start

    few, many = min(seconds(2_000) for _ in range(3)), seconds(20_000)
    # Ten times as many: quadratic would be a hundred times as long.
    assert many < 40 * few + 0.5, (few, many)


def test_damage_in_many_tensors_is_named_in_linear_time(tmp_path):
    def seconds(count):
        file = tmp_path / f"{count}.pt"
        torch.save({f"t{number}": torch.ones(16) for number in range(count)}, file)
        file.write_bytes(file.read_bytes().replace(b"\x00\x00\x80\x3f" * 16, b"\x00\x00\x80\x3e" * 16))
        start = time.monotonic()
        report = _reshard.verify(str(file), True)
        assert not report.sound and sum(finding.key is not None for finding in report.findings) == count
        return time.monotonic() - start

    few, many = min(seconds(1_000) for _ in range(3)), seconds(10_000)
    assert many < 40 * few + 0.5, (few, many)
