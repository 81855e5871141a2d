"""Keeps small objects in memory while an operation runs: indexes and notes, such as manifests.

An operation on a run looks at each step more than once. An object of a known version cannot change,
so one request is enough. Data files are never kept: their bytes must come from the store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_BYTES, _ONE_BYTES = 32 << 20, 4 << 20

Version = tuple[str, str]  # URL and ETag


class KeptObjects:
    """Objects by version, the newest ones up to a number of bytes. Threads may share it."""

    def __init__(self) -> None:
        """Begins without objects."""
        self._lock, self._nbytes, self._num_users = threading.Lock(), 0, 0
        self._objects: OrderedDict[Version, bytes] = OrderedDict()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Returns a context in which objects are kept. Outside of any, none are."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = not self._num_users
            if is_last:
                self.forget("")

    def get(self, version: Version) -> bytes | None:
        """Returns an object; None if it is not kept."""
        with self._lock:
            if (data := self._objects.get(version)) is not None:
                self._objects.move_to_end(version)
            return data

    def put(self, version: Version, data: bytes) -> None:
        """Keeps an object that is not too long, and lets go of the oldest ones."""
        if len(data) > _ONE_BYTES or not self._num_users:
            return
        with self._lock:
            self._nbytes += len(data) - len(self._objects.pop(version, b""))
            self._objects[version] = data
            while self._nbytes > _MOST_BYTES:
                self._nbytes -= len(self._objects.popitem(last=False)[1])

    def forget(self, folder: str) -> None:
        """Lets go of the objects in a folder, whose bytes were wrong on the way; of all for ""."""
        with self._lock:
            for version in [v for v in self._objects if v[0].startswith(folder)]:
                self._nbytes -= len(self._objects.pop(version))


KEPT = KeptObjects()
