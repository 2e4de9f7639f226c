"""Recipes that need no other library to be compared with, and what docs/views.md shows of rules and recipes."""

import re
from pathlib import Path

import pytest
import torch

import reshard
import reshard.torch as rt

PAGE = (Path(__file__).parents[2] / "docs/views.md").read_text()


def training(tensors):
    """A model and what Adam has for it: moments that tell from which weight they are."""
    moments = lambda tensor: {"exp_avg": tensor * 0.5, "exp_avg_sq": tensor * 0.25, "step": torch.tensor(3.0)}
    slots = {key: moments(tensor) for key, tensor in tensors.items()}
    return {"model": tensors, "optim": {"state": slots, "param_groups": [{"lr": 0.1, "params": list(tensors)}]}}


def emptied(tensors):
    zeros = training({key: torch.zeros_like(tensor) for key, tensor in tensors.items()})
    for slots in zeros["optim"]["state"].values():
        slots["step"].zero_()
    zeros["optim"]["param_groups"] = [{"lr": 0.0, "params": []}]
    return zeros


def check(path, view, expected):
    """Strict: every key is there in its shape, and nothing else."""
    found = emptied(expected)
    rt.load(found, path, view=view)
    wanted = training(expected)
    for key, tensor in expected.items():
        assert torch.equal(found["model"][key], tensor), key
        for slot, value in wanted["optim"]["state"][key].items():
            assert torch.equal(found["optim"]["state"][key][slot], value), (key, slot)
    assert found["optim"]["param_groups"][0]["params"] == list(expected) and found["optim"]["param_groups"][0]["lr"] == 0.1


def resize_on_ranks(rank, size, path, names):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    for dim in (0, 1):
        grown = {key: distribute_tensor(torch.full_like(tensor, 7.0), mesh, [Shard(dim)]) for key, tensor in names.items()}
        state = {"model": grown, "optim": {"state": {key: {"exp_avg": tensor.clone()} for key, tensor in grown.items()}}}
        rt.load(state, path, view=reshard.View("vocabulary-resize", **{"from": 11, "to": 16}), strict=False)
        for key, tensor in names.items():
            assert torch.equal(state["model"][key].full_tensor(), tensor), key
            assert torch.equal(state["optim"]["state"][key]["exp_avg"].full_tensor(), tensor * 0.5), key


@pytest.mark.parametrize("above", ["", "model.", "model.language_model."])
@pytest.mark.parametrize("head", [True, False])
def test_a_vocabulary_is_resized_with_the_moments_alike(ranks, tmp_path, above, head):
    torch.manual_seed(0)
    weights = {f"{above}embed_tokens.weight": torch.randn(11, 6), f"{above}norm.weight": torch.randn(6)}
    if head:
        weights["lm_head.weight"] = torch.randn(11, 6)
    rt.save(training(weights), tmp_path / "small")
    longer = lambda tensor: torch.cat([tensor, torch.zeros(5, 6)]) if tensor.ndim == 2 else tensor
    grown = {key: longer(tensor) for key, tensor in weights.items()}
    view = reshard.View("vocabulary-resize", **{"from": 11, "to": 16})
    check(tmp_path / "small", view, grown)
    reshard.convert(tmp_path / "small", tmp_path / "large", to="dcp", ranks=2, view=view)
    check(tmp_path / "large", None, grown)
    check(tmp_path / "large", view.reversed(), weights)
    # A size that is not the one that was said, and one that would cut rows off.
    for sizes, said in (((12, 16), "said to have 12 indices, and has 11"), ((11, 8), "11")):
        with pytest.raises(reshard.InvalidInput, match=said):
            reshard.open(tmp_path / "small", view=reshard.View("vocabulary-resize", **dict(zip(("from", "to"), sizes))))
    if above == "model." and head:
        ranks(3, resize_on_ranks, str(tmp_path / "small"), {key: t for key, t in grown.items() if t.ndim == 2})


def test_pipeline_stages_become_one_model_and_again_stages(tmp_path):
    torch.manual_seed(0)
    stages, model = {}, {}
    for stage in range(3):
        for layer in range(4):
            for name, shape in (("attention.q.weight", (6, 4)), ("norm.bias", (1,)), ("scale", ())):
                tensor = torch.randn(shape)
                stages[f"stage{stage}.layers.{layer}.{name}"] = tensor
                model[f"layers.{stage * 4 + layer}.{name}"] = tensor
    # What is no layer is as it was.
    stages["stage0.embed.weight"] = model["stage0.embed.weight"] = torch.randn(5, 4)
    rt.save(training(stages), tmp_path / "stages")
    view = reshard.View("pipeline-stages-merge", per_stage=4)
    check(tmp_path / "stages", view, model)
    reshard.convert(tmp_path / "stages", tmp_path / "model", to="dcp", ranks=2, view=view)
    check(tmp_path / "model", None, model)
    check(tmp_path / "model", view.reversed(), stages)
    # Into other stages: twelve layers on two.
    others = {
        re.sub(r"^layers\.(\d+)", lambda m: f"stage{int(m[1]) // 6}.layers.{int(m[1]) % 6}", key): t for key, t in model.items()
    }
    check(tmp_path / "stages", [view, reshard.View("pipeline-stages-merge", per_stage=6, reverse=True)], others)
    # Stages that have more layers than is said would come on top of each other.
    with pytest.raises(reshard.InvalidInput, match=r"\{layer\} of .* is 3, not below 3"):
        reshard.open(tmp_path / "stages", view=reshard.View("pipeline-stages-merge", per_stage=3))


