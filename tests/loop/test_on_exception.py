"""A save when the loop raises: only if all ranks raise after the same step, outside an update."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from ckpt_tools import CheckpointManager, steps
from tests.command import run_job
from tests.conftest import HERE
from tests.jobs import torchrun_command


def run_training(root: Path, case: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return run_job(torchrun_command(num_ranks, HERE / "dist" / "raising.py", root, case))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_step_is_saved_if_every_rank_raises(num_ranks: int, tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "all", num_ranks)
    assert done.returncode and "ValueError: no more data\nstep 6 is saved" in done.stderr
    assert [step.number for step in steps(tmp_path / "run")] == [6]
    again = run_training(tmp_path / "run", "all", num_ranks)
    assert again.returncode == 0 and "resumed 6" in again.stdout, again.stderr


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("one", r"nothing is saved after the exception, because not every rank raised"),
        ("update", "nothing is saved after the exception: it came from an optimizer's step"),
        ("apart", "nothing is saved after the exception: the ranks are after steps 6, 5"),
        ("exit", ""),
    ],
)
def test_nothing_is_saved_that_is_not_one_step_of_all_ranks(
    case: str, why: str, tmp_path: Path
) -> None:
    done = run_training(tmp_path / "run", case)
    assert done.returncode and why in done.stderr
    assert steps(tmp_path / "run") == []
    if case != "exit":
        assert "ValueError" in done.stderr
        assert case != "one" or "rank 0" in done.stderr  # the one that did not raise


def test_a_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "saved")
    assert "not saved again" in done.stderr and "ValueError: no more data" in done.stderr
    assert [step.number for step in steps(tmp_path / "run")] == [6]


def test_an_interrupt_saves_and_goes_on_being_one(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointManager(tmp_path) as checkpoints,
        checkpoints.save_on_exception(lambda: 4, state),
    ):
        raise KeyboardInterrupt
    assert [step.number for step in steps(tmp_path)] == [4]


def test_a_save_that_fails_does_not_hide_the_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(3), "bad": object()}
    with (
        pytest.raises(ValueError, match="first"),
        CheckpointManager(tmp_path) as checkpoints,
        checkpoints.save_on_exception(lambda: 4, state),
    ):
        raise ValueError("first")
    assert "step 4 could not be saved after the exception: cannot save state['bad']" in caplog.text
