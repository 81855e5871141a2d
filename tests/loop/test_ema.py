"""The moving average of a model, and the copies in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, Ema, HuggingFace, PlanError, StorageError
from tests.conftest import torchrun


def trained(ema: Ema | None, model: nn.Module, steps: int) -> list[dict[str, torch.Tensor]]:
    """Takes steps, and returns the parameters after each."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(steps):
        model(torch.full((2, 4), float(number))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_its_definition(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    want = {n: p.detach().double() for n, p in model.named_parameters()}
    if dtype == torch.bfloat16:
        model.float()  # so that the steps are plain
        model.to(dtype)
    ema = Ema(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        for name, parameter in model.named_parameters():
            want[name] = 0.9 * want[name] + 0.1 * parameter.detach().double()
    assert all(torch.allclose(ema.shadow[n].double(), t, atol=1e-6) for n, t in want.items())
    assert all(t.dtype == torch.float32 for t in ema.shadow.values())
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(5, {"model": model, "ema": ema})
        other = nn.Linear(4, 3).to(dtype)
        again = Ema(other, 0.9)
        assert checkpoints.resume({"model": other, "ema": again}) == 5
    assert again.num_updates == 5
    assert all(torch.equal(again.shadow[n], t) for n, t in ema.shadow.items())
    ckpt_tools.merge(tmp_path / "run", tmp_path / "ema.safetensors", model_key="ema.model")
    got = load_file(tmp_path / "ema.safetensors")
    assert got.keys() == ema.shadow.keys()
    assert all(torch.equal(got[n], t) for n, t in ema.shadow.items())
    with pytest.raises(PlanError, match="no tensor is below the key 'ema.other'"):
        ckpt_tools.merge(tmp_path / "run", tmp_path / "x.safetensors", model_key="ema.other")


def test_the_average_is_applied_for_a_block_only() -> None:
    model = nn.Linear(4, 3)
    ema = Ema(model, 0.5)
    trained(ema, model, 3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with ema.applied():
        assert all(torch.equal(p, ema.shadow[n]) for n, p in model.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_frozen_parameters_have_no_average_and_nonsense_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert Ema(model).shadow.keys() == {"1.weight", "1.bias"}
    for wrong in ({"decay": 1.0}, {"decay": -0.1}, {"every": 0}):
        arguments: dict[str, Any] = wrong
        with pytest.raises(ValueError, match="expected"):
            Ema(model, **arguments)


def test_a_sharded_average_is_resumed_on_other_ranks(tmp_path: Path) -> None:
    torchrun(2, "ema.py", str(tmp_path), "save")
    torchrun(3, "ema.py", str(tmp_path), "load")


# ---- Hugging Face --------------------------------------------------------------------------------

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16}


def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    shapes = {
        "model.weight": (16, 16),
        "model.bias": 16,
        "lm_head.weight": (4, 16),
        "lm_head.bias": 4,
    }
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


@pytest.mark.slow
def test_a_copy_for_hugging_face_lies_beside_each_second_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"model": nn.Linear(16, 16), "lm_head": nn.Linear(16, 4)})
    export, kept = HuggingFace(base(tmp_path), every=2, dtype="bf16"), {}
    with CheckpointManager(tmp_path / "run", keep_last=1, export=export) as checkpoints:
        for step in (1, 2, 3, 4):
            with torch.no_grad():
                model["model"].weight.fill_(step)
            kept[step] = {n: t.bfloat16() for n, t in model.state_dict().items()}
            checkpoints.save(step, {"model": model}, asynchronous=False)
            checkpoints._writer.huggingface.wait()  # type: ignore[union-attr]
    names = {p.name for p in (tmp_path / "run").iterdir() if not p.name.startswith(".")}
    assert names == {"step-00000002-hf", "step-00000004", "step-00000004-hf"}
    for step in (2, 4):
        there = tmp_path / "run" / f"step-0000000{step}-hf"
        got = {n: t for f in there.glob("*.safetensors") for n, t in load_file(f).items()}
        assert got.keys() == kept[step].keys()
        assert all(torch.equal(got[n], t) for n, t in kept[step].items())
        assert json.loads((there / "config.json").read_text())["hidden_size"] == 16
    with CheckpointManager(tmp_path / "run") as checkpoints:  # the copies are no steps
        assert checkpoints.resume({"model": model}) == 4


def test_a_copy_that_fails_leaves_the_step_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nothing").mkdir()
    checkpoints = CheckpointManager(tmp_path / "run", export=HuggingFace(tmp_path / "nothing"))
    (tmp_path / "nothing").rmdir()
    checkpoints.save(1, {"model": nn.Linear(2, 2)})
    with pytest.raises(StorageError, match="the last copy for Hugging Face failed"):
        checkpoints.close()
    assert "no copy of" in caplog.text
    assert ckpt_tools.verify(tmp_path / "run" / "step-00000001").problems == []
