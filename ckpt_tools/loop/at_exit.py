"""Closes open managers when the process ends, while threads can still be started.

If one fails, the exit status is 1.

Imports nothing of the package.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable

from ckpt_tools.core.logs import log

_open: list[Callable[[], object]] = []
_failed: list[BaseException] = []


def register(close: Callable[[], object]) -> None:
    """Registers a function to call when the process ends. A forked child does not call it."""
    _open.append(close)


def unregister(close: Callable[[], object]) -> None:
    """Removes a function from the list of `register`."""
    if close in _open:
        _open.remove(close)


def _close_all() -> None:
    for close in _open.copy():  # a manager that is closed leaves the list
        try:
            close()
        except BaseException as error:  # noqa: BLE001  # reported by the exit status
            log.exception("the process ends, but its last save failed, or its last publication")
            _failed.append(error)


def _end() -> None:
    """Ends the process with status 1 if a function failed.

    It runs after handlers that were registered later. Python has no other way to set a status here.
    """
    if _failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_end)
# Executors accept no more work when `atexit` calls its handlers. So CPython's own executors use
# this hook, too.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_open.clear)
