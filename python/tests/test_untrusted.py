"""Files that want to run code: none does, on any road, and none is called sound."""

import enum
import io
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import served
from helpers import ALONE
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItemType

import reshard
import reshard.torch as rt
import reshard.torch.checkpoint as drop_in
from reshard import _reshard
from reshard.integrations._trust import read_objects


class Harmless:
    """A class that the program trusts."""


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def glob(module, name):
    return f"c{module}\n{name}\n".encode()


def call(marker):
    """Makes a folder, which shows that it ran."""
    return glob("posix", "mkdir") + text(str(marker)) + b"\x85R"


def archive(entries, comment=b""):
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        warnings.simplefilter("ignore")
        for name, data in entries:
            file.writestr(name, data)
        file.comment = comment
    return buffer.getvalue()


def record(body, *, name="archive/data.pkl", data=b""):
    entries = [(name, b"\x80\x02" + body), ("archive/version", b"3\n")]
    return archive([*entries, ("archive/data/0", data)] if data else entries)


STORAGE = b"(" + text("storage") + glob("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x02tQ"


def tensor(hooks=None, after=b""):
    hooks = glob("collections", "OrderedDict") + b")R" if hooks is None else hooks
    body = glob("torch._utils", "_rebuild_tensor_v2") + b"(" + STORAGE + b"K\x00K\x02\x85K\x01\x85\x89" + hooks + b"tR"
    return body + after


BENIGN = b"\x80\x02K\x07."
FLOATS = struct.pack("<2f", 1, 2)


def attacks(marker):
    """Records by name; unpickled without care, each makes the folder `marker`."""
    evil = call(marker)
    whole = b"\x80\x02" + evil + b"."
    ok = ("archive/data.pkl", BENIGN)
    yield "the_value_itself", record(evil + b".")
    yield "in_a_list", record(b"]" + evil + b"a.")
    yield "popped", record(evil + b"0K\x07.")
    yield "popped_by_mark", record(b"(" + evil + b"1K\x07.")
    yield "left_below", record(evil + b"K\x07.")
    yield "left_in_a_mark", record(b"(" + evil + b"K\x07.")
    yield "remembered_and_popped", record(evil + b"q\x000K\x07.")
    yield "overwritten_in_a_dict", record(b"}(" + text("a") + evil + text("a") + b"K\x07u.")
    yield "state_of_an_ordered_dict", record(glob("collections", "OrderedDict") + b")R}" + text("a") + evil + b"sb.")
    yield "hooks_of_a_tensor", record(tensor(hooks=evil) + b".", data=FLOATS)
    yield "state_of_a_tensor", record(tensor(after=evil + b"b") + b".", data=FLOATS)
    yield "beside_a_tensor", record(b"(" + tensor() + evil + b"t.", data=FLOATS)
    yield "popped_beside_a_tensor", record(evil + b"0" + tensor() + b".", data=FLOATS)
    yield "in_a_storage", record(tensor().replace(text("cpu"), evil) + b".", data=FLOATS)
    rebuild = glob("torch._tensor", "_rebuild_from_type_v2") + b"(" + glob("posix", "mkdir") + glob("torch", "Tensor")
    yield "as_a_rebuild_function", record(rebuild + text(str(marker)) + b"\x85}tR.")
    trusted = glob(Harmless.__module__, "Harmless") + b")\x81"
    yield "behind_a_trusted_class", record(b"(" + trusted + evil + b"t.")
    yield "behind_a_class_that_torch_trusts", record(b"(" + glob("torch.distributed.tensor", "DTensor") + evil + b"t.")
    yield "behind_the_end", archive([("archive/data.pkl", BENIGN + whole)])
    yield "data_pkl_twice", archive([ok, ("archive/data.pkl", whole)])
    yield "data_pkl_twice_turned", archive([("archive/data.pkl", whole), ok])
    yield "data_pkl_in_capitals", archive([("archive/DATA.PKL", whole), ("archive/version", b"3\n")])
    yield "data_pkl_in_both_spellings", archive([ok, ("archive/DATA.PKL", whole)])
    yield "capitals_first", archive([("archive/DATA.PKL", whole), ok])
    yield "another_folder", archive([ok, ("Archive/data.pkl", whole), ("evil/data.pkl", whole)])
    yield "another_folder_first", archive([("ARCHIVE/data.pkl", whole), ok])
    yield "an_archive_in_the_comment", archive([ok], comment=archive([("archive/data.pkl", whole)]))
    yield "an_archive_before_the_archive", archive([("archive/data.pkl", whole)]) + archive([ok])
    yield "an_archive_behind_the_archive", archive([ok]) + archive([("archive/data.pkl", whole)])
    yield "no_archive", whole
    legacy = io.BytesIO()
    torch.save([1, 2], legacy, _use_new_zipfile_serialization=False)
    yield "before_a_file_of_old", whole + legacy.getvalue()
    yield "by_inst", record(b"(" + text(str(marker)) + b"iposix\nmkdir\n.")
    yield "by_obj", record(b"(" + glob("posix", "mkdir") + text(str(marker)) + b"o.")
    stacked = b"\x8c\x05posix\x8c\x05mkdir\x93" + text(str(marker)) + b"\x85R"
    yield "by_stack_global", record(stacked + b"0K\x07.")
    reach = glob("builtins", "getattr") + glob("os", "path") + text("os") + b"\x86R"
    yield (
        "by_getattr",
        record(glob("builtins", "getattr") + reach + text("mkdir") + b"\x86R" + text(str(marker)) + b"\x85R0K\x07."),
    )
    yield (
        "in_a_nested_file",
        record(glob("torch.storage", "_load_from_bytes") + b"B" + struct.pack("<I", len(whole)) + whole + b"\x85R."),
    )
    yield "as_a_default_factory", record(glob("collections", "defaultdict") + evil + b"\x85R.")
    yield "as_a_size", record(glob("torch", "Size") + evil + b"\x85\x85R.")


class Planting(dcp.DefaultSavePlanner):
    """Writes given bytes as the record of "x"."""

    def __init__(self, planted):
        super().__init__()
        self.planted = planted

    def resolve_data(self, write_item):
        if write_item.type == WriteItemType.BYTE_IO and write_item.index.fqn == "x":
            return io.BytesIO(self.planted)
        return super().resolve_data(write_item)


NAMES = [name for name, _ in attacks(pathlib.Path("nowhere"))]


@pytest.fixture(autouse=True)
def trusting():
    with warnings.catch_warnings(), torch.serialization.safe_globals([Harmless]):
        warnings.simplefilter("ignore")
        yield


def quietly(road):
    """What a road raised; whatever it is, nothing may have run."""
    try:
        road()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # PyTorch's own is no Exception
        return error
    return None


@pytest.mark.parametrize("writer", ["ours", "theirs"])
@pytest.mark.parametrize("name", NAMES)
def test_no_record_runs_code_and_none_is_sound(path, tmp_path, name, writer):
    marker = tmp_path / "marker"
    planted = dict(attacks(marker))[name]
    storage = rt.StorageWriter(path) if writer == "ours" else dcp.FileSystemWriter(path)
    try:
        dcp.save({"x": 7, "w": torch.ones(3)}, storage_writer=storage, planner=Planting(planted), **ALONE)
    except CheckpointException as refused:
        # What a load would refuse is not saved in the first place; PyTorch's writer saves it.
        assert writer == "ours" and "a load would refuse it" in str(refused), refused
        assert not marker.exists() and not (pathlib.Path(path) / ".metadata").exists()
        return
    state = {"x": 0, "w": torch.zeros(3)}

    def to_dict():
        with reshard.open(path) as checkpoint:
            return checkpoint.to_dict()

    roads = {
        "load": lambda: rt.load(dict(state), path),
        "load without strict": lambda: rt.load(dict(state), path, strict=False),
        "planner": lambda: dcp.load(dict(state), storage_reader=rt.StorageReader(path), **ALONE),
        "open": to_dict,
        "record": lambda: _reshard.Checkpoint(path).stored_value("x"),
    }
    for road, run in roads.items():
        error = quietly(run)
        assert not marker.exists(), road
        if road != "record":
            assert error is not None, road
    report = reshard.verify(path)
    assert not report.sound and "x" in {finding.key for finding in report.findings}, report
    assert not marker.exists()
    # The rest of the checkpoint is not hidden by it.
    rest = {"w": torch.zeros(3)}
    rt.load(rest, path)
    assert rest["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_no_file_runs_code(tmp_path, name):
    marker = tmp_path / "marker"
    file = tmp_path / "model.pt"
    file.write_bytes(dict(attacks(marker))[name])

    def to_dict():
        with reshard.open(file) as checkpoint:
            return checkpoint.to_dict()

    for run in (
        to_dict,
        lambda: rt.load({"value": 0}, file),
        lambda: dcp.load({"value": 0}, storage_reader=rt.StorageReader(file), **ALONE),
    ):
        assert quietly(run) is not None
        assert not marker.exists()
    error = quietly(lambda: reshard.verify(file))
    assert not marker.exists()
    assert error is not None or not reshard.verify(file).sound


def test_the_attacks_are_real(tmp_path):
    """Of what torch itself reads, most runs: these files are what they claim to be."""
    ran = 0
    for number, name in enumerate(NAMES):
        marker = tmp_path / f"marker-{number}"
        planted = dict(attacks(marker))[name]
        quietly(lambda: torch.load(io.BytesIO(planted), weights_only=False))
        ran += marker.exists()
    assert ran >= 20


def test_what_the_program_trusts_comes_through_every_road(path):
    thing = Harmless()
    thing.numbers = [1, 2]
    dcp.save({"x": thing, "w": torch.ones(3)}, storage_writer=rt.StorageWriter(path), **ALONE)
    for load in (lambda s: rt.load(s, path), lambda s: dcp.load(s, storage_reader=rt.StorageReader(path), **ALONE)):
        state = {"x": None, "w": torch.zeros(3)}
        load(state)
        assert type(state["x"]) is Harmless and state["x"].numbers == [1, 2] and state["w"].tolist() == [1, 1, 1]


def test_planners_get_values_made_anew(path):
    """What reaches the planner is not what lies in the file."""
    seen = []

    class Watching(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            seen.append(value.getvalue())
            super().load_bytes(read_item, value)

    value = {"a": (1, 2.5, "x"), "b": OrderedDict(c=[None, True])}
    odd = record(pickle.dumps((1, [2, "three"]), 2)[2:])
    dcp.save({"x": 0, "y": [value]}, storage_writer=dcp.FileSystemWriter(path), planner=Planting(odd), **ALONE)
    state = {"x": 0, "y": [{"a": 0, "b": {"c": 0}}]}
    dcp.load(state, planner=Watching(), storage_reader=rt.StorageReader(path), **ALONE)
    assert state["x"] == (1, [2, "three"]) and state["y"][0]["a"] == (1, 2.5, "x")
    assert odd not in seen and len(seen) == 3


def planted(base, marker):
    """A checkpoint of PyTorch's for each attack."""
    for name, data in attacks(marker):
        path = base / name
        dcp.save({"x": 7, "w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(path), planner=Planting(data), **ALONE)
        yield name, path


def test_no_side_road_runs_code(tmp_path):
    """The drop-in module, the switch, notebook views, pages and conversions."""
    marker = tmp_path / "marker"
    for name, path in planted(tmp_path / "all", marker):
        out = tmp_path / "out" / name
        out.mkdir(parents=True)

        def drop_in_load(path=path):
            drop_in.load({"x": 0, "w": torch.zeros(3)}, checkpoint_id=path)

        def switched(path=path):
            reshard.install()
            try:
                dcp.load({"x": 0, "w": torch.zeros(3)}, checkpoint_id=path, **ALONE)
            finally:
                reshard.uninstall()

        def shown(path=path):
            with reshard.open(path) as checkpoint:
                for view in (checkpoint, reshard.verify(path), reshard.diff(path, path)):
                    assert view._repr_html_()
                assert checkpoint["w"] is not None
                return checkpoint["x"]

        def viewed(path=path, out=out):
            done = subprocess.run(
                [sys.executable, "-m", "reshard", "report", path, "--output", out / "page.html"],
                capture_output=True,
                env={**os.environ, "PYTHONPATH": str(pathlib.Path(reshard.__file__).parent.parent)},
            )
            assert done.returncode in (0, 2), done.stderr

        def converted(path=path, out=out):
            for skip in (False, True):
                for to in ("m.pt", "m.safetensors", "d"):
                    file = out / f"{skip}-{to}"
                    error = quietly(lambda file=file: reshard.convert(path, file, skip_opaque=skip, verify=False))
                    assert not marker.exists(), (name, file)
                    if error is None and to == "m.pt":
                        # Whoever trusts what was made of it is not betrayed.
                        torch.load(file, weights_only=False)

        def asked(path=path):
            found = served(path, ["x", "w"])
            assert found.code in (0, 2) and "panicked" not in found.said, found.said
            assert not found.answers or found.answers[""][0] == 200

        refused = {"drop-in": drop_in_load, "switch": switched, "open": shown}
        for road, run in {**refused, "report": viewed, "serve": asked, "convert": converted}.items():
            error = quietly(run)
            assert not marker.exists(), (name, road)
            assert (error is not None) is (road in refused), (name, road, error)


def test_no_program_under_the_switch_runs_code(tmp_path):
    marker = tmp_path / "marker"
    paths = [str(path) for _, path in planted(tmp_path / "all", marker)]
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import torch\n"
        "import torch.distributed.checkpoint as dcp\n"
        "refused = 0\n"
        "for path in json.load(open(sys.argv[1])):\n"
        "    try:\n"
        "        dcp.load({'x': 0, 'w': torch.zeros(3)}, checkpoint_id=path)\n"
        "    except BaseException as error:\n"
        "        refused += 1\n"
        "print('refused', refused)\n"
    )
    (tmp_path / "paths").write_text(json.dumps(paths))
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "run", "--", sys.executable, program, tmp_path / "paths"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(reshard.__file__).parent.parent)},
    )
    assert not marker.exists() and f"refused {len(paths)}" in done.stdout, (done.stdout, done.stderr)


class Stage(enum.Enum):
    """An enumeration that a trainer declares."""

    ONE = 1


class ByName:
    """As Python before 3.11.4 pickles a member."""

    def __init__(self, owner, name):
        self.call = getattr, (owner, name)

    def __reduce__(self):
        return self.call


def test_members_of_declared_enumerations_are_read_and_nothing_else_by_getattr(tmp_path):
    def read(value, classes):
        torch.save({"x": value}, tmp_path / "file.pt")
        return read_objects(tmp_path / "file.pt", "file.pt", allow_pickle=False, hint="", classes=classes)["x"]

    assert read(ByName(Stage, "ONE"), [Stage]) is Stage.ONE
    for value, classes in [
        (ByName(Stage, "ONE"), []),
        (ByName(Stage, "__init__"), [Stage]),
        (ByName(Stage, "mro"), [Stage]),
        (ByName(Harmless, "__init__"), [Harmless]),
        (ByName(dict, "fromkeys"), [dict]),
    ]:
        with pytest.raises(reshard.UntrustedPickle, match="getattr|Stage"):
            read(value, classes)
