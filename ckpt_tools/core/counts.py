"""Checks the counts that a user gives."""

from __future__ import annotations


def check_count(
    name: str,
    value: object,
    error: type[Exception],
    least: int = 1,
    none: str | None = None,
) -> None:
    """Refuses what is no whole number, or too small.

    Args:
        name: of the option.
        value: what the user gave.
        error: the class to raise.
        least: the smallest number.
        none: the meaning of None, such as "to keep all steps"; None is refused without one.

    Raises:
        Exception: of class `error`.
    """
    if (value is None and none is not None) or (type(value) is int and value >= least):
        return
    other = f", or None {none}" if none else ""
    raise error(f"{name}: expected a whole number of at least {least}{other}, got {value!r}")
