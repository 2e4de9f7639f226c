"""Recipes against the real thing: models of transformers, saved by it, loaded through a recipe into torchtitan's own models, whose
state-dict adapters are the oracle; sharded, with the optimizer's state, and back."""

import pytest
import torch

pytest.importorskip("torchtitan")
pytest.importorskip("transformers")
from safetensors.torch import load_file

import reshard
import reshard.torch as rt

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)


def hugging_face(kind):
    import transformers

    if kind == "llama3":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, mlp_only_layers=[]
        )
        return transformers.Qwen3MoeForCausalLM(config)
    small = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
    config = transformers.DeepseekV3Config(
        **small,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_routed_experts=4,
        kv_lora_rank=16,
        q_lora_rank=12 if kind == "deepseek_v3" else None,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def titan(kind):
    """torchtitan's model of the same sizes, and its adapter."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

    layers = SMALL["num_hidden_layers"]
    dim, vocabulary, heads, kv_heads = 32, 64, 4, 2
    edges = dict(vocab_size=vocabulary, dim=dim)
    if kind == "llama3":
        import torchtitan.models.llama3 as package
        from torchtitan.models.llama3.model import Llama3Model as model
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter as adapter

        rope = ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
        blocks = package._build_llama3_layers(
            fuse_qkv=False,
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            hidden_dim=48,
            rope=rope,
            attn_backend="flex",
        )
    elif kind.startswith("qwen3"):
        import torchtitan.models.qwen3 as package
        from torchtitan.models.qwen3.model import Qwen3Model as model
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter as adapter

        rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
        common = dict(
            fuse_qkv=False,
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=8,
            rope=rope,
            attn_backend="flex",
        )
        if kind == "qwen3":
            blocks = package._build_qwen3_layers(**common, hidden_dim=48)
        else:
            blocks = package._build_qwen3_moe_layers(
                **common, moe_hidden_dim=16, num_experts=4, top_k=2, moe_comm_backend="standard"
            )
    else:
        import torchtitan.models.deepseek_v3 as package
        from torchtitan.models.deepseek_v3.model import DeepSeekV3Model as model
        from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter as adapter

        rope = ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0)
        blocks = package._build_dsv3_layers(
            n_layers=layers,
            n_dense_layers=1,
            dim=dim,
            n_heads=heads,
            q_lora_rank=12 if kind == "deepseek_v3" else 0,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            mscale=1.0,
            dense_hidden_dim=48,
            moe_hidden_dim=16,
            num_experts=4,
            num_shared_experts=1,
            router_top_k=2,
            router_score_func="sigmoid",
            attn_backend="flex",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=rope,
        )
    config = model.Config(
        **edges,
        norm=RMSNorm.Config(normalized_shape=dim),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary),
        layers=blocks,
    )
    return config, adapter(config, None)


def recipe(kind, **options):
    name = {"llama3": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}.get(kind, "deepseek-v3")
    parameters = dict(heads=4, kv_heads=2) if kind == "llama3" else {}
    return reshard.View(f"{name}-hf-to-torchtitan", **parameters, **options)


def moments(tensors, factor):
    return {key: tensor.float() * factor for key, tensor in tensors.items()}


def check(rank, size, kind, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    stored = load_file(f"{folder}/hf/model.safetensors")
    _, adapter = titan(kind)
    expected = adapter.from_hf(dict(stored))

    def shards(tensors):
        return {key: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for key, tensor in tensors.items()}

    def same(found, wanted):
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, wanted[key]), key

    # Straight from Hugging Face's files.
    state = shards(expected)
    rt.load(state, f"{folder}/hf", view=recipe(kind))
    same(state, expected)
    # A training state under Hugging Face's names, with Adam's moments.
    averages = {name: moments(stored, factor) for name, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25))}

    def optimizer(keys, slot):
        state = {key: {name: slot(name, key) for name in averages} | {"step": torch.tensor(3.0)} for key in keys}
        return {"state": state, "param_groups": [{"lr": 0.1, "params": list(keys)}]}

    def cut(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    before = {"model": {key: cut(tensor) for key, tensor in stored.items()}}
    before["optim"] = optimizer(stored, lambda name, key: cut(averages[name][key]))
    rt.save(before, f"{folder}/training-{size}")
    wanted = {name: adapter.from_hf(dict(tensors)) for name, tensors in averages.items()}
    state = {"model": shards(expected), "optim": optimizer(expected, lambda name, key: cut(torch.zeros_like(wanted[name][key])))}
    for slots in state["optim"]["state"].values():
        slots["step"].zero_()
    rt.load(state, f"{folder}/training-{size}", view=recipe(kind))
    same(state["model"], expected)
    for name in averages:
        same({key: slots[name] for key, slots in state["optim"]["state"].items()}, wanted[name])
    assert all(slots["step"].item() == 3.0 for slots in state["optim"]["state"].values())
    assert sorted(state["optim"]["param_groups"][0]["params"]) == sorted(expected)
    # And back: what torchtitan's names are saved under is Hugging Face's again.
    rt.save(state, f"{folder}/titan-{size}")
    back = {"model": shards(stored), "optim": optimizer(stored, lambda name, key: cut(torch.zeros_like(averages[name][key])))}
    rt.load(back, f"{folder}/titan-{size}", view=recipe(kind, reverse=True))
    same(back["model"], stored)
    for name in averages:
        same({key: slots[name] for key, slots in back["optim"]["state"].items()}, averages[name])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["llama3", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v3_full_query"])
def test_recipes_do_what_torchtitans_adapters_do(ranks, tmp_path, kind, size):
    torch.manual_seed(0)
    hugging_face(kind).save_pretrained(tmp_path / "hf")
    config, adapter = titan(kind)
    # The oracle is one: its names and shapes are those of torchtitan's own model.
    with torch.device("meta"):
        model = config.build()
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    expected = {key: tensor.shape for key, tensor in adapter.from_hf(dict(stored)).items()}
    own = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert {key: own.get(key) for key in expected} == expected
    ranks(size, check, kind, str(tmp_path))
    # Offline, and back to Hugging Face's files, bit for bit.
    reshard.convert(tmp_path / "hf", tmp_path / "titan", to="dcp", ranks=3, view=recipe(kind))
    reshard.convert(tmp_path / "titan", tmp_path / "back", to="safetensors", view=recipe(kind, reverse=True))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in stored.items())
