"""The transformers Trainer with FSDP1 and FSDP2, through the adapter of accelerate: saved on four ranks, resumed on three."""

import json
import pathlib

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from trainers import full_digest

import reshard
import reshard.torch as rt

PRELOAD = ("accelerate", "transformers.trainer", "transformers.models.llama")


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def run(rank, size, folder, version, ours, resume):
    import accelerate.state as states
    from accelerate import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    if ours:
        from reshard.integrations import accelerate as adapter

        adapter.install()
    init = states.AcceleratorState.__init__

    def with_fsdp(self, *args, **kwargs):
        # accelerate turns FSDP on only where it sees an accelerator; this is what it would set.
        init(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None and self.distributed_type == DistributedType.MULTI_CPU:
            shared = states.PartialState._shared_state
            self.fsdp_plugin = kwargs["fsdp_plugin"]
            self.distributed_type = shared["distributed_type"] = DistributedType.FSDP
            self.device = shared["device"] = torch.device("cpu")

    states.AcceleratorState.__init__ = with_fsdp
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=12 // size,
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": version,
            "state_dict_type": "SHARDED_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        },
        save_steps=2,
        logging_steps=1,
        report_to=[],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_grad_norm=0.0,
    )
    digests = {}

    class Look(TrainerCallback):
        def look(self, state, optimizer):
            digests[state.global_step] = full_digest(trainer.model_wrapped, getattr(optimizer, "optimizer", optimizer))

        def on_train_begin(self, args, state, control, optimizer=None, **_):
            if resume:
                self.look(state, optimizer)

        def on_save(self, args, state, control, optimizer=None, **_):
            if not resume:
                self.look(state, optimizer)

    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), callbacks=[Look()])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return digests[2], losses


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_is_resumed_on_other_ranks(tmp_path, ranks, version):
    folder = str(tmp_path / "run")
    saved, through = ranks(4, run, folder, version, True, False)[0]
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        with reshard.open(pathlib.Path(folder) / "checkpoint-2" / name) as ck:
            assert "reshard" in ck.writer
    loaded, losses = ranks(3, run, folder, version, True, True)[0]
    assert loaded == saved
    # The same samples in the same order, whatever the number of ranks: losses are those of the run that was not interrupted.
    assert [losses[3], losses[4]] == pytest.approx([through[3], through[4]], rel=1e-4)
    if version == 2:
        # The Trainer itself loads what the adapter saved, and goes on alike.
        assert ranks(3, run, folder, version, False, True)[0] == (loaded, losses)


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_trainer_saved_is_resumed(tmp_path, ranks, version):
    folder = str(tmp_path / "run")
    saved, _ = ranks(4, run, folder, version, False, False)[0]
    assert ranks(3, run, folder, version, True, True)[0][0] == saved


def test_a_folder_for_the_hub_is_loaded_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    state, optim = rt.get_state_dict(model, optimizer)
    rt.save({"model": state, "optim": optim, "step": 1}, tmp_path / "training")
    hub = tmp_path / "hub"
    model.config.save_pretrained(hub)
    config = (hub / "config.json").read_bytes()
    reshard.convert(tmp_path / "training", hub, to="huggingface", max_shard_size=20_000)
    assert (hub / "config.json").read_bytes() == config
    index = json.loads((hub / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert set(index["weight_map"]) == set(model.state_dict())
    loaded, report = AutoModelForCausalLM.from_pretrained(hub, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
