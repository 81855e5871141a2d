"""bitsandbytes on a CPU: `quantized_job.py OUT`. `--dtype` turns its weights into numbers.

The oracle is the model before, whose weights bitsandbytes itself turns into numbers.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import bitsandbytes as bnb
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ckpt_tools

OUT = Path(sys.argv[1])
KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "stored": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


def numbers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights of a model as numbers of bf16."""
    found = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, bnb.nn.Linear4bit):
            value = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            value = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            continue
        found[f"{name}.weight"] = value.bfloat16()
    return found


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    plain = OUT / "plain"
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(plain)
    for kind, options in KINDS.items():
        how = BitsAndBytesConfig(**options)
        model = LlamaForCausalLM.from_pretrained(plain, quantization_config=how, device_map="cpu")
        model.save_pretrained(OUT / kind)
        assert "bitsandbytes" in ckpt_tools.inspect(OUT / kind).extras["quantized"]
        out = OUT / f"{kind}-bf16"
        done = ckpt_tools.convert(OUT / kind, out, to="hf", base=OUT / kind, dtype="bf16")
        assert any(note.startswith("dequantized: 14 ") for note in done.notes), done.notes
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        read = LlamaForCausalLM.from_pretrained(out, dtype="auto")
        want, got = numbers(model), dict(read.named_parameters())
        assert want.keys() == got.keys()
        for name, value in want.items():  # in float32, products may be fused there
            assert got[name].dtype is torch.bfloat16
            torch.testing.assert_close(got[name].data, value, rtol=2**-7, atol=0.0)
            assert (got[name].data != value).float().mean() < 1e-3, (kind, name)
        with suppress(ckpt_tools.PlanError):
            ckpt_tools.average([OUT / kind, OUT / kind], OUT / "mean", to="hf", base=OUT / kind)
        assert not (OUT / "mean").exists()


if __name__ == "__main__":
    main()
