"""Closes open managers when the process ends, while threads can still be started. A failure becomes
the exit status.

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
    """Has something closed when the process ends, if `unregister` is not called before. A forked
    child closes nothing.
    """
    _open.append(close)


def unregister(close: Callable[[], object]) -> None:
    """Takes back `register`."""
    if close in _open:
        _open.remove(close)


def _close_all() -> None:
    for close in _open:
        try:
            close()
        except BaseException as error:  # noqa: BLE001  # told by the status
            log.exception("the process ends, and its last save is not there")
            _failed.append(error)


def _end() -> None:
    """Gives the process an exit status, after the handlers that were registered later: Python has
    no other way than at once.
    """
    if _failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_end)
# An executor takes no work any more when `atexit` calls its handlers; CPython's own executors use
# this, too.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_open.clear)
