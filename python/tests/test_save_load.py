"""Saving and loading in one process: kinds of leaves, options, errors."""

import collections
import dataclasses
import math
import pathlib
import warnings

import numpy as np
import pytest
import torch
from helpers import ALONE, DTYPES, assert_same_tree, random_bytes, same, zeroed
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import reshard
import reshard.torch as rt
from reshard.torch._describe import Description, flatten


@dataclasses.dataclass
class Position:
    """An object that only unpickling brings back."""

    epoch: int


def test_it_works_alone_without_a_word(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rt.save({"x": torch.ones(3)}, path)
        state = {"x": torch.zeros(3)}
        rt.load(state, path)
    assert state["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_round_trips_bit_for_bit(path, name):
    dtype = getattr(torch, name)
    state = {"whole": random_bytes((4, 6), dtype), "zero": random_bytes((), dtype, 1), "none": random_bytes((0, 2), dtype)}
    rt.save(state, path)
    loaded = {
        key: torch.zeros(t.shape, dtype=torch.uint8).to(dtype) if dtype != torch.complex32 else torch.zeros(t.shape, dtype=dtype)
        for key, t in state.items()
    }
    rt.load(loaded, path)
    assert all(same(state[key], loaded[key]) for key in state)


VALUES = {
    "none": None,
    "true": True,
    "int": -5,
    "big": -(2**90),
    "float": 0.1,
    "inf": math.inf,
    "nan": math.nan,
    "complex": 1 + 2j,
    "str": "text ✓",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "list": [1, [2, "three"], None],
    "tuple": (1, (2.0, "x")),
    "set": {1, 2},
    "frozenset": frozenset({"a"}),
    "empty_list": [],
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "path": pathlib.Path("a/b"),
    "numpy": np.float32(1.5),
    "ordered": [collections.OrderedDict(b=1, a=2)][:0],
}


def test_plain_values_come_back_with_their_types_and_without_pickle(path):
    state = {"v": dict(VALUES)}
    rt.save(state, path)
    loaded = {"v": dict.fromkeys(VALUES, "another")}
    rt.load(loaded, path)
    assert_same_tree(state, loaded)


def test_values_are_put_into_the_callers_own_containers(path):
    rt.save({"a": {"b": [torch.ones(1), {"lr": 0.5}]}, 7: "seven", "ints": {0: {"x": 1}, 1: {"x": 2}}}, path)
    inner, ints = {"lr": None}, {0: {"x": None}, 1: {"x": None}}
    state = {"a": {"b": [torch.zeros(1), inner]}, 7: None, "ints": ints}
    rt.load(state, path)
    assert inner == {"lr": 0.5} and state[7] == "seven" and ints == {0: {"x": 1}, 1: {"x": 2}}
    assert state["a"]["b"][1] is inner


def test_what_is_pickled_needs_to_be_trusted(path):
    rt.save({"position": Position(3), "w": torch.ones(2)}, path)
    state = {"position": None, "w": torch.zeros(2)}
    with pytest.raises(reshard.UntrustedPickle) as raised:
        rt.load(state, path)
    assert raised.value.keys == ["position"] and "Position" in raised.value.class_name
    assert state["w"].tolist() == [0, 0], "nothing is touched before all is known to be fine"
    rt.load(state, path, allow_pickle=True)
    assert state["position"] == Position(3) and state["w"].tolist() == [1, 1]


def test_a_class_that_was_declared_safe_to_torch_is_trusted(path):
    rt.save({"position": Position(3)}, path)
    state = {"position": None}
    with torch.serialization.safe_globals([Position]):
        rt.load(state, path)
    assert state["position"] == Position(3)


def test_a_tuple_with_tensors_needs_no_trust(path):
    rt.save({"pair": (torch.ones(2), "x")}, path)
    state = {"pair": None}
    rt.load(state, path)
    assert state["pair"][0].tolist() == [1, 1] and state["pair"][1] == "x"


def test_what_cannot_be_pickled_is_named(path):
    with pytest.raises(reshard.InvalidInput) as raised:
        rt.save({"a": {"f": lambda: 1}}, path)
    assert raised.value.keys == ["a.f"] and not rt.exists(path)


def test_views_of_all_kinds(path):
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    views = {
        "transposed": base.T,
        "columns": base[:, 2:5],
        "steps": base[::2, ::3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    rt.save(views, path)
    fresh = {key: torch.empty(view.shape, dtype=view.dtype) for key, view in views.items()}
    rt.load(fresh, path)
    assert all(torch.equal(views[key], fresh[key]) for key in views)
    holder = torch.zeros(6, 8)
    into = {"transposed": torch.zeros(6, 8).T, "columns": holder[:, 2:5], "permuted": torch.zeros(2, 3, 4, dtype=torch.int64).permute(2, 0, 1),
            "conjugate": torch.zeros(2, dtype=torch.complex64).conj()}  # fmt: skip
    rt.load(into, path)
    assert all(torch.equal(views[key], into[key]) for key in into)
    assert holder[:, :2].eq(0).all() and holder[:, 5:].eq(0).all()
    with pytest.raises(reshard.InvalidInput, match="expanded"):
        rt.load({"expanded": torch.zeros(2, 1).expand(2, 5)}, path)


def test_tied_tensors_stay_tied(path):
    weight = torch.randn(4, 4)
    rt.save({"a": weight, "b": weight, "row": weight[1]}, path)
    target = torch.zeros(4, 4)
    rt.load({"a": target, "b": target, "row": target[1]}, path)
    assert torch.equal(target, weight)


def test_parameters_and_requires_grad(path):
    model = torch.nn.Linear(3, 2)
    rt.save({"model": dict(model.named_parameters())}, path)
    other = torch.nn.Linear(3, 2)
    rt.load({"model": dict(other.named_parameters())}, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    with reshard.open(path) as ck:
        assert ck["model.weight"].requires_grad
    assert all(p.requires_grad and p.grad is None for p in other.parameters())


def test_sparse_tensors_are_stored_whole(path):
    sparse = torch.eye(3).to_sparse()
    rt.save({"s": sparse}, path)
    state = {"s": torch.zeros(3, 3).to_sparse()}
    rt.load(state, path)
    assert torch.equal(state["s"].to_dense(), torch.eye(3))


def test_meta_tensors_are_filled_and_put(path):
    rt.save({"m": {"w": torch.arange(6.0).reshape(2, 3)}}, path)
    state = {"m": {"w": torch.empty(2, 3, device="meta")}}
    rt.load(state, path)
    assert state["m"]["w"].device.type == "cpu" and state["m"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(reshard.InvalidInput, match="meta"):
        rt.save(state | {"x": torch.empty(1, device="meta")}, path, overwrite=True)


class Counter:
    """A Stateful."""

    def __init__(self, count):
        self.count, self.tensor, self.loads = count, torch.full((2,), float(count)), 0

    def state_dict(self):
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.loads += 1
        self.count = state["count"]
        self.tensor = state["tensor"].clone()


def test_stateful_objects_are_asked_and_given(path):
    model = torch.nn.Linear(2, 2)
    rt.save({"counter": Counter(5), "model": model}, path)
    state = {"counter": Counter(0), "model": torch.nn.Linear(2, 2)}
    counter = state["counter"]
    rt.load(state, path)
    assert state["counter"] is counter and (counter.count, counter.tensor.tolist(), counter.loads) == (5, [5, 5], 1)
    assert torch.equal(state["model"].weight, model.weight)


def test_an_optimizer_with_number_keys(path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rt.save({"optim": optimizer.state_dict()}, path)
    state = {"optim": zeroed(optimizer.state_dict())}
    for group, other in zip(state["optim"]["param_groups"], optimizer.state_dict()["param_groups"]):
        group["lr"] = 99.0
        group["params"] = other["params"]
    rt.load(state, path)
    assert_same_tree(optimizer.state_dict(), state["optim"])


def test_flattening_is_that_of_torch():
    tensor = torch.zeros(1)
    state = {
        "a": {"b": {1: tensor, "c.d": [1, 2]}, "empty": {}, "list": [tensor, {"x": 1}, [1, 2], [tensor]]},
        "t": (tensor, 1), "l": [[1], [[2]]], "m": [{}], 3: [], "od": collections.OrderedDict(z=1), "user": collections.UserDict(q=tensor),
    }  # fmt: skip
    description = Description(loading=False)
    flatten(state, description)
    flat, paths = flatten_state_dict(state)
    assert [leaf.key for leaf in description.leaves] == list(flat)
    assert [leaf.path or (leaf.key,) for leaf in description.leaves] == list(paths.values())


def test_two_leaves_of_one_key_are_refused(path):
    with pytest.raises(reshard.InvalidInput) as raised:
        rt.save({"a": {"b": 1}, "a.b": 2}, path)
    assert raised.value.keys == ["a.b"]


def test_every_difference_is_told_at_once_and_nothing_is_loaded(path):
    rt.save(
        {"m": {"weight": torch.ones(2, 3), "bias": torch.ones(3), "scale": torch.ones(1), "n": 1}, "other": torch.ones(1)}, path
    )
    state = {
        "m": {
            "wieght": torch.zeros(2, 3),
            "bias": torch.zeros(4),
            "scale": torch.zeros(1, dtype=torch.float64),
            "n": torch.zeros(1),
        }
    }
    with pytest.raises(reshard.Mismatch) as raised:
        rt.load(state, path)
    found = {(d["difference"], d["key"]): d for d in raised.value.differences}
    assert set(found) == {
        ("missing", "m.wieght"),
        ("shape", "m.bias"),
        ("dtype", "m.scale"),
        ("kind", "m.n"),
        ("unexpected", "m.weight"),
    }
    assert found["missing", "m.wieght"]["near"] == ["m.weight"]
    assert found["shape", "m.bias"]["stored"] == [3] and found["shape", "m.bias"]["wanted"] == [4]
    assert found["dtype", "m.scale"]["stored"] == "float32"
    assert all(t.eq(0).all() for t in state["m"].values())
    assert "wieght" in str(raised.value) and raised.value.hint


def test_loading_leniently_reports(path):
    rt.save({"m": {"a": torch.ones(2), "b": torch.ones(2)}}, path)
    state = {"m": {"a": torch.zeros(2), "c": torch.zeros(2), "v": "kept"}}
    report = rt.load(state, path, strict=False)
    assert state["m"]["a"].tolist() == [1, 1] and state["m"]["c"].tolist() == [0, 0] and state["m"]["v"] == "kept"
    assert report.missing == ["m.c", "m.v"] and report.unexpected == ["m.b"]


def test_a_part_of_a_checkpoint_may_be_wanted(path):
    rt.save({"model": {"w": torch.ones(1)}, "optim": {"s": torch.ones(1)}}, path)
    state = {"model": {"w": torch.zeros(1)}}
    rt.load(state, path)
    assert state["model"]["w"].item() == 1


def test_casting_is_a_choice(path):
    rt.save({"w": torch.tensor([1.5, 2.5])}, path)
    wide, narrow = {"w": torch.zeros(2, dtype=torch.float64)}, {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(reshard.Mismatch):
        rt.load(wide, path)
    report = rt.load(wide, path, cast="widening")
    assert wide["w"].tolist() == [1.5, 2.5]
    assert report.casts == (reshard.Cast("w", "float32", "float64", False),)
    with pytest.raises(reshard.Mismatch):
        rt.load(narrow, path, cast="widening")
    rt.load(narrow, path, cast="any")
    assert narrow["w"].tolist() == [1.5, 2.5]
    with pytest.raises(reshard.InvalidInput):
        rt.load(narrow, path, cast="sometimes")


def test_renaming(path):
    rt.save({"module.a": torch.ones(1), "module.b": torch.full((1,), 2.0)}, path)
    state = {"a": torch.zeros(1), "b": torch.zeros(1), "new": torch.zeros(1)}
    rt.load(state, path, rename=lambda key: None if key == "new" else f"module.{key}")
    assert [t.item() for t in state.values()] == [1, 2, 0]
    state = {"a": torch.zeros(1)}
    rt.load(state, path, rename={"a": "module.b"}, strict=False)
    assert state["a"].item() == 2


def test_overwriting_is_a_choice(path):
    rt.save({"x": torch.ones(1)}, path)
    with pytest.raises(FileExistsError) as raised:
        rt.save({"x": torch.zeros(1)}, path)
    assert isinstance(raised.value, reshard.AlreadyExists)
    rt.save({"x": torch.zeros(1)}, path, overwrite=True)
    with reshard.open(path) as ck:
        assert ck["x"][0] == 0
    assert len(list(pathlib.Path(path).glob("*.distcp"))) == 1


def test_the_place_has_two_names(tmp_path):
    rt.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    rt.load({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(reshard.InvalidInput):
        rt.save({}, tmp_path, checkpoint_id=tmp_path)
    with pytest.raises(reshard.InvalidInput):
        rt.save({})


def test_arguments_are_named_as_torch_names_them(tmp_path):
    state = {"x": torch.arange(3.0)}
    rt.save(state_dict=state, checkpoint_id=tmp_path / "a", no_dist=True)
    rt.async_save(state_dict=state, checkpoint_id=tmp_path / "b", no_dist=True).result()
    for name in "ab":
        loaded = {"x": torch.zeros(3)}
        rt.load(state_dict=loaded, checkpoint_id=tmp_path / name, no_dist=True)
        assert same(loaded["x"], state["x"])
    with pytest.raises(TypeError, match="progress"):
        rt.async_save(state, tmp_path / "c", progress=True)


def test_an_empty_dict_is_not_silently_left_empty(path):
    rt.save({"model": {"w": torch.ones(2), "deep": {"b": torch.ones(1)}}, "step": 3, "nothing": {}}, path)
    for state in ({"model": {}}, {"model": {"deep": {}}}, {"model": {}, "step": 0}):
        with pytest.raises(reshard.Mismatch) as raised:
            rt.load(state, path)
        assert set(raised.value.keys) == {"model.w", "model.deep.b"}
        assert set(rt.load(state, path, strict=False).unexpected) == {"model.w", "model.deep.b"}
    # What was saved empty is loaded empty, and what is not asked for is nobody's business.
    state = {"nothing": {}, "step": 0}
    rt.load(state, path)
    assert state == {"nothing": {}, "step": 3}


def test_reports_print_and_tell_everything(path):
    report = rt.save({"x": torch.ones(1000)}, path)
    assert report.total_bytes == 4000 and report.records == 1 and report.files == 1 and report.seconds > 0
    assert path in str(report) and "<table>" in report._repr_html_() and report.to_dict()["total_bytes"] == 4000
    report = rt.load({"x": torch.zeros(1000)}, path)
    assert report.bytes_wanted == 4000 and report.verified == 1 and "read" in report.phases
    assert "<table>" in report._repr_html_() and report.to_dict()["tensors"] == 1 and "4.0 kB" in str(report)


def test_a_shard_view_is_its_regions(path):
    whole = torch.arange(20, dtype=torch.float32).reshape(4, 5)
    flat = whole.reshape(-1).clone()
    pieces = [((0, 0), flat[0:5].view(1, 5)), ((1, 0), flat[5:15].view(2, 5)), ((3, 0), flat[15:20].view(1, 5))]
    rt.save({"w": rt.ShardView(torch.float32, (4, 5), pieces)}, path)
    target = torch.zeros(20)
    rt.load({"w": rt.ShardView(torch.float32, (4, 5), [((1, 2), target[0:6].view(2, 3))])}, path)
    assert torch.equal(target[:6].view(2, 3), whole[1:3, 2:5]) and target[6:].eq(0).all()
    with pytest.raises(ValueError):
        rt.ShardView(torch.float32, (4, 5), [((3, 0), flat[0:10].view(2, 5))])


def test_per_rank_values_alone(path):
    rt.save({"rng": rt.PerRank({"state": torch.arange(3), "seed": 5})}, path)
    own = rt.PerRank({"state": torch.zeros(3, dtype=torch.int64), "seed": 0})
    rt.load({"rng": own}, path)
    assert own.value["state"].tolist() == [0, 1, 2] and own.value["seed"] == 5
    single = rt.PerRank(1)
    rt.save({"x": single}, path, overwrite=True)
    other = rt.PerRank(0)
    rt.load({"x": other}, path)
    assert other.value == 1


def test_dicts_that_old_releases_stored_whole(path):
    rt.save({"outer": [("placeholder",)]}, path)
    # PyTorch before 2.4 stored a dict without tensors as one value: here a record of such a dict under the dict's key.
    import torch.distributed.checkpoint as dcp

    dcp.save({"config": 0, "w": torch.ones(1)}, checkpoint_id=path + "-old", **ALONE, planner=_OldPlanner())
    state = {"config": {"a": None, "b": {"c": None}}, "w": torch.zeros(1)}
    rt.load(state, path + "-old")
    assert state["config"] == {"a": 1, "b": {"c": 2}}


class _OldPlanner(torch.distributed.checkpoint.DefaultSavePlanner):
    def lookup_object(self, index):
        return {"a": 1, "b": {"c": 2}} if index.fqn == "config" else super().lookup_object(index)


def test_the_state_must_be_a_dict(path):
    with pytest.raises(reshard.InvalidInput):
        rt.save([torch.ones(1)], path)
    with pytest.raises(reshard.NotFound):
        rt.load({"x": torch.zeros(1)}, path)


def test_ten_thousand_tensors(path):
    state = {f"layer.{i}": torch.full((8,), float(i)) for i in range(10_000)}
    rt.save(state, path)
    loaded = {key: torch.zeros(8) for key in state}
    rt.load(loaded, path)
    assert all(loaded[key][0] == state[key][0] for key in state)
