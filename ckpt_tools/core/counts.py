"""Checks the counts that a user gives."""

from __future__ import annotations


def check_count(
    name: str,
    value: object,
    error: type[Exception],
    least: int = 1,
    or_none: bool | str = False,
) -> None:
    """Refuses what is no whole number, or too small.

    Args:
        name: of the option.
        value: of the option.
        error: the class to raise.
        least: the smallest number.
        or_none: whether None is allowed, or the meaning of None, such as "to keep all steps".

    Raises:
        Exception: of class `error`.
    """
    if (value is None and or_none) or (type(value) is int and value >= least):
        return
    other = f", or None {or_none}" if isinstance(or_none, str) else ""
    raise error(f"{name}: expected a whole number of at least {least}{other}, got {value!r}")
