"""Block-scaled weights: codes times scales wherever values are wanted, bit for bit what PyTorch computes, and back into codes."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
import reshard.torch as rt

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def codes_of(shape, dtype, seed):
    """Every code there is, but for those that are no numbers: of these all bit patterns are alike."""
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[torch.isfinite(every.view(dtype).float())]
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, len(numbers), shape, generator=generator)
    return numbers[picked].view(dtype)


def scales_of(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-5


def dequantised(codes, scales, block, dtype):
    """As DeepSeek and transformers do it: float8 to float32, times the scale of the block, rounded once."""
    wide = scales
    for dim, size in enumerate(block):
        wide = wide.repeat_interleave(size, dim=dim).narrow(dim, 0, codes.shape[dim])
    return (codes.float() * wide).to(dtype)


def unpacked(blocks, scales, dtype):
    """As transformers does it for gpt-oss."""
    table = torch.tensor(FP4, dtype=dtype)
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    values = torch.ldexp(pairs, scales.int().unsqueeze(-1) - 127).to(dtype)
    return values.flatten(-2).transpose(1, 2).contiguous()


def model(path, block=(4, 4), dtype=torch.float8_e4m3fn, config=True):
    """A folder as on the hub: codes, scales, a plain norm, packed experts; odd sizes, so that blocks at the edges are cut."""
    path.mkdir()
    tensors = {"norm.weight": torch.randn(5, dtype=torch.bfloat16)}
    for layer, shape in enumerate([(8, 8), (9, 7), (1, 13), (17, 4)]):
        grid = [-(-size // edge) for size, edge in zip(shape, block, strict=True)]
        tensors[f"layers.{layer}.weight"] = codes_of(shape, dtype, layer)
        tensors[f"layers.{layer}.weight_scale_inv"] = scales_of(grid, layer)
    generator = torch.Generator().manual_seed(9)
    tensors["experts.gate_blocks"] = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    tensors["experts.gate_scales"] = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8, generator=generator)
    save_file(tensors, path / "model.safetensors")
    if config:
        settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
        (path / "config.json").write_text(json.dumps(settings))
    return tensors


def weights(tensors, dtype, block=(4, 4)):
    made = {"norm.weight": tensors["norm.weight"].to(dtype)}
    for layer in range(4):
        codes, scales = tensors[f"layers.{layer}.weight"], tensors[f"layers.{layer}.weight_scale_inv"]
        made[f"layers.{layer}.weight"] = dequantised(codes, scales, block, dtype)
    made["experts.gate"] = unpacked(tensors["experts.gate_blocks"], tensors["experts.gate_scales"], dtype)
    return made


def same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        view = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}[tensor.element_size()]
        assert torch.equal(found[key].contiguous().view(view), tensor.contiguous().view(view)), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("codes", FLOAT8)
def test_a_load_and_a_cast_give_weights_by_default(tmp_path, dtype, codes):
    tensors = model(tmp_path / "model", dtype=codes)
    expected = weights(tensors, dtype)
    state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    if dtype != torch.bfloat16:
        state["norm.weight"] = torch.empty(5, dtype=torch.bfloat16)
    report = rt.load(state, tmp_path / "model")
    assert {cast.key for cast in report.casts} == set(expected) - {"norm.weight"}
    same({**state, "norm.weight": state["norm.weight"].to(dtype)}, expected)
    name = str(dtype).removeprefix("torch.")
    reshard.convert(tmp_path / "model", tmp_path / "wide.safetensors", to="safetensors", cast=name)
    same(load_file(tmp_path / "wide.safetensors"), expected)


def test_the_size_of_blocks_follows_from_shapes_where_nothing_says_it(tmp_path):
    tensors = model(tmp_path / "model", block=(16, 16), config=False)
    # One row or column of blocks, or whole blocks: nothing else can be told, and these can.
    shape = torch.randn(300, 260)
    more = {"big": codes_of(shape.shape, torch.float8_e4m3fn, 5), "big_scale_inv": scales_of((3, 3), 5)}
    save_file({**more, "row": tensors["layers.0.weight"], "row_scale": scales_of((8, 1), 1)}, tmp_path / "big.safetensors")
    state = {"big": torch.empty(300, 260), "row": torch.empty(8, 8)}
    rt.load(state, tmp_path / "big.safetensors")
    assert torch.equal(state["big"], dequantised(more["big"], more["big_scale_inv"], (128, 128), torch.float32))
    assert torch.equal(state["row"], tensors["layers.0.weight"].float() * scales_of((8, 1), 1))
    save_file({"odd": more["big"], "odd_scale_inv": scales_of((7, 7), 2)}, tmp_path / "odd.safetensors")
    with pytest.raises(reshard.Mismatch, match="weight_block_size in config.json"):
        rt.load({"odd": torch.empty(300, 260)}, tmp_path / "odd.safetensors")


def test_codes_whose_scales_are_missing_are_an_error_and_never_numbers(tmp_path):
    tensors = model(tmp_path / "model")
    del tensors["layers.1.weight_scale_inv"], tensors["experts.gate_scales"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    for key, shape in [("layers.1.weight", (9, 7)), ("experts.gate", (2, 96, 6))]:
        with pytest.raises(reshard.Mismatch, match="scales.*missing"):
            rt.load({key: torch.empty(shape)}, tmp_path / "model")
    with pytest.raises(reshard.InvalidInput, match="scales.*missing"):
        reshard.convert(tmp_path / "model", tmp_path / "out", to="safetensors", cast="bfloat16")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    with pytest.raises(reshard.InvalidInput, match="scales.*missing"):
        reshard.open(tmp_path / "model", view="dequantise")


RULES = """
dequantise = "bfloat16"

