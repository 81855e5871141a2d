"""Limits of what a background save takes from the training beside it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Limits of the writer of background saves, on each rank.

    Attributes:
        jobs: its threads.
        max_mbps: megabytes per second, until the loop waits for the save; no limit if None.
    """

    jobs: int
    max_mbps: float | None = None

    def throttle(self, is_waited_for: threading.Event) -> Throttle | None:
        """Returns a throttle for one save; None if there is no limit."""
        return None if self.max_mbps is None else Throttle(self.max_mbps * 1e6, is_waited_for)


class Throttle:
    """Lets threads pass so many bytes per second, all together, until it is lifted."""

    def __init__(self, bytes_per_s: float, is_lifted: threading.Event) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, time.monotonic()
        self._is_lifted, self._lock = is_lifted, threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Waits until these bytes, which a thread has written, are within the limit, or no more."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            wait_s = self._free_at - now
        self._is_lifted.wait(wait_s)
