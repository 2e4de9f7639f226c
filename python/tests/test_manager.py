"""The folder of steps."""

import pathlib

import pytest
import torch

import reshard
import reshard.torch as rt


def state(value):
    return {"model": {"w": torch.full((4,), float(value))}, "epoch": value}


@pytest.mark.parametrize("async_", [True, False])
def test_saving_finding_and_restoring(tmp_path, async_):
    with rt.CheckpointManager(tmp_path, keep_last=2, keep_every=40, async_=async_) as manager:
        assert manager.latest() is None and manager.restore(state(0)) is None
        for step in (10, 20, 30, 40, 50, 60):
            manager.save(step, state(step))
        manager.wait()
        assert manager.steps() == [40, 50, 60] and manager.latest() == 60
        wanted = state(0)
        report = manager.restore(wanted)
        assert report.step == 60 and wanted["epoch"] == 60 and wanted["model"]["w"].tolist() == [60] * 4
        manager.restore(wanted, 40)
        assert wanted["epoch"] == 40
        with pytest.raises(reshard.NotFound):
            manager.restore(wanted, 10)
        assert manager.warnings == [] and "3 steps" in repr(manager)


def test_the_best_are_kept(tmp_path):
    manager = rt.CheckpointManager(tmp_path, keep_last=1, keep_best=2, metric="loss", async_=False)
    for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0, float("nan")]):
        manager.save(step, state(step), metrics={"loss": loss})
    assert manager.steps() == [1, 3, 5] and manager.best() == 1 and manager.metrics(3) == {"loss": 2.0}


def test_a_step_is_replaced_and_leftovers_are_removed(tmp_path):
    manager = rt.CheckpointManager(tmp_path, keep_last=3, async_=False)
    manager.save(5, state(1))
    manager.save(5, state(2))
    unfinished = tmp_path / "step-3"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    manager.save(6, state(6))
    assert manager.steps() == [5, 6] and not unfinished.exists()
    wanted = state(0)
    manager.restore(wanted, 5)
    assert wanted["epoch"] == 2


def test_what_makes_no_sense_is_refused(tmp_path):
    for options in ({"mode": "most"}, {"keep_best": 1}, {"keep_last": 0}):
        with pytest.raises(reshard.InvalidInput):
            rt.CheckpointManager(tmp_path, **options)
    with pytest.raises(reshard.InvalidInput):
        rt.CheckpointManager(tmp_path, async_=False).save(1, {"_reshard": 1})


def on_ranks(rank, size, root):
    manager = rt.CheckpointManager(root, keep_last=2)
    for step in range(4):
        manager.save(step, {"w": torch.full((3,), float(step)), "rng": rt.PerRank(rank * 100 + step)})
    manager.close()
    own = rt.PerRank(None)
    wanted = {"w": torch.zeros(3), "rng": own}
    report = manager.restore(wanted)
    assert report.step == 3 and wanted["w"].tolist() == [3, 3, 3] and own.value == rank * 100 + 3


def test_on_ranks(ranks, tmp_path):
    ranks(2, on_ranks, str(tmp_path))
    assert sorted(p.name for p in pathlib.Path(tmp_path).iterdir()) == ["step-2", "step-3"]
