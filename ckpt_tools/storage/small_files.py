"""Small files beside a checkpoint, and those that a person names: a config, a key map, a list of
names.

Whoever made a directory may have put a device, a pipe or a giant there.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import read
from ckpt_tools.storage.local import LocalStore, failed

MAX_JSON_BYTES = 64 << 20


def read_named(path: str | os.PathLike[str], most: int = MAX_JSON_BYTES) -> bytes:
    """Returns a file that a person has named. A link is followed; a device, a pipe, a directory or
    a longer file is refused.

    Args:
        path: of the local file system.
        most: bytes that it may have.

    Raises:
        StorageError: it is another thing than such a file, or cannot be read.
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
    """Returns a file of a directory. A link that leads out of the directory is refused too.

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


def parse_json(data: bytes) -> Any:
    """Returns what JSON says.

    Raises:
        ValueError: it is malformed, or nested too deep.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
