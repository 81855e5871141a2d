"""The names of the directories of steps."""

from __future__ import annotations

import re

# the names under which a run may save; the first one is our own
STEP_PATTERNS = ("step-{:08d}", "step-{}", "checkpoint-{}", "global_step_{}")
STEP = re.compile(r"(?:step|checkpoint|global_step|epoch)[-_]?([0-9]{1,18})")


def is_step_name(name: str) -> bool:
    """Tells whether a folder of that name is a step of a run."""
    return STEP.fullmatch(name) is not None


def number_in(name: str) -> int | None:
    """Returns the number in the name of a step's directory; None for any other name."""
    found = STEP.fullmatch(name)
    return int(found[1]) if found else None


def step_name(number: int, pattern: str = STEP_PATTERNS[0]) -> str:
    """Returns the name of a step's directory.

    Args:
        number: of the step.
        pattern: one of `STEP_PATTERNS`.
    """
    return pattern.format(number)
