"""A save that returns before its copy is complete holds the next update, and nothing else.

The thread that copies is blocked by an event, so each order of events is certain.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

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


def test_after_the_end_of_a_manager_an_optimizer_has_no_hook(tmp_path: Path) -> None:
    state = made()
    hooks = state["optimizer"]._optimizer_step_pre_hooks
    with CheckpointManager(tmp_path, overlap_copy=True) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
        assert len(hooks) == 1
    assert not hooks
    train(state)


def test_without_overlap_nothing_is_hooked_and_a_save_has_copied_everything(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path) as checkpoints:
        wanted = expected(state)
        checkpoints.save(1, state)
        assert not state["optimizer"]._optimizer_step_pre_hooks
        with torch.no_grad():
            parameter(state).fill_(3.0)
        checkpoints.wait()
        check(tmp_path / "step-00000001", wanted)
