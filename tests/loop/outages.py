"""Stores that answer late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.servers.servers import Server


class Impatient(Server):
    """A server whose clients give up at once: what is tried again is tried by this package."""

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {
            "config_kwargs": {
                "retries": {"max_attempts": 0},
                "connect_timeout": 2,
                "read_timeout": 10,
            }
        }


def later(seconds: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer
