"""The job of one file: killed, resumed on other ranks, and exported."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from tests.command import run_job
from tests.jobs import kill_after_step, torchrun_command
from tests.training.runs import QUIET
from training import minimal

TEXT = Path(minimal.__file__)  # it learns itself


def words(num_ranks: int, folder: Path) -> list[str]:
    more = (folder, TEXT, "--steps", 12, "--save-every", 4)
    return torchrun_command(num_ranks, TEXT, *more)


def losses(num_ranks: int, folder: Path) -> dict[str, str]:
    """Runs the job to its end; returns the losses that it prints, by step."""
    done = run_job(words(num_ranks, folder), env=os.environ | QUIET, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"step (\d+): loss ([0-9.]+)", done.stdout))


def test_it_is_short_and_stands_alone() -> None:
    text = TEXT.read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"^(from|import) training", text, re.MULTILINE)


@pytest.mark.slow
def test_killed_and_resumed_it_has_the_losses_of_one_run(tmp_path: Path) -> None:
    whole = losses(2, tmp_path / "whole")
    assert list(whole) == ["4", "8", "12"]
    kill_after_step(words(2, tmp_path / "part"), tmp_path / "part", 4, os.environ | QUIET)
    rest = losses(1, tmp_path / "part")
    assert list(rest) == ["8", "12"]
    for step, loss in rest.items():
        assert float(loss) == pytest.approx(float(whole[step]), abs=2e-4)
    model = minimal.Model()
    model.load_state_dict(load_file(tmp_path / "part" / "model.safetensors"))
    assert ckpt_tools.verify(tmp_path / "part" / "model.safetensors").problems == []
    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.long))).all()
