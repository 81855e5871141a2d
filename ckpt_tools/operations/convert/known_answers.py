"""Keeps the answers of transformers about a model, for this process and for the next command.

To ask takes some 4 s, most of it for imports. The answer depends on the question, on the model's
configuration, and on the installed packages; the name of its file is a hash of these. The files lie
in `$CKPT_CACHE`, else in `ckpt-tools` in the user's cache directory. With an empty `CKPT_CACHE`,
there are none.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import StorageError
from ckpt_tools.storage import write_file
from ckpt_tools.storage.local import LocalStore

_NAME = re.compile(r"[0-9a-f]{64}\.json(?:\.[0-9a-f]{8})?")
_MOST, _MOST_TOLD = 64, 4  # answers that are kept in files, and in this process
_MAX_BYTES = 64 << 20


_told: dict[str, Any] = {}  # in this process, the newest last: a job that publishes asks again


class KnownAnswer:
    """The answer to one question, if it has been given before."""

    def __init__(self, code: str, question: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Takes the question.

        Args:
            code: asks the question.
            question: all that the answer depends on, but for the config.
            config: of the model. An answer is not kept if it names other files.
        """
        self._key = ""
        if "configuration_files" not in config:  # transformers may read one of these instead
            self._key = _hash([code, question, config])

    def read(self) -> Any:
        """Returns the answer; None if it is not known."""
        if self._key in _told:
            return _told[self._key]
        file = self._file
        if file is None:
            return None
        try:
            about = file.stat()
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
                return None
            crc, _, data = file.read_bytes().partition(b"\n")
            if crc.decode("ascii") != hex64(crc64nvme(data)):
                return None
            answer = json.loads(data)
            with suppress(OSError):
                os.utime(file)  # the oldest are removed
        except (OSError, ValueError, RecursionError):
            return None
        self._remember(answer)
        return answer

    def keep(self, answer: Any) -> None:
        """Keeps an answer; in a file, if the directory can be written to."""
        if not self._key:
            return
        self._remember(answer)
        file = self._file
        if file is None:
            return
        data, folder = json.dumps(answer).encode(), file.parent
        own = f"{file.name}.{os.urandom(4).hex()}"  # nobody reads half of a file
        with suppress(OSError, StorageError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = hex64(crc64nvme(data)).encode("ascii") + b"\n" + data
            write_file(LocalStore(folder), own, text)
            os.replace(folder / own, file)
            mine = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
            there = sorted(mine, key=lambda path: path.stat().st_mtime)
            for path in there[:-_MOST]:
                path.unlink(missing_ok=True)

    def _remember(self, answer: Any) -> None:
        while len(_told) >= _MOST_TOLD:
            _told.pop(next(iter(_told)), None)
        _told[self._key] = answer

    @cached_property
    def _file(self) -> Path | None:
        """Returns the file; None if there can be none."""
        folder = _folder() if self._key else None
        installed = None if folder is None else _installed()
        if folder is None or installed is None:
            return None
        return folder / f"{_hash([self._key, installed])}.json"


def _hash(told: object) -> str:
    from hashlib import sha256  # with OpenSSL: 3.5 MiB

    text = json.dumps(told, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


def _folder() -> Path | None:
    chosen = os.environ.get("CKPT_CACHE")
    if chosen is not None:
        return Path(chosen) / "transformers" if chosen else None
    try:
        above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # there is no home
        return None
    return Path(above) / "ckpt-tools" / "transformers"


def _installed() -> list[Any] | None:
    """Returns facts that tell the installed packages; None if they are not known.

    Of all packages, it is their release. A working copy of transformers has the same release after
    an edit, so of its files it is their places, sizes and times.
    """
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
    return [sys.version, releases, files] if files else None


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
