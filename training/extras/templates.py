"""Renders chat templates in a process of its own, with limits on memory and time.

A template comes with the tokenizer. It is a program, and its loops and products may have no end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import resource
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from training.config import ConfigError

SECONDS = 20.0  # for one chat
BYTES = 2 << 30  # beyond what this process has
_MAX_ANSWER_BYTES = 256 << 20
_DATA_LINE = "VmData:"


class Renderer:
    """A process that renders the chats of one tokenizer. It is started for the first chat."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ours: Connection | None = None
        self._process: Any = None

    def render(self, turns: Sequence[Mapping[str, Any]], tools: Any, is_open: bool) -> str:
        """Returns a chat as text.

        Args:
            turns: the turns.
            tools: that the assistant may call.
            is_open: end with the beginning of the assistant's next turn.

        Raises:
            ConfigError: the template fails, or takes too much memory or time.
        """
        if self._ours is None:
            self._start()
        assert self._ours is not None
        with contextlib.suppress(BrokenPipeError):
            self._ours.send((turns, tools, is_open))
        try:
            if not self._ours.poll(SECONDS):
                raise TimeoutError(f"it takes longer than {SECONDS:.0f} s")
            # JSON and no pickle: the template may be anybody's
            is_fine, text = json.loads(self._ours.recv_bytes(_MAX_ANSWER_BYTES))
        except (EOFError, OSError) as error:
            is_fine, text = False, str(error) or "its process was ended"
        if not is_fine:
            self.close()
            raise ConfigError(f"the chat template fails: {text}")
        return str(text)

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")  # the tokenizer is loaded already
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._tokenizer, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._ours = self._process = None


def _serve(tokenizer: Any, pipe: Connection) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent; Linux alone has this
    most = _data_nbytes() + BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while True:
        try:
            turns, tools, is_open = pipe.recv()
        except EOFError:
            return
        try:
            text = tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=is_open
            )
            answer = (True, text)
        except MemoryError:
            answer = (False, f"it needs more than {BYTES >> 30} GiB")
        except Exception as error:  # noqa: BLE001  # a template may raise anything
            answer = (False, " ".join(str(error).split())[:200] or type(error).__name__)
        pipe.send_bytes(json.dumps(answer).encode())


def _data_nbytes() -> int:
    """Returns the bytes that this process has for data; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return 1024 * next((int(x.split()[1]) for x in file if x.startswith(_DATA_LINE)), 0)
    return 0
