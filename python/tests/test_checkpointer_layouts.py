"""One run through every way to lay a model out: what one wrapper on some ranks saved, another on others goes on with."""

import logging

import pytest
import torch
from torch import nn

import reshard.torch as rt

FSDP2 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))


def laid_out(layout, size):
    model = net()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if layout in ("fsdp2", "tp"):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (size,))
        if layout == "tp":
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=mesh)
    return torch.compile(model, backend="eager") if layout == "compiled" else model


def train(rank, size, root, layout, steps):
    """Restores, trains some steps and saves; returns the whole state that was restored, the one at the end, and the losses."""
    model = laid_out(layout, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    sampler = rt.ResumableSampler(50, seed=1)
    saved, restored = [], []
    ckpt = rt.Checkpointer(
        root,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=sampler,
        rng=True,
        signals=(),
        on_save=saved.append,
        on_restore=restored.append,
    )
    start = ckpt.restore()
    before, losses = whole(model, optimizer, scheduler), []
    for step in range(start, start + steps):
        # The same on every rank, so that losses do not depend on how many there are.
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    sampler.position += 6
    ckpt.save(start + steps - 1, metrics={"loss": losses[-1]})
    ckpt.close()
    assert len(saved) == 1 and saved[0].total_bytes > 0 and len(restored) == (start > 0)
    return start, sampler.position, before, whole(model, optimizer, scheduler), losses


def whole(model, optimizer, scheduler):
    """The state as plain lists, put together from all ranks."""
    options = rt.StateDictOptions(full_state_dict=True)
    weights, moments = rt.get_state_dict(model, optimizer, options=options)
    slots = {name: {slot: value.tolist() for slot, value in each.items()} for name, each in moments["state"].items()}
    found = {"weights": {name: value.tolist() for name, value in weights.items()}, "slots": slots}
    found["options"] = [group["lr"] for group in moments["param_groups"]]
    return found | {"scheduler": scheduler.state_dict()["last_epoch"]}


def test_a_run_goes_on_under_any_wrapper_on_any_ranks(tmp_path, ranks):
    _, _, _, _, uninterrupted = ranks(1, train, str(tmp_path / "whole"), "plain", 12)[0]
    root, at, losses = str(tmp_path / "run"), 0, []
    ended = None
    chain = [("ddp", 2), ("fsdp1", 3), ("fsdp2", 4), ("tp", 2), ("compiled", 1), ("ddp", 3)]
    for layout, size in chain:
        if layout == "fsdp2" and not FSDP2:
            layout = "fsdp1"
        found = ranks(size, train, root, layout, 2)
        for start, position, before, after, seen in found:
            assert start == at and position == 3 * at + 6
            if ended is not None:
                assert before == ended, f"what {layout} on {size} ranks restored is not what was saved"
            assert after == found[0][3] and seen == pytest.approx(found[0][4])
        at, ended = at + 2, found[0][3]
        losses += found[0][4]
    assert losses == pytest.approx(uninterrupted, rel=1e-4)


def test_a_restore_is_a_line_in_the_log(tmp_path, caplog):
    model = net()
    with rt.Checkpointer(tmp_path / "run", model=model, signals=()) as ckpt:
        ckpt.save(3)
        ckpt.wait()
        with caplog.at_level(logging.INFO, logger="reshard"):
            assert ckpt.restore() == 4
    assert "step-3" in caplog.text and "loaded" in caplog.text
