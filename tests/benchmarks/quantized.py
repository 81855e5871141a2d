"""Quantized weights to bfloat16 and back: ckpt, a copy of the result, and peers, in turn.

    python tests/benchmarks/quantized.py DIR [--rows 8192] [--layers 16] [--runs 5] [--jobs 2]

Peers: torch's own reader of fp8 blocks, and transformers' functions for MXFP4 of gpt-oss and for
writing fp8 blocks, each with safetensors' writer. All hold the whole model.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import race
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.engine.quantize import METHODS

_COPY = """
import os, shutil, sys
shutil.copyfile(sys.argv[1], sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
_SAVE = """
from safetensors.torch import save_file
save_file(tensors, sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""
_TORCH = (
    """
import os, sys
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
torch.set_num_threads(int(sys.argv[3]))
with safe_open(f"{sys.argv[1]}/model.safetensors", "pt") as file:
    names = [n for n in file.keys() if n.endswith("weight")]
    tensors = {n: torch.empty(file.get_slice(n).get_shape(), dtype=torch.bfloat16) for n in names}
reader = QuantizedHuggingFaceStorageReader(
    path=sys.argv[1], target_dtype=torch.bfloat16, block_size=128, thread_count=1
)
dcp.load(tensors, storage_reader=reader, no_dist=True)
"""
    + _SAVE
)
_TRANSFORMERS = (
    """
import os, sys
import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
torch.set_num_threads(int(sys.argv[3]))
tensors = {}
with safe_open(f"{sys.argv[1]}/model.safetensors", "pt") as file:
    for name in file.keys():
        if name.endswith("_blocks"):
            front = name.removesuffix("_blocks")
            blocks, scales = file.get_tensor(name), file.get_tensor(f"{front}_scales")
            tensors[front] = convert_moe_packed_tensors(blocks, scales).contiguous()
"""
    + _SAVE
)
_QUANTIZE = (
    """
import os, sys
import torch
from types import SimpleNamespace
from safetensors import safe_open
from transformers.integrations.finegrained_fp8 import Fp8Quantize
torch.set_num_threads(int(sys.argv[3]))
config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
operation, tensors = Fp8Quantize(SimpleNamespace(quantization_config=config)), {}
with safe_open(f"{sys.argv[1]}/model.safetensors", "pt") as file:
    for name in file.keys():
        value = file.get_tensor(name)
        tensors |= operation._quantize_one(name, value) if "_proj" in name else {name: value}
"""
    + _SAVE
)
_CODES = "codes"  # written, and not read
Tensors = dict[str, torch.Tensor]


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def fp8(n: int) -> tuple[Tensors, dict[str, Any]]:
    codes = some_bytes(n, n)
    codes[(codes & 127) == 127] = 0  # no NaN
    scales = torch.rand(-(-n // 128), -(-n // 128))
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}, said


def packed(n: int) -> tuple[Tensors, dict[str, Any]]:
    weights = {"num_bits": 4, "type": "int", "group_size": 128}
    said = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    parts = {
        "weight_packed": some_bytes(n, n // 2).view(torch.int32),
        "weight_scale": torch.rand(n, n // 128).bfloat16(),
        "weight_shape": torch.tensor([n, n]),
    }
    return parts, {"quant_method": "compressed-tensors", **said}


def nvfp4(n: int) -> tuple[Tensors, dict[str, Any]]:
    scales = torch.rand(n, n // 16).to(torch.float8_e4m3fn)
    parts = {"weight_packed": some_bytes(n, n // 2), "weight_scale": scales}
    parts["weight_global_scale"] = torch.ones(1)
    return parts, {"quant_method": "compressed-tensors"}


def gpt_oss(n: int) -> tuple[Tensors, dict[str, Any]]:
    experts = max(1, n // 256)
    columns = 32 * max(1, n * n // experts // (n // 2) // 32)
    blocks = some_bytes(experts, n // 2, columns // 32, 16)
    parts = {"down_proj_blocks": blocks, "down_proj_scales": blocks[..., 0] % 40 + 100}
    return parts, {"quant_method": "mxfp4"}


def gptq(n: int) -> tuple[Tensors, dict[str, Any]]:
    parts = {
        "qweight": some_bytes(n // 8, 4 * n).view(torch.int32),
        "qzeros": some_bytes(n // 128, n // 2).view(torch.int32),
        "scales": torch.rand(n // 128, n).half(),
        "g_idx": (torch.arange(n) // 128).int(),
    }
    return parts, {"quant_method": "gptq", "bits": 4, "group_size": 128}


def awq(n: int) -> tuple[Tensors, dict[str, Any]]:
    parts = {
        "qweight": some_bytes(n, n // 2).view(torch.int32),
        "qzeros": some_bytes(n // 128, n // 2).view(torch.int32),
        "scales": torch.rand(n // 128, n).half(),
    }
    return parts, {"quant_method": "awq", "bits": 4, "group_size": 128}


def nf4(n: int) -> tuple[Tensors, dict[str, Any]]:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [n, n]}
    text = bytearray(json.dumps(state).encode())
    parts = {
        "weight": some_bytes(n * n // 2, 1),
        "weight.absmax": torch.rand(n * n // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(text, dtype=torch.uint8),
    }
    return parts, {"quant_method": "bitsandbytes", "load_in_4bit": True}


KINDS: dict[str, tuple[Callable[[int], tuple[Tensors, dict[str, Any]]], str]] = {
    "fp8 blocks": (fp8, _TORCH),
    "packed int4": (packed, ""),
    "NVFP4": (nvfp4, ""),
    "MXFP4 of gpt-oss": (gpt_oss, _TRANSFORMERS),
    "GPTQ": (gptq, ""),
    "AWQ": (awq, ""),
    "nf4": (nf4, ""),
}


def write(folder: Path, kind: str, args: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for layer in range(args.layers):
        parts, said = KINDS[kind][0](args.rows)
        tensors |= {f"model.layers.{layer}.mlp.{name}": part for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def race_to_codes(args: argparse.Namespace) -> None:
    """Times `ckpt convert --quantize` of a Llama, and a copy of what it writes."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=args.rows,
        intermediate_size=args.rows * 2,
        num_hidden_layers=max(1, args.layers // 10),
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    source, result = args.dir / "bfloat16", args.dir / "codes"
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(source, max_shard_size="1TB")
    out = args.dir / "out.safetensors"
    for method in METHODS:
        ckpt_tools.convert(
            source, result, to="hf", base=source, quantize=method, overwrite=True,
            max_shard_bytes=1 << 40,
        )  # fmt: skip
        (file,) = result.glob("*.safetensors")
        convert = ["-m", "ckpt_tools", "convert", source, args.dir / "out", "--to", "hf"]
        convert += ["--base", source, "--quantize", method, "-j", args.jobs, "--overwrite"]
        race_of = {
            f"ckpt convert --quantize {method}": [sys.executable, *convert],
            "copy of the result, fsync": [sys.executable, "-c", _COPY, file, out],
        }
        if method == "fp8-block":
            race_of["peer"] = [sys.executable, "-c", _QUANTIZE, source, out, args.jobs]
        gb = model.num_parameters() * 2 / 1e9
        race(
            f"{method}: {gb:.2f} GB of bfloat16",
            race_of,
            args.runs,
            before=lambda: out.unlink(missing_ok=True),
            against="copy of the result, fsync",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--rows", type=int, default=8192, help="and columns of a weight")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kind", choices=[*KINDS, _CODES], nargs="+", default=[*KINDS, _CODES])
    args = parser.parse_args()
    out = args.dir / "out.safetensors"
    for kind in args.kind:
        if kind == _CODES:
            race_to_codes(args)
            continue
        source = args.dir / kind.replace(" ", "-")
        write(source, kind, args)
        model = args.dir / "model.safetensors"
        ckpt_tools.merge(source, model, dtype="bf16", overwrite=True)
        merge = ["-m", "ckpt_tools", "merge", source, out, "--dtype", "bf16", "-j", args.jobs]
        race_of = {
            "ckpt merge --dtype bf16": [sys.executable, *merge],
            "copy of the result, fsync": [sys.executable, "-c", _COPY, model, out],
        }
        if peer := KINDS[kind][1]:
            race_of["peer"] = [sys.executable, "-c", peer, source, out, args.jobs]
        gb = model.stat().st_size / 1e9
        race(
            f"{kind}: {gb:.2f} GB of bfloat16",
            race_of,
            args.runs,
            before=lambda: out.unlink(missing_ok=True),
            against="copy of the result, fsync",
        )
        model.unlink()
        for path in source.iterdir():
            path.unlink()


if __name__ == "__main__":
    main()
