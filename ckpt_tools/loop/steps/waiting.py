"""Waits for a store during outages, and logs the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from ckpt_tools.core.logs import log
from ckpt_tools.errors import PeerError, StorageError
from ckpt_tools.ranks.gloo import GlooGroup

T = TypeVar("T")
FIRST_WORD_S, NEXT_WORD_S = 5.0, 60.0
_LONGEST_PAUSE_S = 15.0


def with_hint(error: BaseException) -> str:
    """Returns an error with its hint on one line, for a log."""
    hint = getattr(error, "hint", None)
    return f"{error} (hint: {hint})" if hint else str(error)


def pause_of(attempt: int) -> float:
    """Returns the seconds to wait before the next try, after this many failures."""
    return float(min(2.0**attempt, _LONGEST_PAUSE_S))


def retry_outage(what: str, call: Callable[[], T], retry_s: float) -> T:
    """Calls a function, and retries it while the store cannot be reached.

    Args:
        what: names it in the log.
        call: the function.
        retry_s: seconds of retries after the first failure.

    Raises:
        StorageError: it failed for another reason, or for too long.
    """
    deadline = None
    for attempt in count():
        try:
            return call()
        except StorageError as error:
            deadline = deadline or time.monotonic() + retry_s
            left = deadline - time.monotonic()
            if not error.is_transient or left <= 0:
                raise
            log.warning("%s: %s; trying again for %.0f s", what, with_hint(error), left)
            time.sleep(min(pause_of(attempt), left))
    raise AssertionError


def is_outage(error: BaseException) -> bool:
    """Tells whether an error means that a store cannot be reached."""
    return isinstance(error, StorageError) and error.is_transient


def wait_for_thread(find: Callable[[], threading.Thread | None], what: str) -> None:
    """Waits until there is no thread any more; logs this after 5 s and then every minute.

    Args:
        find: returns the thread that works now, or None.
        what: names the work in the log: "a step to be mirrored to s3://bucket/run".
    """
    began, wait_s = time.monotonic(), FIRST_WORD_S
    while (thread := find()) is not None:
        thread.join(wait_s)
        if thread.is_alive():
            log.warning("waiting for %s, for %.0f s so far", what, time.monotonic() - began)
            wait_s = NEXT_WORD_S


def wait_for(running: Future[T], what: str) -> T:
    """Waits for a background task; logs this after 5 s and then every minute."""
    began, wait_s = time.monotonic(), FIRST_WORD_S
    while True:
        try:
            return running.result(wait_s)
        except TimeoutError:
            if running.done():
                return running.result()
            log.warning("waiting for %s, for %.0f s so far", what, time.monotonic() - began)
            wait_s = NEXT_WORD_S


def tries_again(
    group: GlooGroup, error: BaseException, deadline: float, what: str, num_tries: int
) -> bool:
    """Returns on all ranks whether to retry after an outage of the store, and waits before that.

    Args:
        group: all ranks; each has an error.
        error: the error of this rank.
        deadline: time of the monotonic clock after which there is no retry.
        what: names it in the log.
        num_tries: number of tries so far.
    """
    mine = is_outage(error)
    try:
        votes = [mine or isinstance(error, PeerError), mine, time.monotonic() < deadline]
        passing, outages, on_time = group.sum(votes, "decide whether to try again")
    except PeerError:
        return False
    if not outages or passing < group.size or on_time < group.size:
        return False
    if group.rank == 0:
        log.warning(
            "%s: %s; trying again for %.0f s", what, with_hint(error), deadline - time.monotonic()
        )
    time.sleep(pause_of(num_tries - 1))
    return True
