"""LoRA adapters that PEFT wrote, seen on their base: what PEFT's own merge gives."""

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file

import reshard
import reshard.torch as rt

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
CASES = {
    "plain": dict(r=4, lora_alpha=10, target_modules=["q_proj", "down_proj"]),
    "stable": dict(r=3, lora_alpha=7, target_modules="all-linear", use_rslora=True),
    "patterns": dict(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 5}
    ),
    # The first pattern that matches counts, in the order of the file.
    "order": dict(
        r=4, lora_alpha=8, target_modules=["q_proj"], alpha_pattern={"layers.1.self_attn.q_proj": 3, "q_proj": 5, "a.never": 1}
    ),
    "whole modules": dict(r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "embeddings": dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "o_proj"]),
    "head": dict(r=4, lora_alpha=6, target_modules=["lm_head"]),
    "biases": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], bias="all"),
}


def trained(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_on_its_base_is_what_peft_merges(tmp_path, case, dtype):
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=case == "biases")).to(dtype)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**CASES[case], task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    trained(model).save_pretrained(tmp_path / "adapter")
    expected = {key: tensor.detach().clone() for key, tensor in model.merge_and_unload().state_dict().items()}
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    rt.load(state, tmp_path / "base", view=tmp_path / "adapter")
    # PEFT rounds the update and the sum to the weight's type, and sums in another order.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    changed = 0
    stored = load_file(tmp_path / "base" / "model.safetensors")
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}")
        changed += not torch.equal(state[key], stored[key])
    assert changed >= (1 if case == "head" else 2)
    assert reshard.verify(tmp_path / "base", view=tmp_path / "adapter").sound
    reshard.convert(tmp_path / "base", tmp_path / "merged", to="safetensors", view=tmp_path / "adapter")
    again = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


def same(tmp_path, expected, views, base="base"):
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    rt.load(state, tmp_path / base, view=views)
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def stored(model):
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def test_layers_that_lie_the_other_way_round(tmp_path):
    """GPT-2 has its weights as [in, out], which `fan_in_fan_out` says; its head is its embeddings."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = trained(peft.get_peft_model(base, lora))
    model.save_pretrained(tmp_path / "adapter")
    merged = stored(model.merge_and_unload())
    names = load_file(tmp_path / "base" / "model.safetensors")
    same(tmp_path, {key: merged[key] for key in names}, tmp_path / "adapter")


def test_a_vocabulary_that_grew_after_the_base_was_saved(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")

    def grown(name, **settings):
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        base.resize_token_embeddings(70)
        model = trained(peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)))
        model.save_pretrained(tmp_path / name)
        return stored(model.merge_and_unload())

    expected = grown("whole", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    assert expected["lm_head.weight"].shape[0] == 70
    same(tmp_path, expected, tmp_path / "whole")
    # The head as it grew, and an update of it: both lie in the adapter, and both count.
    expected = grown("head", target_modules=["lm_head"])
    keys = load_file(tmp_path / "head" / "adapter_model.safetensors")
    assert "base_model.model.lm_head.base_layer.weight" in keys, sorted(keys)
    with reshard.open(tmp_path / "base", view=tmp_path / "head") as checkpoint:
        found = torch.from_numpy(checkpoint["lm_head.weight"][...])
    torch.testing.assert_close(found, expected["lm_head.weight"], rtol=1e-5, atol=1e-5)


def test_embeddings_that_are_the_head_too(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True})
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    assert "lm_head.weight" not in load_file(tmp_path / "base" / "model.safetensors")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"))
    trained(model).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merged = stored(model.merge_and_unload())
    del merged["lm_head.weight"]
    same(tmp_path, merged, tmp_path / "adapter")
    # A head that was trained by itself is one from then on.
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = trained(peft.get_peft_model(base, lora))
    model.save_pretrained(tmp_path / "head")
    merged = stored(model.merge_and_unload())
    assert not torch.equal(
        merged["lm_head.weight"], load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]
    )
    same(
        tmp_path,
        {key: merged[key] for key in merged if key != "model.embed_tokens.weight"}
        | {"model.embed_tokens.weight": load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]},
        tmp_path / "head",
    )
    # An update of the head alone, which the base does not have.
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model = trained(peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")))
    model.save_pretrained(tmp_path / "update", save_embedding_layers=False)
    with pytest.raises(reshard.InvalidInput, match="where the embeddings are the head, too"):
        reshard.open(tmp_path / "base", view=tmp_path / "update")


def test_several_adapters_are_views_one_after_the_other(tmp_path):
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    base.save_pretrained(tmp_path / "base")
    first = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, first, adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj", "up_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    expected = stored(model.merge_and_unload(adapter_names=["first", "second"]))
    same(tmp_path, expected, [tmp_path / "first", tmp_path / "second"])
    assert reshard.verify(tmp_path / "base", view=[tmp_path / "first", tmp_path / "second"]).sound
    # Damage in an adapter's file is found, too.
    path = tmp_path / "second" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(reshard.ReshardError):
        reshard.open(tmp_path / "base", view=[tmp_path / "first", tmp_path / "second"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (dict(use_dora=True, target_modules=["q_proj"]), "use_dora"),
        (dict(init_lora_weights="pissa", target_modules=["q_proj"]), 'init_lora_weights is "pissa"'),
        (dict(target_modules=[], target_parameters=["q_proj.weight"]), "target_parameters"),
        (dict(lora_bias=True, target_modules=["q_proj"]), "lora_bias"),
    ],
)
def test_what_is_no_product_of_two_factors_is_refused_by_its_name(tmp_path, settings, text):
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias="lora_bias" in settings))
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    trained(model).save_pretrained(tmp_path / "adapter")
    with pytest.raises(reshard.InvalidInput, match=text):
        reshard.open(tmp_path / "base", view=tmp_path / "adapter")
