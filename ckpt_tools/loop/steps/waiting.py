"""Waits for a store during outages, and logs the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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


class Outage:
    """The retries of one operation while the store cannot be reached.

    The time counts from the first failure: a long save may have worked for an hour before it.
    """

    def __init__(self, retry_s: float) -> None:
        """Stores the seconds of retries after the first failure."""
        self._retry_s, self._deadline, self._num_tries = retry_s, float("inf"), 0

    @property
    def left_s(self) -> float:
        """Returns the seconds in which a further try may begin."""
        return max(0.0, min(self._retry_s, self._deadline - time.monotonic()))

    def _begin(self) -> None:
        """Notes a failure."""
        self._num_tries += 1
        self._deadline = min(self._deadline, time.monotonic() + self._retry_s)

    def waits(self, error: StorageError, what: str) -> bool:
        """Waits before the next try of this process alone; returns whether there is one.

        Args:
            error: of the try that has failed.
            what: names it in the log.
        """
        self._begin()
        if not error.is_transient or not (left := self.left_s):
            return False
        log.warning("%s: %s; trying again for %.0f s", what, with_hint(error), left)
        time.sleep(min(pause_of(self._num_tries - 1), left))
        return True

    def tries_again(self, group: GlooGroup, error: BaseException, what: str) -> bool:
        """Returns on all ranks whether to retry after an outage of the store, and waits before.

        Args:
            group: all ranks; each has an error.
            error: the error of this rank.
            what: names it in the log.
        """
        self._begin()
        mine = is_outage(error)
        try:
            votes = [mine or isinstance(error, PeerError), mine, self.left_s > 0]
            passing, outages, on_time = group.sum(votes, "decide whether to try again")
        except PeerError:
            return False
        if not outages or passing < group.size or on_time < group.size:
            return False
        if group.rank == 0:
            text = with_hint(error)
            log.warning("%s: %s; trying again for %.0f s", what, text, self.left_s)
        time.sleep(pause_of(self._num_tries - 1))
        return True


def retry_outage(what: str, call: Callable[[], T], retry_s: float) -> T:
    """Calls a function, and retries it while the store cannot be reached.

    Args:
        what: names it in the log.
        call: the function.
        retry_s: seconds of retries after the first failure.

    Raises:
        StorageError: it failed for another reason, or for too long.
    """
    outage = Outage(retry_s)
    while True:
        try:
            return call()
        except StorageError as error:
            if not outage.waits(error, what):
                raise


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


def wait_for(running: Future[T], what: str, logs: bool = True) -> T:
    """Waits for a background task; logs this, if it may, after 5 s and then every minute."""
    began, wait_s = time.monotonic(), FIRST_WORD_S
    while True:
        try:
            return running.result(wait_s)
        except TimeoutError:
            if running.done():
                return running.result()
            if logs:
                log.warning("waiting for %s, for %.0f s so far", what, time.monotonic() - began)
            wait_s = NEXT_WORD_S
