"""Checks the arguments of the manager's methods."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable

from ckpt_tools.publish.step_names import STEP_PATTERNS, number_in
from ckpt_tools.run.retention import Retention, check_rules
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


def chosen_rules(
    keep_last: int | None, keep_every: int | None, retention: Retention | None
) -> Retention:
    """Returns the rules by which steps stay.

    Raises:
        ValueError: both ways to give them are used.
    """
    if retention is None:
        return Retention(keep_last, keep_every)
    check_rules(retention)
    if keep_last != Retention().last or keep_every is not None:
        raise ValueError(
            "retention replaces keep_last and keep_every: give only one, Retention(last=…, every=…)"
        )
    return retention


def _check_keep_last(keep_last: int | None) -> None:
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(
            f"keep_last: expected at least 1, or None to keep all steps, got {keep_last!r}"
        )


def _check_mirror(root: str | os.PathLike[str], mirror: str) -> None:
    if not isinstance(mirror, str) or not mirror:
        raise TypeError(f"mirror: expected a URL, such as s3://bucket/run, got {mirror!r}")
    if is_url(root):
        raise ValueError(
            f"mirror: only a run on a disk has a mirror, and the root is {str(root)!r}"
        )
    if not is_url(mirror):
        raise ValueError(
            f"mirror: expected the URL of an object store, such as s3://bucket/run; {mirror!r} is"
            " a path"
        )


def check_manager(
    root: str | os.PathLike[str],
    keep_last: int | None,
    when_busy: str,
    mirror: str | None,
    max_failures: int,
    timeout_s: float,
    step_format: str,
    **numbers: float | None,
) -> None:
    for place in (root, mirror):
        if is_url(place):
            check_url(place)
    if mirror is not None:
        _check_mirror(root, mirror)
    _check_keep_last(keep_last)
    for name, value in numbers.items():
        least = 0 if name in ("timeout_s", "retry_s", "save_every_s") else 1
        is_number = type(value) is int or (least == 0 and type(value) is float)
        if value is not None and (not is_number or not value >= least or value == 0 < least):
            raise ValueError(f"{name}: expected a number of at least {least}, got {value!r}")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s: expected more than 0, got {timeout_s!r}")
    if when_busy not in ("wait", "skip"):
        raise ValueError(f"when_busy: expected 'wait' or 'skip', got {when_busy!r}")
    if type(max_failures) is not int or max_failures < 1:
        raise ValueError(f"max_failures: expected at least 1, got {max_failures!r}")
    if step_format not in STEP_PATTERNS:
        raise ValueError(
            f"step_format: expected one of {', '.join(STEP_PATTERNS)}, got {step_format!r}"
        )
