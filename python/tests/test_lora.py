"""LoRA adapters: a base seen with an adapter's updates added, slice by slice, and an adapter taken out of PEFT's wrapper."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
import reshard.torch as rt

ALPHA, RANK = 12, 4


def base(dtype=torch.float32):
    torch.manual_seed(3)
    shapes = {"layers.0.q.weight": (17, 9), "layers.1.q.weight": (17, 9), "embed.weight": (11, 6), "head.weight": (5, 6)}
    return {key: torch.randn(shape).to(dtype) for key, shape in shapes.items()} | {"norm.weight": torch.ones(6, dtype=dtype)}


def factors(dtype=torch.float32):
    torch.manual_seed(4)
    made = {}
    for layer in range(2):
        made[f"base_model.model.layers.{layer}.q.lora_A.weight"] = torch.randn(RANK, 9).to(dtype)
        made[f"base_model.model.layers.{layer}.q.lora_B.weight"] = torch.randn(17, RANK).to(dtype)
    made["base_model.model.embed.lora_embedding_A"] = torch.randn(RANK, 11).to(dtype)
    made["base_model.model.embed.lora_embedding_B"] = torch.randn(6, RANK).to(dtype)
    made["base_model.model.head.weight"] = torch.randn(5, 6).to(dtype)
    return made


def adapter(path, dtype=torch.float32, **settings):
    path.mkdir()
    save_file(factors(dtype), path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "modules_to_save": ["head"], **settings}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(scale=ALPHA / RANK, second=None, dtype=torch.float32):
    made, own = base(dtype), factors(dtype)
    for layer, scaling in enumerate([scale, second or scale]):
        a, b = (own[f"base_model.model.layers.{layer}.q.lora_{factor}.weight"].double() for factor in "AB")
        made[f"layers.{layer}.q.weight"] = (made[f"layers.{layer}.q.weight"].double() + scaling * (b @ a)).to(dtype)
    a, b = (own[f"base_model.model.embed.lora_embedding_{factor}"].double() for factor in "AB")
    made["embed.weight"] = (made["embed.weight"].double() + scale * (b @ a).T).to(dtype)
    made["head.weight"] = own["base_model.model.head.weight"]
    return made


def close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float64, 1e-5)])
def test_an_adapter_is_a_view_of_its_base(tmp_path, dtype, tolerance):
    save_file(base(dtype), tmp_path / "base.safetensors")
    folder = adapter(tmp_path / "adapter", dtype)
    expected = merged(dtype=dtype)
    state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    rt.load(state, tmp_path / "base.safetensors", view=folder)
    close(state, expected, tolerance)
    reshard.convert(tmp_path / "base.safetensors", tmp_path / "made.safetensors", view=folder)
    found = load_file(tmp_path / "made.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
    # Parts are what the whole has there, and the optimizer's tree, where the model is below a word, is one too.
    reshard.convert(tmp_path / "base.safetensors", tmp_path / "tree", to="dcp", add_prefix="model.")
    part = torch.empty(3, 4, dtype=dtype)
    wanted = {"model": {"layers.1.q.weight": rt.ShardView(dtype, (17, 9), [((7, 2), part)])}}
    rt.load(wanted, tmp_path / "tree", view=[folder, {"drop": ["layers.0.{x...}", "{x}.weight"]}])
    assert torch.equal(part, state["layers.1.q.weight"][7:10, 2:6])
    report = reshard.View(folder).check(tmp_path / "base.safetensors")
    (made,) = report.made.values()
    assert {key.key for key in made} == set(expected) - {"norm.weight"} and report.kept == 1


def test_scales_follow_the_adapters_settings(tmp_path):
    save_file(base(), tmp_path / "base.safetensors")
    for name, settings, scales in [
        ("stable", {"use_rslora": True}, (ALPHA / RANK**0.5, None)),
        ("pattern", {"alpha_pattern": {"layers.1.q": 2}}, (ALPHA / RANK, 2 / RANK)),
    ]:
        reshard.convert(
            tmp_path / "base.safetensors", tmp_path / f"{name}.safetensors", view=adapter(tmp_path / name, **settings)
        )
        close(load_file(tmp_path / f"{name}.safetensors"), merged(*scales), 1e-5)


def test_what_cannot_be_merged_is_named(tmp_path):
    save_file(base(), tmp_path / "base.safetensors")
    for name, settings, text in [
        ("dora", {"use_dora": True}, "use_dora"),
        ("other", {"peft_type": "IA3"}, "IA3"),
        ("unknown", {"modules_to_save": None, "peft_type": "LORA"}, None),
    ]:
        folder = adapter(tmp_path / name, **settings)
        if text is not None:
            with pytest.raises(reshard.InvalidInput, match=text):
                reshard.open(tmp_path / "base.safetensors", view=folder)
    for change, text in [
        ({"base_model.model.layers.7.q.lora_A.weight": torch.ones(4, 9)}, "only one of its factors"),
        ({"base_model.model.layers.0.q.lora_magnitude_vector": torch.ones(17)}, "not a factor A or B"),
        ({"base_model.model.layers.0.q.lora_B.weight": torch.ones(16, 4)}, "do not fit each other"),
        ({"base_model.model.tail.weight": torch.ones(3)}, "nothing of the base"),
    ]:
        save_file({**factors(), **change}, tmp_path / "unknown" / "adapter_model.safetensors")
        with pytest.raises(reshard.InvalidInput, match=text):
            reshard.open(tmp_path / "base.safetensors", view=tmp_path / "unknown")
    with pytest.raises(reshard.InvalidInput, match="nothing takes a sum apart"):
        reshard.View(tmp_path / "dora", reverse=True)
    with pytest.raises(reshard.InvalidInput, match="folder without rules"):
        reshard.View(tmp_path)


def test_a_wrapped_model_is_merged_or_its_adapter_taken_out_with_the_optimizer(tmp_path):
    wrapped = {}
    for layer in range(2):
        wrapped[f"base_model.model.layers.{layer}.q.base_layer.weight"] = base()[f"layers.{layer}.q.weight"]
        for factor in "AB":
            own = factors()[f"base_model.model.layers.{layer}.q.lora_{factor}.weight"]
            wrapped[f"base_model.model.layers.{layer}.q.lora_{factor}.default.weight"] = own
    trained = {key: tensor for key, tensor in wrapped.items() if "lora" in key}
    slots = {key: {"exp_avg": tensor * 2, "step": torch.tensor(3.0)} for key, tensor in trained.items()}
    state = {"model": wrapped, "optim": {"state": slots, "param_groups": [{"lr": 0.1, "params": list(trained)}]}}
    rt.save(state, tmp_path / "saved")
    split = reshard.View("lora-split")
    reshard.convert(tmp_path / "saved", tmp_path / "adapter.safetensors", part="model", view=split)
    expected = {key: tensor for key, tensor in factors().items() if ".q." in key}
    found = load_file(tmp_path / "adapter.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    with reshard.open(tmp_path / "saved", view=split) as checkpoint:
        key = "base_model.model.layers.1.q.lora_B.weight"
        assert torch.equal(torch.from_numpy(checkpoint[f"optim.state.{key}.exp_avg"].numpy()), expected[key] * 2)
    merge = [reshard.View({"drop": "{x...}.unused", "optional": True}), reshard.View("lora-merge", alpha=ALPHA, rank=RANK)]
    reshard.convert(tmp_path / "saved", tmp_path / "merged.safetensors", view=merge, prefix="model.base_model.model.")
    close(
        load_file(tmp_path / "merged.safetensors"),
        {key: tensor for key, tensor in merged().items() if ".q." in key},
        1e-5,
    )


def compressed(path, **tree):
    """A checkpoint whose records are compressed."""
    rt.save(tree, path.with_name(f"{path.name}-plain"))
    reshard.convert(path.with_name(f"{path.name}-plain"), path, to="dcp", compression="zstd")
    return path


def test_compressed_records_of_base_and_adapter_are_never_mixed_up(tmp_path):
    folder = compressed(tmp_path / "adapter", **factors())
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "modules_to_save": ["head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    plain = adapter(tmp_path / "plain-adapter")
    save_file(base(), tmp_path / "base.safetensors")
    expected = merged()
    packed = compressed(tmp_path / "base", **base())
    for stored in (packed, tmp_path / "base.safetensors"):
        for view in (folder, plain):
            state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
            rt.load(state, stored, view=view, verify="always")
            close(state, expected, 1e-5)
            assert reshard.verify(stored, view=view).sound
    # A second adapter's records are a third's neighbours.
    twice = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    rt.load(twice, packed, view=[folder, folder])
    first, second = base()["layers.0.q.weight"], expected["layers.0.q.weight"]
    torch.testing.assert_close(twice["layers.0.q.weight"], second + (second - first), rtol=1e-4, atol=1e-4)
    # Damage in the adapter is found by verification, and named with its path.
    data = next(folder.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 0x55
    data.write_bytes(content)
    report = reshard.verify(packed, view=folder)
    assert not report.sound and any(str(folder) in (finding.file or "") for finding in report.findings), report.findings


def test_damage_in_an_adapter_is_found(tmp_path):
    rt.save(factors(), tmp_path / "adapter")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "modules_to_save": ["head"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(base(), tmp_path / "base.safetensors")
    load = lambda: rt.load(
        {key: torch.empty_like(tensor) for key, tensor in base().items()},
        tmp_path / "base.safetensors",
        view=tmp_path / "adapter",
    )
    load()
    assert reshard.verify(tmp_path / "base.safetensors", view=tmp_path / "adapter").sound
    data = next((tmp_path / "adapter").glob("*.distcp"))
    needle = factors()["base_model.model.head.weight"].numpy().tobytes()
    content = bytearray(data.read_bytes())
    content[content.index(needle) + 5] ^= 1
    data.write_bytes(content)
    assert not reshard.verify(tmp_path / "base.safetensors", view=tmp_path / "adapter").sound
    # What is read whole is compared with its checksum, also where it lies beside the base.
    with pytest.raises(reshard.Corrupt):
        load()
