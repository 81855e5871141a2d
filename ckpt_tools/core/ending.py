"""What a signal changes: nobody waits for a store any more, so that the process ends soon.

The command calls `begin` from its signal handlers. Nothing here happens in a training job.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools.errors import StorageError

if TYPE_CHECKING:
    from concurrent.futures import Future  # `ckpt inspect` starts no threads

T = TypeVar("T")

_POLL_S = 0.1
_CLEANING_S = 1.2  # for requests that remove what this process has written
_LAST_WORD_S = 0.5  # to tell other processes; the rest of that time is for cleaning
_began: float | None = None
is_cut = False  # whether the time to clean up was too short
is_published = False  # whether a result of this process is complete at its destination


def begin() -> None:
    """Notes that a signal has come. Waits that have begun end now."""
    global _began  # one process ends once
    _began = _began or time.monotonic()


def has_begun() -> bool:
    """Tells whether a signal has come."""
    return _began is not None


def cut() -> None:
    """Notes that some work could not be cleaned up."""
    global is_cut
    is_cut = True


def published() -> None:
    """Notes that a result is complete at its destination."""
    global is_published
    is_published = True


def refuse_wait(is_cleaning: bool = True, is_last_word: bool = False) -> None:
    """Refuses to wait any longer for a store, if a signal has come.

    Args:
        is_cleaning: the wait began after the signal. Then it has a little time.
        is_last_word: it is a message to other processes: it has less time, and nothing is left if
            it is not sent.

    Raises:
        StorageError: the wait has to end.
    """
    most_s = _LAST_WORD_S if is_last_word else _CLEANING_S
    if _began is None or (is_cleaning and time.monotonic() - _began < most_s):
        return
    if is_cleaning and not is_last_word:
        cut()
    raise StorageError("the process ends, and waits for no store")


def result(work: Future[T], keeps: bool = False, is_last_word: bool = False) -> T:
    """Waits for a request, and returns its result.

    Args:
        work: the request. It is cancelled if nobody waits for it any more.
        keeps: do not cancel it, because the cleaning needs its result.
        is_last_word: as for `refuse_wait`.

    Raises:
        StorageError: a signal came meanwhile; or it had come before, and the time to clean up is
            over.
    """
    is_cleaning = has_begun()
    while True:
        try:
            return work.result(_POLL_S)
        except TimeoutError:
            if work.done():
                return work.result()
            try:
                refuse_wait(is_cleaning, is_last_word)
            except StorageError:
                if not keeps:
                    work.cancel()
                raise
