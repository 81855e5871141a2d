"""Limits of what a background save takes from the training beside it."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass

_MAX_NICE = 19


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Limits of the writer of background saves, on each rank.

    Attributes:
        jobs: its threads.
        nice: niceness that its threads get, unless they have a higher one. On Linux, each thread
            has its own.
        max_mbps: megabytes per second, until the loop waits for the save; no limit if None.
    """

    jobs: int
    nice: int = 0
    max_mbps: float | None = None

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        if type(self.nice) is not int or not 0 <= self.nice <= _MAX_NICE:
            raise ValueError(f"writer_nice: expected 0 to {_MAX_NICE}, got {self.nice!r}")
        limit = 1 if self.max_mbps is None else self.max_mbps
        if type(limit) not in (int, float) or not 0 < limit < math.inf:
            raise ValueError(f"max_mbps: expected a number above 0, got {self.max_mbps!r}")

    def lower_priority(self) -> None:
        """Lowers the priority of this thread, and of the threads that it starts from now on."""
        if not self.nice:
            return
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < self.nice:
            os.setpriority(os.PRIO_PROCESS, thread, self.nice)

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
