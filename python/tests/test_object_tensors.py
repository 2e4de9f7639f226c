"""Tensors that are stored whole, as objects: what differs is known before anything is loaded."""

import pytest
import torch

import reshard
import reshard.torch as rt


def sparse(dtype=torch.float64, fill=1e30):
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([fill, 2.0], dtype=dtype), (4,)).coalesce()


def csr():
    return torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to_sparse_csr()


def test_a_sparse_tensor_is_cast_only_where_that_is_allowed(path):
    rt.save({"x": sparse(), "y": torch.ones(2)}, path)
    state = {"x": sparse(torch.float16, 0.5), "y": torch.zeros(2)}
    for cast in ("never", "widening"):
        with pytest.raises(reshard.Mismatch, match="dtype: x is float64 in the checkpoint, float16 wanted") as error:
            rt.load(state, path, cast=cast)
        (one,) = error.value.differences
        assert one["difference"] == "dtype" and one["key"] == "x" and one["narrowing"] and error.value.keys == ["x"]
        assert state["y"].tolist() == [0, 0], "nothing is loaded before every difference is known"
    report = rt.load(state, path, strict=False)
    assert [d["key"] for d in report.differences] == ["x"] and state["y"].tolist() == [1, 1]
    assert state["x"].to_dense().tolist() == [0.5, 0, 2, 0], "what differs is left alone"
    report = rt.load(state, path, cast="any")
    assert [(c.key, c.from_, c.to, c.narrowing) for c in report.casts] == [("x", "float64", "float16", True)]
    wide = {"x": sparse(torch.float64, 0.5)}
    rt.save({"x": sparse(torch.float16, 3.0)}, f"{path}-2")
    report = rt.load(wide, f"{path}-2", cast="widening")
    assert wide["x"].to_dense().tolist() == [3, 0, 2, 0] and not report.casts[0].narrowing


def test_objects_of_another_kind_or_shape_are_differences(path):
    rt.save({"x": csr(), "y": torch.ones(2)}, path)
    for wanted, words in ((csr().to_dense().to_sparse_coo(), "kind: x is"), (torch.zeros(3, 3).to_sparse_csr(), "shape: x is")):
        state = {"x": wanted, "y": torch.zeros(2)}
        with pytest.raises(reshard.Mismatch, match=words):
            rt.load(state, path)
        assert state["y"].tolist() == [0, 0]


def test_an_object_that_cannot_be_copied_into_is_named(path):
    rt.save({"x": csr()}, path)
    # As many elements as there are not in the stored one.
    state = {"x": torch.ones(2, 2).to_sparse_csr()}
    try:
        rt.load(state, path)
    except reshard.InvalidInput as error:
        assert "'x'" in str(error) and error.keys == ["x"] and "None" in error.hint
    else:
        assert torch.equal(state["x"].to_dense(), csr().to_dense())
    state = {"x": None}
    rt.load(state, path)
    assert torch.equal(state["x"].to_dense(), csr().to_dense())
