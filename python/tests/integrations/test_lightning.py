"""Lightning's FSDP and ModelParallel strategies: saved on four ranks, resumed on three."""

import io
import os
import pathlib

import pytest
import torch

pytest.importorskip("lightning")
from trainers import batch, full_digest, net

import reshard
import reshard.torch

PRELOAD = ("lightning",)


def run(rank, size, folder, strategy, ours, resume, background=True, callback=False):
    import lightning
    from lightning.pytorch import strategies
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    # Lightning takes the group that is there, and what the launcher says in the environment.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="x", GROUP_RANK="0")
    # Lightning passes the index of the root device, which the CPU has not.
    init = FullyShardedDataParallel.__init__

    def on_the_cpu(self, *args, **kwargs):
        kwargs["device_id"] = kwargs.get("device_id") or torch.device("cpu")
        init(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = on_the_cpu

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.losses = []

        def configure_model(self):
            if strategy == "model parallel":
                mesh = self.device_mesh["data_parallel"]
                for layer in self.net:
                    if isinstance(layer, torch.nn.Linear):
                        fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, _, index):
            x = batch(self.global_step)
            loss = (self.net(x) - x).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            parameters = self.parameters() if strategy == "model parallel" else self.trainer.model.parameters()
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    if ours:
        from reshard.integrations import lightning as found

        more = {"background": background}
    else:
        found, more = strategies, {}
    if strategy == "fsdp":
        # A subclass: Lightning refuses the class itself without a GPU.
        chosen = type("FSDP", (found.FSDPStrategy,), {})(state_dict_type="sharded", use_orig_params=True, **more)
    else:
        chosen = found.ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, **more)
    seen = {}

    class Look(lightning.Callback):
        def on_train_start(self, trainer, module):
            seen["loaded"] = full_digest(trainer.strategy.model, trainer.optimizers[0])
            seen["step"] = trainer.global_step

    callbacks = [Look()]
    if callback:
        callbacks.append(
            lightning.pytorch.callbacks.ModelCheckpoint(
                dirpath=folder + "-each", every_n_train_steps=1, save_top_k=-1, save_last=callback, filename="{step}"
            )
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=chosen,
        max_steps=5 if resume else 3,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callback),
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(list(range(5)), batch_size=1), ckpt_path=folder if resume else None)
    if not resume:
        trainer.save_checkpoint(folder)
        seen["loaded"] = full_digest(trainer.strategy.model, trainer.optimizers[0])
        if ours:
            trainer.strategy.settle()
    return seen["loaded"], module.losses[-2:], seen["step"]


@pytest.mark.parametrize("strategy", ["model parallel", "fsdp"])
def test_a_run_is_resumed_on_other_ranks_by_either(tmp_path, ranks, strategy):
    folder = str(tmp_path / "last.ckpt")
    saved, _, _ = ranks(4, run, folder, strategy, True, False)[0]
    with reshard.open(folder) as ck:
        assert "reshard" in ck.writer
    assert (pathlib.Path(folder) / "meta.pt").exists() and reshard.verify(folder).sound
    loaded, losses, step = ranks(3, run, folder, strategy, True, True)[0]
    assert loaded == saved and step == 3
    assert ranks(3, run, folder, strategy, False, True)[0] == (loaded, losses, step)


@pytest.mark.parametrize("strategy", ["model parallel", "fsdp"])
def test_what_lightning_saved_is_resumed(tmp_path, ranks, strategy):
    folder = str(tmp_path / "last.ckpt")
    saved, _, _ = ranks(4, run, folder, strategy, False, False)[0]
    loaded, _, step = ranks(3, run, folder, strategy, True, True)[0]
    assert loaded == saved and step == 3


@pytest.mark.parametrize("last", [True, "link"])
def test_model_checkpoints_are_all_complete(tmp_path, ranks, last):
    folder = str(tmp_path / "run.ckpt")
    ranks(2, run, folder, "fsdp" if last is True else "model parallel", True, False, True, last)
    found = sorted(path.name for path in pathlib.Path(folder + "-each").iterdir())
    assert "last.ckpt" in found and len(found) == 4
    for name in found:
        assert reshard.verify(f"{folder}-each/{name}").sound
    # What is neither model nor optimizer is part of the checkpoint: a file of another save beside it does not matter.
    (pathlib.Path(folder + "-each") / "last.ckpt" / "meta.pt").write_bytes(
        (pathlib.Path(folder + "-each") / "step=1.ckpt" / "meta.pt").read_bytes()
    )
    assert ranks(3, run, folder + "-each/last.ckpt", "fsdp" if last is True else "model parallel", True, True)[0][2] == 3


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("inside", [True, False], ids=["in the checkpoint", "in meta.pt"])
def test_what_lies_beside_the_model_executes_nothing(tmp_path, inside):
    from reshard.integrations._lightning import Background

    folder, marker = tmp_path / "last.ckpt", tmp_path / "marker"
    rest = io.BytesIO()
    torch.save({"callbacks": Hostile(str(marker))}, rest)
    state = {"state_dict": {"w": torch.ones(3)}}
    reshard.torch.save({**state, "lightning_meta": rest.getvalue()} if inside else state, folder)
    (folder / "meta.pt").write_bytes(rest.getvalue())
    for weights_only in (None, True):
        with pytest.raises(reshard.UntrustedPickle, match="posix.mkdir"):
            Background().read(folder, {"state_dict": {"w": torch.zeros(3)}}, True, weights_only)
        assert not marker.exists()
    Background().read(folder, {"state_dict": {"w": torch.zeros(3)}}, True, False)
    assert marker.exists()
