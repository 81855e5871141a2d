"""Generates text from an exported model in one plain process, without process group and FSDP.

    python -m training.extras.sample run/export --prompt 'def main'

The directory holds safetensors and `model.json` (the built-in decoder), or a model that
`transformers` loads. Without a tokenizer, text is bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from training.extras.local_models import open_local
from training.model import Decoder, ModelConfig, logits_of, max_seq_len

_NUM_BYTES = 256


def load_model(directory: Path) -> nn.Module:
    """Returns the model of an export, in evaluation mode; every name must fit."""
    if not (directory / "model.json").exists():
        from transformers import AutoModelForCausalLM

        model: nn.Module = open_local(AutoModelForCausalLM, directory)
        return model.eval()
    return load_decoder(directory / "model.safetensors", directory / "model.json")


def load_decoder(weights: Path, sizes: Path) -> Decoder:
    """Returns a built-in decoder with the weights of one safetensors file.

    A tied weight may be in the file once or twice.
    """
    with torch.device("meta"):
        model = Decoder(ModelConfig(**json.loads(sizes.read_text())))
    tensors = load_file(weights)
    if model.config.tied_embeddings:
        tensors["output.weight"] = tensors["tok_embeddings.weight"] = tensors.get(
            "tok_embeddings.weight", tensors.get("output.weight")
        )
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


@torch.no_grad()
def generate(
    model: nn.Module, tokens: list[int], count: int, temperature: float, seed: int
) -> list[int]:
    """Returns the prompt's ids, followed by `count` sampled ids.

    At temperature 0 they are always the most likely ids.
    """
    generator = torch.Generator().manual_seed(seed)
    window, tokens = max_seq_len(model), list(tokens)
    for _ in range(count):
        logits = logits_of(model, torch.tensor([tokens[-window:]]))[0, -1].float()
        if temperature:
            chances = torch.softmax(logits / temperature, -1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
    return tokens


def tokenizer_of(directory: Path) -> Any:
    """Returns the export's tokenizer, or None if text is bytes."""
    if not (directory / "tokenizer_config.json").exists():
        return None
    from transformers import AutoTokenizer

    return open_local(AutoTokenizer, directory)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Returns a prompt as `training.data prepare` writes one: without the end of a sequence."""
    if tokenizer is None:
        return list(prompt.encode())
    first = tokenizer.bos_token_id
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return [*([] if first is None else [first]), *ids]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="training.extras.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", type=Path, help="run.dir/export of a run with run.export = true")
    add("--prompt", default="def main(")
    add("--tokens", type=int, default=200)
    add("--temperature", type=float, default=0.7, help="0: always the likeliest token")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if problem := _problem(args):
        raise SystemExit(f"training.extras.sample: {problem}")
    tokenizer, model = tokenizer_of(args.directory), load_model(args.directory)
    prompt = prompt_ids(tokenizer, args.prompt)
    ids = generate(model, prompt, args.tokens, args.temperature, args.seed)
    if tokenizer is None and max(ids) >= _NUM_BYTES:
        raise SystemExit(
            f"training.extras.sample: the model's answer is no bytes, and {args.directory} has no"
            " tokenizer: copy the one that prepared the data there"
        )
    print(tokenizer.decode(ids) if tokenizer else bytes(ids).decode("utf-8", "replace"))


def _problem(args: argparse.Namespace) -> str:
    folder = args.directory
    if not folder.is_dir():
        return f"no such directory: {folder}"
    if (folder / "adapter_config.json").exists():
        merged = "`ckpt merge MODEL out/model.safetensors --lora"
        return f"{folder} holds adapters: merge them with {merged} {folder}`, and use transformers"
    sizes = folder / "model.json"
    if sizes.exists() and "factory" in json.loads(sizes.read_text()):
        return f"{folder} holds the module of a factory, which this command cannot call"
    if not (folder / "model.json").exists() and not (folder / "config.json").exists():
        export, remedy = folder / "export", "train with --set run.export=true, and give its export"
        remedy = f"give {export}" if export.is_dir() else remedy
        return f"no exported model in {folder}: {remedy}"
    if not args.temperature >= 0 or args.tokens < 0:
        given = f"{args.temperature} and {args.tokens}"
        return f"--temperature and --tokens must be at least 0, got {given}"
    return "" if args.prompt else "--prompt must not be empty"


if __name__ == "__main__":
    main()
