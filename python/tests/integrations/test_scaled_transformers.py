"""Block-scaled weights against transformers' own dequantisation: MXFP4 as gpt-oss has it, float8 as DeepSeek has it."""

import json

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import save_file

import reshard.torch as rt


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # Every code in either half of a byte; exponents of small and of large numbers.
    blocks = torch.arange(256, dtype=torch.uint8).repeat(6).reshape(2, 12, 4, 16)
    scales = torch.randint(90, 160, (2, 12, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    key = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{key}_blocks": blocks, f"{key}_scales": scales}, tmp_path / "model.safetensors")
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=dtype)
    state = {key: torch.empty(expected.shape, dtype=dtype)}
    rt.load(state, tmp_path)
    assert torch.equal(state[key], expected)
    part = torch.empty(1, 50, 5, dtype=dtype)
    rt.load({key: rt.ShardView(dtype, tuple(expected.shape), [((1, 40, 3), part)])}, tmp_path)
    assert torch.equal(part, expected[1:, 40:90, 3:8])


def block_scaled(kind):
    """Codes and scales in each of the forms that transformers reads."""
    torch.manual_seed(0)
    shape = (3, 256, 128) if kind == "experts" else (256, 384)
    codes = (torch.randn(shape) * 50).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    powers = torch.randint(117, 131, grid, dtype=torch.uint8)
    rows = torch.randint(117, 131, (256, 384 // 32), dtype=torch.uint8)
    match kind:
        case "float32" | "experts":
            return codes, torch.rand(grid) + 0.01
        case "powers":
            return codes, powers.view(torch.float8_e8m0fnu)
        case "mxfp8":
            return codes, rows
        case "fp4":
            return torch.randint(0, 256, (256, 192), dtype=torch.uint8).view(torch.int8), rows.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("kind", ["float32", "experts", "powers", "mxfp8", "fp4"])
def test_scaled_weights_are_what_transformers_makes_of_them(tmp_path, kind):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, scales = block_scaled(kind)
    torch.save({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.pt")
    # It asks for nothing but the two.
    expected = fp8.Fp8Dequantize(None).convert({"weight": codes, "weight_scale_inv": scales})["weight"]
    state = {"a.weight": torch.empty(expected.shape, dtype=expected.dtype)}
    rt.load(state, tmp_path / "model.pt", strict=False)
    assert torch.equal(state["a.weight"], expected)
