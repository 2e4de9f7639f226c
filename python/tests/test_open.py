"""Looking into checkpoints without torch's help."""

import collections
import math
import pathlib
import re

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE, DTYPES, bits, random_bytes
from safetensors.numpy import save_file

import reshard
import reshard.torch as rt


@pytest.fixture
def saved(path):
    state = {
        "model": {
            "weight": torch.arange(60, dtype=torch.float32).reshape(3, 4, 5),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
        },
        "optim": [{"step": torch.tensor(1.5)}, {"step": torch.tensor(2.5)}],
        "epoch": 3,
        "name": "run",
        "nested": {"list": [1, 2.5, "x"], "none": None},
    }
    rt.save(state, path)
    return path


def test_it_lists_keys_shapes_and_chunks(saved):
    with reshard.open(saved) as ck:
        assert set(ck.keys()) == {
            "model.weight", "model.scalar", "model.empty", "optim.0.step", "optim.1.step", "epoch", "name", "nested.list", "nested.none",
        }  # fmt: skip
        weight = ck["model.weight"]
        assert (weight.shape, weight.dtype, weight.ndim, weight.size, weight.nbytes, len(weight)) == (
            (3, 4, 5),
            "float32",
            3,
            60,
            240,
            3,
        )
        assert weight.chunks == [reshard.Chunk((0, 0, 0), (3, 4, 5), "__0_0.distcp")]
        assert ck["epoch"] == 3 and ck["name"] == "run" and ck["nested.list"] == [1, 2.5, "x"] and ck["nested.none"] is None
        assert ck.format == "dcp" and ck.save_id and "reshard" in ck.writer
        assert ck.key_path("optim.1.step") == ("optim", 1, "step")
        assert "model.weight" in ck and "weight" not in ck and len(ck) == 9
        page = ck._repr_html_()
        assert "<table>" in page and 'class="map"' in page and "240 B" in page
    with pytest.raises(reshard.InvalidInput):
        list(ck.keys())


