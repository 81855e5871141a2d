"""`--names`: what transformers has in memory, and what it saves. The oracle is `save_pretrained`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools

Run = Callable[..., Any]
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN = {**SMALL, "num_experts": 4, "head_dim": 4}
DEEPSEEK = {
    **SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3Moe": QWEN,
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 8},
    "Mixtral": {**SMALL, "num_local_experts": 4},
    "DeepseekV3": DEEPSEEK,
    "Glm4Moe": {**DEEPSEEK, "num_key_value_heads": 2},
    "Jamba": {**SMALL, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_offset": 1},
    "GraniteMoe": {**SMALL, "num_local_experts": 4},
    "GptOss": {**SMALL, "num_local_experts": 4, "head_dim": 4},
    "Llama": SMALL,
}


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    kind = getattr(transformers, f"{name}ForCausalLM", None)
    config = getattr(transformers, f"{name}Config", None)
    if kind is None or config is None:
        pytest.skip(f"no {name} in this release")
    return kind(config(**MODELS[name]))


def job_of(model: Any) -> dict[str, Any]:
    """Returns the state of a training job after a step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    numbered = optimizer.state_dict()
    return {
        "model": model.state_dict(),
        "optimizer": {
            "state": {names[n]: state for n, state in numbered["state"].items()},
            "param_groups": [
                {**g, "params": [names[n] for n in g["params"]]} for g in numbered["param_groups"]
            ],
        },
    }


def config_of(model: Any, folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def oracle(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what transformers itself saves."""
    model.save_pretrained(folder)
    return read_all(folder)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_job_becomes_the_files_that_transformers_saves(name: str, tmp_path: Path) -> None:
    """And back: the names of memory, with the moments, bit by bit."""
    model = model_of(name)
    job = job_of(model)
    dcp.save(job, checkpoint_id=tmp_path / "dcp", no_dist=True)
    base = config_of(model, tmp_path / "base")
    want = oracle(model, tmp_path / "want")
    result = ckpt_tools.convert(tmp_path / "dcp", tmp_path / "hf", to="hf", base=base)
    same(read_all(tmp_path / "hf"), want)
    differs = {*want} != {*job["model"]}
    told = [note for note in result.notes if "with the names of files" in note]
    assert bool(told) == differs or len(want) < len(job["model"])  # tied weights are no change
    # with the optimizer, to the Hub's names and back
    for step, (source, names) in enumerate((("dcp", "hub"), ("step0", "transformers"))):
        ckpt_tools.convert(
            tmp_path / source, tmp_path / f"step{step}", to="dcp", base=base, names=names, ranks=3
        )
    assert not ckpt_tools.verify(tmp_path / "step1").problems
    back = {
        "model": {n: torch.zeros_like(v) for n, v in job["model"].items()},
        "optimizer": {
            "state": {
                n: {k: torch.zeros_like(v) for k, v in state.items()}
                for n, state in job["optimizer"]["state"].items()
            }
        },
    }
    dcp.load(back, checkpoint_id=tmp_path / "step1", no_dist=True)
    same(back["model"], job["model"])
    for parameter, state in job["optimizer"]["state"].items():
        same(back["optimizer"]["state"][parameter], state)
