"""Memory of the process: pauses the garbage collector, and returns free memory to the system."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Turns off the cyclic garbage collector while very many objects are built.

    It would walk through all objects of the process again and again. With torch, one walk takes
    0.2 s.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def trimmer() -> Callable[[int], int] | None:
    """Returns the C library's `malloc_trim`, which gives free memory back; None if there is none.

    glibc keeps up to 64 MiB of what a process has freed. Python's own objects cannot use this
    memory, because they live elsewhere.
    """
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Gives free memory back. This takes about 5 ms for 64 MiB."""
    function = trimmer()
    if function is not None:
        function(0)
