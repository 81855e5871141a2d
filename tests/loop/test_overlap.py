"""A save that returns before its copy is complete holds the next update, and nothing else.

The thread that copies is blocked by an event, so each order of events is certain.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ckpt_tools
from ckpt_tools import CheckpointManager, Ema, Writing
from tests.loop.cached_states import check, expected, flat, made, parameter, train
from tests.stock import assert_stock_torch_reads

State = dict[str, Any]


class Half:
    """A save whose copy is blocked: the second of a run.

    Attributes:
        released: set when the copy may go on.
    """

    def __init__(self, checkpoints: CheckpointManager, released: threading.Event) -> None:
        self.checkpoints, self.released = checkpoints, released

    def release_soon(self) -> None:
        """Lets the copy go on while the caller waits for it."""
        threading.Timer(0.3, self.released.set).start()


@contextmanager
def half_saved(
    folder: Path, state: State, between: Callable[[], object] = lambda: None
) -> Iterator[Half]:
    """Yields after the second save, whose copy is blocked until it is released."""
    released = threading.Event()
    with CheckpointManager(
        folder, keep_last=None, writing=Writing(overlap_copy=True)
    ) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        between()
        assert checkpoints._stage._pool is not None
        checkpoints._stage._pool.submit(released.wait, 60)
        checkpoints.save(2, state)
        try:
            yield Half(checkpoints, released)
        finally:
            released.set()


def test_an_optimizer_waits_for_the_copy_and_a_forward_pass_does_not(tmp_path: Path) -> None:
    state = made()
    wanted = expected(state)
    with half_saved(tmp_path, state) as half:
        state["model"](torch.randn(5, 4)).square().sum().backward()  # also counts in a buffer
        state["mean"].fill_(-1)
        half.release_soon()
        state["optimizer"].step()
        assert half.released.is_set()
    check(tmp_path / "step-00000002", wanted)


def test_before_step_waits_for_the_copy(tmp_path: Path) -> None:
    state = made()
    wanted = expected(state)
    with half_saved(tmp_path, state) as half:
        half.release_soon()
        half.checkpoints.before_step()
        assert half.released.is_set()
        with torch.no_grad():
            parameter(state).fill_(3.0)
    check(tmp_path / "step-00000002", wanted)


def test_a_resume_waits_for_the_copy(tmp_path: Path) -> None:
    state = made()
    first = expected(state)
    second: State = {}

    def between() -> None:
        train(state)
        second.update(expected(state))

    with half_saved(tmp_path, state, between) as half:
        half.release_soon()
        assert half.checkpoints.resume(state, 1) == 1
        assert half.released.is_set()
    check(tmp_path / "step-00000002", second)
    for name, value in expected(state).items():
        assert not torch.is_tensor(value) or torch.equal(value, first[name]), name


def test_an_optimizer_that_is_not_in_the_state_waits_too(tmp_path: Path) -> None:
    state = made()
    wanted = expected(state)
    other = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    with half_saved(tmp_path, state) as half:
        state["model"](torch.randn(5, 4)).square().sum().backward()
        half.release_soon()
        other.step()
        assert half.released.is_set()
    check(tmp_path / "step-00000002", wanted)


def test_two_optimizers_in_two_threads_both_wait(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with half_saved(tmp_path, {"model": model, "optimizers": optimizers}) as half:
        half.release_soon()
        threads = [threading.Thread(target=optimizer.step) for optimizer in optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = assert_stock_torch_reads(tmp_path / "step-00000002")["model"]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def embed(state: State, half: Half) -> None:
    """Runs a forward pass that writes parameters; they are copied at once."""
    state["table"](torch.arange(8))


def freeze(state: State, half: Half) -> None:
    """Moves a frozen parameter, which an optimizer has, too."""
    with torch.no_grad():
        state["frozen"].weight.mul_(2)


def evaluate(state: State, half: Half) -> None:
    with state["ema"].applied():
        half.checkpoints.wait()


def load(state: State, half: Half) -> None:
    ckpt_tools.load(Path(half.checkpoints.root) / "step-00000001", state)


def count(state: State, half: Half) -> None:
    """Changes what lies behind a parameter, in one long tensor that is in the state as well."""
    state["long"][4:].add_(1)


@pytest.mark.parametrize("change", [embed, freeze, evaluate, load, count])
def test_what_writes_into_parameters_beside_an_optimizer(
    change: Callable[[State, Half], None], tmp_path: Path
) -> None:
    state = made()
    long = torch.zeros(8)
    extra = nn.ParameterList([nn.Parameter(long[:4])])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    table = nn.Embedding(8, 4, max_norm=0.5)
    model = state["model"]
    trained = [*model.parameters(), *extra, *frozen.parameters(), *table.parameters()]
    state |= {"extra": extra, "long": long, "frozen": frozen, "table": table}
    state["optimizer"] = torch.optim.SGD(trained, lr=0.1)
    state["ema"] = Ema(model, 0.5)
    for average in state["ema"].shadow.values():
        average.fill_(7.0)
    wanted: State = {}

    def between() -> None:
        with torch.no_grad():
            for weight in trained:
                weight.add_(1)
        parts = {"model": model, "frozen": frozen, "table": table, "extra": extra}
        wanted.update(
            {f"{k}.{n}": v.clone() for k, m in parts.items() for n, v in m.state_dict().items()}
        )
        wanted["long"] = long.clone()

    with half_saved(tmp_path, state, between) as half:
        half.release_soon()
        change(state, half)
    stored = flat(assert_stock_torch_reads(tmp_path / "step-00000002"))
    for name, value in wanted.items():
        assert torch.equal(stored[name], value), name


def test_a_forked_child_does_not_wait(tmp_path: Path) -> None:
    state = made()
    with half_saved(tmp_path, state):
        child = os.fork()
        if not child:
            state["optimizer"].step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_every_step_of_a_loop_is_saved_as_it_was(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(
        tmp_path, keep_last=None, writing=Writing(overlap_copy=True)
    ) as checkpoints:
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
    with CheckpointManager(tmp_path / "without"):
        assert hooks() == before
    with CheckpointManager(tmp_path / "with", writing=Writing(overlap_copy=True)) as checkpoints:
        checkpoints.save(1, state)
        assert hooks() == before + 1
    assert hooks() == before
    train(state)


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
    inner = state["optimizer"]
    state["optimizer"] = Wrapper(inner)
    with CheckpointManager(
        tmp_path, keep_last=None, writing=Writing(overlap_copy=True)
    ) as checkpoints:
        for step in (1, 2):
            wanted = expected(state | {"optimizer": inner})
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


@pytest.mark.parametrize("asynchronous", [True, False])
def test_ctrl_c_in_the_copy_reaches_the_loop_and_fails_the_save(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor is a view with strides, so both kinds of save copy it."""
    state = {"w": torch.arange(12.0).view(3, 4).t()}
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()

        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(2, state)
        if asynchronous:
            with pytest.raises(ckpt_tools.CheckpointError, match="was interrupted"):
                checkpoints.wait()
        checkpoints.save(3, state)
    found = assert_stock_torch_reads(tmp_path / "step-00000003")
    assert torch.equal(found["w"], state["w"])
    assert not (tmp_path / "step-00000002").exists()