def test_notebooks_show_sizes_and_never_markup_of_a_checkpoint(tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    tensors = {f"layer{i}": torch.full((8, 8), math.nan if i == 3 else float(i)) for i in range(90)}
    with_markup = {**tensors, f'"{hostile}': torch.ones(300), "turned\u202ethgiew": torch.ones(200)}
    rt.save({"model": with_markup, hostile: "<b>"}, tmp_path / hostile.replace("/", ""))
    with reshard.open(tmp_path / hostile) as ck:
        page = ck._repr_html_()
        assert "<img" not in page and "&lt;img" in page and "93 keys" in page and "and 33 more keys" in page
        assert "\u202e" not in page and "turned&lt;U+202E&gt;thgiew" in page
        assert page.count("<span style=") == 40, "the smallest share a box"
        areas = [float(w) * float(h) for w, h in re.findall(r"width:([0-9.]+)px;height:([0-9.]+)px;background", page)]
        assert max(areas) > 3 * sorted(areas)[-3], "boxes are as large as what they stand for"
    health = reshard.health(tmp_path / hostile)._repr_html_()
    assert "nan" in health and "not checked: structure, checksums" in health and "<img" not in health
    verified = reshard.verify(tmp_path / hostile)._repr_html_()
    assert "sound" in verified and "<img" not in verified


def test_notebooks_show_differences_and_runs(tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    layers = {f"layers.{i}.weight": torch.arange(1.0, 10.0).reshape(3, 3) for i in range(12)}
    moved = {**layers, "layers.3.weight": layers["layers.3.weight"] * 1.5, "layers.4.weight": layers["layers.4.weight"] * 1.25}
    moved["layers.7.weight"] = torch.full((3, 3), math.nan)
    slot = {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    rt.save({"model": layers, "optim": slot, "step": 1, "gone": 3, hostile: 1}, tmp_path / "run" / "step-1")
    slot["state"]["w"]["exp_avg"] = torch.full((3,), 9.0)
    rt.save({"model": moved, "optim": slot, "step": 2, hostile: 2}, tmp_path / "run" / "step-2")
    found = reshard.diff(tmp_path / "run" / "step-1", tmp_path / "run" / "step-2")
    keys = [differing.key for differing in found.different]
    assert keys[0] == "model.layers.7.weight" and keys[-3:] == [
        "model.layers.3.weight",
        "model.layers.4.weight",
        "optim.state.w.exp_avg",
    ]
    page = found._repr_html_()
    assert (
        "9 new NaN" in page and "0.5" in page and "value 1 → 2" in page and "1 only in the first" in page and "<img" not in page
    )
    assert "no difference" in reshard.diff(tmp_path / "run" / "step-1", tmp_path / "run" / "step-1")._repr_html_()
    page = reshard.trend(tmp_path / "run")._repr_html_()
    assert "2 complete steps" in page and "model.layers.7.weight" in page and "step-2" in page
    with reshard.open(tmp_path / "run" / "step-1") as ck:
        page = ck._repr_html_()
    assert page.count("<span style=") == 13, "layers are told apart, and the optimizer"
    assert "<td>3</td>" in page, "plain values are shown"


INDICES = [
    np.s_[:], np.s_[1], np.s_[-1], np.s_[1:], np.s_[::2], np.s_[::-1], np.s_[2:0:-1], np.s_[..., 1], np.s_[1, ..., 2], np.s_[:, 1:3, ::3],
    np.s_[None, 1, :, None], np.s_[5:], np.s_[0, 1, 2], np.s_[...], np.s_[:, -3:-1], np.s_[np.int64(2)], np.s_[()], np.s_[:, 3:1],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_that_of_numpy(saved, index):
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    with reshard.open(saved) as ck:
        found = ck["model.weight"][index]
    assert np.array_equal(found, array[index]) and np.shape(found) == array[index].shape


@pytest.mark.parametrize(
    "index", [np.s_[3], np.s_[0, 0, 0, 0], np.s_[..., ...], np.s_[[0, 1]], "weight", np.s_[1.5], np.s_[True]], ids=str
)
def test_indices_that_make_no_sense_are_refused(saved, index):
    with reshard.open(saved) as ck, pytest.raises(IndexError):
        ck["model.weight"][index]


def test_everything_at_once_is_nested_as_it_was(saved):
    with reshard.open(saved) as ck:
        whole = ck.to_dict()
        assert whole["optim"][1]["step"] == 2.5 and whole["nested"] == {"list": [1, 2.5, "x"], "none": None}
        assert whole["model"]["empty"].shape == (0, 3) and whole["model"]["scalar"].shape == ()
        assert isinstance(ck.to_dict(lazy=True)["model"]["weight"], reshard.Tensor)
        assert ck.to_dict(flat=True)["optim.0.step"] == 1.5
        assert np.asarray(ck["model.weight"]).sum() == sum(range(60))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_bit_for_bit(path, name):
    tensor = random_bytes((5, 3), getattr(torch, name))
    rt.save({"t": tensor}, path)
    with reshard.open(path) as ck:
        found = ck["t"]
        array = found.numpy()
    assert found.dtype == name and array.shape == (5, 3)
    assert array.tobytes() == bits(tensor).numpy().tobytes()
    if name in ("float32", "int64", "bool", "complex64"):
        assert array.dtype == np.dtype(name)


def test_a_type_that_numpy_lacks_comes_as_its_bits_or_as_ml_dtypes(path):
    rt.save({"t": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, path)
    with reshard.open(path) as ck:
        array = ck["t"].numpy()
    try:
        import ml_dtypes
    except ImportError:
        assert array.dtype == np.uint16 and array.tolist() == [0x3F80, 0x4000]
    else:
        assert array.dtype == ml_dtypes.bfloat16 and array.tolist() == [1.0, 2.0]


def test_a_key_that_is_not_there_says_what_is_near(saved):
    with reshard.open(saved) as ck:
        with pytest.raises(KeyError) as raised:
            ck["model.weigth"]
        assert isinstance(raised.value, reshard.NoSuchKey) and "model.weight" in str(raised.value)
        assert raised.value.keys == ["model.weigth"]
        assert ck.get("nothing", 5) == 5


def test_nothing_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        reshard.open(tmp_path / "nothing")
    assert isinstance(raised.value, reshard.NotFound)


def test_data_without_metadata_is_incomplete(saved):
    (pathlib.Path(saved) / ".metadata").unlink()
    with pytest.raises(reshard.Incomplete):
        reshard.open(saved)


def test_damage_is_found_and_named(saved):
    file = pathlib.Path(saved) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(np.arange(60, dtype=np.float32).tobytes())
    assert at > 0
    data[at + 7] ^= 1
    file.write_bytes(data)
    with reshard.open(saved) as ck, pytest.raises(reshard.Corrupt) as raised:
        ck["model.weight"].numpy()
    assert raised.value.keys == ["model.weight"] and raised.value.files == ["__0_0.distcp"]


def test_safetensors_and_torch_files_open_too(tmp_path):
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, dtype=np.int16)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"who": "me"})
    with reshard.open(tmp_path / "x.safetensors") as ck:
        assert ck.format == "safetensors" and np.array_equal(ck["a"][1:, 2], arrays["a"][1:, 2]) and ck.notes["who"] == "me"
    torch.save({"model": {"a": torch.from_numpy(arrays["a"]).T}, "step": 4}, tmp_path / "x.pt")
    with reshard.open(tmp_path / "x.pt") as ck:
        assert ck.format == "torch" and np.array_equal(ck["model.a"].numpy(), arrays["a"].T) and ck["step"] == 4


def test_what_torch_wrote_opens(tmp_path):
    state = {"w": torch.randn(4, 4), "v": {"od": collections.OrderedDict(a=1), "path": pathlib.Path("x/y"), "big": 2**100}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", **ALONE)
    with reshard.open(tmp_path / "dcp") as ck:
        assert np.array_equal(ck["w"].numpy(), state["w"].numpy())
        assert ck["v.od.a"] == 1 and ck["v.path"] == pathlib.Path("x/y") and ck["v.big"] == 2**100


def test_a_pickled_object_is_not_run(tmp_path):
    marker = tmp_path / "was-run"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    dcp.save({"bad": Payload(), "good": 1}, checkpoint_id=tmp_path / "dcp", **ALONE)
    with reshard.open(tmp_path / "dcp") as ck:
        assert ck["good"] == 1
        with pytest.raises(reshard.UntrustedPickle) as raised:
            ck["bad"]
    assert raised.value.keys == ["bad"] and "open" in raised.value.class_name
    assert not marker.exists()


def test_steps_and_latest(tmp_path):
    for step in (5, 20, 100):
        rt.save({"x": torch.zeros(1)}, tmp_path / f"step-{step}")
    (tmp_path / "step-999").mkdir()
    (tmp_path / "notes").mkdir()
    assert [step for step, _ in reshard.steps(tmp_path)] == [5, 20, 100]
    assert reshard.latest(tmp_path) == str(tmp_path / "step-100")
    assert reshard.latest(tmp_path / "notes") is None


def test_verifying(saved):
    report = reshard.verify(saved)
    assert report and report.sound and report.checked == report.records == 9 and report.findings == ()
    file = pathlib.Path(saved) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(np.arange(60, dtype=np.float32).tobytes()) + 7] ^= 1
    file.write_bytes(data)
    report = reshard.verify(saved)
    assert not report and any(f.key == "model.weight" and f.file == "__0_0.distcp" for f in report.findings)
    assert "model.weight" in str(report) and "damaged" in repr(report) and report.to_dict()["sound"] is False
    assert reshard.verify(saved, data=False)
