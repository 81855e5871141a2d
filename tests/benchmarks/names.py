"""A mixture of experts from transformers' names in memory to the Hub's, and back.

    python tests/benchmarks/names.py DIR [--layers 3] [--ranks 8] [--runs 3] [--no-peer]

Beside it: `cp` of the source with its fsync, and the route of transformers itself, which loads the
model and saves it. One layer of 128 experts has 1.2 GB in bf16.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import harness
import torch
import transformers

import ckpt_tools

PEER = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2])
"""


def make(folder: Path, layers: int, ranks: int, is_tiny: bool) -> tuple[Path, ...]:
    """Writes a job's step, a config, and two directories: with the Hub's names, and with memory's."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=64 if is_tiny else 2048,
        moe_intermediate_size=32 if is_tiny else 768,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4 if is_tiny else 32,
        num_key_value_heads=4,
        head_dim=16 if is_tiny else 128,
        num_experts=8 if is_tiny else 128,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM._from_config(config)
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
    config.save_pretrained(folder / "base")
    noise = torch.randn(1 << 20).to(torch.bfloat16)
    state = {
        name: noise.repeat(-(-value.numel() // noise.numel()))[: value.numel()].view(value.shape)
        for name, value in model.state_dict().items()
    }
    ckpt_tools.save(folder / "one", state)
    ckpt_tools.reshard(folder / "one", folder / "step", to_ranks=ranks)
    shutil.rmtree(folder / "one")
    ckpt_tools.convert(folder / "step", folder / "hub", to="hf", base=folder / "base")
    ckpt_tools.convert(
        folder / "step", folder / "peer", to="hf", base=folder / "base", names="transformers"
    )
    return folder / "step", folder / "base", folder / "hub", folder / "peer"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="for a check of this script")
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    step, base, hub, peer = make(args.dir, args.layers, args.ranks, args.tiny)
    out, back = args.dir / "out", args.dir / "back"
    ckpt = [sys.executable, "-m", "ckpt_tools.cli.app", "convert", "--quiet", "--base", base]
    to_memory: list[str | Path] = [*ckpt, hub, back, "--to", "dcp", "--names", "transformers"]
    to_memory += ["--ranks", str(args.ranks)]
    commands: dict[str, list[str | Path]] = {
        "to the Hub's names": [*ckpt, step, out, "--to", "hf"],
        "the same without proof": [*ckpt, step, out, "--to", "hf", "--no-prove"],
        "cat of the result": ["sh", "-c", f"cat {hub}/*.safetensors > /dev/null"],
        "back to those of memory": to_memory,
        "the same without its proof": [*to_memory, "--no-prove"],
        "cp and fsync": ["sh", "-c", f"cp -r {step} {args.dir / 'cp'} && sync {args.dir}/cp/*"],
    }
    if not args.no_peer:
        commands["transformers loads and saves"] = [
            sys.executable,
            "-c",
            PEER,
            peer,
            args.dir / "saved",
        ]

    def before() -> None:
        for name in ("out", "back", "cp", "saved"):
            shutil.rmtree(args.dir / name, ignore_errors=True)
        os.sync()

    nbytes = sum(path.stat().st_size for path in step.iterdir())
    harness.race(f"{nbytes / 1e9:.2f} GB", commands, args.runs, before=before)


if __name__ == "__main__":
    main()
