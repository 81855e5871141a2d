"""A save when the loop raises: only if all ranks raise after the same step, outside an update."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from ckpt_tools import CheckpointManager, Writing, steps
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("one", r"nothing is saved after the exception: rank 0 did not raise within 4 s"),
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
    assert "ValueError: no more data\nstep 6 is saved" in done.stderr
    assert "not saved again" not in done.stderr
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


def test_a_save_that_training_waits_for_is_not_skipped(tmp_path: Path) -> None:
    state = {"w": torch.ones(3_000_000)}
    with CheckpointManager(tmp_path, writing=Writing(when_busy="skip")) as checkpoints:
        checkpoints.save(1, state)
        with (
            pytest.raises(ValueError, match="first"),
            checkpoints.save_on_exception(lambda: 2, state),
        ):
            raise ValueError("first")
    assert [step.number for step in steps(tmp_path)] == [1, 2]


def test_an_update_is_found_behind_another_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def fail(*_: object) -> None:
        raise ValueError("within")

    def train() -> None:
        try:
            optimizer.step()
        except ValueError as error:
            raise RuntimeError("outer") from error

    optimizer.register_step_post_hook(fail)
    with (
        pytest.raises(RuntimeError, match="outer"),
        CheckpointManager(tmp_path) as checkpoints,
        checkpoints.save_on_exception(lambda: 2, {"w": parameter}),
    ):
        train()
    assert steps(tmp_path) == [] and "it came from an optimizer's step" in caplog.text


@pytest.mark.parametrize("number", [2.5, "x"])
def test_a_bad_number_does_not_hide_the_exception(
    number: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ValueError, match="first"),
        CheckpointManager(tmp_path) as checkpoints,
        checkpoints.save_on_exception(lambda: number, {"w": torch.ones(2)}),  # type: ignore[arg-type, return-value]
    ):
        raise ValueError("first")
    assert "because of a second one" in caplog.text and steps(tmp_path) == []


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


@pytest.mark.parametrize("case", ["between two optimizers", "before it is noted", "noted"])
def test_parameters_that_are_ahead_of_the_step_are_not_saved(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    first, second, other = (torch.optim.SGD(m.parameters(), 0.1) for m in models)
    state = {"a": models[0], "b": models[1], "optimizers": [first, second]}
    done: list[int] = [3]

    def train() -> None:
        first.step()
        if case == "between two optimizers":
            raise ValueError("stop")
        second.step()
        if case == "before it is noted":
            raise ValueError("stop")
        done.append(4)
        other.step()  # of no part of the state
        raise ValueError("stop")

    with (
        pytest.raises(ValueError, match="stop"),
        CheckpointManager(tmp_path) as checkpoints,
        checkpoints.save_on_exception(lambda: done[-1], state),
    ):
        train()
    assert [step.number for step in steps(tmp_path)] == ([4] if case == "noted" else [])
    is_told = "an optimizer has stepped since step 3 was noted as complete" in caplog.text
    assert is_told == (case != "noted")


def test_an_older_step_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(3)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(30, state)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == 30
        with (
            pytest.raises(ValueError, match="stop"),
            checkpoints.save_on_exception(lambda: 5, state),
        ):
            raise ValueError("stop")
    assert [step.number for step in steps(tmp_path)] == [30]
    assert "step() returned 5, and step 30 is saved or resumed already" in caplog.text


def test_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "killed")
    assert done.returncode and "nothing is saved after the exception: a rank is gone" in done.stderr
    assert "PeerError" in done.stderr and steps(tmp_path / "run") == []
    assert "waiting at most" not in done.stderr
