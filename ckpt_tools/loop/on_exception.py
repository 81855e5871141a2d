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

from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError
from ckpt_tools.loop.arguments import check_step
from ckpt_tools.loop.waiting import with_hint
from ckpt_tools.ranks.gloo import GlooGroup


class Saves(Protocol):
    """The part of a manager that saves."""

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
    group = GlooGroup(timeout_s, process_group)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        try:
            number = _agreed_step(group, step, error, wait_s)
            if number is not None:
                _save(manager, number, state, error)
        except Exception:  # noqa: BLE001  the first exception is the one to raise
            log.exception("nothing is saved after the exception, because of a second one")
        raise
    finally:
        group.close()


def _agreed_step(
    group: GlooGroup, step: Callable[[], int | None], error: BaseException, wait_s: float
) -> int | None:
    """Returns on all ranks the step to save; None if there is none, with the reason in the log."""
    number = step()
    mine = (None if number is None else check_step(number), is_in_update(error))
    if missing := group.missing_after(wait_s):
        log.error(
            "nothing is saved after the exception: rank %s did not raise within %g s",
            ", ".join(map(str, missing)),
            wait_s,
        )
        return None
    found = group.all_gather(mine, "save after an exception")
    steps = {number for number, _ in found}
    if any(is_updating for _, is_updating in found):
        log.error(
            "nothing is saved after the exception: it came from an optimizer's step, so some"
            " parameters may be updated and others not"
        )
    elif len(steps) > 1:
        shown = ", ".join(map(str, (number for number, _ in found)))
        log.error("nothing is saved after the exception: the ranks are after steps %s", shown)
    else:
        return steps.pop()
    return None


def is_in_update(error: BaseException) -> bool:
    """Tells whether an exception, or one that led to it, passed through `step` of an optimizer."""
    chain, seen = [error], set[int]()
    while chain:
        one = chain.pop()
        if id(one) not in seen:
            seen.add(id(one))
            if _passed_update(one.__traceback__):
                return True
            chain += [other for other in (one.__cause__, one.__context__) if other is not None]
    return False


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
    try:
        if manager.save(step, state, asynchronous=False):
            error.add_note(f"step {step} is saved")
    except CheckpointError as failure:
        log.error("step %d could not be saved after the exception: %s", step, with_hint(failure))
