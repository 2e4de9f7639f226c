"""Values of every plain kind: what comes back is what went in, type for type, or the save says no."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import uuid
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ALONE

import reshard
import reshard.torch as rt


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.5


def same(a, b):
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        # NumPy's own unpickling turns arrays of the other byte order around.
        a, b = (x.astype(x.dtype.newbyteorder("=")) for x in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex() if a == a else b != b
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, decimal.Decimal):
        return str(a) == str(b)
    if isinstance(a, datetime.datetime):
        return a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
    return a == b


east = datetime.timezone(datetime.timedelta(hours=-5, minutes=30), "east")

PLAIN = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    "big_endian": np.arange(5, dtype=">i4"),
    "no_elements": np.zeros((0, 3), dtype=np.uint8),
    "no_dimensions": np.array(2.5),
    "texts": np.array(["a", "bcd", "\u00e9"]),
    "bytes_array": np.array([b"ab", b"c"]),
    "bools": np.array([True, False]),
    "complex_array": np.array([1 + 2j], dtype=np.complex64),
    "scalar": np.float64(0.1),
    "small": np.int8(-3),
    "numpy_bool": np.bool_(True),
    "numpy_dtype": np.dtype("float32"),
    "numpy_date": np.datetime64("2024-02-29T01:02:03.004", "ms"),
    "numpy_dates": np.array(["2024-02-29", "NaT"], dtype="datetime64[D]"),
    "numpy_durations": np.array([[1, -2]], dtype=">m8[25us]"),
    "numpy_no_unit": np.timedelta64(5),
    "numpy_date_dtype": np.dtype("<M8[ns]"),
    "numpy_rng": np.random.RandomState(0).get_state(),
    "numpy_generator": np.random.default_rng(0).bit_generator.state,
    "python_rng": random.Random(0).getstate(),
    "torch_rng": torch.Generator().manual_seed(3).get_state(),
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    "folded": datetime.datetime(2024, 11, 3, 1, 30, fold=1),
    "aware": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    "east": datetime.datetime(2024, 1, 1, tzinfo=east),
    "date": datetime.date(1, 1, 1),
    "time": datetime.time(23, 59, 59, 999999, tzinfo=east),
    "timedelta": datetime.timedelta(days=-3, microseconds=1),
    "path": pathlib.PurePosixPath("/a/b"),
    "fraction": fractions.Fraction(-3, 7),
    "decimal": decimal.Decimal("-1.50E+10"),
    "not_a_number": decimal.Decimal("NaN"),
    "complex": complex(-0.0, float("inf")),
    "uuid": uuid.UUID(int=7),
    "bytearray": bytearray(b"xy"),
    "range": range(1, 10, 2),
    "slice": slice(None, -1, 2),
    "counter": (collections.Counter("abca"),),
    "ordered": (collections.OrderedDict(b=1, a=2),),
    "default": (collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2})),
    "frozenset": frozenset([1, (2, 3)]),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "layout": torch.strided,
    "memory_format": torch.channels_last,
    "class": int,
    "nothing": None,
    "huge": -(1 << 200),
    "dates_in_a_dict": ({datetime.date(2024, 1, 1): 1, uuid.UUID(int=3): 2},),
}


@pytest.mark.parametrize("writer", ["ours", "torch", "file", "storage"])
def test_plain_values_come_back_as_what_they_were(path, tmp_path, writer):
    state = {key: (value if isinstance(value, tuple) else (value,)) for key, value in PLAIN.items()}
    if writer != "ours":
        # Python's protocol 2, which torch uses, cannot pickle torch's memory formats and drops the fold of a time.
        del state["memory_format"], state["folded"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        if writer == "ours":
            rt.save(state, path, strict_values=True)
        elif writer == "file":
            path = tmp_path / "state.pt"
            torch.save(state, path)
        else:
            storage = rt.StorageWriter(path) if writer == "storage" else dcp.FileSystemWriter(path)
            dcp.save(state, storage_writer=storage, **ALONE)
    loaded = dict.fromkeys(state, ())
    with reshard.open(path) as checkpoint:
        wanted = [key for key in state if key != "torch_rng"]
        for key in wanted:
            assert same(checkpoint[key], state[key]), key
    if writer == "file":
        return
    rt.load(loaded, path)
    for key, value in state.items():
        assert same(loaded[key], value), key
    through = dict.fromkeys(state, ())
    dcp.load(through, storage_reader=rt.StorageReader(path), **ALONE)
    for key, value in state.items():
        assert same(through[key], value), key
    assert reshard.verify(path).sound


@pytest.mark.parametrize(
    "thing",
    [Settings(), Color.RED, argparse.Namespace(a=1), io.BytesIO(b"x"), {"deep": [(Settings(),)]}],
    ids=lambda t: type(t).__name__,
)
def test_objects_are_warned_about_and_come_back_when_trusted(path, thing):
    state = {"x": thing, "w": torch.ones(2)}
    with pytest.raises(reshard.InvalidInput, match="not plain data"):
        rt.save(state, path, strict_values=True)
    with pytest.warns(UserWarning, match="allow_pickle=True: x"):
        rt.save(state, path)
    wanted = {"x": {"deep": [None]} if isinstance(thing, dict) else None, "w": torch.zeros(2)}
    with pytest.raises(reshard.UntrustedPickle):
        rt.load(wanted, path)
    rt.load(wanted, path, allow_pickle=True)
    if isinstance(thing, io.BytesIO):
        assert wanted["x"].getvalue() == b"x"
    else:
        assert wanted["x"] == thing


def random_value(rng, depth=0, names=tuple(PLAIN)):
    leaves = [PLAIN[name] for name in names]
    kinds = 8 if depth < 3 else 3
    kind = rng.randrange(kinds)
    if kind == 0:
        return rng.choice([v for v in leaves if not isinstance(v, torch.Tensor)])
    if kind == 1:
        return rng.choice([0, 1, -1, 1.0, -0.0, float("nan"), True, "", "a.b", b"\xff", 2**63, 2**64 + 1, 1e308, None, "\u20ac"])
    if kind == 2:
        return np.frombuffer(rng.randbytes(16), dtype=rng.choice(["u1", "<f4", ">f8", "<i8", "c8", "S4", "<M8[s]"])).copy()
    inside = [random_value(rng, depth + 1, names) for _ in range(rng.randrange(4))]
    if kind == 3:
        return tuple(inside)
    if kind == 4:
        return (inside,)
    if kind == 5:
        return (dict(zip("abcd", inside)),)
    if kind == 6:
        return (collections.OrderedDict(zip([1, "1", None, True], inside)),)
    return (collections.defaultdict(rng.choice([None, int, list, dict]), zip("ab", inside)),)


def test_random_states_come_back_or_are_refused(tmp_path):
    for seed in range(40):
        rng = random.Random(seed)
        state = {f"k{i}": (random_value(rng),) for i in range(12)}
        path = tmp_path / str(seed)
        rt.save(state, path, strict_values=True)
        loaded = dict.fromkeys(state, ())
        rt.load(loaded, path)
        for key, value in state.items():
            assert same(loaded[key], value), (seed, key, value, loaded[key])


def test_keys_that_become_one_are_refused_at_the_save(path):
    for state in (
        {"None": torch.ones(1), None: {}},
        {"1": torch.ones(1), 1: torch.ones(1)},
        {"a": {"b": {}}, "a.b": torch.ones(1)},
        {0: {"x": {"y": {}}}, "0": torch.ones(1)},
    ):
        with pytest.raises(reshard.InvalidInput, match="same flattened key"):
            rt.save(state, path)
        assert not pathlib.Path(path).exists() or not rt.exists(path)


@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_an_odd_tensor_does_not_hide_the_others(path, writer):
    state = {"w": torch.ones(2), "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    wanted = {"w": torch.zeros(2)}
    if writer == "ours":
        # PyTorch's own writer cannot save these.
        state["sparse"] = torch.eye(3).to_sparse()
        wanted["sparse"] = torch.zeros(3, 3).to_sparse()
    storage = rt.StorageWriter(path) if writer == "ours" else dcp.FileSystemWriter(path)
    dcp.save(state, storage_writer=storage, **ALONE)
    with reshard.open(path) as checkpoint:
        assert checkpoint["w"].numpy().tolist() == [1, 1]
    rt.load(wanted, path, strict=False)
    assert wanted["w"].tolist() == [1, 1]
    if writer == "ours":
        assert torch.equal(wanted["sparse"].to_dense(), torch.eye(3))
    assert reshard.verify(path).sound


@pytest.mark.parametrize("how", ["dcp", "file"])
def test_conjugated_and_negated_views_have_their_values(path, tmp_path, how):
    z = torch.tensor([1 + 2j, -3 - 4j])
    state = {
        "conj": z.conj(),
        "neg": z.clone().conj().imag,
        "both": torch._neg_view(z.clone().conj()),
        "ints": torch._neg_view(torch.arange(4)),
    }
    if how == "dcp":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), **ALONE)
    else:
        path = tmp_path / "z.pt"
        torch.save(state, path)
    loaded = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    rt.load(loaded, path)
    for key, value in state.items():
        assert torch.equal(loaded[key], value), key
    with reshard.open(path) as checkpoint:
        assert (checkpoint["conj"].numpy() == z.conj().resolve_conj().numpy()).all()


def test_a_number_loads_into_a_tensor_that_stands_for_it(path):
    rt.save({"lr": 0.25, "step": 3, "w": torch.ones(1)}, path)
    lr = torch.tensor(1.0)
    state = {"lr": lr, "step": torch.tensor(0), "w": torch.zeros(1)}
    rt.load(state, path)
    assert state["lr"] is lr and lr.item() == 0.25 and state["step"].item() == 3


def test_a_tensor_without_dimensions_loads_into_the_number_that_stands_for_it(path):
    saved = {"lr": torch.tensor(0.25), "step": torch.tensor(3), "on": torch.tensor(True), "groups": [{"lr": torch.tensor(0.5)}]}
    rt.save(saved, path)
    state = {"lr": 1.0, "step": 0, "on": False, "groups": [{"lr": 0.0}]}
    rt.load(state, path)
    assert state == {"lr": 0.25, "step": 3, "on": True, "groups": [{"lr": 0.5}]}
    assert [type(value) for value in state.values()] == [float, int, bool, list] and type(state["groups"][0]["lr"]) is float
    # A number of another kind would change its value.
    with pytest.raises(reshard.Mismatch, match="kind: step"):
        rt.load({"step": 0.5}, path)


def test_a_storage_writer_tells_of_objects_and_refuses_them_when_asked(path):
    state = {"x": Settings(), "deep": {"y": Color.RED}, "w": torch.ones(2), "plain": [1, "a"]}
    with pytest.raises(dcp.CheckpointException) as refused:
        dcp.save(state, storage_writer=rt.StorageWriter(path, strict_values=True), **ALONE)
    assert "not plain data" in str(refused.value)
    assert not rt.exists(path)
    with pytest.warns(UserWarning, match=r"allow_pickle=True: .*Settings") as told:
        dcp.save(state, storage_writer=rt.StorageWriter(path), **ALONE)
    assert len([one for one in told if "allow_pickle" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        dcp.save({"w": torch.ones(2), "n": 3}, storage_writer=rt.StorageWriter(path), **ALONE)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": {"c": torch.arange(3)}}, "a.b": 2},
        {"a": {"0": {"x": torch.arange(3), "y": [1, {"z": 4}]}, 0: -0.0}},
        {"a": {"b": {"c": {"d": torch.arange(2)}}}, "a.b": [1, 2], "a.b.c": "text"},
    ],
)
def test_a_key_that_others_begin_with_is_one_of_its_own(tmp_path, state):
    """What is stored under the name of a dict need not be that dict."""

    def blank(tree):
        if isinstance(tree, dict):
            return {key: blank(value) for key, value in tree.items()}
        if isinstance(tree, torch.Tensor):
            return torch.zeros_like(tree)
        return [blank(value) for value in tree] if isinstance(tree, list) and dict in map(type, tree) else "another"

    rt.save(state, tmp_path / "checkpoint")
    wanted = blank(state)
    rt.load(wanted, tmp_path / "checkpoint")
    assert repr(wanted) == repr(state)
