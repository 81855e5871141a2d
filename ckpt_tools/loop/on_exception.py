"""Saves when the training loop raises, if all ranks raise after the same step.

Imports torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError, PeerError, printable
from ckpt_tools.loop.arguments import check_step
from ckpt_tools.loop.steps.waiting import with_hint
from ckpt_tools.ranks.gloo import GlooGroup

_SHOWN = 200  # characters of an exception


class Saves(Protocol):
    """The part of a manager that saves."""

    @property
    def last_step(self) -> int | None:
        """The step that was saved last or resumed from."""
        ...

    def save(self, step: int, state: Mapping[str, Any], asynchronous: bool | None = None) -> bool:
        """Saves a step."""
        ...

    def wait(self) -> None:
        """Waits for the save in the background."""
        ...


@contextmanager
def saved_on_exception(
    manager: Saves,
    step: Callable[[], int | None],
    state: Mapping[str, Any],
    wait_s: float,
    timeout_s: float,
    process_group: dist.ProcessGroup | None,
) -> Iterator[None]:
    """Saves the state if the block raises; the exception then continues.

    Args:
        manager: saves.
        step: returns the number of the last complete step; None before the first.
        state: as given to `save`.
        wait_s: seconds to wait for the exceptions of the other ranks.
        timeout_s: seconds for which ranks wait for each other at the start.
        process_group: all ranks.
    """
    group, updates = GlooGroup(timeout_s, process_group), _Updates(step, state)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        try:
            number = _agreed_step(group, updates, error, wait_s)
            if number is not None:
                _save(manager, number, state, error)
        except Exception:  # noqa: BLE001  the first exception is the one to raise
            log.exception("nothing is saved after the exception, because of a second one")
        raise
    finally:
        updates.stop()
        group.close()


class _Updates:
    """Notes at which step the optimizers of a state have updated parameters last.

    Between two optimizers, or before the loop has noted its step, the parameters are ahead of the
    last complete step. Saved under its number, they would be wrong.
    """

    def __init__(self, step: Callable[[], int | None], state: Mapping[str, Any]) -> None:
        self.step, self.has_updated = step, False
        self.last: int | None = None
        self.parameters = set(_parameters(state))
        self._handle = register_optimizer_step_post_hook(self._note)

    @property
    def is_ahead(self) -> bool:
        """Tells whether parameters were updated after the last complete step."""
        return self.has_updated and self.last == self.step()

    def stop(self) -> None:
        """Stops noting."""
        self._handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self.parameters or self.parameters & mine:
            self.has_updated, self.last = True, self.step()


def _parameters(state: Any) -> Iterator[int]:
    """Yields the identities of the parameters in a state."""
    if isinstance(state, torch.nn.Module):
        yield from map(id, state.parameters())
    elif isinstance(state, torch.optim.Optimizer):
        yield from (id(p) for group in state.param_groups for p in group["params"])
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _parameters(value)


def _agreed_step(
    group: GlooGroup, updates: _Updates, error: BaseException, wait_s: float
) -> int | None:
    """Returns on all ranks the step to save; None if there is none, with the reason in the log."""
    if any(isinstance(one, PeerError) for one in _chain(error)):
        log.error("nothing is saved after the exception: a rank is gone")
        return None
    number = updates.step()
    mine = (
        None if number is None else check_step(number),
        is_in_update(error),
        updates.is_ahead,
    )
    if group.size > 1:
        log.warning(
            "%s: %s; waiting at most %g s for the exceptions of the other ranks",
            type(error).__name__,
            printable(" ".join(str(error).split())[:_SHOWN]),
            wait_s,
        )
    if missing := group.missing_after(wait_s):
        log.error(
            "nothing is saved after the exception: rank %s did not raise within %g s",
            ", ".join(map(str, missing)),
            wait_s,
        )
        return None
    found = group.all_gather(mine, "save after an exception")
    steps = {number for number, _, _ in found}
    if any(is_updating for _, is_updating, _ in found):
        log.error(
            "nothing is saved after the exception: it came from an optimizer's step, so some"
            " parameters may be updated and others not"
        )
    elif len(steps) > 1:
        shown = ", ".join(map(str, (number for number, _, _ in found)))
        log.error("nothing is saved after the exception: the ranks are after steps %s", shown)
    elif any(is_ahead for _, _, is_ahead in found):
        log.error(
            "nothing is saved after the exception: an optimizer has stepped since step %s was noted"
            " as complete, so the parameters are no longer those of that step",
            number,
        )
    else:
        return steps.pop()
    return None


def is_in_update(error: BaseException) -> bool:
    """Tells whether an exception, or one that led to it, passed through `step` of an optimizer."""
    return any(_passed_update(one.__traceback__) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and those that led to it."""
    chain, seen = [error], set[int]()
    while chain:
        one = chain.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            chain += [other for other in (one.__cause__, one.__context__) if other is not None]


def _passed_update(trace: TracebackType | None) -> bool:
    return any(
        frame.f_code.co_name in ("step", "wrapper")  # torch wraps it, with its hooks
        and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
        for frame, _ in traceback.walk_tb(trace)
    )


def _save(manager: Saves, step: int, state: Mapping[str, Any], error: BaseException) -> None:
    try:
        manager.wait()
    except CheckpointError as failure:
        log.error("the save before the exception failed: %s", with_hint(failure))
    newest = manager.last_step
    if newest is not None and newest >= step:
        if newest == step:
            error.add_note(f"step {step} is saved")
        else:
            log.error(
                "nothing is saved after the exception: step() returned %d, and step %d is saved or"
                " resumed already",
                step,
                newest,
            )
        return
    try:
        if manager.save(step, state, asynchronous=False):
            error.add_note(f"step {step} is saved")
    except CheckpointError as failure:
        log.error("step %d could not be saved after the exception: %s", step, with_hint(failure))
