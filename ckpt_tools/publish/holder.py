"""The process that holds a root, as its lock or lease names it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tools.errors import StorageError, printable


def own_holder() -> dict[str, Any]:
    """Returns this process as a holder."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "boot": _boot(),
        "started": _started(os.getpid()),
    }


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> str:
    """Returns when a process started, in the kernel's units; "" if there is no such process."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def is_own(holder: Mapping[str, Any]) -> bool:
    me = own_holder()
    return all(holder.get(key) == me[key] for key in ("host", "pid", "boot", "started"))


def held_by_another(root: str, holder: Mapping[str, Any], text: str) -> StorageError:
    if is_own(holder):
        return StorageError(
            f"this process has another manager open on {printable(root)}, or copies to it, since"
            f" {printable(str(holder.get('since')))}",
            hint=(
                "call close() on it first; a notebook cell that makes a manager should close the"
                " one before"
            ),
        )
    if is_holder_alive(holder) is False:
        text = f"unknown; the last one that its lock names has ended ({text})"
    return StorageError(
        f"another job writes to {printable(root)}: {text or 'unknown'}",
        hint="give each job a root of its own, or end that job first",
    )


def parse_holder(data: bytes) -> tuple[dict[str, Any], str]:
    """Returns the holder that a lock names, and the same as text for people."""
    text = printable(data.decode("utf-8", "replace").strip())
    with suppress(ValueError, RecursionError):
        holder = json.loads(data)
        if isinstance(holder, dict):
            shown = ", ".join(
                f"{key} {printable(str(holder[key]))}"
                for key in ("host", "pid", "since")
                if key in holder
            )
            return holder, shown or text
    return {}, text


def is_holder_alive(holder: Mapping[str, Any]) -> bool | None:
    """Tells whether the process that holds a lease is alive; None if it ran on another machine."""
    if (
        not holder.get("boot")
        or holder.get("boot") != _boot()
        or holder.get("host") != socket.gethostname()
    ):
        return None
    pid = holder.get("pid")
    return _started(pid if type(pid) is int else 0) == holder.get("started")