@pytest.mark.parametrize("to", ["megatron-group-experts", "megatron-grouped-gemm", "megatron-stack-experts"])
def test_experts_of_megatron_are_put_together_in_each_of_its_ways(tmp_path, to):
    torch.manual_seed(0)
    experts, hidden, inner = 3, 4, 5
    for above in ("decoder.layers.1", "mtp.layers.0.transformer_layer"):
        before, expected = {}, {}
        first = [torch.randn(2 * inner, hidden) for _ in range(experts)]
        second = [torch.randn(hidden, inner) for _ in range(experts)]
        for number in range(experts):
            before[f"{above}.mlp.experts.local_experts.{number}.linear_fc1.weight"] = first[number]
            before[f"{above}.mlp.experts.local_experts.{number}.linear_fc2.weight"] = second[number]
        for layer, tensors in (("linear_fc1", first), ("linear_fc2", second)):
            match to:
                case "megatron-group-experts":
                    for number, tensor in enumerate(tensors):
                        expected[f"{above}.mlp.experts.{layer}.weight{number}"] = tensor
                case "megatron-grouped-gemm":
                    # As its forward looks at them: [expert, in, out].
                    turned = torch.stack(tensors).transpose(1, 2).contiguous()
                    shape = (hidden, -1) if layer == "linear_fc1" else (-1, hidden)
                    expected[f"{above}.mlp.experts.weight{layer[-1]}"] = turned.view(shape)
                case _:
                    expected[f"{above}.mlp.experts.experts.{layer}.weight"] = torch.stack(tensors)
        path = tmp_path / above
        rt.save(training(before), path)
        sizes = {"experts": experts, "hidden": hidden} if to == "megatron-grouped-gemm" else {}
        view = reshard.View(to, **sizes)
        found = emptied(expected)
        rt.load(found, path, view=view)
        for key, tensor in expected.items():
            assert torch.equal(found["model"][key], tensor), key
            assert torch.equal(found["optim"]["state"][key]["exp_avg"], tensor * 0.5), key
        rt.save(found, tmp_path / f"{above}-made")
        back = emptied(before)
        rt.load(back, tmp_path / f"{above}-made", view=view.reversed())
        assert all(torch.equal(back["model"][key], tensor) for key, tensor in before.items())
        assert all(torch.equal(back["optim"]["state"][key]["exp_avg"], tensor * 0.5) for key, tensor in before.items())


# ---- the page ----------------------------------------------------------------------------------------------------------------


def test_files_of_rules_on_the_page_are_read():
    blocks = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        reshard.View.parse(block, kv_heads=2)


def test_steps_in_the_table_of_the_page_are_read():
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `{")]
    steps = [step for row in rows for step in re.findall(r"`(\{.*?\})`", row)]
    assert len(steps) >= 16
    parameters = "[parameters]\nheads = 4\nalpha = 8\nrank = 2\n"
    several = {"concat": 2, "dequantise": 2, "lora": 3, "split": 2, "quantise": 2}
    seen = set()
    for step in steps:
        word = re.match(r"\{ (\w+) =", step)[1]
        seen.add(word)
        names = [f"a{number}" for number in range(several.get(word, 1))]
        joins, parts = word in ("concat", "dequantise", "lora"), word in ("split", "quantise")
        old = names if joins else [f"a{'.{expert}' * (word == 'stack')}"]
        new = names if parts else [f"b{'.{expert}' * (word == 'unstack')}"]
        quoted = lambda texts: "[" + ", ".join(f'"{text}"' for text in texts) + "]"
        reshard.View.parse(f"{parameters}[[rule]]\nfrom = {quoted(old)}\nto = {quoted(new)}\nsteps = [{step}]\n")
    # All that there are: the parser names them.
    with pytest.raises(reshard.InvalidInput) as raised:
        reshard.View({"from": "a", "to": "b", "steps": [{"nothing": 0}]})
    assert all(word in str(raised.value) for word in seen), raised.value


def test_the_page_lists_all_recipes():
    section = PAGE[PAGE.index("## Recipes") : PAGE.index("## Block-scaled weights")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(reshard.recipes())
