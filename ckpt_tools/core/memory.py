"""Returns free memory to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def trimmer() -> Callable[[int], int] | None:
    """Returns the C library's function that gives its free memory back; None if it has none.

    glibc keeps up to 64 MiB of what a process has freed. Python's own objects cannot use this
    memory, because they live elsewhere.
    """
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Gives free memory back. This takes about 5 ms for 64 MiB."""
    function = trimmer()
    if function is not None:
        function(0)
