"""`--base` of `inspect` and `check`: what a checkpoint has of the model that a config describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError

Run = Callable[..., Any]
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=8,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.fixture(scope="module")
def base(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a config alone."""
    folder = tmp_path_factory.mktemp("base")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def weights(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Returns the tensors that transformers writes."""
    folder = tmp_path_factory.mktemp("weights")
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_what_transformers_writes_and_holds_is_complete(
    model: Any, weights: dict[str, torch.Tensor], base: Path, tmp_path: Path, ckpt: Run
) -> None:
    """The files leave out one of two tied names, and a training job may have both."""
    assert "lm_head.weight" not in weights
    save_file(weights, tmp_path / "hub.safetensors")
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": model, "optimizer": optimizer})
    for path, naming in (("hub.safetensors", "hub"), ("run/step-00000001", "transformers")):
        found = ckpt_tools.inspect(tmp_path / path, base=base).presence
        assert found is not None and found.is_complete, [*found.lines()]
        assert found.naming == naming
        done = ckpt("inspect", tmp_path / path, "--base", base)
        assert done.returncode == 0, done.stderr
        number = len(found.expected)
        assert f"all {number} tensors of the model are present" in done.stdout, done.stdout
    done = ckpt("check", tmp_path / "run", "--base", base)
    assert done.returncode == 0, done.stdout + done.stderr


def test_experts_that_lack_are_counted(
    weights: dict[str, torch.Tensor], base: Path, tmp_path: Path, ckpt: Run
) -> None:
    def expert(name: str) -> int:
        return int(name.partition(".experts.")[2].partition(".")[0] or 0)

    part = {n: t for n, t in weights.items() if expert(n) < 2 or n.startswith("model.layers.1.")}
    gone = weights.keys() - part.keys()
    part["model.norm.weight"] = torch.ones(15)
    part["model.more.weight"] = torch.ones(2)
    save_file(part, tmp_path / "part.safetensors")
    done = ckpt("inspect", tmp_path / "part.safetensors", "--base", base, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["presence"]
    assert {*found["missing"]} == gone and not found["is_complete"]
    assert found["unexpected"] == ["model.more.weight"]
    assert found["other_shapes"] == {"model.norm.weight": {"shape": [15], "expected": [16]}}
    done = ckpt("inspect", tmp_path / "part.safetensors", "--base", base)
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "2 of 8 experts are present, in 2 layers" in lines, done.stdout
    assert "model.layers.*.mlp.experts.*.up_proj.weight (12 of 24)" in lines
    assert "model.norm.weight: [15], in the model [16]" in lines


def test_fused_experts_of_one_rank_are_counted(
    model: Any, base: Path, tmp_path: Path, ckpt: Run
) -> None:
    """As a job saves them whose ranks hold different experts under one name."""
    state = {n: t[:2] if ".experts." in n else t for n, t in model.state_dict().items()}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": state})
    done = ckpt("check", tmp_path / "run", "--base", base)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "step 1: another model: 2 of 8 experts are present, in 6 tensors" in lines, lines


def test_codes_and_scales_count_as_their_weight(
    weights: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    quantized = dict(weights)
    for name in weights:
        if name.endswith("_proj.weight"):
            quantized[name] = weights[name].to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(quantized, tmp_path / "fp8.safetensors")
    found = ckpt_tools.inspect(tmp_path / "fp8.safetensors", base=base).presence
    assert found is not None and found.is_complete, [*found.lines()]


def test_weights_tell_where_transformers_does_not_know_the_model(
    weights: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((base / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "small.safetensors")
    with pytest.raises(PlanError, match="cannot tell which tensors .*NoSuchModel.*no weights"):
        ckpt_tools.inspect(tmp_path / "small.safetensors", base=other)
    save_file(weights, other / "model.safetensors")
    found = ckpt_tools.inspect(tmp_path / "small.safetensors", base=other).presence
    assert found is not None and "weights" in found.told_by
    assert {*found.missing} == weights.keys() - {"model.norm.weight"}


def test_another_model_and_no_config_are_refused(base: Path, tmp_path: Path, ckpt: Run) -> None:
    save_file({"encoder.w": torch.ones(2)}, tmp_path / "w.safetensors")
    done = ckpt("inspect", tmp_path / "w.safetensors", "--base", base)
    assert done.returncode == 13 and "no tensor has a name of the model" in done.stderr
    done = ckpt("inspect", tmp_path / "w.safetensors", "--base", tmp_path / "nothing")
    assert done.returncode == 13 and "config.json" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_body_and_a_wrapper_are_compared_under_their_prefix(
    weights: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    body = {n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")}
    wrapped = {f"foo.{name}": value for name, value in weights.items()}
    for tensors, prefix, is_complete in ((body, "+model.", True), (wrapped, "-foo.", False)):
        save_file(tensors, tmp_path / "w.safetensors")
        found = ckpt_tools.inspect(tmp_path / "w.safetensors", base=base).presence
        assert found is not None and found.prefix == prefix
        assert not found.missing and found.is_complete is is_complete
        assert f"prefix '{prefix[1:]}'" in next(found.lines())
    ckpt_tools.save(tmp_path / "run/step-00000001", {"model": body})
    assert ckpt_tools.check_run(tmp_path / "run", base=base) == []


@pytest.mark.slow
def test_steps_without_a_manifest_are_compared_and_a_wrong_directory_is_refused(
    model: Any, base: Path, tmp_path: Path, ckpt: Run
) -> None:
    state = model.state_dict()
    for number in (1, 2):
        dcp.save({"model": state}, checkpoint_id=tmp_path / f"run/step-{number:08d}", no_dist=True)
        state.pop("model.norm.weight", None)
    done = ckpt("check", tmp_path / "run", "--base", tmp_path / "nothing")
    assert done.returncode == 13 and "config.json" in done.stderr, done.stderr
    for is_sealed in (False, True):
        done = ckpt("check", tmp_path / "run", "--base", base)
        assert done.returncode == 1, done.stderr
        assert "step 2: another model: missing: 1 of" in done.stdout, (is_sealed, done.stdout)
        assert ckpt("seal", tmp_path / "run/step-00000002").returncode == 0 or is_sealed
