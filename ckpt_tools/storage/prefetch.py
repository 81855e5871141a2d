"""Fetches announced ranges in advance, in windows, in parallel and within a memory budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from ckpt_tools.storage.base import Data
from ckpt_tools.storage.ranges import Range, Window, coalesce
from ckpt_tools.storage.windows import MARGIN_BYTES, FetchedRange, Margins

GAP_BYTES = 256 << 10  # fetching a hole of this size is cheaper than a second request
WINDOW_BYTES = 8 << 20
# limits in bytes: of running requests; of these and of windows that wait to be read
ROOMY, FRUGAL = (96 << 20, 128 << 20), (56 << 20, 72 << 20)
# when so few windows are left, they are split into requests of this size or more, so that no
# connection is idle
_LAST, _LAST_BYTES = 16, 2 << 20
_BATCH_BYTES, _BATCH = 32 << 20, 1024  # announced bytes and ranges that are planned together


class Prefetcher:
    """The windows of one store, and the margins around them."""

    def __init__(
        self,
        fetch: Callable[[str, int, int], Future[Data]],
        size: Callable[[str], int],
        bounds: tuple[int, int] = ROOMY,
    ) -> None:
        """Stores the functions and bounds.

        Args:
            fetch: starts to fetch a range of a file.
            size: returns the size of an announced file.
            bounds: the limits in bytes, such as `ROOMY`.
        """
        self._fetch, self._size = fetch, size
        self._most_coming, self._most = bounds
        self._lock = threading.RLock()  # reentrant: a fetch may complete at once, in this thread
        self.windows: OrderedDict[tuple[str, int, int], FetchedRange] = OrderedDict()
        self.margins = Margins()
        self.announced: list[Range] = []
        self._announced_nbytes = self._coming_nbytes = self._num_coming = 0
        self._waiting: list[Window] = []
        self._is_all = False

    def announce(self, ranges: Iterable[tuple[str, int, int]], is_all: bool) -> None:
        """Queues ranges that will be read soon; `is_all` means that no more will follow."""
        with self._lock:
            self._is_all = is_all
            for file, start, nbytes in (r for r in ranges if self.margins.find(*r) is None):
                self.announced.append(Range(file, start, nbytes, 0))
                self._announced_nbytes += nbytes
            if is_all or self._announced_nbytes >= _BATCH_BYTES or len(self.announced) >= _BATCH:
                self._start()

    def take(self, path: str, start: int, nbytes: int) -> FetchedRange | None:
        """Returns the window of a range; None if the range was not announced.

        The window is released when its last byte is taken.
        """
        with self._lock:
            found = self._find(path, start, nbytes)
            if found is None and any(
                r.file == path and r.start <= start < r.start + r.nbytes for r in self.announced
            ):
                self._start()
                found = self._find(path, start, nbytes)
            if (
                found is None
                and (
                    late := next(
                        (w for w in self._waiting if _covers(w, path, start, nbytes)), None
                    )
                )
                is not None
            ):
                self._waiting.remove(late)
                if self._is_full():
                    # drop the oldest window, which was not read yet
                    self.windows.popitem(last=False)[1].future.cancel()
                self._begin(late)
                found = self._find(path, start, nbytes)
            if (
                found is not None
                and not found.future.done()
                and self._announced_nbytes >= WINDOW_BYTES
            ):
                self._start()  # the reader waits already: do not wait for a full batch as well
            return found

    def close(self) -> None:
        """Cancels all requests and releases all windows."""
        with self._lock:
            self.announced.clear()
            self._waiting.clear()
            self.margins = Margins()
            while self.windows:
                self.windows.popitem()[1].future.cancel()

    def _start(self) -> None:
        """Starts to fetch the announced ranges.

        The more ranges start together, the more neighbours share one request.
        """
        ranges, self.announced, self._announced_nbytes = self.announced, [], 0
        self._waiting += coalesce((r for r in ranges if r.nbytes), GAP_BYTES, WINDOW_BYTES)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Starts windows while there is room. Holes count, so some announced ranges may wait.

        Running requests use less than the whole budget. So windows that wait to be read do not keep
        connections idle.
        """
        while self._waiting and self._coming_nbytes < self._most_coming and not self._is_full():
            self._begin(self._waiting.pop(0))

    def _is_full(self) -> bool:
        return sum(w.nbytes for w in self.windows.values()) >= self._most

    def _begin(self, window: Window) -> None:
        start = max(0, window.start - MARGIN_BYTES)
        nbytes = min(window.start + window.nbytes + MARGIN_BYTES, self._size(window.file)) - start
        if (window.file, start, nbytes) not in self.windows and nbytes > 0:
            is_last = self._is_all and len(self._waiting) + self._num_coming < _LAST
            future = (
                self._fetch_in_pieces(window.file, start, nbytes)
                if is_last
                else self._fetch(window.file, start, nbytes)
            )
            self.windows[window.file, start, nbytes] = FetchedRange(
                start, nbytes, sum(r.nbytes for r in window.ranges), future
            )
            self._coming_nbytes += nbytes
            self._num_coming += 1
            future.add_done_callback(partial(self.margins.keep, window, start))
            future.add_done_callback(partial(self._arrived, nbytes))

    def _fetch_in_pieces(self, path: str, start: int, nbytes: int) -> Future[Data]:
        """Fetches a range with several parallel requests."""
        step = -(-nbytes // max(1, nbytes // _LAST_BYTES))
        parts = [
            self._fetch(path, start + at, min(step, nbytes - at)) for at in range(0, nbytes, step)
        ]
        return parts[0] if len(parts) == 1 else _together(parts)

    def _arrived(self, nbytes: int, done: Future[Data]) -> None:
        del done
        with self._lock:
            self._coming_nbytes -= nbytes
            self._num_coming -= 1
            self._begin_waiting()

    def _find(self, path: str, start: int, nbytes: int) -> FetchedRange | None:
        for key, window in self.windows.items():
            if key[0] == path and key[1] <= start and start + nbytes <= key[1] + key[2]:
                window.left -= nbytes
                if window.left <= 0:
                    del self.windows[key]
                    self._begin_waiting()
                return window
        return None


def _together(parts: list[Future[Data]]) -> Future[Data]:
    """Returns a future with the bytes of all parts, or the error of one of them."""
    whole: Future[Data] = Future()
    left, lock = [len(parts)], threading.Lock()

    def arrived(done: Future[Data]) -> None:
        del done
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if not is_last:
            return
        try:
            if whole.set_running_or_notify_cancel():
                whole.set_result(b"".join([part.result() for part in parts]))
        except BaseException as error:  # noqa: BLE001  # the reader of the future gets it
            whole.set_exception(error)
        parts.clear()  # breaks a reference cycle: the parts refer to this function

    for part in parts:
        part.add_done_callback(arrived)
    return whole


def _covers(window: Window, path: str, start: int, nbytes: int) -> bool:
    return (
        window.file == path
        and window.start <= start
        and start + nbytes <= window.start + window.nbytes
    )
