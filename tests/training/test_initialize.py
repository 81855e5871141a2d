"""First values of models of `transformers`: as transformers itself gives them, which is the oracle
here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.initialize import FirstValues
from training.model import initializer

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    # scales residual layers
    "gpt2": {
        "n_embd": 64,
        "n_layer": 8,
        "n_head": 4,
        "vocab_size": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    # the mixer writes all its parts
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    "opt": SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64},  # tied
    # norms begin at zero; rotary buffers
    "gemma2": SMALL | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128},
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_and_buffer_begins_as_transformers_begins_it(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **MODELS[kind])
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    init = FirstValues(model, initializer(model), 0, torch.device("cpu"))
    for module in model.modules():
        init.materialize(module, torch.device("cpu"))
    ours = dict(model.named_parameters())
    assert len(ours) == len(list(expected.parameters()))
    for name, parameter in expected.named_parameters():
        mean, std = parameter.mean().item(), parameter.std().item()
        assert ours[name].mean().item() == pytest.approx(mean, abs=0.3 * std + 1e-9), name
        assert ours[name].std().item() == pytest.approx(std, rel=0.25), name
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.named_buffers())
