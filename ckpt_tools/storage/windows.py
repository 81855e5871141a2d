"""What was fetched ahead of an object store: windows that wait to be read, and the margins around
and between them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from concurrent.futures import Future
from dataclasses import dataclass

from ckpt_tools.storage.base import Data
from ckpt_tools.storage.ranges import Range, Window

MARGIN_BYTES, _MARGINS_BYTES = 4 << 10, 64 << 20


class Margins:
    """What was fetched around and between the ranges that were asked for, as far as there is room.

    In a packed format that is what frames the payloads: to be proved later without asking for it
    again.
    """

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._nbytes, self._lock = 0, threading.Lock()

    def keep(self, window: Window, start: int, done: Future[Data]) -> None:
        """Keeps the holes of a window that was fetched from byte `start`, each with a margin on
        both sides.
        """
        if done.cancelled() or done.exception() is not None or self._nbytes > _MARGINS_BYTES:
            return
        data, end = done.result(), start
        for item in (*window.ranges, Range(window.file, start + len(done.result()), 0, 0)):
            if item.start > end:
                first, last = (
                    max(start, end - MARGIN_BYTES),
                    min(start + len(data), item.start + MARGIN_BYTES),
                )
                self._add(window.file, first, bytes(data[first - start : last - start]))
            end = max(end, item.start + item.nbytes)

    def _add(self, path: str, start: int, data: bytes) -> None:
        with self._lock:
            starts, parts = self._starts.setdefault(path, []), self._parts.setdefault(path, [])
            at = bisect_right(starts, start)
            starts.insert(at, start)
            parts.insert(at, data)
            self._nbytes += len(data)

    def find(self, path: str, start: int, nbytes: int) -> bytes | None:
        """Returns a range that was kept."""
        with self._lock:
            at = bisect_right(self._starts.get(path, []), start) - 1
            if at < 0:
                return None
            first, data = self._starts[path][at], self._parts[path][at]
            return (
                data[start - first : start - first + nbytes]
                if start + nbytes <= first + len(data)
                else None
            )


@dataclass
class FetchedRange:
    """A range that is being fetched, and how many of its announced bytes nobody has read yet."""

    start: int
    nbytes: int
    left: int
    future: Future[Data]
