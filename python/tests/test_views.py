"""Views: a checkpoint seen through rules while it is loaded, opened, converted, compared and verified."""

import json
import subprocess
import sys
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
import reshard.torch as rt

EXPERTS = 4

RULES = """
rest = "error"

[parameters]
kv_heads = "how many heads keys and values have"

[[rule]]
name = "experts"
from = "layers.{layer}.experts.{expert}.w"
to = "blocks.{layer}.experts"
steps = [{ stack = "expert" }, { transpose = [1, 2] }]

[[rule]]
name = "attention"
from = ["layers.{layer}.q", "layers.{layer}.k", "layers.{layer}.v"]
to = "blocks.{layer}.qkv"
steps = [{ concat = 0, groups = "kv_heads", ratio = [2, 1, 1] }]
"""


def separate() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for layer in range(2):
        for expert in range(EXPERTS):
            tensors[f"layers.{layer}.experts.{expert}.w"] = torch.randn(6, 10)
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            tensors[f"layers.{layer}.{name}"] = torch.randn(rows, 12)
    return tensors


def seen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with whole tensors."""
    made = {}
    for layer in range(2):
        experts = [tensors[f"layers.{layer}.experts.{expert}.w"] for expert in range(EXPERTS)]
        made[f"blocks.{layer}.experts"] = torch.stack(experts).transpose(1, 2).contiguous()
        q, k, v = (tensors[f"layers.{layer}.{name}"].view(2, -1, 12) for name in "qkv")
        made[f"blocks.{layer}.qkv"] = torch.cat([q, k, v], dim=1).reshape(32, 12)
    return made


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(separate(), path)
    return path


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_a_checkpoint_is_opened_converted_compared_and_verified_through_rules_and_back(model, rules, tmp_path):
    expected = seen(separate())
    view = reshard.View(rules, kv_heads=2)
    with reshard.open(model, view=view) as checkpoint:
        same({key: torch.from_numpy(checkpoint[key][...]) for key in checkpoint}, expected)
        assert checkpoint["blocks.1.experts"][1:3, :2, 3].tolist() == expected["blocks.1.experts"][1:3, :2, 3].tolist()
    made = tmp_path / "made.safetensors"
    reshard.convert(model, made, view=view)
    same(load_file(made), expected)
    assert reshard.diff(model, made, view=view).equal
    assert reshard.digest(model, view=view) == reshard.digest(made)
    assert reshard.verify(model, view=view).sound
    back = tmp_path / "back"
    reshard.convert(made, back, to="dcp", ranks=2, view=view.reversed())
    same({key: torch.from_numpy(value[...]) for key, value in reshard.open(back).items()}, separate())
    assert reshard.verify(back, view=view).sound
    # Views compose.
    both = [view, view.reversed()]
    same({key: torch.from_numpy(value[...]) for key, value in reshard.open(model, view=both).items()}, separate())


def load_on_ranks(rank, size, path, rules, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    expected = seen(separate())
    mesh = init_device_mesh("cpu", (size,))
    for dim in (0, 1):
        state = {key: distribute_tensor(torch.zeros_like(value), mesh, [Shard(dim)]) for key, value in expected.items()}
        rt.load(state, path, view=reshard.View(rules, kv_heads=2))
        same({key: value.full_tensor() for key, value in state.items()}, expected)
    # With an optimizer: its slots follow their parameters.
    state = {"model": state, "optim": {"state": {}, "param_groups": []}}
    slots = {key: {"exp_avg": value.clone() * 2, "step": torch.tensor(7.0)} for key, value in state["model"].items()}
    state["optim"] = {"state": slots, "param_groups": [{"lr": 0.1, "params": list(slots)}]}
    rt.save(state, folder)
    back = {
        "model": {key: torch.zeros_like(value) for key, value in separate().items()},
        "optim": {
            "state": {key: {"exp_avg": torch.zeros_like(value), "step": torch.tensor(0.0)} for key, value in separate().items()},
            "param_groups": [{"lr": 0.0, "params": []}],
        },
    }
    rt.load(back, folder, view=reshard.View(rules, kv_heads=2, reverse=True))
    same(back["model"], separate())
    same({key: value["exp_avg"] for key, value in back["optim"]["state"].items()}, {k: v * 2 for k, v in separate().items()})
    assert all(slots["step"].item() == 7.0 for slots in back["optim"]["state"].values())
    (group,) = back["optim"]["param_groups"]
    assert group["lr"] == 0.1 and sorted(group["params"]) == sorted(separate())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_load_their_shards_through_rules_and_optimizers_follow(ranks, model, rules, tmp_path, size):
    ranks(size, load_on_ranks, str(model), str(rules), str(tmp_path / "saved"))


def test_rules_are_written_as_dicts_and_mistakes_are_named(model, rules, tmp_path):
    rule = {"from": "layers.{i}.q", "to": "q.{i}", "steps": [{"pad": 0, "size": 20, "value": 1.5}, {"cast": "bf16"}]}
    with reshard.open(model, view=[rule, {"drop": "layers.{rest...}"}]) as checkpoint:
        assert [*checkpoint] == ["q.0", "q.1"]
        assert (checkpoint["q.0"].shape, checkpoint["q.0"].dtype) == ((20, 12), "bfloat16")
    state = {"q.0": torch.zeros(20, 12, dtype=torch.bfloat16)}
    rt.load(state, model, view=[rule, {"drop": ["layers.{rest...}", "q.1"]}])
    expected = torch.cat([separate()["layers.0.q"], torch.full((4, 12), 1.5)]).to(torch.bfloat16)
    assert torch.equal(state["q.0"], expected)
    # What the loaded tensor holds stays where nothing is stored.
    live = {"from": "layers.0.q", "to": "q", "steps": [{"pad": 0, "size": 20, "value": "live"}]}
    state = {"q": torch.full((20, 12), 7.0)}
    rt.load(state, model, view=[live, {"drop": "layers.{rest...}"}])
    assert torch.equal(state["q"][:16], separate()["layers.0.q"]) and (state["q"][16:] == 7.0).all()
    with pytest.raises(reshard.InvalidInput, match=r"rules.toml:5:12: the parameter \"kv_heads\" has no value"):
        reshard.View(rules)
    with pytest.raises(reshard.InvalidInput, match='rule "a": transpose names two dimensions'):
        reshard.View({"from": "a", "to": "b", "steps": [{"transpose": [1]}]})
    with pytest.raises(reshard.InvalidInput, match=r"rule \"attention\" \(line 13\): .*cannot be shared"):
        reshard.open(model, view=reshard.View.parse(RULES.replace("[2, 1, 1]", "[3, 1, 1]"), kv_heads=2))
    with pytest.raises(reshard.InvalidInput, match="cannot be reversed: slice leaves elements out"):
        reshard.View({"from": "a", "to": "b", "steps": [{"slice": 0, "stop": 2}]}, reverse=True)
    report = reshard.View(rules, kv_heads=2).check(model)
    made = report.made["experts"][0]
    assert (made.key, made.shape, made.dtype, len(made.from_)) == ("blocks.0.experts", (4, 10, 6), "float32", EXPERTS)
    assert "llama3-hf-to-torchtitan" in reshard.recipes()


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "reshard", *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_slots_by_number_cannot_follow_and_are_an_error_unless_it_is_said_what_becomes_of_them(tmp_path):
    """`torch.save` of an optimizer's own state dict numbers its parameters: a transposed weight with moments as they were would train
    on without a word."""
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = str(tmp_path / "training.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    turned = {"from": "weight", "to": "weight", "steps": [{"transpose": [0, 1]}]}
    with pytest.raises(reshard.InvalidInput, match=r'2 slots .* \("optimizer.state.0.exp_avg" is the first\).*\[slots\]'):
        reshard.open(path, view=reshard.View(turned))
    # Names and dtypes do not change what belongs together.
    for fine in ({"from": "weight", "to": "w"}, {"from": "weight", "to": "weight", "steps": [{"cast": "bfloat16"}]}):
        with reshard.open(path, view=reshard.View(fine)) as checkpoint:
            assert "optimizer.state.0.exp_avg" in checkpoint
    # A view of its own does it for a recipe.
    dropping = reshard.View.parse('[slots]\nexp_avg = "drop"\nexp_avg_sq = "drop"\n')
    with reshard.open(path, view=[dropping, reshard.View(turned)]) as checkpoint:
        assert "optimizer.state.0.exp_avg" not in checkpoint and "optimizer.state.0.step" in checkpoint
    rules = tmp_path / "rules.toml"
    for word, there in (("drop", False), ("same", True)):
        rules.write_text(
            f'[slots]\nexp_avg = "{word}"\nexp_avg_sq = "{word}"\n\n[[rule]]\nfrom = "weight"\nto = "weight"\n'
            "steps = [{ transpose = [0, 1] }]\n"
        )
        with reshard.open(path, view=str(rules)) as checkpoint:
            assert ("optimizer.state.0.exp_avg" in checkpoint) == there
            assert torch.equal(torch.from_numpy(checkpoint["model.weight"].numpy()), model.weight.detach().T)


def test_the_command_sees_through_rules(model, rules, tmp_path):
    code, out, err = command("view", "check", rules, model, "--set", "kv_heads=2")
    assert code == 0, err
    assert "experts: 8 keys → 2 keys" in " ".join(out.split())
    assert "blocks.0.experts: float32 [4, 10, 6] from layers.0.experts.0.w, …, layers.0.experts.3.w" in " ".join(out.split())
    made = tmp_path / "made"
    code, out, err = command("convert", model, made, "--to", "safetensors", "--view", rules, "--set", "kv_heads=2")
    assert code == 0, err
    same(load_file(made / "model.safetensors"), seen(separate()))
    code, out, err = command("diff", made, model, "--view", rules, "--set", "kv_heads=2", "--reverse")
    assert code == 0, (out, err)
    code, out, err = command("ls", model, "layers.0.*", "--json", "--view", '{from="layers.{i}.q", to="q.{i}"}')
    assert code == 0 and "q.0" not in out and json.loads(out), err
    code, out, err = command("plan", model, "--mesh", "2", "--rule", "*=S(0)", "--view", rules, "--set", "kv_heads=2")
    assert code == 0, err
    code, out, err = command("view", "check", '{from="layers.{i}.x", to="x"}', model)
    assert code == 2 and "does not name {i}" in err


def test_every_verb_sees_through_rules(model, rules, tmp_path):
    words = ["--view", rules, "--set", "kv_heads=2"]
    keys = sorted(seen(separate()))
    code, out, err = command("ls", model, "--json", *words)
    assert code == 0 and sorted(entry["key"] for entry in json.loads(out)["entries"]) == keys, (out, err)
    code, out, err = command("inspect", model, "--json", *words)
    assert code == 0 and json.loads(out)["tensors"] == len(keys), (out, err)
    code, out, err = command("show", model, "blocks.1.experts", "--slice", "2,1:3,:2", "--json", *words)
    found = seen(separate())["blocks.1.experts"][2, 1:3, :2]
    assert code == 0 and torch.equal(torch.tensor(json.loads(out)["values"]), found), (out, err)
    code, out, err = command("stats", model, "--json", *words)
    assert code == 0 and all(key in out for key in keys), (out, err)
    code, out, err = command("digest", model, *words)
    assert code == 0 and all(key in out for key in keys), (out, err)
    code, out, err = command("verify", model, *words)
    assert code == 0, (out, err)
    code, out, err = command("relayout", model, tmp_path / "cut", "--mesh", "2", *words)
    assert code == 0, (out, err)
    code, out, err = command("diff", model, tmp_path / "cut", *words)
    assert code == 0, (out, err)
    code, out, err = command("report", model, "--histograms", "--verify", "-o", tmp_path / "page.html", *words)
    page = (tmp_path / "page.html").read_text()
    assert code == 0 and "blocks.0.qkv" in page and "layers.0.q" not in page, (out, err)
    code, out, err = command("report", model, tmp_path / "cut", "-o", tmp_path / "two.html", *words)
    assert code == 0, (out, err)
    # Several views, and a parameter that only one of them has.
    both = ["--view", '{from="layers.{i}.experts.{x...}", to="layers.{i}.experts.{x}"}', *words]
    code, out, err = command("ls", model, "--json", *both)
    assert code == 0 and sorted(entry["key"] for entry in json.loads(out)["entries"]) == keys, (out, err)
    code, out, err = command("ls", model, *both, "--set", "unknown=3")
    assert code == 2 and 'no view has a parameter "unknown"' in " ".join(err.split()), err
    assert reshard.stats(model, "blocks.0.qkv", view=reshard.View(rules, kv_heads=2)).elements == 32 * 12
    assert sorted(reshard.stats(model, view=reshard.View(rules, kv_heads=2))) == keys


def test_the_page_is_served_through_rules(model, rules):
    line = [sys.executable, "-m", "reshard", "serve", model, "--until-stdin-ends", "--view", rules, "--set", "kv_heads=2"]
    with subprocess.Popen([str(word) for word in line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=30) as page:
            text = page.read().decode()
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/tensor?key=blocks.0.qkv", timeout=30) as answer:
            detail = json.loads(answer.read())
        server.stdin.close()
        assert "blocks.0.qkv" in text and "layers.0.q" not in text
        assert detail["key"] == "blocks.0.qkv" and detail["stats"], detail
        assert server.wait(30) == 0
