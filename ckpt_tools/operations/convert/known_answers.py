"""Keeps what transformers has answered about a model, for the next command.

To ask takes some 4 s, most of it for imports. The answer depends on the question, on the model's
configuration, and on the installed packages; the name of its file is a hash of these. The files lie
in `$CKPT_CACHE`, else in `ckpt-tools` in the user's cache directory. An empty `CKPT_CACHE` turns
this off.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import StorageError
from ckpt_tools.storage import write_file
from ckpt_tools.storage.local import LocalStore

_NAME = re.compile(r"[0-9a-f]{64}\.json(?:\.[0-9a-f]{8})?")
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
        folder = _folder()
        installed = None if folder is None or names_other_files(config) else _installed()
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
            about = self._file.stat()
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
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
            mine = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
            there = sorted(mine, key=lambda path: path.stat().st_mtime)
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


def names_other_files(config: Mapping[str, Any]) -> bool:
    """Tells whether transformers may read another file of the directory in place of the config."""
    return "configuration_files" in config


def _installed() -> str | None:
    """Returns what tells the installed packages; None if that is not known.

    Of all packages, it is their release. A working copy of transformers has the same release after
    an edit, so of its files it is their places, sizes and times.
    """
    from hashlib import sha256
    from importlib.machinery import PathFinder

    # a child process asks, which imports nothing from the working directory
    places = [place for place in sys.path if place not in ("", os.getcwd())]
    spec = PathFinder.find_spec("transformers", places)
    roots = (spec.submodule_search_locations if spec is not None else None) or []
    try:
        files = sorted(found for root in roots for found in _files_below(root))
        releases = sorted(
            entry.name
            for place in places
            if os.path.isdir(place)
            for entry in os.scandir(place)
            if entry.name.endswith((".dist-info", ".egg-info", ".egg-link"))
        )
    except OSError:
        return None
    told = repr([sys.version, releases, files])
    return sha256(told.encode("utf-8", "surrogateescape")).hexdigest() if files else None


def _files_below(folder: str) -> Iterator[tuple[str, int, int, int]]:
    """Yields path, size and times of each Python file below a directory."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files_below(entry.path)
            elif entry.name.endswith(".py") and entry.is_file():
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns, about.st_ctime_ns
