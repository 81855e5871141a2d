"""Notes SIGTERM, SIGUSR1 and SIGUSR2 for training loops that ask for them.

One handler serves all managers of a process. If no loop asks for signals, or a second signal
arrives, the signal acts as it would without the handler. Imports nothing of the package.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckpt_tools.core.logs import log

NOTED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ASKS: dict[int, str] = {signal.SIGTERM: "preempted()", signal.SIGUSR1: "preempted()"}
_ASKS[signal.SIGUSR2] = "should_save()"
SAVE_NOW = signal.SIGUSR2  # a request for a save, as often as wanted
SAME_S = 1.0  # torchrun and Slurm both forward a signal: a second one so soon is a duplicate

_watches: list[SignalWatch] = []
_old: dict[int, Any] = {}
_first: dict[int, float] = {}


class SignalWatch:
    """The last signal that one manager has noted.

    Attributes:
        was_asked: whether the training loop has asked for signals yet.
        number: the last signal that was noted; 0 for none.
        is_polled: whether the training loop has asked for requests for a save yet.
        wants_save: whether such a request has come since.
    """

    def __init__(self) -> None:
        self.was_asked, self.number = False, 0
        self.is_polled, self.wants_save = False, False
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers, so signals act as usual
        if not _watches:
            _first.clear()
            _old.update({number: signal.signal(number, _handle) for number in NOTED})
        _watches.append(self)

    def take_request(self) -> bool:
        """Tells whether a request for a save has come since the last call."""
        self.is_polled, is_wanted = True, self.wants_save
        self.wants_save = False
        return is_wanted

    def stop(self) -> None:
        """Stops noting signals; the last watch restores the previous handlers."""
        if self not in _watches:
            return
        _watches.remove(self)
        if not _watches and threading.current_thread() is threading.main_thread():
            for number, handler in _old.items():
                if signal.getsignal(number) is _handle:
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            _old.clear()


def _handle(number: int, frame: FrameType | None) -> None:
    if number == SAVE_NOW and any(watch.is_polled for watch in _watches):
        for watch in _watches:
            watch.wants_save = True
        return
    name, now = signal.Signals(number).name, time.monotonic()
    if now - _first.get(number, -SAME_S) < SAME_S:
        return
    is_asked = number != SAVE_NOW and any(watch.was_asked for watch in _watches)
    is_second = number in _first
    _first[number] = now
    if is_second or not is_asked:
        log.warning(
            "got %s%s",
            name,
            (
                " again"
                if is_second
                else f", and the training loop does not call {_ASKS[number]}: it is not handled"
            ),
        )
        _handle_as_before(number, frame)
        return
    log.warning("got %s: preempted() tells the training loop; a second one is not handled", name)
    for watch in _watches:
        watch.number = number


def _after_fork() -> None:
    """Restores the previous handlers in a forked child, which has no manager."""
    for number, handler in _old.items():
        if signal.getsignal(number) is _handle:
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    _watches.clear()
    _old.clear()


os.register_at_fork(after_in_child=_after_fork)


def _handle_as_before(number: int, frame: FrameType | None) -> None:
    """Handles a signal as it would be handled without this module."""
    old: Callable[[int, FrameType | None], object] | int | None = _old.get(number)
    if callable(old):
        old(number, frame)
    elif old != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
