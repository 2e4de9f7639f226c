"""accelerate and the transformers Trainer with FSDP1 and FSDP2: saved on four ranks, resumed on three."""

import os
import pathlib

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from trainers import full_digest

import reshard

PRELOAD = ("accelerate", "transformers.models.llama")


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))


class Count:
    n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def run(rank, size, folder, version, how, resume):
    if how == "adapter":
        from reshard.integrations import accelerate as adapter

        adapter.install()
    elif how == "switch":
        reshard.install()
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    os.environ["FSDP_VERSION"] = str(version)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if version == 1 else None,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )
    accelerator = Accelerator(cpu=True)
    # accelerate turns FSDP on only where it sees an accelerator; this is what it would set.
    shared = PartialState._shared_state
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.device = shared["device"] = torch.device("cpu")
    model = llama()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    count = Count()
    accelerator.register_for_checkpointing(count)
    loaded = None
    if resume:
        accelerator.load_state(folder)
        loaded = full_digest(model, optimizer.optimizer)
    losses = []
    for _ in range(2):
        ids = torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(1000 + count.n))
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        count.n += 1
        losses.append(loss.item())
    if not resume:
        accelerator.save_state(folder)
        loaded = full_digest(model, optimizer.optimizer)
    return loaded, losses, count.n


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_is_resumed_on_other_ranks(tmp_path, ranks, version):
    folder = str(tmp_path / "checkpoint-2")
    saved, _, _ = ranks(4, run, folder, version, "adapter", False)[0]
    below = sorted(path.name for path in pathlib.Path(folder).iterdir() if path.is_dir())
    assert below == ["optimizer_0", "pytorch_model_fsdp_0"]
    for name in below:
        with reshard.open(f"{folder}/{name}") as ck:
            assert "reshard" in ck.writer
    loaded, losses, count = ranks(3, run, folder, version, "adapter", True)[0]
    assert loaded == saved and count == 4
    if version == 2:
        # accelerate itself loads what the adapter saved, and goes on alike.
        assert ranks(3, run, folder, version, "none", True)[0] == (loaded, losses, count)


@pytest.mark.parametrize("version", [1, 2])
def test_what_accelerate_saved_is_resumed(tmp_path, ranks, version):
    folder = str(tmp_path / "checkpoint-2")
    saved, _, _ = ranks(4, run, folder, version, "none", False)[0]
    assert ranks(3, run, folder, version, "adapter", True)[0][0] == saved


def test_the_switch_alone_does_it_with_fsdp2(tmp_path, ranks):
    folder = str(tmp_path / "checkpoint-2")
    saved, _, _ = ranks(4, run, folder, 2, "switch", False)[0]
    with reshard.open(f"{folder}/pytorch_model_fsdp_0") as ck:
        assert "reshard" in ck.writer
    assert ranks(3, run, folder, 2, "switch", True)[0][0] == saved
