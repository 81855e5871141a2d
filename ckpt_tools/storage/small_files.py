"""Reads small files beside a checkpoint or named by the user, such as a config or a key map.

An untrusted directory may hold a device, a pipe or a huge file instead.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import read
from ckpt_tools.storage.local import LocalStore, failed

MAX_JSON_BYTES = 64 << 20


def read_named(path: str | os.PathLike[str], most: int = MAX_JSON_BYTES) -> bytes:
    """Returns the contents of a file that the user has named.

    It follows a link, but refuses a device, a pipe, a directory or a longer file.

    Args:
        path: a local path.
        most: largest number of bytes.

    Raises:
        StorageError: it is not such a file, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise failed("open", os.fspath(path), error) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"not a regular file: {printable(os.fspath(path))}")
        _check_size(found.st_size, most, os.fspath(path))
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(most + 1)[:most]
    except OSError as error:
        raise failed("read", os.fspath(path), error) from error
    finally:
        os.close(fd)


def read_beside(folder: str | os.PathLike[str], name: str, most: int = MAX_JSON_BYTES) -> bytes:
    """Returns the contents of a file in a directory; also refuses a link that leads out of it.

    Raises:
        StorageError: as for `read_named`.
    """
    store = LocalStore(Path(folder))
    try:
        _check_size(store.size(name), most, name)
        return read(store, name)
    finally:
        store.close()


def _check_size(nbytes: int, most: int, name: str) -> None:
    if nbytes > most:
        raise StorageError(
            f"a file is too long: expected at most {most} bytes, got {nbytes} ({printable(name)})"
        )


def parse_json(data: bytes | str) -> Any:
    """Returns the value of JSON text.

    Raises:
        ValueError: it is malformed, nested too deep, or has a key twice in one object.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {printable(counts.most_common(1)[0][0])!r} occurs twice")
    return table
