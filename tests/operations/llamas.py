"""Small Llamas of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


def llama(tied: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def base(model: Any, folder: Path) -> Path:
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not to go along")
    return folder
