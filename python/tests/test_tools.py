"""The tools of the command in Python, with typed results."""

import dataclasses
import pathlib

import pytest
import torch
from helpers import same
from torch.distributed.checkpoint.state_dict import get_state_dict

import reshard
import reshard.torch as rt


@pytest.fixture
def saved(tmp_path):
    path = str(tmp_path / "run" / "step-10")
    rt.save(
        {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "optim": {"x": torch.zeros(2)}, "step": 10}, path
    )
    return path


def test_convert_selects_renames_and_casts(saved, tmp_path):
    target = str(tmp_path / "model.safetensors")
    report = reshard.convert(saved, target, part="model", prefix="model.", rename={"^a$": "first"}, cast="b=bf16")
    assert (report.format, report.tensors, report.to) == ("safetensors", 2, target) and dataclasses.is_dataclass(report)
    assert [(cast.key, cast.to, cast.narrowing) for cast in report.casts] == [("b", "bfloat16", True)]
    with reshard.open(target) as ck:
        assert sorted(ck.keys()) == ["b", "first"]
    with pytest.raises(reshard.AlreadyExists):
        reshard.convert(saved, target)
    assert reshard.convert(saved, target, keys=["model.a"], overwrite=True).tensors == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.to = "x"
    for wrong in ({"to": "zip"}, {"part": "half"}, {}, {"to": "torch", "ranks": 2}):
        with pytest.raises(reshard.InvalidInput):
            reshard.convert(saved, tmp_path / "other", **wrong)


def test_numbers_of_every_tensor_are_those_of_torch(tmp_path):
    path = str(tmp_path / "dtypes")
    state = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.randn(300, 40, dtype=torch.float64).mul_(3)
        values[0, :3] = torch.tensor([0.0, -0.0, 1e-40])
        state[str(dtype)] = values.to(dtype)
    state["odd"] = torch.tensor([[1.0, float("nan")], [float("inf"), -float("inf")]])
    state["int"] = torch.arange(-500, 500)
    rt.save(state, path)
    found = reshard.stats(path)
    assert set(found) == set(state)
    for key, tensor in state.items():
        wide = tensor.double()
        finite = wide[wide.isfinite()]
        stats = found[key]
        assert stats == reshard.stats(path, key)
        counts = (stats.elements, stats.nans, stats.positive_infinities, stats.negative_infinities, stats.zeros)
        wanted = (tensor.numel(), wide.isnan().sum(), (wide == torch.inf).sum(), (wide == -torch.inf).sum(), (wide == 0).sum())
        assert counts == tuple(map(int, wanted)), key
        assert (stats.min, stats.max, stats.absmax) == (finite.min(), finite.max(), finite.abs().max())
        for ours, theirs in ((stats.mean, finite.mean()), (stats.l2, finite.norm()), (stats.std, finite.std(correction=0))):
            assert ours == pytest.approx(float(theirs), rel=1e-9, abs=1e-9), key
        assert sum(count for _, count in stats.magnitudes) == int((finite != 0).sum())
        for share, ours in ((0.05, stats.percentiles.p5), (0.5, stats.percentiles.p50), (0.95, stats.percentiles.p95)):
            exact = float(finite.sort().values[round(share * (finite.numel() - 1))])
            assert ours == pytest.approx(exact, rel=0 if tensor.itemsize <= 2 else 2**-8, abs=0), (key, share)


def test_health_names_rules_and_what_was_looked_at(tmp_path):
    path = str(tmp_path / "sick")
    rt.save({"model": {"nan": torch.tensor([[1.0, float("nan")]]), "zero": torch.zeros(4, 4), "fine": torch.randn(4, 4)}}, path)
    report = reshard.health(path)
    assert {(finding.rule, finding.key) for finding in report.findings} == {("nan", "model.nan"), ("zero-weight", "model.zero")}
    assert not report.healthy and report.checked == ("numbers",)
    assert reshard.health(path, limits={"nan": None}).healthy
    assert reshard.health(path, include=["model.fine"], verify=True).checked == ("checksums", "numbers")
    with pytest.raises(reshard.InvalidInput, match="unknown rule"):
        reshard.health(path, limits={"nonsense": 1})
    with pytest.raises(reshard.InvalidInput, match="nowhere"):
        reshard.health(path, include=["nowhere.*"])


