"""bitsandbytes on a CPU: `quantized_job.py OUT`. A cast of everything else leaves its weights alone.

The oracle is the model before, whose plain weights are cast by torch.
"""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ckpt_tools

OUT = Path(sys.argv[1])
KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "stored": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


def logits(folder: Path, casts: bool) -> torch.Tensor:
    """Returns what a model says; `casts` casts its plain weights here."""
    model = LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    for parameter in model.parameters() if casts else ():
        if type(parameter) is torch.nn.Parameter and parameter.dtype is torch.float32:
            parameter.data = parameter.data.bfloat16()
    return model(torch.arange(16)[None]).logits.detach()


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
        done = ckpt_tools.convert(
            OUT / kind, OUT / f"{kind}-bf16", to="hf", base=OUT / kind, dtype="bf16"
        )
        assert any("codes and scales" in note for note in done.notes)
        want, got = logits(OUT / kind, True), logits(OUT / f"{kind}-bf16", False)
        assert want.float().std() > 0.01
        assert torch.equal(want, got), (kind, (want - got).abs().max(), want.abs().max())
        with suppress(ckpt_tools.PlanError):
            ckpt_tools.average([OUT / kind, OUT / kind], OUT / "mean", to="hf", base=OUT / kind)
        assert not (OUT / "mean").exists()


if __name__ == "__main__":
    main()
