"""Bytes fetched in advance from an object store: windows, and the margins around them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.storage.base import Data
from ckpt_tools.storage.ranges import Range, Window

if TYPE_CHECKING:
    from concurrent.futures import Future  # `ckpt inspect` starts no threads

MARGIN_BYTES, _MARGINS_BYTES = 4 << 10, 64 << 20


class Margins:
    """Fetched bytes around and between the announced ranges, up to a memory limit.

    In a packed format, these bytes frame the payloads. A later check needs them, without another
    request.
    """

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._nbytes, self._lock = 0, threading.Lock()

    def keep(self, window: Window, start: int, done: Future[Data]) -> None:
        """Keeps the holes of a window, each with a margin on both sides.

        The window was fetched from byte `start`.
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
        """Returns a range that was kept, else None."""
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
    """A range that is being fetched. `left` counts its announced bytes that were not read yet."""

    start: int
    nbytes: int
    left: int
    future: Future[Data]
