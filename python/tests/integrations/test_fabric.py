"""Fabric's FSDP and ModelParallel strategies: saved on four ranks, resumed on three."""

import os
import pathlib

import pytest
import torch

pytest.importorskip("lightning")
from trainers import batch, full_digest, net

import reshard

PRELOAD = ("lightning",)


def run(rank, size, folder, strategy, ours, resume):
    import lightning
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="x", GROUP_RANK="0")
    init = FullyShardedDataParallel.__init__

    def on_the_cpu(self, *args, **kwargs):
        kwargs["device_id"] = kwargs.get("device_id") or torch.device("cpu")
        init(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = on_the_cpu
    if ours:
        from reshard.integrations import fabric as found
    else:
        from lightning.fabric import strategies as found

    def parallelize(module, mesh):
        for layer in module:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(module, mesh=mesh["data_parallel"])

    if strategy == "fsdp":
        # A subclass: Fabric refuses the class itself without a GPU.
        chosen = type("FSDP", (found.FSDPStrategy,), {})(state_dict_type="sharded", use_orig_params=True)
    else:
        chosen = found.ModelParallelStrategy(parallelize, data_parallel_size=size, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=size, strategy=chosen)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    loaded = None
    if resume:
        assert fabric.load(folder, state) == {}
        loaded = full_digest(model._forward_module, optimizer.optimizer)
    losses = []
    for _ in range(2):
        x = batch(state["step"])
        loss = (model(x) - x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        losses.append(loss.item())
    if not resume:
        fabric.save(folder, state)
        loaded = full_digest(model._forward_module, optimizer.optimizer)
        if ours:
            fabric.strategy.settle()
    return loaded, losses, state["step"]


@pytest.mark.parametrize("strategy", ["model parallel", "fsdp"])
def test_a_run_is_resumed_on_other_ranks_by_either(tmp_path, ranks, strategy):
    folder = str(tmp_path / "step-2.ckpt")
    saved, _, _ = ranks(4, run, folder, strategy, True, False)[0]
    assert (pathlib.Path(folder) / "meta.pt").exists() and reshard.verify(folder).sound
    loaded, losses, step = ranks(3, run, folder, strategy, True, True)[0]
    assert loaded == saved and step == 4
    assert ranks(3, run, folder, strategy, False, True)[0] == (loaded, losses, step)


@pytest.mark.parametrize("strategy", ["model parallel", "fsdp"])
def test_what_fabric_saved_is_resumed(tmp_path, ranks, strategy):
    folder = str(tmp_path / "step-2.ckpt")
    saved, _, _ = ranks(4, run, folder, strategy, False, False)[0]
    assert ranks(3, run, folder, strategy, True, True)[0][0] == saved
