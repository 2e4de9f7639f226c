"""Views over every kind of source: other programs' folders, flat parameters of FSDP1, files of the hub, an object store; and into
tensor-parallel targets. What a view gives is compared with the same done to whole arrays, the optimizer's slots included."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_foreign import FOREIGN, given
from test_objects import BUCKET, options, server  # noqa: F401

import reshard
import reshard.torch as rt

CORPUS = Path(__file__).parents[2] / "crates/formats/tests/corpus"

#: A weight of each, and the keys of its slots.
SOURCES = {
    "deepspeed-0.19/zero1_w3_bf16": ("up.weight", "optim.state.{}.exp_avg"),
    "deepspeed-0.19/zero2_w4_tp": ("up.weight", "optim.state.{}.exp_avg"),
    "deepspeed-0.19/zero3_w3_sub": ("up.weight", "optim.state.{}.exp_avg"),
    "deepspeed-0.19/zero3_w3_sub_universal": ("up.weight", "optim.state.{}.exp_avg"),
    "megatron-optimizer/fully_reshardable": ("up.weight", "optimizer.state.exp_avg.{}"),
    "megatron-optimizer/fully_sharded_model_space": ("up.weight", "optimizer.state.exp_avg.{}"),
    "megatron-optimizer/dp_reshardable": ("up.weight", "optimizer.state.exp_avg.{}"),
    "megatron-fsdp/fsdp_dtensor": ("module.decoder.layers.0.mlp.linear_fc1.weight_w", "optimizer.state.{}.exp_avg"),
    "nanotron-0.4/zero1_dp2_tp2": ("layer.up.weight", "optim.state.{}.exp_avg"),
    "lightning-2.6/fsdp2_w2": ("net.0.weight", "optimizer_0.state.{}.exp_avg"),
    "torchtitan-0.3/fsdp2_w2": ("0.weight", "optimizer.state.{}.exp_avg"),
    "torch_checkpointing-0.1/fsdp2_w2": ("0.weight", None),
    "ranks-torch-2.13/verl_w4": ("rows", None),
    "ranks-torch-2.13/accelerate_w2": ("layer.weight", "optim.state.{}.exp_avg"),
}


def halves(tensor):
    """What the rules below make of a tensor: two parts of its rows, each turned."""
    rows = tensor.shape[0]
    low, high = tensor.split([rows // 2, rows - rows // 2])
    return {"new.low": low.T.contiguous(), "new.high": high.T.contiguous()}


def rules_for(name, rows):
    split = {"split": 0, "sizes": [rows // 2, rows - rows // 2]}
    return {"from": name, "to": ["new.low", "new.high"], "steps": [split, {"transpose": [0, 1]}]}


#: Slots that have numbers in place of parameters' names follow nobody: what becomes of them has to be said.
NUMBERED = '[slots]\nexp_avg = "same"\nexp_avg_sq = "same"\n'


def view_text(name, rows):
    sizes = f"sizes = [{rows // 2}, {rows - rows // 2}]"
    steps = f"[{{ split = 0, {sizes} }}, {{ transpose = [0, 1] }}]"
    return f'[[rule]]\nfrom = "{name}"\nto = ["new.low", "new.high"]\nsteps = {steps}\n'


def tensors(path, wanted, **opening):
    """Some tensors of a checkpoint, whole."""
    with reshard.open(path, **opening) as checkpoint:
        found = {key: checkpoint[key] for key in checkpoint if wanted(key)}
    state = {key: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for key, t in found.items() if hasattr(t, "shape")}
    rt.load(state, path, strict=False, **opening)
    return state


def check(path, name, slot, folder, **opening):
    own = tensors(path, lambda key: name in key, **opening)
    shape = next(tensor.shape for tensor in own.values() if tensor.ndim == 2)
    own = {key: tensor for key, tensor in own.items() if tensor.shape == shape}
    assert slot is None or slot.format(name) in own, sorted(own)
    view = reshard.View(rules_for(name, shape[0]))
    if slot is None:
        view = reshard.View.parse(NUMBERED + view_text(name, shape[0]))
    expected = {key.replace(name, part): half for key, tensor in own.items() for part, half in halves(tensor).items()}
    found = tensors(path, lambda key: key in expected or key in own, view=view, **opening)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    # In parts, as another layout wants them.
    parts = {key: torch.zeros_like(tensor[1:, 1:]) for key, tensor in expected.items()}
    places = {key: rt.ShardView(t.dtype, tuple(t.shape), [((1, 1), parts[key])]) for key, t in expected.items()}
    rt.load(places, path, strict=False, view=view, **opening)
    assert all(torch.equal(part, expected[key][1:, 1:]) for key, part in parts.items())
    # Written, and back.
    reshard.convert(path, folder / "made", to="dcp", ranks=2, view=view, skip_opaque=True, sync=False, **opening)
    back = tensors(folder / "made", lambda key: key in own or key in expected, view=view.reversed())
    assert back.keys() == own.keys() and all(torch.equal(back[key], tensor) for key, tensor in own.items())


@pytest.mark.parametrize("case", SOURCES)
def test_folders_of_other_programs_are_seen_through_rules_with_their_optimizers(case, tmp_path):
    name, slot = SOURCES[case]
    check(FOREIGN / case / "checkpoint", name, slot, tmp_path, **given(case))


@pytest.mark.parametrize("case", ["fsdp1_flat_w4", "fsdp1_orig_w3", "hsdp_w4", "tp_fsdp2_w4"])
def test_checkpoints_of_pytorch_in_every_layout_are_seen_through_rules(case, tmp_path):
    check(CORPUS / "torch-2.13" / case / "checkpoint", "blocks.1.up.weight", "optim.state.{}.exp_avg", tmp_path)


def test_a_model_as_the_hub_has_it_is_seen_through_rules(tmp_path):
    """Several files, and an index that says which has what."""
    torch.manual_seed(0)
    hub = tmp_path / "hub"
    hub.mkdir()
    weights = {f"layers.{i}.{part}": torch.randn(rows, 6).bfloat16() for i in range(3) for part, rows in (("q", 8), ("k", 4))}
    index = {}
    for number in range(2):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        held = {key: tensor for at, (key, tensor) in enumerate(weights.items()) if at % 2 == number}
        save_file(held, hub / name)
        index |= dict.fromkeys(held, name)
    (hub / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    view = reshard.View(
        {
            "from": ["layers.{i}.q", "layers.{i}.k"],
            "to": "qk",
            "steps": [{"concat": 0, "ratio": [2, 1], "groups": 2}, {"stack": "i"}],
        }
    )
    fused = [
        torch.cat([weights[f"layers.{i}.q"].view(2, 4, 6), weights[f"layers.{i}.k"].view(2, 2, 6)], 1).reshape(12, 6)
        for i in range(3)
    ]
    found = tensors(hub, lambda key: True, view=view)
    assert found.keys() == {"qk"} and torch.equal(found["qk"], torch.stack(fused))
    back = tensors(hub, lambda key: True, view=[view, view.reversed()])
    assert back.keys() == weights.keys() and all(torch.equal(back[key], tensor) for key, tensor in weights.items())


def test_an_object_store_is_read_through_rules_and_no_more_than_is_wanted(server, options, tmp_path, request):  # noqa: F811
    """The same checkpoint in a folder and in a bucket; a slice of a turned tensor reads its own bytes."""
    torch.manual_seed(0)
    weights = {f"e.{i}": torch.randn(256, 512) for i in range(4)}
    slots = {key: {"exp_avg": tensor * 2, "step": torch.tensor(5.0)} for key, tensor in weights.items()}
    path = f"s3://{BUCKET}/{request.node.name}"
    rt.save({"model": weights, "optim": {"state": slots}}, path, storage_options=options)
    view = reshard.View({"from": "e.{i}", "to": "e", "steps": [{"stack": "i"}, {"transpose": [1, 2]}]})
    expected = torch.stack([*weights.values()]).transpose(1, 2)
    state = {
        "model": {"e": torch.zeros(4, 512, 256)},
        "optim": {"state": {"e": {"exp_avg": torch.zeros(4, 512, 256), "step": torch.zeros(())}}},
    }
    rt.load(state, path, view=view, storage_options=options)
    assert torch.equal(state["model"]["e"], expected) and state["optim"]["state"]["e"]["step"] == 5
    assert torch.equal(state["optim"]["state"]["e"]["exp_avg"], expected * 2)
    part = torch.zeros(1, 512, 3)
    place = rt.ShardView(torch.float32, (4, 512, 256), [((2, 0, 7), part)])
    report = rt.load({"model": {"e": place}}, path, strict=False, view=view, storage_options=options)
    assert torch.equal(part, expected[2:3, :, 7:10])
    assert report.bytes_read == part.nbytes
    made = f"{path}-made"
    reshard.convert(path, made, to="dcp", view=view, storage_options=options)
    assert reshard.diff(path, made, view=view, storage_options=options).equal
    assert reshard.verify(path, view=view, storage_options=options).sound
    with reshard.open(made, view=view.reversed(), storage_options=options) as back:
        assert all(np.array_equal(back[f"model.{key}"][...], tensor.numpy()) for key, tensor in weights.items())


RULES = """
rest = "drop"

