"""A checkpoint of Lightning's ModelParallelStrategy (FSDP2), small, and what the trainer holds.

    python make_lightning.py OUT

needs lightning (made with 2.6.6) and a CPU; two ranks. Writes OUT/fsdp2_w2.
"""

import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from common import digest, ranks
from torch import nn


def run(out: Path) -> None:
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Tiny(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 7})
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5))
            self.register_buffer("seen", torch.tensor(3))

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, _, __):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(self.global_step))
            loss = (self.net(x) - x).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    model = Tiny()
    best = L.pytorch.callbacks.ModelCheckpoint(dirpath=out / "unused", save_top_k=0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=2,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(list(range(2)), batch_size=1))
    trainer.save_checkpoint(out / "checkpoint")
    full = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    expected = {f"state_dict.{name}": digest(full(tensor)) for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, slots in trainer.optimizers[0].state.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            expected[f"optimizer_0.state.{names[parameter]}.{slot}"] = digest(full(slots[slot]))
    if dist.get_rank() == 0:
        (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    dist.barrier()


def main() -> None:
    out = Path(sys.argv[1]) / "fsdp2_w2"
    out.mkdir(parents=True)
    ranks(2, lambda: run(out))


if __name__ == "__main__":
    main()
