"""`packed_job.py OUT`: what each peer's own reader makes of packed codes, and what `--dtype` does.

compressed-tensors, bitsandbytes and transformers (gpt-oss) quantize and read on a CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckpt_tools

OUT = Path(sys.argv[1])
NAME = "model.layers.0.mlp.up_proj."
ROWS, COLUMNS = 96, 256
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
FLOAT4: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}
# format, arguments, whether it is exact in float32
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "group": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32}, True),
    "channel": ("pack-quantized", INT4 | {"strategy": "channel"}, True),
    "zeros": (
        "pack-quantized",
        INT4 | {"strategy": "group", "group_size": 64, "symmetric": False},
        True,
    ),
    "8 bits": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}, True),
    "3 bits": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}, True),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, True),
    "int8 with zeros": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        True,
    ),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, True),
    # it is read in the type of its scales there
    "nvfp4": ("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group"}, False),
}


def save(folder: Path, tensors: dict[str, torch.Tensor], said: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return folder


def numbers(folder: Path, dtype: str = "fp32") -> dict[str, torch.Tensor]:
    out = folder / f"{dtype}.safetensors"
    ckpt_tools.merge(folder / "model.safetensors", out, dtype=dtype)
    return load_file(out)


def of_compressed_tensors(kind: str) -> None:
    form, how, is_exact = KINDS[kind]
    args = QuantizationArgs(**how)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(ROWS, COLUMNS)
    groups = COLUMNS // args.group_size if args.group_size else 1
    blocks = weight.reshape(ROWS, groups, -1)
    state = {"weight": weight}
    most = {("float", 8): 448.0, ("float", 4): 6.0}.get((args.type, args.num_bits))
    scale = blocks.abs().amax(-1) / (most or (1 << (args.num_bits - 1)) - 1)
    if form.startswith("nvfp4"):
        factor = 6.0 * 448.0 / weight.abs().max()
        state["weight_global_scale"] = factor.reshape(1)
        scale = (scale * factor).to(torch.float8_e4m3fn).float()
    state["weight_scale"] = scale
    if not args.symmetric:
        low, high = -(1 << (args.num_bits - 1)), (1 << (args.num_bits - 1)) - 1
        state["weight_scale"] = (blocks.amax(-1) - blocks.amin(-1)) / (high - low)
        zero = (low - blocks.amin(-1) / state["weight_scale"]).round().clamp(low, high)
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    want = compressor.decompress(dict(stored), scheme)["weight"].float()
    said = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    folder = save(OUT / kind, {NAME + name: tensor for name, tensor in stored.items()}, said)
    got = numbers(folder)
    assert got.keys() == {f"{NAME}weight"}, (kind, got.keys())
    if is_exact:
        assert torch.equal(got[f"{NAME}weight"], want), (kind, got[f"{NAME}weight"] - want)
    else:
        torch.testing.assert_close(got[f"{NAME}weight"], want, rtol=2**-6, atol=0.0)
    assert (got[f"{NAME}weight"] - weight).abs().max() < weight.abs().max() / 2


def of_bitsandbytes(kind: str, block: int, nested: bool) -> None:
    weight = torch.randn(ROWS, COLUMNS + 1)
    codes, state = bnb.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type=kind
    )
    want = bnb.dequantize_4bit(codes, state)
    parts = {f"{NAME}weight": codes}
    parts |= {f"{NAME}weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    got = numbers(save(OUT / f"{kind} {block} {nested}", parts, said))[f"{NAME}weight"]
    # its own product may be fused
    torch.testing.assert_close(got, want, rtol=2**-22, atol=1e-9)


def of_int8() -> None:
    weight = torch.randn(ROWS, COLUMNS)
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    parts = {f"{NAME}weight": codes, f"{NAME}SCB": scales}
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    got = numbers(save(OUT / "int8 of bitsandbytes", parts, said))[f"{NAME}weight"]
    assert torch.equal(got, bnb.int8_vectorwise_dequant(codes, scales))


def of_gpt_oss() -> None:
    blocks = torch.randint(0, 256, (4, 64, 5, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (4, 64, 5), dtype=torch.uint8)
    front = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {f"{front}_blocks": blocks, f"{front}_scales": scales}
    folder = save(OUT / "gpt-oss", parts, {"quant_method": "mxfp4"})
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        want = convert_moe_packed_tensors(blocks, scales, dtype=kind)
        assert torch.equal(numbers(folder, dtype)[front], want)


def main() -> None:
    torch.manual_seed(0)
    for kind in KINDS:
        of_compressed_tensors(kind)
    for quant_type in ("nf4", "fp4"):
        for block, nested in ((64, False), (64, True), (256, True)):
            of_bitsandbytes(quant_type, block, nested)
    of_int8()
    of_gpt_oss()


if __name__ == "__main__":
    main()
