"""`quantize_job.py OUT`: transformers and compressed-tensors load what `--quantize` writes."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig

import ckpt_tools

OUT = Path(sys.argv[1])
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# transformers 5.24 fails to load experts of int8
JOBS = {
    "llama": (
        "Llama",
        {"tie_word_embeddings": False},
        ("fp8-block", "fp8-channel", "int8-channel", "mxfp4"),
    ),
    "tied": ("Qwen3", {"tie_word_embeddings": True}, ("fp8-block", "fp8-channel", "mxfp4")),
    "experts": ("Qwen3Moe", EXPERTS, ("fp8-block", "fp8-channel", "mxfp4")),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
        },
    ),
}
INPUT = torch.arange(1, 17).reshape(1, -1)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def saved(name: str, dtype: torch.dtype) -> tuple[Any, Path, Path]:
    torch.manual_seed(1)
    kind, more, _ = JOBS[name]
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)
    folder = OUT / f"{name} {dtype}"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "src", no_dist=True)
    model.save_pretrained(folder / "base")
    return model, folder, folder / "base"


def loads(name: str) -> None:
    """The weights that transformers loads are the numbers of the codes."""
    model, folder, base = saved(name, torch.bfloat16)
    for method in JOBS[name][2]:
        out, plain = folder / method, folder / f"{method} plain"
        ckpt_tools.convert(folder / "src", out, to="hf", base=base, quantize=method)
        ckpt_tools.convert(out, plain, to="hf", base=out, dtype="bf16")
        want = type(model).from_pretrained(plain, dtype=torch.bfloat16).state_dict()
        got, info = type(model).from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(info.values()), (name, method, info)
        with torch.no_grad():  # compressed-tensors makes numbers when they are needed
            got(INPUT)
        state = got.state_dict()
        assert state.keys() >= want.keys(), (name, method)
        for fqn, tensor in want.items():
            assert torch.equal(state[fqn], tensor), (name, method, fqn)
        own = model.state_dict()
        changed = [n for n in own if not torch.equal(own[n], want[n])]
        assert len(changed) >= 8, (name, method, changed)


def same_codes(method: str) -> None:
    """In float32, codes and scales are those of compressed-tensors, bit by bit."""
    form, how = KINDS[method]
    args = QuantizationArgs(**how)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    model, folder, base = saved("llama", torch.float32)
    out = folder / method
    ckpt_tools.convert(folder / "src", out, to="hf", base=base, quantize=method)
    got, compressor = tensors_in(out), BaseCompressor.get_value_from_registry(form)
    for name, weight in model.state_dict().items():
        if "_proj" not in name:
            continue
        parts = weight.reshape(len(weight), -1, 32 if method == "mxfp4" else weight.shape[1])
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        want = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        front = name.removesuffix("weight")
        mine = {n.removeprefix(front): t for n, t in got.items() if n.startswith(front)}
        assert mine.keys() == want.keys(), (method, mine.keys(), want.keys())
        for part, tensor in want.items():
            assert mine[part].dtype == tensor.dtype, (method, part)
            assert torch.equal(mine[part].view(torch.uint8), tensor.view(torch.uint8)), (
                method,
                part,
            )


def of_modelopt() -> None:
    """transformers loads what was NVFP4 of ModelOpt; each weight is what ModelOpt's formula says."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    made, folder = transformers.LlamaForCausalLM(config).to(torch.bfloat16), OUT / "modelopt"
    made.save_pretrained(folder)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    tensors, want = tensors_in(folder), {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        rows, columns = tensors[name].shape
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scales = torch.rand(rows, columns // 16).mul(400).add(1).to(torch.float8_e4m3fn)
        factor = torch.rand(()).mul(1e-4).add(1e-5)
        module = name.removesuffix(".weight")
        tensors |= {name: codes, f"{module}.weight_scale": scales}
        tensors |= {f"{module}.weight_scale_2": factor, f"{module}.input_scale": torch.tensor(0.01)}
        numbers = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        want[name] = numbers * scales.float().mul(factor).repeat_interleave(16, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    text["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(text))
    out = OUT / "of modelopt"
    ckpt_tools.convert(folder, out, to="hf", base=folder, quantize="compressed-tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    loaded(INPUT)
    got = loaded.state_dict()
    for name, numbers in want.items():
        torch.testing.assert_close(got[name].float(), numbers, rtol=2**-6, atol=0.0)


def main() -> None:
    of_modelopt()
    for name in JOBS:
        loads(name)
    for method in KINDS:
        same_codes(method)


main()