[[rule]]
from = ["blocks.0.up.weight", "blocks.1.up.weight"]
to = "up.weight"
steps = [{ concat = 0 }]

[[rule]]
from = ["blocks.0.up.bias", "blocks.1.up.bias"]
to = "up.bias"
steps = [{ concat = 0 }]

[[rule]]
from = ["blocks.0.down.weight", "blocks.1.down.weight"]
to = "down.weight"
steps = [{ concat = 1 }]
"""


def into_tensor_parallel(rank, size, path):
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    model = nn.Module()
    model.up, model.down = nn.Linear(8, 28), nn.Linear(28, 8, bias=False)
    model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    model_state, optimizer_state = rt.get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    rt.load(state, path, view=reshard.View.parse(RULES))
    rt.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    with reshard.open(path) as checkpoint:
        plain = {key: torch.as_tensor(checkpoint[key].numpy()) for key in checkpoint if "blocks" in key}
    names = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, dim in names.items():
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel()
        both = lambda before, after="": torch.cat([plain[f"{before}blocks.{i}.{name}{after}"] for i in (0, 1)], dim)
        assert torch.equal(parameter.full_tensor(), both("model.")), name
        for slot in ("exp_avg", "exp_avg_sq"):
            found = optimizer.state[parameter][slot]
            assert torch.equal(found.full_tensor(), both("optim.state.", f".{slot}")), (name, slot)
        assert optimizer.state[parameter]["step"] == plain[f"optim.state.blocks.0.{name}.step"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["fsdp1_flat_w4", "fsdp2_w3"])
def test_tensor_parallel_modules_load_fused_weights_and_moments(ranks, case, size):
    """What FSDP saved, with two blocks joined into one, into modules that are split by columns and by rows."""
    ranks(size, into_tensor_parallel, str(CORPUS / "torch-2.13" / case / "checkpoint"))
