"""Writes files so that a reader finds the old one or the new one, and never through a link."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TextIO


def replace_file(path: Path, data: str | bytes) -> None:
    """Writes a file in place of the one that is there. A link is replaced, and not followed."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with half.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def open_to_append(path: Path) -> TextIO:
    """Opens a text file to add lines at its end.

    Raises:
        OSError: it is a link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
