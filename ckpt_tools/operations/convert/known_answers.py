"""Keeps what transformers has answered about a model, for the next command.

To ask takes some 4 s, most of it for imports. The answer depends on the question, on the model's
configuration, and on the installed packages; the name of its file is a hash of these. The files lie
in `$CKPT_CACHE`, else in `ckpt-tools` in the user's cache directory. An empty `CKPT_CACHE` turns
this off.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import StorageError
from ckpt_tools.storage import write_file
from ckpt_tools.storage.local import LocalStore

_PACKAGES = ("torch", "accelerate")  # whose release may matter; of transformers, each file does
_MOST = 64  # answers that are kept
_MAX_BYTES = 64 << 20


class KnownAnswer:
    """The file of the answer to one question."""

    def __init__(self, code: str, question: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Finds the file.

        Args:
            code: what is run to ask.
            question: without anything that the answer does not depend on.
            config: of the model.
        """
        self._file: Path | None = None
        folder, installed = _folder(), _installed()
        if folder is not None and installed is not None:
            from hashlib import sha256  # with OpenSSL: 3.5 MiB

            told = [code, question, config, installed]
            text = json.dumps(told, sort_keys=True, default=str)
            self._file = folder / f"{sha256(text.encode()).hexdigest()}.json"

    def read(self) -> Any:
        """Returns the answer; None if it is not known."""
        if self._file is None:
            return None
        try:
            if self._file.stat().st_size > _MAX_BYTES:
                return None
            crc, _, data = self._file.read_bytes().partition(b"\n")
            if crc.decode("ascii") != hex64(crc64nvme(data)):
                return None
            answer = json.loads(data)
            with suppress(OSError):
                os.utime(self._file)  # the oldest are removed
        except (OSError, ValueError, RecursionError):
            return None
        return answer

    def keep(self, answer: Any) -> None:
        """Keeps an answer, if the directory can be written to."""
        if self._file is None:
            return
        data, folder = json.dumps(answer).encode(), self._file.parent
        own = f"{self._file.name}.{os.urandom(4).hex()}"  # nobody reads half of a file
        with suppress(OSError, StorageError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = hex64(crc64nvme(data)).encode("ascii") + b"\n" + data
            write_file(LocalStore(folder), own, text)
            os.replace(folder / own, self._file)
            there = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in there[:-_MOST]:
                path.unlink(missing_ok=True)


def _folder() -> Path | None:
    chosen = os.environ.get("CKPT_CACHE")
    if chosen is not None:
        return Path(chosen) / "transformers" if chosen else None
    try:
        above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # there is no home
        return None
    return Path(above) / "ckpt-tools" / "transformers"


def _installed() -> list[object] | None:
    """Returns what tells the installed packages; None without transformers.

    A release number does not tell changes in a working copy, so sizes and times of all files do.
    """
    from importlib.metadata import version  # it imports what reads mails

    try:
        spec = importlib.util.find_spec("transformers")
        releases = [version(name) for name in _PACKAGES]
    except (ImportError, ValueError):
        return None
    places = (spec.submodule_search_locations if spec is not None else None) or []
    found = [stat for place in places for stat in _stats(place)]
    if not found:
        return None
    newest, size = max(time for time, _ in found), sum(size for _, size in found)
    return [sys.version, *releases, *places, len(found), newest, size]


def _stats(folder: str) -> Iterator[tuple[int, int]]:
    """Yields time and size of each Python file below a directory."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _stats(entry.path)
            elif entry.name.endswith(".py"):
                about = entry.stat()
                yield about.st_mtime_ns, about.st_size
