"""The process of the command: its standard streams, its signals and its exit status."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

from ckpt_tools.cli.tables import RED, style
from ckpt_tools.core import ending
from ckpt_tools.errors import printable_lines, redacted
from ckpt_tools.ranks.base import is_launched, tell_launcher

EXIT_STATUS = """EXIT STATUS

0 fine · 1 error · 2 wrong usage · 10 not a checkpoint · 11 malformed or unsafe file ·
12 holes or overlaps · 13 the request does not fit · 14 damaged bytes ·
15 reading or writing failed · 16 another rank failed · 130 interrupted · 143 terminated"""


CUT = "the store did not answer in time, so unfinished work may be left; ckpt prune removes it"


_PATIENCE_S = 20.0  # for everything that follows a signal


def _end_at_last(number: int) -> None:
    """Makes sure that the process ends, also if the signal came at an unfortunate instant.

    The exception of a handler can leave a lock of Python's own held, such as that of a future. Then
    a thread never ends, and the process waits for it.
    """

    def end(*_: Any) -> NoReturn:
        text = "error: it did not end in time after the signal, so unfinished work may be left\n"
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(128 + number)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)


def terminated(number: int, frame: Any) -> NoReturn:
    """Ends the command after SIGTERM.

    A process of torchrun says nothing: torchrun ends the others if one has failed.
    """
    del frame
    ending.begin()
    _end_at_last(number)
    if is_launched(os.environ):
        raise SystemExit(128 + number)
    with suppress(RuntimeError):  # the signal came while something was printed
        fail("terminated by SIGTERM", None, 128 + number, "Terminated")
    raise SystemExit(128 + number)


def interrupted(number: int, frame: Any) -> NoReturn:
    """Ends the command after Ctrl-C."""
    del frame
    ending.begin()
    _end_at_last(number)
    raise KeyboardInterrupt


def prepare_streams() -> None:
    """Makes sure that the standard streams are open, and accept any text.

    The next opened file would get the number of a closed stream (`>&-`). Messages would then be
    written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # this takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # LC_ALL=C supports only ASCII
    if not os.environ.get("COLUMNS", "1").isdecimal() or int(os.environ.get("COLUMNS", "1")) < 1:
        del os.environ["COLUMNS"]


def report_ignored(ignored: Any) -> None:
    """Prints an error in another package's `__del__` as one line: a traceback may hold secrets."""
    where = getattr(ignored.object, "__qualname__", type(ignored.object).__qualname__)
    text = f"{where}: {type(ignored.exc_value).__name__}: {ignored.exc_value}"
    with suppress(OSError, ValueError):
        print(f"ignored: {printable_lines(redacted(text))}", file=sys.stderr)


def print_json(message: str, hint: str | None, code: int, kind: str) -> None:
    """Prints an error as JSON on stdout, if the command was called with --json."""
    if "--json" in sys.argv[1:]:
        with suppress(OSError):  # stdout may be what failed
            print(json.dumps({"error": kind, "message": message, "hint": hint, "exit_code": code}))
            sys.stdout.flush()


def fail(message: str, hint: str | None, code: int, kind: str = "") -> NoReturn:
    if kind:
        print_json(message, hint, code, kind)
    print(f"{style('error:', RED, sys.stderr)} {printable_lines(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable_lines(hint)}", file=sys.stderr)
    if is_launched(os.environ):
        advice = f"; hint: {printable_lines(hint)}" if hint else ""
        tell_launcher(printable_lines(message) + advice)
    raise SystemExit(code)


def leave(code: Any) -> NoReturn:
    """Ends the process after a signal, without its threads, which may wait for a store.

    A signal can come while a `with` statement is entered: after the context manager has made
    something, and before Python knows that it has to leave it. Only its frame knows then.
    Collecting that frame lets it clean up. `_end_at_last` bounds the time of that, too.
    """
    gc.collect()
    if ending.is_cut and code == 128 + signal.SIGTERM:  # the message came before the cleaning
        with suppress(OSError, ValueError):
            print(f"hint: {CUT}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def drop_output() -> None:
    """Points stdout to /dev/null: the flush at exit would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
