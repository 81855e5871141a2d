"""Adapters of PEFT in the training program: trained, killed, resumed, exported, merged. The oracle
is PEFT in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from tests.command import run_command
from tests.jobs import PYTHON_PATH, kill_after_step, torchrun_command
from tests.peers.environments import JOBS, python_of
from training.extras.prepare import prepare

STEPS = 6
ENVIRONMENT = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}


def started(ranks: int, *overrides: str) -> list[str]:
    words = [word for override in overrides for word in ("--set", override)]
    command = torchrun_command(ranks, "-m", "training", *words)
    return [python_of("peft"), *command[1:]]


def run(ranks: int, *overrides: str, status: int = 0) -> str:
    done = subprocess.run(
        started(ranks, *overrides), env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == (status != 0), said
    return said


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "text.txt").write_text("Sphinx of black quartz, judge my vow. " * 60)
    prepare([folder / "text.txt"], folder / "tokens.npy", progress=False)
    return folder


def test_adapters_are_trained_as_peft_trains_them(model: Path, tmp_path: Path) -> None:
    given = (
        f"model.path={model}",
        f"data.train={model}/tokens.npy",
        "data.seq_len=16",
        "data.batch_size=8",
        "data.check_tokenizer=false",
        "lora.rank=4",
        "lora.alpha=8",
        "optim.lr=1e-2",
        "optim.min_lr_ratio=1",
        "run.export=true",
        "metrics.progress=false",
    )
    # after a step of rate 0 the adapter is as it began
    run(1, *given, f"run.dir={tmp_path}/zero", "run.steps=1", "optim.lr=1e-30")
    shutil.copytree(tmp_path / "zero/export", tmp_path / "first")
    said = run(2, *given, f"run.dir={tmp_path}/run", f"run.steps={STEPS}")
    assert "2,048 of them trained" in said or "of them trained, on 2 ranks" in said, said
    command = [python_of("peft"), JOBS / "lora_oracle.py", model, model / "tokens.npy", tmp_path]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, capture_output=True)
    wanted = json.loads((tmp_path / "losses.json").read_text())
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=2e-5)
    logits = torch.load(tmp_path / "logits.pt")
    assert torch.allclose(logits["export"], logits["oracle"], atol=1e-4)
    # only adapters are saved
    with ckpt_tools.open(tmp_path / f"run/step-{STEPS:08d}") as step:
        names = [name for name in step if name.startswith("model.")]
    assert len(names) == 8 and all(".lora_" in name for name in names)
    # killed after a step, and resumed on another number of ranks, and without FSDP
    part = (*given, f"run.dir={tmp_path}/part", "checkpoint.every=2", "checkpoint.keep_last=900")
    words = started(2, *part, "run.steps=900")
    kill_after_step(words, tmp_path / "part", 2, os.environ | ENVIRONMENT)
    shutil.copytree(tmp_path / "part", tmp_path / "ddp")
    said = run(1, *part, f"run.steps={STEPS}")
    assert "resumed at step 2" in said and "the step has only what trains" in said
    run(2, *part, f"run.steps={STEPS}", "fsdp.strategy=NO_SHARD", f"run.dir={tmp_path}/ddp")
    for name in ("part", "ddp"):
        assert losses(tmp_path / name) == pytest.approx(wanted, rel=2e-5), name
    # merged, it computes the same
    done = run_command(
        "merge", model, tmp_path / "merged.safetensors", "--lora", tmp_path / "run/export"
    )
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(model)
    merged.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=False)
    logits_of_merged = merged(torch.arange(32)[None]).logits
    assert torch.allclose(logits_of_merged, logits["oracle"], atol=1e-4)
    assert not torch.allclose(
        AutoModelForCausalLM.from_pretrained(model)(torch.arange(32)[None]).logits,
        logits["oracle"],
        atol=1e-3,
    )
    # other weights below the adapter, or another scale, are refused
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    more = (f"run.steps={STEPS + 1}",)
    told = run(1, *part, *more, f"model.path={other}", status=2)
    assert "the adapters were trained on other weights" in told
    assert "lora.alpha = 16" in run(1, *part, *more, "lora.alpha=16", status=2)
    run(1, *part, *more, f"model.path={other}", "model.may_change=true")


def test_what_adapters_cannot_do_is_said(model: Path) -> None:
    given = (f"model.path={model}", f"data.train={model}/tokens.npy", "data.seq_len=16")
    told = run(1, *given, "lora.rank=4", "lora.targets=absent", "run.steps=1", status=2)
    assert "lora.targets: Target modules" in told and "Traceback" not in told
    assert 'lora.rank needs fsdp.api = "fsdp2"' in run(
        1, *given, "lora.rank=4", "fsdp.api=fsdp1", status=2
    )


def test_targets_that_are_nowhere_are_refused(model: Path, tmp_path: Path) -> None:
    tokens = f"data.train={model}/tokens.npy"
    given = (f"model.path={model}", tokens, "lora.rank=2", f"run.dir={tmp_path}/run")
    for targets, message in (
        ("q_proj,nonsense", "lora.targets: no linear layer is called 'nonsense'"),
        ("all-linear,q_proj", "lora.targets: 'all-linear' stands alone"),
    ):
        said = run(1, *given, f"lora.targets={targets}", status=2)
        assert message in said, said
