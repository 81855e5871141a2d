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
from ckpt_tools.loop.waiting import with_hint
from ckpt_tools.ranks.gloo import GlooGroup


class Saves(Protocol):
    """The part of a manager that saves."""

    def save(self, step: int, state: Mapping[str, Any], asynchronous: bool | None = None) -> bool:
        """Saves a step."""
        ...


@contextmanager
def saved_on_exception(
    manager: Saves,
    step: Callable[[], int | None],
    state: Mapping[str, Any],
    wait_s: float,
    process_group: dist.ProcessGroup | None,
) -> Iterator[None]:
    """Saves the state if the block raises; the exception then continues.

    Args:
        manager: saves.
        step: returns the number of the last complete step; None before the first.
        state: as given to `save`.
        wait_s: seconds to wait for the exceptions of the other ranks.
        process_group: all ranks.
    """
    group = GlooGroup(wait_s, process_group)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        number = _agreed_step(group, step, error)
        if number is not None:
            _save(manager, number, state, error)
        raise
    finally:
        group.close()


def _agreed_step(
    group: GlooGroup, step: Callable[[], int | None], error: BaseException
) -> int | None:
    """Returns on all ranks the step to save; None if there is none, with the reason in the log."""
    try:
        mine = (step(), is_in_update(error.__traceback__))
        found = group.all_gather(mine, "save after an exception")
    except Exception as other:  # noqa: BLE001  the first exception is the one to raise
        log.error("nothing is saved after the exception, because not every rank raised: %s", other)
        return None
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


def is_in_update(trace: TracebackType | None) -> bool:
    """Tells whether an exception passed through `step` of an optimizer."""
    return any(
        frame.f_code.co_name in ("step", "wrapper")  # torch wraps it, with its hooks
        and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
        for frame, _ in traceback.walk_tb(trace)
    )


def _save(manager: Saves, step: int, state: Mapping[str, Any], error: BaseException) -> None:
    try:
        manager.save(step, state, asynchronous=False)
        error.add_note(f"step {step} is saved")
    except CheckpointError as failure:
        log.error("step %d could not be saved after the exception: %s", step, with_hint(failure))
