"""Views that ask for too much: refused with rule and key, before anything is read, without time or memory."""

import pytest
import torch

import reshard
import reshard.torch as rt

MOST = 2**63 - 1


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved"
    rt.save({"a": torch.ones(4, 2)}, path)
    return path


@pytest.mark.parametrize(
    "steps",
    [
        [{"pad": 0, "size": MOST}, {"pad": 1, "size": 9}],
        [{"pad": 0, "size": 10**12}, {"unstack": "u"}],
        [{"slice": 1, "start": 0, "stop": 0}, {"pad": 0, "size": MOST}, {"unstack": "u"}],
        [{"slice": 0, "start": MOST, "stop": MOST}],
        [{"unflatten": 0, "sizes": [MOST, MOST]}],
        [{"unflatten": MOST, "sizes": [1, -1]}],
        [{"transpose": [-MOST, MOST]}],
        [{"split": 0, "groups": MOST}],
        [{"reshape": [MOST, MOST, 0]}],
        [{"slice": 1, "start": 0, "stop": 0}, {"pad": 0, "size": MOST}, {"flatten": [0, 1]}, {"reshape": [9]}],
    ],
)
def test_numbers_without_bounds_are_refused(saved, steps):
    unstacked = any("unstack" in step for step in steps)
    view = reshard.View({"from": "a", "to": "b.{u}" if unstacked else "b", "steps": steps})
    with pytest.raises(reshard.InvalidInput, match='rule "a".*"a"'):
        reshard.open(saved, view=view)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule = " + "[" * 100_000 + "]" * 100_000, "the rules:1:"),
        ('description = "' + "x" * (2 << 20) + '"', "longer than rules are"),
        ("[[rule]]\ndrop = [" + '"a",' * 100_000 + "]", "more than 20000 names"),
        ('[[rule]]\nfrom = "' + "{a...}" * 20_000 + '"\nto = "b"', "size limit"),
        ('[[rule]]\nfrom = "{a:0..0}"\nto = "b"', "invalid range"),
    ],
)
def test_texts_of_rules_are_bounded(text, said):
    with pytest.raises(reshard.InvalidInput, match=said):
        reshard.View.parse(text)


def test_many_steps_in_one_line_have_their_places_quickly():
    reshard.View.parse('rule = [{ from = "a", to = "b", steps = [' + '{cast="fp32"},' * 50_000 + "] }]")


def test_nothing_is_read_before_every_rule_fits_the_metadata(tmp_path):
    slots = {f"e.{i}": {"step": torch.tensor(3.0)} for i in range(2)}
    rt.save({"model": {f"e.{i}": torch.ones(4, 2) for i in range(2)}, "optim": {"state": slots}}, tmp_path / "saved")
    stack = {"from": "e.{i}", "to": "e", "steps": [{"stack": "i"}]}
    with reshard.open(tmp_path / "saved", view=stack) as checkpoint:
        assert "optim.state.e.step" in checkpoint
    for file in (tmp_path / "saved").glob("*.distcp"):
        file.unlink()
    # Steps that become one are compared, and so read; where another rule does not fit, not even they are.
    with pytest.raises(reshard.Incomplete):
        reshard.open(tmp_path / "saved", view=stack)
    for wrong in ({"from": "missing", "to": "x"}, {"from": "e.{i}", "to": "x.{i}"}, {"drop": "nothing"}):
        with pytest.raises(reshard.InvalidInput):
            reshard.open(tmp_path / "saved", view=reshard.View([stack, wrong]))


@pytest.mark.parametrize("to", ["torchtitan", "megatron"])
def test_what_the_hub_has_behind_the_last_layer_of_deepseek_v3_is_left_out(tmp_path, to):
    def names(layer):
        attention = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "q_proj"]
        words = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{word}" for word in attention)]
        return [*words, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]

    kept = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    kept += [f"model.layers.{layer}.{word}.weight" for layer in range(3) for word in names(layer)]
    behind = ["enorm", "hnorm", "eh_proj", "shared_head.head", "shared_head.norm", "embed_tokens", *names(3)]
    tree = {key: torch.ones(4, 2) for key in [*kept, *(f"model.layers.3.{word}.weight" for word in behind)]}
    rt.save(tree, tmp_path / "hub")
    view = reshard.View(f"deepseek-v3-hf-to-{to}", layers=3)
    with reshard.open(tmp_path / "hub", view=view) as checkpoint:
        assert not any("layers.3." in key for key in checkpoint)
    with reshard.open(tmp_path / "hub", view=[view, view.reversed()]) as checkpoint:
        assert sorted(checkpoint) == sorted(kept)
