"""PEFT: `peft_kinds_job.py OUT`: for each way to begin an adapter, and for models that mix Linear
and Conv1D, base, adapter and PEFT's own merge.

OUT/CASE/base.pt, OUT/CASE/adapter, OUT/CASE/merged.pt. Conv1D keeps its weight as [in, out].
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

BEGINNINGS = [True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"]


class Block(nn.Module):
    """Layers by name; a pair of numbers (in, out) after the kind."""

    def __init__(self, layers):
        super().__init__()
        for name, (kind, size_in, size_out) in layers.items():
            setattr(
                self,
                name,
                Conv1D(size_out, size_in) if kind == "conv1d" else nn.Linear(size_in, size_out),
            )

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(layers) for layers in blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {
    "linear": ({"q": ("linear", 16, 16), "up": ("linear", 16, 24), "down": ("linear", 24, 16)},),
    "conv1d": (
        {"c_attn": ("conv1d", 16, 48), "c_proj": ("conv1d", 48, 16)},
        {"c_proj": ("conv1d", 16, 16)},
    ),
    "square-conv1d": ({"a": ("conv1d", 16, 16)},),
    "mixed-by-name": (
        {"a": ("conv1d", 16, 24), "b": ("linear", 24, 16)},
        {"a": ("conv1d", 16, 16), "b": ("linear", 16, 16)},
    ),
    "mixed-unknown": ({"a": ("conv1d", 16, 16), "b": ("linear", 16, 24), "c": ("linear", 24, 16)},),
    "mixed-unknown-too": ({"b": ("linear", 16, 16), "a": ("conv1d", 16, 24)},),
}


def write(out, model, begins):
    out.mkdir()
    torch.save(model.state_dict(), out / "base.pt")
    names = sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if hasattr(module, "weight")
        }
    )
    peft = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=begins)
    )
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter)
    peft.save_pretrained(out / "adapter")
    torch.save(peft.merge_and_unload().state_dict(), out / "merged.pt")


def main():
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    for begins in BEGINNINGS:
        write(out / f"begins-{begins}", Net(*MODELS["linear"]), begins)
    for name, blocks in MODELS.items():
        write(out / name, Net(*blocks), True)


if __name__ == "__main__":
    main()
