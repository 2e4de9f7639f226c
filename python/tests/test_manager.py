"""The folder of steps."""

import os
import pathlib
import threading
import time

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


def abandoned(folder, age):
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"PK\x03\x04 half a record")
    then = time.time() - age
    os.utime(folder / "__0_0.distcp", (then, then))


def test_a_budget_and_a_step_that_was_read_whole(tmp_path):
    state = {"w": torch.arange(10_000, dtype=torch.float32)}
    with rt.CheckpointManager(tmp_path / "budget", keep_last=None, budget=100_000, async_=False) as manager:
        for step in range(4):
            manager.save(step, state)
        assert manager.steps() == [2, 3]
    with rt.CheckpointManager(tmp_path / "young", keep_last=1, keep_younger=3600, async_=False) as manager:
        for step in range(3):
            manager.save(step, state)
        assert manager.steps() == [0, 1, 2]
    with rt.CheckpointManager(tmp_path / "fallback", keep_last=1, fallback=True, async_=False) as manager:
        manager.save(0, state)
        # The next one is damaged as soon as it is written: no length shows it.
        retire, manager._retire = manager._retire, lambda: None
        manager.save(1, state)
        file = next((tmp_path / "fallback" / "step-1").glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[20_000] ^= 1
        file.write_bytes(content)
        retire()
        assert (tmp_path / "fallback" / "step-0" / ".metadata").exists()
        manager._retire = retire
        manager.save(2, state)
        assert manager.steps()[-1] == 2 and not (tmp_path / "fallback" / "step-0").exists()


def test_a_step_is_replaced_and_abandoned_saves_are_removed_after_a_while(tmp_path):
    manager = rt.CheckpointManager(tmp_path, keep_last=3, async_=False)
    manager.save(5, state(1))
    manager.save(5, state(2))
    abandoned(tmp_path / "step-3", age=4000)
    abandoned(tmp_path / "step-4", age=60)
    manager.save(6, state(6))
    assert manager.steps() == [5, 6] and not (tmp_path / "step-3").exists() and (tmp_path / "step-4").exists()
    wanted = state(0)
    manager.restore(wanted, 5)
    assert wanted["epoch"] == 2


@pytest.mark.parametrize("keep_last", [None, 1])
def test_folders_that_are_not_its_own_stay(tmp_path, keep_last):
    """Exports, files of torch.save, results, and checkpoints of others, under the names of steps."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    foreign = {"step-1": "results.txt", "step-2": "model.pt", "step-3": "__0_0.distcp", "step-4": "notes/deep.txt"}
    for name, file in foreign.items():
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_bytes((tmp_path / "x.pt").read_bytes()[1:] if file == "__0_0.distcp" else b"PK")
    torch.save({"w": torch.ones(2)}, tmp_path / "step-2" / "model.pt")
    rt.save({"w": torch.ones(2)}, tmp_path / "step-5")
    (tmp_path / "step-07").mkdir()
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    manager = rt.CheckpointManager(tmp_path, keep_last=keep_last, async_=False)
    for step in (8, 9):
        manager.save(step, state(step))
    left = {path.name for path in tmp_path.iterdir()} - {"x.pt"}
    assert left == {*foreign, "step-5", "step-07", "step-9"} | ({"step-8"} if keep_last is None else set())
    assert reshard.verify(tmp_path / "step-5") and manager.warnings == []


def test_a_file_beside_a_checkpoint_survives_it(tmp_path):
    manager = rt.CheckpointManager(tmp_path, keep_last=1, async_=False)
    manager.save(1, state(1))
    (tmp_path / "step-1" / "eval.json").write_text("{}")
    manager.save(2, state(2))
    assert manager.steps() == [2] and [path.name for path in (tmp_path / "step-1").iterdir()] == ["eval.json"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda step: (step / "__0_0.distcp").unlink(), "missing"),
        (lambda step: (step / ".metadata").write_bytes(b"\x80\x04N."), "metadata"),
        (lambda step: flip(step / "__0_0.distcp"), "damaged|checksum"),
        (lambda step: (step / ".metadata").unlink(), "never finished"),
    ],
)
def test_restore_goes_back_to_the_newest_whole_step(tmp_path, damage, words):
    manager = rt.CheckpointManager(tmp_path, keep_last=2, async_=False)
    big = {"w": torch.arange(5000.0)}
    for step in (1, 2, 3):
        manager.save(step, {"w": big["w"] + step, "epoch": step})
    damage(tmp_path / "step-3")
    wanted = {"w": torch.zeros(5000), "epoch": 0}
    with pytest.warns(UserWarning, match=f"step-3 is not restored: .*({words})"):
        report = manager.restore(wanted)
    assert report.step == 2 and wanted["epoch"] == 2 and wanted["w"][0] == 2
    # Nothing is whole: the error of the newest.
    for step in (2, 3):
        (tmp_path / f"step-{step}" / "__0_0.distcp").unlink(missing_ok=True)
    with pytest.warns(UserWarning):
        assert manager.restore(wanted) is None


def test_a_broken_step_does_not_count(tmp_path):
    manager = rt.CheckpointManager(tmp_path, keep_last=2, async_=False)
    for step in (1, 2):
        manager.save(step, state(step))
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    manager.save(3, state(3))
    assert manager.steps() == [1, 3]


def job(root, first, failures):
    try:
        with rt.CheckpointManager(root, keep_last=2) as manager:
            for step in range(first, first + 30, 2):
                manager.save(step, state(step)).result()
    except Exception as error:
        failures.append(error)


def test_two_jobs_on_one_root(tmp_path):
    failures = []
    jobs = [threading.Thread(target=job, args=(tmp_path, first, failures)) for first in (1, 2)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert failures == []
    steps = rt.CheckpointManager(tmp_path).steps()
    assert steps[-1] == 30 and all(reshard.verify(tmp_path / f"step-{step}") for step in steps)


def test_addresses_are_those_that_the_engine_knows(tmp_path):
    for text in (tmp_path, "s3://b/k", "S3A://b/k", "gcs://b/k", "azure://c/k", "memory://m", "https://h/x"):
        assert rt.StorageReader.validate_checkpoint_id(text) and rt.StorageWriter.validate_checkpoint_id(text)
    for text in ("abfs://c/k", "hdfs://x/y", "s3://", "s3://user:word@bucket/key"):
        assert not rt.StorageReader.validate_checkpoint_id(text)
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.open("s3://user:hush@bucket/key")
    assert "hush" not in str(caught.value)


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
