"""A run in three lines: everything that a run has to remember, on any number of ranks."""

import logging
import os
import random
import signal

import numpy
import pytest
import torch
from helpers import same
from torch import nn

import reshard
import reshard.torch as rt


class Run:
    """A small training run."""

    def __init__(self, root, fresh=True, seed=0, **more):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        data = torch.arange(40 * 6, dtype=torch.float32).reshape(40, 6) / 100
        self.sampler = rt.ResumableSampler(data, seed=3)
        self.loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=self.sampler)
        self.ckpt = rt.Checkpointer(
            root, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, loader=self.loader, rng=True, **more
        )

    def train(self, start, stop):
        losses = []
        batches = iter(self.loader)
        for step in range(start, stop):
            batch = next(batches)
            loss = self.model(batch).square().mean() + torch.rand(()) + random.random() + numpy.random.rand()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            if self.ckpt.step(step, metrics={"loss": loss.item()}):
                break
        return losses


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path, caplog):
    first = Run(tmp_path / "run", every=4)
    assert first.ckpt.restore() == 0 and first.ckpt.restored is None
    with caplog.at_level(logging.INFO, logger="reshard"):
        first.train(0, 4)
        first.ckpt.wait()
    assert [record for record in caplog.records if "saved" in record.message and "step-3" in record.message]
    rest = first.train(4, 8)
    first.ckpt.close()
    second = Run(tmp_path / "run", seed=9, every=4)
    assert second.ckpt.latest() == 7 and second.ckpt.restore(3) == 4
    assert second.ckpt.restored.step == 3 and second.sampler.position == 16
    assert second.train(4, 8) == rest
    second.ckpt.close()


def test_a_checkpoint_elsewhere_is_restored_by_its_path(tmp_path):
    first = Run(tmp_path / "run", async_=False)
    first.train(0, 2)
    first.ckpt.save(1)
    reports = []
    second = Run(tmp_path / "other", seed=4, on_restore=reports.append)
    assert second.ckpt.restore(tmp_path / "run" / "step-1") == 2
    assert all(same(a, b) for a, b in zip(first.model.parameters(), second.model.parameters()))
    assert len(reports) == 1
    first.ckpt.close()
    second.ckpt.close()


def test_what_a_checkpoint_elsewhere_lacks_is_an_error_unless_it_may_be(tmp_path):
    model = nn.Linear(3, 3)
    rt.save({"model": model, "optimizer": 1, "note": "of another program"}, tmp_path / "other")
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = [parameter.clone() for parameter in other.parameters()]
    with rt.Checkpointer(tmp_path / "run", model=other, signals=()) as ckpt:
        with pytest.raises(reshard.Mismatch, match="0.weight"):
            ckpt.restore(tmp_path / "other")
        assert ckpt.restore(tmp_path / "other", strict=False) == 0
        assert {one["key"] for one in ckpt.restored.differences} >= {"model.0.weight", "model.1.bias"}
    assert all(same(a, b) for a, b in zip(before, other.parameters()))
    again = nn.Linear(3, 3)
    with rt.Checkpointer(tmp_path / "run", model=again, signals=()) as ckpt:
        assert ckpt.restore(tmp_path / "other") == 0
    assert same(again.weight, model.weight)


@pytest.mark.parametrize("how", ["signal", "time"])
def test_before_a_run_is_stopped_it_saves(tmp_path, how):
    run = Run(tmp_path / "run", time_limit=0.0 if how == "time" else None)
    before = signal.getsignal(signal.SIGUSR1)
    if how == "signal":
        assert run.ckpt.step(0) is False
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.ckpt.preempted
    assert run.ckpt.step(1) is True
    assert run.ckpt.latest() == 1
    run.ckpt.close()
    if how == "signal":
        assert signal.getsignal(signal.SIGUSR1) != before


