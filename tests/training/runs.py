"""Runs of the training program, and what they write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.command import run_job
from tests.conftest import HERE
from tests.jobs import torchrun_command

TINY = (
    "model.dim=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.hidden_dim=64",
    "data.seq_len=32",
    "data.batch_size=8",
    "metrics.progress=false",
    "optim.max_grad_norm=1.0",
    "optim.warmup_steps=3",
)


def command(num_ranks: int, *arguments: object, script: str = "") -> list[str]:
    return torchrun_command(
        num_ranks, *([HERE / "dist" / script] if script else ["-m", "training"]), *arguments
    )


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(*words: str, status: int = 0, **environment: str) -> str:
    result = run_job(words, env=os.environ | QUIET | environment, timeout=800)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    found = [line for line in lines(directory) if "loss" in line]
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return [line["loss"] for line in found]


ONE = (sys.executable, "-m", "training")
