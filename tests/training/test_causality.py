"""A model that sees the token that it predicts is refused before it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.config import Config, ConfigError
from training.extras import causality

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def made(kind: str, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = {
        "bert": lambda: transformers.BertConfig(**SIZES, intermediate_size=64),
        "bert decoder": lambda: transformers.BertConfig(
            **SIZES, intermediate_size=64, is_decoder=True
        ),
        "roberta": lambda: transformers.RobertaConfig(**SIZES, intermediate_size=64),
        "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=64),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64
        ),
        "qwen3 experts": lambda: transformers.Qwen3MoeConfig(
            **SIZES,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
        ),
    }[kind]()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def test_a_model_that_takes_few_tokens_is_proved_with_as_many() -> None:
    transformers = pytest.importorskip("transformers")
    config = Config.model_validate({"data": {"seq_len": 8}})
    shape = {"vocab_size": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 8}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    causality.prove_causal(model, config, torch.device("cpu"))
    bert = transformers.BertConfig(
        **SIZES | {"vocab_size": 8, "max_position_embeddings": 8}, intermediate_size=64
    )
    model = transformers.BertLMHeadModel(bert)
    with pytest.raises(ConfigError, match="the model is not causal"):
        causality.prove_causal(model, config, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["bert", "bert decoder", "roberta", "llama", "gpt2", "qwen3 experts"]
)
def test_only_a_causal_model_is_accepted(kind: str, dtype: torch.dtype) -> None:
    model = made(kind, dtype).train()
    config, device = Config(), torch.device("cpu")
    if kind in ("bert", "roberta"):
        with pytest.raises(ConfigError, match="the model is not causal"):
            causality.prove_causal(model, config, device)
    else:
        causality.prove_causal(model, config, device)
    assert model.training and all(module.training for module in model.modules())
