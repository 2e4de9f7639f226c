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
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_on_its_base_is_what_peft_merges(tmp_path, case, dtype):
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**CASES[case], task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
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
    assert changed >= 3
    reshard.convert(tmp_path / "base", tmp_path / "merged", to="safetensors", view=tmp_path / "adapter")
    again = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())