def test_what_nobody_looked_at_is_not_healthy_and_named(tmp_path):
    sparse = torch.tensor([[0.0, float("nan")]]).to_sparse()
    torch.save({"w": torch.randn(4, 4), "sparse": sparse, "step": 3}, tmp_path / "model.pt")
    report = reshard.health(tmp_path / "model.pt")
    assert report.healthy and list(report.unread) == ["sparse"]
    values = reshard.health(tmp_path / "model.pt", include=["step"])
    assert not values.healthy and values.checked == () and not values.findings
    assert "checked: nothing" in values._repr_html_()


def test_each_of_several_optimizers_is_looked_at(tmp_path):
    modules = {name: torch.nn.Linear(4, 4, bias=False) for name in ("gen", "disc")}
    optimizers = {name: torch.optim.AdamW(module.parameters()) for name, module in modules.items()}
    state = {}
    for name, module in modules.items():
        module(torch.randn(2, 4)).sum().backward()
        optimizers[name].step()
        state[name], state[f"optim_{name}"] = get_state_dict(module, optimizers[name])
    assert reshard.health(rt.save(state, tmp_path / "well").path).healthy
    state["optim_disc"]["state"]["weight"]["exp_avg_sq"].neg_()
    rt.save(state, tmp_path / "sick")
    report = reshard.health(tmp_path / "sick")
    assert [finding.key for finding in report.findings if finding.severity == "error"] == ["optim_disc.state.weight.exp_avg_sq"]
    assert [param.weights for param in report.params] == ["gen.weight", "disc.weight"]


def test_a_run_has_a_trend_and_a_first_bad_step(tmp_path):
    with rt.CheckpointManager(str(tmp_path / "run"), keep_last=9) as manager:
        for step in range(1, 7):
            weight = torch.full((4, 4), float("nan") if step >= 5 else float(step))
            manager.save(step, {"model": {"w": weight}}, metrics={"loss": 1 / step})
    run = reshard.trend(tmp_path / "run", numbers=True, include=["model.*"])
    assert [step.metrics["loss"] for step in run.steps] == [pytest.approx(1 / step) for step in range(1, 7)]
    assert [bad.key for bad in run.bad] == ["model.w"]
    assert run.bad[0].what == "nan" and run.bad[0].first == run.steps[4].name and run.bad[0].fine == run.steps[3].name
    assert run.steps[1].tensors["model.w"].change == pytest.approx(1.0) and run.skipped == ()
    assert run.bad[0].severity == "error" and run.bad[0].before is None and run.bad[0].last == f"fine in {run.steps[3].name}"
    assert reshard.trend(tmp_path / "run", limits={"nan": None}).bad == ()
    for wrong in ({"folder": tmp_path / "nope"}, {"folder": tmp_path / "run", "include": ["nowhere.*"]}):
        with pytest.raises(reshard.InvalidInput):
            reshard.trend(**wrong)


