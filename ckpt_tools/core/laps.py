"""Measures how long each phase of a work takes."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Laps:
    """A clock that notes the seconds of one phase after the other.

    Attributes:
        seconds: by the phase's name, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        """Ends a phase, which began when the one before ended."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._at
        self._at = now


def format_laps(seconds: Mapping[str, float]) -> str:
    """Returns the phases for a message: `collect 0.01 s, copy 0.20 s`."""
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
