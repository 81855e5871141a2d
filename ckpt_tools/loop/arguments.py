"""Checks the arguments of the manager's methods."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable

from ckpt_tools.core.counts import check_count
from ckpt_tools.loop.options import check_seconds
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.storage import check_url, is_url

_MAX_STEP = 10**18


def check_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step: expected an integer, got a {type(step).__name__}") from None
    if isinstance(step, bool) or not 0 <= number < _MAX_STEP:
        raise ValueError(f"step: expected an integer from 0 on, below 10**18, got {step!r}")
    return number


def shown_choice(only: str | Callable[[str], bool] | None) -> str:
    return "a function" if callable(only) else repr(only)


def check_name(name: str | None) -> str:
    """Returns the name of a directory below the root; "" for None.

    Raises:
        ValueError: it leads elsewhere, is hidden, or is that of a step.
    """
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    parts = name.split("/")
    if any(not part or part.startswith(".") or "\0" in part for part in parts):
        raise ValueError(f"name: expected the name of a directory below the root, got {name!r}")
    if number_in(parts[0]) is not None:
        raise ValueError(f"name: {parts[0]!r} is the name of a step, and steps have no name here")
    return name


def check_choice(step: int | None, path: object) -> int | None:
    """Returns the number of the step to resume from; None if the user gives none."""
    if step is not None and path is not None:
        raise ValueError("resume takes `step` or `path`, not both")
    return None if step is None else check_step(step)


def check_manager(
    root: str | os.PathLike[str],
    keep_last: int | None,
    timeout_s: float,
    save_every: int | None,
    save_every_s: float | None,
) -> None:
    if is_url(root):
        check_url(root)
    check_count("keep_last", keep_last, ValueError, or_none="to keep all steps")
    check_count("save_every", save_every, ValueError, or_none=True)
    check_seconds("save_every_s", save_every_s)
    check_timeout(timeout_s)


def check_timeout(timeout_s: float) -> None:
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s: expected a number of seconds above 0, got {timeout_s!r}")