def test_diff_digest_and_stats(saved, tmp_path):
    other = str(tmp_path / "other")
    rt.save({"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.full((4,), 1.5)}, "step": 11, "more": 1}, other)
    report = reshard.diff(saved, other)
    assert not report.equal and report.only_first == ("optim.x",) and report.only_second == ("more",) and report.same == 1
    differing = {each.key: each for each in report.different}
    assert differing["model.b"].elements.different == 4 and differing["model.b"].elements.max_absolute == 0.5
    assert (differing["step"].first, differing["step"].second) == (10, 11)
    assert reshard.diff(saved, other, include=["model.*"], tolerance=0.6).equal and reshard.diff(saved, saved).equal
    first, second = reshard.digest(saved), reshard.digest(other)
    assert first["model.a"] == second["model.a"] and first["model.b"] != second["model.b"]
    assert first["model.a"].shape == (2, 3) and first["model.a"].dtype == "float32" and first["step"].value == 10
    found = reshard.stats(saved, "model.a", bins=2)
    assert (found.min, found.max, found.mean, found.elements, found.histogram) == (0.0, 5.0, 2.5, 6, (3, 3))
    with pytest.raises(reshard.NoSuchKey):
        reshard.stats(saved, "nothing")
    with pytest.raises(reshard.InvalidInput):
        reshard.diff(saved, other, tolerance=-1)


def test_relayout_and_merge(saved, tmp_path):
    cut = str(tmp_path / "cut")
    report = reshard.relayout(saved, cut, mesh="2")
    assert len(report.files) == 2 and reshard.diff(saved, cut).equal
    other = str(tmp_path / "other")
    rt.save({"model": {"a": torch.zeros(2, 3), "b": torch.full((4,), 3.0)}, "optim": {"x": torch.zeros(2)}, "step": 10}, other)
    merged = reshard.merge([saved, other], tmp_path / "mean", weights=[3, 1])
    assert merged.averaged == 3 and merged.written.format == "dcp"
    with reshard.open(tmp_path / "mean") as ck:
        assert ck["model.b"].numpy().tolist() == [1.5] * 4


def test_edit_and_recover(saved, tmp_path):
    edited = str(tmp_path / "edited")
    report = reshard.edit(saved, edited, drop=["optim.*"], rename={"^model\\.": "net."}, set={"step": 0, "note": ["x", 1]})
    assert report.dropped == ("optim.x",) and ("model.a", "net.a") in report.renamed and set(report.set) == {"step", "note"}
    with reshard.open(edited) as ck:
        assert ck["step"] == 0 and ck["note"] == ["x", 1] and "net.a" in ck and "optim.x" not in ck
    with pytest.raises(reshard.InvalidInput, match="plain"):
        reshard.edit(saved, tmp_path / "again", set={"step": object()})
    # Through rules, as the command does: what they make is written.
    seen = str(tmp_path / "seen")
    rules = {"from": "model.a", "to": "turned", "steps": [{"transpose": [1, 0]}]}
    assert reshard.edit(saved, seen, drop=["optim.*"], set={"step": 7}, view=rules).set == ("step",)
    with reshard.open(seen) as ck:
        assert ck["step"] == 7 and same(torch.from_numpy(ck["turned"].numpy().copy()), torch.arange(6.0).reshape(2, 3).T)
    with pytest.raises(reshard.ReshardError, match="map"):
        reshard.edit(saved, tmp_path / "mapped", parameter_map=tmp_path / "no-map.json")
    (pathlib.Path(saved) / ".metadata").unlink()
    found = reshard.recover(saved, dry_run=True)
    assert not found.published and not (pathlib.Path(saved) / ".metadata").exists()
    assert reshard.recover(saved).published
    state = {"model": {"a": torch.zeros(2, 3)}}
    rt.load(state, saved, strict=False)
    assert same(state["model"]["a"], torch.arange(6.0).reshape(2, 3))


def test_prune(tmp_path):
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        rt.save({"a": torch.ones(3), "metrics": {"loss": 1.0 / step if step < 3 else 5.0}}, root / f"step-{step}")
    report = reshard.prune(root, keep_last=1, keep_best="metrics.loss:min:1", dry_run=True)
    assert report.dry_run and [pathlib.Path(path).name for path in report.removed] == ["step-1", "step-3"]
    assert len(list(root.iterdir())) == 4
    assert reshard.prune(root, keep_last=2).bytes > 0
    assert sorted(path.name for path in root.iterdir()) == ["step-3", "step-4"]
    for wrong in ({"keep_best": "loss"}, {"keep_every": 0}, {"keep_younger": -1.0}):
        with pytest.raises(reshard.InvalidInput):
            reshard.prune(root, **wrong)
