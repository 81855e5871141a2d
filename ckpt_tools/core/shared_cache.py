"""Values that several threads need: each is made once, and the recent ones are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedCache(Generic[K, V]):
    """Values by key. While one thread makes a value, the others that want it wait."""

    def __init__(self, most_nbytes: int, least: int, nbytes_of: Callable[[V], int]) -> None:
        """Sets the bounds.

        Args:
            most_nbytes: of all values that are kept, unless they are few.
            least: so many values are kept at any size.
            nbytes_of: returns the bytes of a value.
        """
        self._most_nbytes, self._least, self._nbytes_of = most_nbytes, least, nbytes_of
        self._lock = threading.Lock()
        self._found: OrderedDict[K, V] = OrderedDict()
        self._busy: dict[K, threading.Lock] = {}
        self._nbytes = 0

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Returns the value of a key, and makes it if it is not kept. An error is not kept."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                if key in self._found:
                    return self._found[key]
            value = make()
            with self._lock:
                if key in self._found:  # made twice, since it had been dropped meanwhile
                    self._nbytes -= self._nbytes_of(self._found[key])
                self._found[key] = value
                self._nbytes += self._nbytes_of(value)
                self._busy.pop(key, None)
                while self._nbytes > self._most_nbytes and len(self._found) > self._least:
                    self._nbytes -= self._nbytes_of(self._found.popitem(last=False)[1])
        return value

    def find(self, key: K) -> V | None:
        """Returns the value of a key if it is kept, else None."""
        with self._lock:
            return self._found.get(key)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._found.clear()
            self._nbytes = 0