def test_more_models_optimizers_and_values(tmp_path):
    def parts():
        models = {"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)}
        optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
        return models, optimizers

    models, optimizers = parts()
    for name, model in models.items():
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizers[name].step()
    seen = {"n": 3}
    ckpt = rt.Checkpointer(tmp_path, model=models, optimizer=optimizers, state={"seen": seen, "name": "run 7"}, async_=False)
    ckpt.save(5, metrics={"loss": 1.0})
    again, fresh = parts()
    values = {"n": 0}
    other = rt.Checkpointer(tmp_path, model=again, optimizer=fresh, state={"seen": values, "name": None})
    assert other.restore() == 6 and other.state["name"] == "run 7" and other.state["seen"]["n"] == 3
    for name in models:
        assert same(again[name].weight, models[name].weight)
        slot = optimizers[name].state[models[name].weight]["exp_avg"]
        assert same(fresh[name].state[again[name].weight]["exp_avg"], slot)
    with pytest.raises(reshard.InvalidInput, match="no model"):
        rt.Checkpointer(tmp_path, optimizer=torch.optim.SGD(models["g"].parameters())).save(1)
    with pytest.raises(reshard.InvalidInput, match="state_dict"):
        rt.Checkpointer(tmp_path, loader=[1, 2])
    for each in (ckpt, other):
        each.close()


def test_modules_and_optimizers_are_leaves(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rt.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    with reshard.open(tmp_path / "a") as ck:
        assert "model.0.weight" in ck and "optimizer.state.0.weight.exp_avg" in ck
    other = nn.Sequential(nn.Linear(3, 2))
    fresh = torch.optim.Adam(other.parameters())
    rt.load({"model": other, "optimizer": fresh}, tmp_path / "a")
    assert same(other[0].weight, model[0].weight)
    assert same(fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


# ---- the position in the data -----------------------------------------------------------------------------------------------


def consume(position, length, ranks, batch, batches, seed, workers=0):
    """What some ranks get in some batches, from a position on; and the position after it."""
    taken, ends = [], set()
    for rank in range(ranks):
        sampler = rt.ResumableSampler(length, seed=seed, rank=rank, world_size=ranks)
        sampler.load_state_dict({"position": position, "length": length, "seed": seed, "shuffle": True})
        data = torch.arange(length)
        loader = torch.utils.data.DataLoader(data, batch_size=batch, sampler=sampler, num_workers=workers)
        loader = sampler.follow(loader) if workers else loader
        got = []
        while len(got) < batches:
            for each in loader:
                got.append(each.tolist())
                if len(got) == batches:
                    break
        taken.append(got)
        ends.add(sampler.position)
    assert len(ends) == 1, "the ranks disagree on the position"
    # In the order of the turns.
    order = []
    for number in range(batches):
        parts = [got[number] for got in taken]
        assert len({len(part) for part in parts}) == 1, "ranks have batches of different sizes"
        order += [sample for turn in zip(*parts) for sample in turn]
    return order, ends.pop()


def whole_order(length, seed, epochs):
    sampler = rt.ResumableSampler(length, seed=seed, rank=0, world_size=1)
    return [sample for epoch in range(epochs) for sample in sampler._order(epoch)]


def test_no_sample_is_lost_or_seen_twice_for_any_ranks_and_batches():
    generator = random.Random(7)
    for case in range(60):
        length, seed = generator.randint(1, 40), generator.randint(0, 5)
        position, seen = 0, []
        for _ in range(generator.randint(1, 5)):
            ranks, batch = generator.randint(1, min(6, length)), generator.randint(1, 7)
            order, position = consume(position, length, ranks, batch, generator.randint(1, 6), seed)
            seen += order
            assert position == len(seen)
        wanted = whole_order(length, seed, position // length + 1)[:position]
        assert seen == wanted, f"case {case}"
        for epoch in range(position // length):
            assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_workers_that_run_ahead_do_not_count():
    position, seen = 0, []
    for ranks, batch, batches, workers in ((2, 3, 3, 2), (1, 4, 2, 1), (3, 2, 2, 2)):
        order, position = consume(position, 29, ranks, batch, batches, 1, workers)
        seen += order
    assert seen == whole_order(29, 1, 2)[: len(seen)] and position == len(seen)


def test_random_state_of_a_machine_with_other_devices_is_restored_as_far_as_it_goes(tmp_path, monkeypatch):
    import reshard.torch._checkpointer as checkpointer

    taken = checkpointer.random_state
    # A machine with a GPU.
    monkeypatch.setattr(checkpointer, "random_state", lambda: taken() | {"cuda": torch.arange(16, dtype=torch.uint8)})
    with rt.Checkpointer(tmp_path / "gpu", rng=True, signals=()) as ckpt:
        ckpt.save(0)
    expected = torch.rand(3)
    monkeypatch.setattr(checkpointer, "random_state", taken)
    with rt.Checkpointer(tmp_path / "gpu", rng=True, signals=()) as ckpt:
        assert ckpt.restore() == 1
    assert same(torch.rand(3), expected)
    # A machine without NumPy.
    without = {name: part for name, part in taken().items() if name != "numpy"}
    monkeypatch.setattr(checkpointer, "random_state", lambda: without)
    with rt.Checkpointer(tmp_path / "bare", rng=True, signals=()) as ckpt:
        ckpt.save(0)
    monkeypatch.setattr(checkpointer, "random_state", taken)
    with rt.Checkpointer(tmp_path / "bare", rng=True, signals=()) as ckpt:
        assert ckpt.restore() == 1
    assert same(torch.random.get_rng_state(), without["torch"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_last_batch_that_is_dropped_does_not_end_the_training(workers):
    sampler = rt.ResumableSampler(7, seed=3, rank=0, world_size=2)
    loader = torch.utils.data.DataLoader(torch.arange(7), batch_size=2, sampler=sampler, num_workers=workers, drop_last=True)
    loader = sampler.follow(loader)
    passes = [sum(len(batch) for batch in loader) for _ in range(3)]
    # Three turns of two ranks, then four, as one sample of the first epoch was left; then three again.
    assert passes == [2, 4, 2] and sampler.position == 20


def test_a_position_in_other_data_is_refused():
    sampler = rt.ResumableSampler(10)
    with pytest.raises(reshard.Mismatch, match="10"):
        sampler.load_state_dict(rt.ResumableSampler(11).state_dict())
    loader = torch.utils.data.DataLoader(list(range(10)), sampler=sampler, num_workers=1)
    with pytest.raises(reshard.InvalidInput, match="ahead"):
        rt.Checkpointer("run", loader=loader)
    with pytest.raises(reshard.InvalidInput):
        rt.ResumableSampler([])


# ---- on other numbers of ranks ----------------------------------------------------------------------------------------------


def save_on_ranks(rank, size, path):
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    with rt.Checkpointer(path, model=model, loader=rt.ResumableSampler(100), rng=True, signals=()) as ckpt:
        ckpt.loader.position = 12
        ckpt.save(4)
    stop = rt.Checkpointer(path, signals=(), time_limit=0.0 if rank == 1 else None)._agreed(rank == 1)
    rt.save({"own": {"x": rt.PerRank({"n": rank, "t": torch.full((2,), rank)}), "y": 1}}, path + "-own")
    return stop, torch.rand(()).item()


def restore_on_ranks(rank, size, path):
    torch.manual_seed(50)
    ckpt = rt.Checkpointer(path, model=nn.Linear(3, 2), loader=rt.ResumableSampler(100), rng=True, signals=())
    start = ckpt.restore()
    answers = {}
    for policy in (
        "error",
        "drop",
        lambda saved, rank, size: {"n": [saved[r]["n"] for r in sorted(saved)], "t": saved[0]["t"].tolist()},
    ):
        own = rt.PerRank({"n": -1, "t": torch.zeros(2, dtype=torch.int64)}, policy)
        state = {"own": {"x": own, "y": 0}}
        try:
            rt.load(state, path + "-own")
            answers[policy if isinstance(policy, str) else "function"] = own.value["n"], state["own"]["y"]
        except reshard.Mismatch as error:
            answers["error"] = "ranks saved it" in str(error)
    return start, ckpt.loader.position, torch.rand(()).item(), list(ckpt.restored.notes), answers


def test_a_run_resumes_on_another_number_of_ranks(tmp_path, ranks):
    path = str(tmp_path / "run")
    saved = ranks(3, save_on_ranks, path)
    assert [stop for stop, _ in saved] == [True] * 3
    same_ranks = ranks(3, restore_on_ranks, path)
    assert [(start, position) for start, position, *_ in same_ranks] == [(5, 12)] * 3
    assert [number for _, _, number, *_ in same_ranks] == [number for _, number in saved]
    assert same_ranks[1][3] == [] and same_ranks[1][4]["error"] == (1, 1)
    fewer = ranks(2, restore_on_ranks, path)
    assert [(start, position) for start, position, *_ in fewer] == [(5, 12)] * 2
    assert len({number for _, _, number, *_ in fewer}) == 2 and "derived" in fewer[0][3][0]
    assert [number for _, _, number, *_ in ranks(2, restore_on_ranks, path)] == [number for _, _, number, *_ in fewer]
    assert fewer[1][4] == {"error": True, "drop": (-1, 1), "function": ([0, 1, 2], 1)}


class Stage(nn.Module):
    """A part of a model, under the names of the whole."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in layers})

    def trained(self):
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)


def staged(rank, size, root, resume):
    """Six layers on a pipeline of as many stages as there are ranks."""
    stage = Stage(range(rank * 6 // size, (rank + 1) * 6 // size))
    optimizer = stage.trained()
    ckpt = rt.Checkpointer(root, model=stage, optimizer=optimizer, signals=())
    start = ckpt.restore()
    if not resume:
        for number, layer in stage.layers.items():
            torch.nn.init.constant_(layer.weight, float(number))
            layer(torch.ones(1, 4)).sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        optimizer.step()
        ckpt.save(4)
    ckpt.close()
    names = {parameter: name for name, parameter in stage.named_parameters()}
    slots = {names[parameter]: state["exp_avg"].tolist() for parameter, state in optimizer.state.items()}
    options = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    weights = {name: parameter.tolist() for name, parameter in stage.named_parameters()}
    return start, weights, slots, options


def test_stages_of_a_pipeline_resume_on_other_stages(tmp_path, ranks):
    root = str(tmp_path / "run")

    def together(results):
        weights, slots = {}, {}
        for _, own, moments, options in results:
            weights.update(own)
            slots.update(moments)
            assert options == [(0.5, 0.1), (0.5, 0.0)]
        assert len(weights) == len(slots) == 12
        return weights, slots

    saved = ranks(3, staged, root, False)
    for size in (3, 2, 1):
        resumed = ranks(size, staged, root, True)
        assert {start for start, *_ in resumed} == {5} and together(resumed) == together(saved)


def test_schedulers_scalers_and_compiled_models(tmp_path):
    def parts():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        return {
            "model": torch.compile(model),
            "optimizer": optimizer,
            "scheduler": [torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)],
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        }

    first = parts()
    first["optimizer"].step()
    for scheduler in first["scheduler"]:
        scheduler.step()
    first["scaler"].scale(torch.ones(()))
    first["scaler"].update(4.0)
    with rt.Checkpointer(tmp_path, **first, async_=False) as ckpt:
        ckpt.save(1)
    with reshard.open(ckpt.manager.path(1)) as checkpoint:
        assert "model.weight" in checkpoint, "a compiled model has its own names"
    again = parts()
    with rt.Checkpointer(tmp_path, **again) as ckpt:
        assert ckpt.restore() == 2
    assert [each.state_dict() for each in again["scheduler"]] == [each.state_dict() for each in first["scheduler"]]
    assert again["scaler"].state_dict() == first["scaler"].state_dict()
    assert same(again["model"].weight, first["model"].weight)