[[rule]]
from = "layers.{layer}.weight"
to = "blocks.{layer}.turned"
steps = [{ transpose = [0, 1] }, { unflatten = 1, sizes = [1, -1] }]

[[rule]]
from = "experts.gate"
to = ["experts.{expert}.left", "experts.{expert}.right"]
steps = [{ split = 1 }, { unstack = "expert" }, { transpose = [0, 1] }]
"""


def seen(tensors):
    made = weights(tensors, torch.bfloat16)
    new = {"norm.weight": made["norm.weight"]}
    for layer in range(4):
        new[f"blocks.{layer}.turned"] = made[f"layers.{layer}.weight"].T.unsqueeze(1).contiguous()
    for expert, (side, half) in itertools.product(range(2), enumerate(["left", "right"])):
        new[f"experts.{expert}.{half}"] = made["experts.gate"][expert].chunk(2)[side].T.contiguous()
    return new


def command(*words):
    package = os.path.dirname(os.path.dirname(reshard.__file__))
    line, environment = [sys.executable, "-m", "reshard", *map(str, words)], {**os.environ, "PYTHONPATH": package}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_rules_lie_on_top_and_every_verb_reads_weights(tmp_path):
    tensors = model(tmp_path / "model")
    (tmp_path / "rules.toml").write_text(RULES)
    view, path = reshard.View(tmp_path / "rules.toml"), tmp_path / "model"
    expected = seen(tensors)
    same(opened(path, view), expected)
    for target, folder in [("safetensors", "a.safetensors"), ("dcp", "b"), ("torch", "c.pt")]:
        reshard.convert(path, tmp_path / folder, to=target, view=view)
        assert reshard.diff(path, tmp_path / folder, view=view).equal
    same(load_file(tmp_path / "a.safetensors"), expected)
    digest = reshard.digest(path, view=view)
    assert all(reshard.digest(tmp_path / name) == digest for name in ("a.safetensors", "b", "c.pt"))
    assert reshard.verify(path, view=view).sound
    with reshard.open(path, view=view) as checkpoint:
        for key, tensor in expected.items():
            part = tuple(slice(size // 3, size // 3 * 2 + 1) for size in tensor.shape)
            found = torch.from_numpy(checkpoint[key][part].view("int16").copy())
            assert torch.equal(found, tensor[part].contiguous().view(torch.int16)), key
    words = ["--view", tmp_path / "rules.toml"]
    for verb in ("ls", "inspect", "stats", "digest", "verify"):
        command(verb, path, *words)
    assert "blocks.1.turned" in command("show", path, "blocks.1.turned", *words)


def opened(path, view):
    with reshard.open(path, view=view) as checkpoint:
        return {key: torch.from_numpy(checkpoint[key].numpy().view("int16").copy()).view(torch.bfloat16) for key in checkpoint}


def sharded(rank, size, path, saved):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    expected = seen(torch.load(saved))
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(0))]
    for placement in placements:
        state, wanted = {}, {}
        for key, tensor in expected.items():
            own = [p if isinstance(p, Replicate) or p.dim < tensor.dim() else Replicate() for p in placement]
            wanted[key] = distribute_tensor(tensor, mesh, own)
            state[key] = distribute_tensor(torch.zeros_like(tensor), mesh, own)
        rt.load(state, path, view=reshard.View.parse(RULES))
        same({key: t.to_local() for key, t in state.items()}, {key: t.to_local() for key, t in wanted.items()})


def test_every_rank_gets_its_shard_of_the_weights(ranks, tmp_path):
    tensors = model(tmp_path / "model")
    torch.save(tensors, tmp_path / "tensors.pt")
    ranks(4, sharded, str(tmp_path / "model"), str(tmp_path / "tensors.pt"))


def test_a_slice_reads_only_the_scales_that_it_needs(tmp_path):
    codes, scales = codes_of((512, 512), torch.float8_e4m3fn, 1), scales_of((4, 4), 1)
    save_file({"w": codes, "w_scale_inv": scales}, tmp_path / "m.safetensors")
    part = torch.empty(3, 512)
    state = {"w": rt.ShardView(torch.float32, (512, 512), [((130, 0), part)])}
    report = rt.load(state, tmp_path / "m.safetensors")
    assert torch.equal(part, dequantised(codes, scales, (128, 128), torch.float32)[130:133])
    assert report.bytes_read == 3 * 512 + 4 * 4


@pytest.mark.parametrize("dtype", FLOAT8)
def test_weights_become_codes_and_scales_and_back(tmp_path, dtype):
    torch.manual_seed(1)
    name = str(dtype).removeprefix("torch.")
    shapes = {"a_proj.weight": (9, 7), "b_proj.weight": (130, 300), "c_proj.weight": (128, 128), "z_proj.weight": (3, 4)}
    plain = {key: torch.randn(shape).to(torch.bfloat16) for key, shape in shapes.items()}
    plain["z_proj.weight"].zero_()
    plain["norm.weight"] = torch.randn(3).bfloat16()
    save_file(plain, tmp_path / "m.safetensors")
    step = {"quantise": name, "block": [16, 16], "from": "bfloat16"}
    rule = {"from": "{x}_proj.weight", "to": ["{x}_proj.weight", "{x}_proj.weight_scale_inv"], "steps": [step]}
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "q.safetensors", to="safetensors", view=rule)
    found = load_file(tmp_path / "q.safetensors")
    most = torch.finfo(dtype).max
    for key in shapes:
        weight = plain[key].float()
        grid = [-(-size // 16) for size in weight.shape]
        padded = torch.zeros(grid[0] * 16, grid[1] * 16)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        largest = padded.view(grid[0], 16, grid[1], 16).abs().amax(dim=(1, 3))
        scales = torch.where(largest > 0, largest / most, torch.ones(()))
        wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).clamp(-most, most).to(dtype)
        assert torch.equal(found[f"{key}_scale_inv"], scales), key
        assert torch.equal(found[key].view(torch.uint8), codes.view(torch.uint8)), key
    back = reshard.View(rule, reverse=True)
    reshard.convert(tmp_path / "q.safetensors", tmp_path / "p.safetensors", to="safetensors", view=back)
    again = load_file(tmp_path / "p.safetensors")
    for key in shapes:
        expected = dequantised(found[key], found[f"{key}_scale_inv"], (16, 16), torch.bfloat16)
        assert torch.equal(again[key].view(torch.int16), expected.view(torch.int16)), key
    assert torch.equal(again["norm.weight"], plain["norm.weight"])


def test_codes_that_stay_codes_keep_their_scales(tmp_path):
    tensors = model(tmp_path / "model")
    reshard.convert(tmp_path / "model", tmp_path / "a.safetensors", to="safetensors", cast="*norm*=float32")
    same(load_file(tmp_path / "a.safetensors"), {**tensors, "norm.weight": tensors["norm.weight"].float()})
    reshard.relayout(tmp_path / "model", tmp_path / "b", mesh="dp=2", cast="bfloat16")
    expected = weights(tensors, torch.bfloat16)
    state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    rt.load(state, tmp_path / "b")
    same(state, expected)
    with pytest.raises(reshard.InvalidInput, match="mean is not a weight"):
        reshard.merge([tmp_path / "model", tmp_path / "model"], tmp_path / "c", to="dcp")


def exponents(shape, seed):
    """Powers of two as bytes: the exponents of numbers from 1/1024 to 8."""
    return torch.randint(117, 131, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_that_are_powers_of_two(tmp_path, dtype):
    """In blocks, as newer models of DeepSeek have them (`float8_e8m0fnu`), and in stretches of 32 (MXFP8), there as plain bytes, too."""
    codes = codes_of((40, 96), torch.float8_e4m3fn, 1)
    powers, stretches = exponents((3, 6), 2), exponents((40, 3), 3)
    tensors = {
        "blocks.weight": codes,
        "blocks.weight_scale_inv": powers.view(torch.float8_e8m0fnu),
        "mx.weight": codes.clone(),
        "mx.weight_scale": stretches.view(torch.float8_e8m0fnu),
        "bytes.weight": codes.clone(),
        "bytes.weight_scale": stretches.clone(),
    }
    torch.save(tensors, tmp_path / "m.pt")
    wide = lambda scales: torch.ldexp(torch.tensor([1.0]), scales.int() - 127)
    mx = dequantised(codes, wide(stretches), (1, 32), dtype)
    expected = {"blocks.weight": dequantised(codes, wide(powers), (16, 16), dtype), "mx.weight": mx, "bytes.weight": mx}
    state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    rt.load(state, tmp_path / "m.pt")
    same(state, expected)
    for key, tensor in expected.items():
        part = torch.zeros(7, 40, dtype=dtype)
        rt.load({key: rt.ShardView(dtype, (40, 96), [((30, 50), part)])}, tmp_path / "m.pt", strict=False)
        assert torch.equal(part, tensor[30:37, 50:90]), key
    # Bytes in any other form are not known to be exponents.
    torch.save({"w": codes, "w_scale": powers.view(torch.uint8).clone()}, tmp_path / "n.pt")
    with pytest.raises(reshard.Mismatch, match="scales of type uint8, of which it is not known"):
        rt.load({"w": torch.empty(40, 96)}, tmp_path / "n.pt")


@pytest.mark.parametrize("config", [True, False])
def test_experts_in_one_tensor_have_scales_of_their_own(tmp_path, config):
    """`[expert, rows, columns]`, with blocks of rows and columns of each expert; edges are cut."""
    block = (16, 16)
    folder = tmp_path / "m"
    folder.mkdir()
    codes, scales = codes_of((3, 40, 50), torch.float8_e4m3fn, 1), scales_of((3, 3, 4), 2)
    rows, for_rows = codes_of((3, 40, 50), torch.float8_e4m3fn, 3), scales_of((3, 40, 1), 4)
    tensors = {"up": codes, "up_scale_inv": scales, "down": rows, "down_scale": for_rows}
    save_file(tensors, folder / "model.safetensors")
    if config:
        settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
        (folder / "config.json").write_text(json.dumps(settings))
    expected = {
        "up": dequantised(codes, scales, (1, *block), torch.bfloat16),
        "down": (rows.float() * for_rows).to(torch.bfloat16),
    }
    state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    rt.load(state, folder)
    same(state, expected)
    # One expert of its own, turned, reads that expert's codes and scales.
    view = reshard.View.parse(
        'dequantise = "bfloat16"\n[[rule]]\nfrom = "up"\nto = "up.{expert}"\n'
        'steps = [{ unstack = "expert" }, { transpose = [0, 1] }]\n[[rule]]\ndrop = "down"\n'
    )
    own = torch.empty(50, 40, dtype=torch.bfloat16)
    report = rt.load({"up.1": own}, folder, view=view, strict=False)
    assert torch.equal(own, expected["up"][1].T)
    assert report.bytes_read == 40 * 50 + 4 * 3 * 4
    wrong = {**tensors, "up_scale_inv": scales_of((2, 3, 4), 2)}
    save_file(wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(reshard.Mismatch, match='"up_scale_inv" of shape .2, 3, 4. are not scales of "up"'):
        rt.load({"up": torch.empty(3, 40, 50)}, tmp_path / "wrong.safetensors")


@pytest.mark.parametrize("shape", [(12, 1), (12,), (1,), ()])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_of_channels_and_of_whole_weights(tmp_path, dtype, shape):
    """As compressed-tensors writes them: `weight` and `weight_scale`, floats and integers of eight bits."""
    if dtype == torch.int8:
        codes = torch.arange(-96, 96, dtype=torch.int8).reshape(12, 16)
    else:
        codes = codes_of((12, 16), dtype, 1)
    scales = (scales_of(shape or (1,), 2).reshape(shape)).to(torch.bfloat16)
    tensors = {
        "a.weight": codes,
        "a.weight_scale": scales,
        "a.input_scale": torch.ones(1),
        "count": torch.ones(3, dtype=torch.int8),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    wide = scales.float().reshape(12, 1) if scales.numel() == 12 else scales.float().reshape(())
    expected = {"a.weight": (codes.float() * wide).to(torch.bfloat16)}
    state = {"a.weight": torch.empty(12, 16, dtype=torch.bfloat16)}
    rt.load(state, tmp_path / "m.safetensors", strict=False)
    same(state, expected)
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "wide.safetensors", cast="bfloat16")
    found = load_file(tmp_path / "wide.safetensors")
    same({"a.weight": found.pop("a.weight")}, expected)
    assert "a.weight_scale" not in found and found["count"].dtype == torch.int8
    # As they are where they are wanted as they are.
    kept = {"a.weight": torch.empty_like(codes), "a.weight_scale": torch.empty_like(scales)}
    rt.load(kept, tmp_path / "m.safetensors", strict=False)
    assert torch.equal(kept["a.weight"].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(
        kept["a.weight_scale"], scales
    )


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"a.weight_scale": torch.ones(12, 1), "a.weight_zero_point": torch.ones(12, 1, dtype=torch.int8)}, "zero points"),
        ({"a.SCB": torch.ones(12)}, "bitsandbytes"),
        ({"a.weight_scale": torch.ones(5, 1)}, "are not scales of"),
        ({"a.weight_scale": torch.ones(12, 1, dtype=torch.int32)}, "scales of type int32"),
    ],
)
def test_codes_that_cannot_be_weights_are_never_numbers(tmp_path, beside, said):
    save_file({"a.weight": torch.arange(-96, 96, dtype=torch.int8).reshape(12, 16), **beside}, tmp_path / "m.safetensors")
    for cast in ("never", "widening", "any"):
        with pytest.raises(reshard.Mismatch, match=said):
            rt.load({"a.weight": torch.empty(12, 16, dtype=torch.bfloat16)}, tmp_path / "m.safetensors", cast=cast)
    for asked in ("bfloat16", "a.weight=float32"):
        with pytest.raises(reshard.InvalidInput, match=said):
            reshard.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", cast=asked)
    assert not (tmp_path / "out.safetensors").exists()


def test_four_bit_codes_in_plain_rows(tmp_path):
    """Two codes a byte and an exponent for each 32 of a row, as integers of eight bits, whose shape is not that of the weight."""
    generator = torch.Generator().manual_seed(0)
    bytes_ = torch.randint(0, 256, (3, 10, 48), dtype=torch.uint8, generator=generator)
    powers = exponents((3, 10, 3), 1)
    tensors = {"up.weight": bytes_.view(torch.int8), "up.weight_scale_inv": powers.view(torch.float8_e8m0fnu)}
    torch.save(tensors, tmp_path / "m.pt")
    table = torch.tensor(FP4)
    values = torch.stack([table[(bytes_ & 15).long()], table[(bytes_ >> 4).long()]], dim=-1).flatten(-2)
    wide = torch.ldexp(torch.tensor([1.0]), powers.int() - 127).repeat_interleave(32, dim=-1)
    expected = (values * wide).to(torch.bfloat16)
    state = {"up.weight": torch.empty(3, 10, 96, dtype=torch.bfloat16)}
    rt.load(state, tmp_path / "m.pt", strict=False)
    same(state, {"up.weight": expected})
    part = torch.empty(1, 4, 41, dtype=torch.bfloat16)
    report = rt.load(
        {"up.weight": rt.ShardView(torch.bfloat16, (3, 10, 96), [((2, 5, 40), part)])}, tmp_path / "m.pt", strict=False
    )
    assert torch.equal(part, expected[2:, 5:9, 40:81])
    assert report.bytes_read == 4 * (2 * 16 + 2)
    torch.save({**tensors, "up.weight_scale_inv": exponents((3, 10, 4), 1).view(torch.float8_e8m0fnu)}, tmp_path / "n.pt")
    with pytest.raises(reshard.Mismatch, match="four-bit codes"):
        rt.load({"up.weight": torch.empty(3, 10, 96)}, tmp_path / "n.pt")


def test_scales_beside_a_weight_as_deepseek_names_them(tmp_path):
    codes, scales = codes_of((40, 50), torch.float8_e4m3fn, 1), scales_of((1, 1), 2)
    save_file({"wq.weight": codes, "wq.scale": scales}, tmp_path / "m.safetensors")
    state = {"wq.weight": torch.empty(40, 50)}
    rt.load(state, tmp_path / "m.safetensors", strict=False)
    assert torch.equal(state["wq.weight"], codes.float() * scales)
