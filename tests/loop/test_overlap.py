"""A save that returns before its copy is complete holds the next update, and nothing else.

The thread that copies is blocked by an event, so each order of events is certain.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ckpt_tools import CheckpointManager
from tests.loop.test_state_cache import check, expected, made, parameter, train


@pytest.fixture
def released() -> threading.Event:
    return threading.Event()


def block(checkpoints: CheckpointManager, released: threading.Event) -> None:
    """Blocks the thread that copies, and releases it a moment later."""
    assert checkpoints._stage._pool is not None
    checkpoints._stage._pool.submit(released.wait, 60)
    threading.Timer(0.3, released.set).start()


def test_an_optimizer_waits_for_the_copy_and_a_forward_pass_does_not(
    tmp_path: Path, released: threading.Event
) -> None:
    state = made()
    with CheckpointManager(tmp_path, overlap_copy=True) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        block(checkpoints, released)
        wanted = expected(state)
        checkpoints.save(2, state)
        state["model"](torch.randn(5, 4)).square().sum().backward()  # also counts in a buffer
        state["mean"].fill_(-1)
        assert not released.is_set()
        state["optimizer"].step()
        assert released.is_set()
        checkpoints.wait()
        check(tmp_path / "step-00000002", wanted)


def test_before_step_waits_for_the_copy(tmp_path: Path, released: threading.Event) -> None:
    state = made()
    with CheckpointManager(tmp_path, overlap_copy=True) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        block(checkpoints, released)
        wanted = expected(state)
        checkpoints.save(2, state)
        checkpoints.before_step()
        assert released.is_set()
        with torch.no_grad():
            parameter(state).fill_(3.0)
        checkpoints.wait()
        check(tmp_path / "step-00000002", wanted)


def test_a_resume_and_the_next_save_wait_for_the_copy(
    tmp_path: Path, released: threading.Event
) -> None:
    state = made()
    with CheckpointManager(tmp_path, overlap_copy=True, keep_last=None) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        first = expected(state)
        train(state)
        block(checkpoints, released)
        second = expected(state)
        checkpoints.save(2, state)
        assert checkpoints.resume(state, 1) == 1
        assert released.is_set()
        check(tmp_path / "step-00000002", second)
        for name, value in expected(state).items():
            same = torch.equal(value, first[name]) if torch.is_tensor(value) else True
            assert same, name


def test_every_step_of_a_loop_is_saved_as_it_was(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path, overlap_copy=True, keep_last=None) as checkpoints:
        for step in range(1, 30):
            wanted = expected(state)
            checkpoints.save(step, state)
            train(state)
            train(state)
            checkpoints.wait()
            check(tmp_path / f"step-{step:08d}", wanted)


def hooks() -> int:
    return len(_global_optimizer_pre_hooks)


def test_a_manager_hooks_into_steps_until_it_is_closed(tmp_path: Path) -> None:
    state, before = made(), hooks()
    with CheckpointManager(tmp_path / "without") as checkpoints:
        assert hooks() == before
    with CheckpointManager(tmp_path / "with", overlap_copy=True) as checkpoints:
        checkpoints.save(1, state)
        assert hooks() == before + 1
    assert hooks() == before
    train(state)


def test_an_optimizer_that_is_not_in_the_state_waits_too(
    tmp_path: Path, released: threading.Event
) -> None:
    state = made()
    other = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    with CheckpointManager(tmp_path, overlap_copy=True) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        block(checkpoints, released)
        wanted = expected(state)
        checkpoints.save(2, state)
        state["model"](torch.randn(5, 4)).square().sum().backward()
        other.step()
        assert released.is_set()
        checkpoints.wait()
        check(tmp_path / "step-00000002", wanted)


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer without a hook of its own, as some frameworks do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups
        self._optimizer_state_dict_pre_hooks = {}
        self._optimizer_state_dict_post_hooks = {}

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad)


def test_the_tensors_of_an_optimizer_without_hooks_are_copied_at_once_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = made()
    state["optimizer"] = Wrapper(state["optimizer"])
    with CheckpointManager(tmp_path, overlap_copy=True, keep_last=None) as checkpoints:
        for step in (1, 2):
            wanted = expected(state | {"optimizer": state["optimizer"].inner})
            checkpoints.save(step, state)
            state["model"](torch.randn(5, 4)).square().sum().backward()
            state["optimizer"].step()
            checkpoints.wait()
            check(tmp_path / f"step-{step:08d}", wanted)
    (told,) = [r.getMessage() for r in caplog.records if "overlap_copy" in r.getMessage()]
    assert told == (
        "overlap_copy: the tensors of a Wrapper are copied at once, since torch calls no hooks"
        " before its steps"
    )


def test_without_overlap_a_save_has_copied_everything(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path) as checkpoints:
        wanted = expected(state)
        checkpoints.save(1, state)
        with torch.no_grad():
            parameter(state).fill_(3.0)
        checkpoints.wait()
        check(tmp_path / "step-00000001", wanted)
