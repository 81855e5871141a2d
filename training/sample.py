"""Generates text from a merged model in one plain process: no process group, no FSDP, no optimizer.

python -m training.sample model.safetensors --config run/model.json --prompt 'def main'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from training.model import Decoder, ModelConfig


def load_model(weights: Path, config: Path) -> Decoder:
    """Returns a decoder with the weights of one safetensors file; every name must fit."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**json.loads(config.read_text())))
    model.load_state_dict(load_file(weights), strict=True, assign=True)
    return model.eval()


@torch.no_grad()
def generate(model: Decoder, prompt: bytes, num_bytes: int, temperature: float, seed: int) -> bytes:
    """Returns the prompt and `num_bytes` sampled bytes behind it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_bytes):
        logits = model(torch.tensor([tokens[-model.config.max_seq_len :]]))[0, -1]
        tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)))
    return bytes(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    text = generate(load_model(args.weights, args.config), args.prompt.encode(), args.bytes, args.temperature, args.seed)
    print(text.decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
