"""Recipes against Megatron core: models of transformers loaded through a recipe into its GPTModel, which then computes the same logits;
its state dict, seen backwards, is Hugging Face's file again, bit for bit; with the state of an optimizer."""

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from test_recipes import SMALL, hugging_face

import reshard
import reshard.torch as rt


def without_devices():
    """Megatron core asks for CUDA in places where the CPU would do."""
    import contextlib

    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.dot_product_attention as attention
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.multi_latent_attention as latent

    # Megatron compiles some of its layers, for which a machine may have no compiler.
    torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    # Without Transformer Engine some names are asked for that are not defined, or are no types.
    moe.te_general_gemm = None
    latent.HAVE_TE = False
    build = attention.DotProductAttention.__init__

    # The local attention does not know that keys and values may have other sizes; it has no parameters.
    def init(self, *arguments, k_channels=None, v_channels=None, **more):
        build(self, *arguments, **more)

    attention.DotProductAttention.__init__ = init


def gpt(kind, grouped=False, second_token=False):
    """Megatron core's model of the same sizes, of the local layer spec."""
    import torch.nn.functional as functional
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1)
    common = dict(
        num_layers=SMALL["num_hidden_layers"],
        hidden_size=SMALL["hidden_size"],
        num_attention_heads=SMALL["num_attention_heads"],
        ffn_hidden_size=SMALL["intermediate_size"],
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    experts = dict(num_moe_experts=4, moe_ffn_hidden_size=16, moe_router_topk=2, moe_token_dispatcher_type="allgather")
    experts |= dict(moe_grouped_gemm=True) if grouped else {}
    common |= dict(mtp_num_layers=1) if second_token else {}
    if kind == "deepseek_v3":
        config = MLATransformerConfig(
            **common,
            **experts,
            multi_latent_attention=True,
            qk_layernorm=True,
            rope_type="rope",
            rotary_base=10000,
            rotary_scaling_factor=1.0,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_head_dim=8,
            qk_pos_emb_head_dim=4,
            v_head_dim=8,
            moe_layer_freq=[0, 1],
            moe_shared_expert_intermediate_size=16,
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            moe_router_num_groups=2,
            moe_router_group_topk=1,
            moe_router_topk_scaling_factor=2.5,
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        # Probabilities of the chosen experts are not made to sum to one, as in transformers by default.
        moe = {**experts, "moe_router_pre_softmax": True} if kind == "qwen3_moe" else {}
        normed = kind.startswith("qwen3")
        config = TransformerConfig(**common, **moe, num_query_groups=2, kv_channels=8, qk_layernorm=normed)
        spec = get_gpt_layer_local_spec(
            num_experts=moe.get("num_moe_experts"), moe_grouped_gemm=grouped, qk_layernorm=normed, normalization="RMSNorm"
        )
    return GPTModel(
        config,
        spec,
        vocab_size=SMALL["vocab_size"],
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if second_token else None,
    )


def recipe(kind, reverse=False):
    name = {"qwen3_moe": "qwen3"}.get(kind, kind).replace("_", "-")
    heads = {} if kind == "deepseek_v3" else {"heads": 4, "kv_heads": 2}
    return reshard.View(f"{name}-hf-to-megatron", reverse=reverse, **heads)


def interleaved(query, key, value, groups):
    """As Megatron lays them out, by an own loop: of each group its queries, its key, its value."""
    rows = []
    for group in range(groups):
        for part in (query, key, value):
            size = part.shape[0] // groups
            rows.extend(part[group * size + row] for row in range(size))
    return torch.stack(rows)


def tensors_of(model):
    return {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def training(tensors):
    """A model and what Adam has for it: moments that tell from which weight they are."""
    slots = {
        key: {"exp_avg": tensor * 0.5, "exp_avg_sq": tensor * 0.25, "step": torch.tensor(3.0)} for key, tensor in tensors.items()
    }
    groups = [{"lr": 0.1, "params": list(tensors)}]
    return {"model": tensors, "optim": {"state": slots, "param_groups": groups}}


def emptied(state):
    """The same shapes with nothing in them."""
    zeros = training({key: torch.zeros_like(tensor) for key, tensor in state.items()})
    for slots in zeros["optim"]["state"].values():
        slots["step"].zero_()
    zeros["optim"]["param_groups"][0]["params"] = []
    return zeros


def same_training(found, tensors):
    expected = training(tensors)
    assert found["model"].keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(found["model"][key], tensor), key
        for name, slot in expected["optim"]["state"][key].items():
            assert torch.equal(found["optim"]["state"][key][name], slot), (key, name)
    assert sorted(found["optim"]["param_groups"][0]["params"]) == sorted(tensors)


def load(rank, size, kind, folder):
    without_devices()
    model = gpt(kind).eval()
    state = tensors_of(model)
    # Strict: every tensor of the model is there, in its shape, and nothing else.
    rt.load(state, f"{folder}/hf", view=recipe(kind))
    stored = load_file(f"{folder}/hf/model.safetensors")
    if kind != "deepseek_v3":
        parts = [stored[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(state["decoder.layers.1.self_attention.linear_qkv.weight"], interleaved(*parts, groups=2))
    tokens = torch.arange(12)[None] * 5 % 64
    mask = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        found = model(tokens, torch.arange(12)[None], mask)
    torch.testing.assert_close(found, torch.load(f"{folder}/logits.pt"), rtol=1e-4, atol=1e-5)
    # And backwards, from its state dict.
    rt.save(state, f"{folder}/state")
    back = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    rt.load(back, f"{folder}/state", view=recipe(kind, reverse=True))
    assert all(torch.equal(back[key], tensor) for key, tensor in stored.items())
    # The optimizer's state goes both ways alike.
    rt.save(training(stored), f"{folder}/hf-training")
    there = emptied(state)
    rt.load(there, f"{folder}/hf-training", view=recipe(kind))
    same_training(there, state)
    rt.save(there, f"{folder}/megatron-training")
    back = emptied(stored)
    rt.load(back, f"{folder}/megatron-training", view=recipe(kind, reverse=True))
    same_training(back, stored)


@pytest.mark.parametrize("kind", ["llama3", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_recipes_give_megatrons_own_model(ranks, tmp_path, kind):
    torch.manual_seed(0)
    model = hugging_face(kind).eval()
    if kind == "deepseek_v3":
        # What chooses experts, which training changes and a new model has as zeros.
        torch.nn.init.normal_(model.model.layers[1].mlp.gate.e_score_correction_bias, std=0.05)
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.save(model(torch.arange(12)[None] * 5 % 64).logits, tmp_path / "logits.pt")
    ranks(1, load, kind, str(tmp_path))


def load_codes(rank, size, folder):
    without_devices()
    model = gpt("deepseek_v3").to(torch.bfloat16)
    model.decoder.layers[1].mlp.router.expert_bias = model.decoder.layers[1].mlp.router.expert_bias.float()
    state = tensors_of(model)
    expected = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    rt.load(state, f"{folder}/codes.safetensors", view=recipe("deepseek_v3"))
    rt.load(expected, f"{folder}/plain.safetensors", view=recipe("deepseek_v3"))
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())
    assert all(tensor.any() for key, tensor in state.items() if "expert_bias" not in key)


def test_block_scaled_weights_come_into_megatrons_own_model(ranks, tmp_path):
    """As DeepSeek publishes its weights: float8 with scales of blocks."""
    torch.manual_seed(0)
    hugging_face("deepseek_v3").save_pretrained(tmp_path / "hf")
    stored, plain = {}, {}
    for key, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        if key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            scale = torch.rand(1, 1) + 0.5
            codes = (tensor * 20).to(torch.float8_e4m3fn)
            stored |= {key: codes, f"{key}_scale_inv": scale}
            plain[key] = (codes.float() * scale).to(torch.bfloat16)
        else:
            stored[key] = plain[key] = tensor if "e_score" in key else tensor.to(torch.bfloat16)
    save_file(stored, tmp_path / "codes.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    ranks(1, load_codes, str(tmp_path))


def without_kernels():
    """What the grouped kernels compute, expert by expert: they need CUDA."""
    import types

    import megatron.core.transformer.moe.experts as experts

    def gmm(rows, weights, counts, trans_b):
        assert not trans_b
        parts = zip(rows.split(counts.tolist()), weights)
        return torch.cat([part @ weight for part, weight in parts])

    experts.gg.assert_grouped_gemm_is_available = lambda: None
    experts.gg.ops = types.SimpleNamespace(gmm=gmm)


def load_grouped(rank, size, kind, folder):
    without_devices()
    without_kernels()
    model = gpt(kind, grouped=True).eval()
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "experts"):
            # Its own kernels know no other type.
            layer.mlp.experts.config.bf16 = True
    state = tensors_of(model)
    assert any(key.endswith("mlp.experts.weight1") for key in state)
    together = reshard.View("megatron-grouped-gemm", experts=4, hidden=SMALL["hidden_size"])
    # Without it, what is missing is named.
    with pytest.raises(reshard.Mismatch, match="mlp.experts.weight1"):
        rt.load(dict(state), f"{folder}/hf", view=recipe(kind))
    rt.load(state, f"{folder}/hf", view=[recipe(kind), together])
    tokens = torch.arange(12)[None] * 5 % 64
    mask = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        found = model(tokens, torch.arange(12)[None], mask)
    torch.testing.assert_close(found, torch.load(f"{folder}/logits.pt"), rtol=1e-4, atol=1e-5)
    stored = load_file(f"{folder}/hf/model.safetensors")
    rt.save(state, f"{folder}/grouped")
    back = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    rt.load(back, f"{folder}/grouped", view=[together.reversed(), recipe(kind, reverse=True)])
    assert all(torch.equal(back[key], tensor) for key, tensor in stored.items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_experts_come_into_megatrons_grouped_layers(ranks, tmp_path, kind):
    torch.manual_seed(0)
    model = hugging_face(kind).eval()
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.save(model(torch.arange(12)[None] * 5 % 64).logits, tmp_path / "logits.pt")
    ranks(1, load_grouped, kind, str(tmp_path))


def load_second_token(rank, size, folder):
    without_devices()
    model = gpt("deepseek_v3", second_token=True)
    state = {key: tensor for key, tensor in tensors_of(model).items() if tensor.is_floating_point()}
    first = reshard.View("deepseek-v3-mtp-hf-to-megatron", layers=2)
    rest = reshard.View("deepseek-v3-hf-to-megatron", layers=2)
    # Strict: all tensors of the model are there, and nothing else.
    rt.load(state, f"{folder}/hub.safetensors", view=[first, rest])
    stored = load_file(f"{folder}/hub.safetensors")
    layer, above = "model.layers.2", "mtp.layers.0"
    same = {
        f"{layer}.enorm.weight": f"{above}.enorm.weight",
        f"{layer}.hnorm.weight": f"{above}.hnorm.weight",
        f"{layer}.eh_proj.weight": f"{above}.eh_proj.weight",
        f"{layer}.shared_head.norm.weight": f"{above}.final_layernorm.weight",
        f"{layer}.self_attn.o_proj.weight": f"{above}.transformer_layer.self_attention.linear_proj.weight",
        f"{layer}.mlp.gate.weight": f"{above}.transformer_layer.mlp.router.weight",
        f"{layer}.mlp.experts.3.down_proj.weight": f"{above}.transformer_layer.mlp.experts.local_experts.3.linear_fc2.weight",
        "model.layers.1.self_attn.o_proj.weight": "decoder.layers.1.self_attention.linear_proj.weight",
    }
    for old, new in same.items():
        assert torch.equal(state[new], stored[old]), new
    joined = torch.cat([stored[f"{layer}.mlp.experts.1.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(state[f"{above}.transformer_layer.mlp.experts.local_experts.1.linear_fc1.weight"], joined)
    # Backwards, all but the copies of embeddings and head.
    rt.save(state, f"{folder}/state")
    kept = {key: tensor for key, tensor in stored.items() if not key.startswith((f"{layer}.embed", f"{layer}.shared_head.head"))}
    back = {key: torch.zeros_like(tensor) for key, tensor in kept.items()}
    rt.load(back, f"{folder}/state", view=[rest.reversed(), first.reversed()])
    assert all(torch.equal(back[key], tensor) for key, tensor in kept.items())


def test_the_layer_that_predicts_a_second_token_comes_into_megatrons_own(ranks, tmp_path):
    """The hub's files have it behind the last layer; transformers makes none, so it is written here in its shapes."""
    torch.manual_seed(0)
    hugging_face("deepseek_v3").save_pretrained(tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    hidden = SMALL["hidden_size"]
    last = {key: tensor for key, tensor in stored.items() if key.startswith("model.layers.1.")}
    stored |= {key.replace("layers.1.", "layers.2."): torch.randn_like(tensor) for key, tensor in last.items()}
    norms = ("enorm", "hnorm", "shared_head.norm")
    stored |= {f"model.layers.2.{name}.weight": torch.randn(hidden) for name in norms}
    stored["model.layers.2.eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    stored["model.layers.2.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.2.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, tmp_path / "hub.safetensors")
    ranks(1, load_second_token, str(tmp_path))
