"""Stores: read and write files of bytes, on disks, in memory and in object stores."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_tools.storage.base import (
    Capabilities,
    Store,
    WritableStore,
    Writer,
    check_path,
    check_url,
    is_url,
    local_path,
    place_of,
    read,
    write_file,
)
from ckpt_tools.storage.local import LocalStore, PinnedStore
from ckpt_tools.storage.memory import MemoryStore, NoStore
from ckpt_tools.storage.overlay import Overlay

if TYPE_CHECKING:
    from ckpt_tools.storage.remote import RemoteStore

__all__ = [
    "Capabilities",
    "LocalStore",
    "MemoryStore",
    "NoStore",
    "Overlay",
    "PinnedStore",
    "RemoteStore",
    "Store",
    "WritableStore",
    "Writer",
    "check_path",
    "check_url",
    "is_url",
    "local_path",
    "open_store",
    "place_of",
    "read",
    "write_file",
]


def open_store(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """Returns the store of a directory or of a URL.

    Args:
        path: a path or a URL.
        options: of the object store, as fsspec takes them. A directory ignores them.

    Raises:
        StorageError: the URL cannot be opened.
    """
    where = os.fspath(path)
    if not is_url(where):
        return LocalStore(local_path(where))
    from ckpt_tools.storage.remote import RemoteStore

    return RemoteStore(where, options)


def __getattr__(name: str) -> object:
    """Imports the store of object stores at its first use: it takes longer than most commands."""
    if name != "RemoteStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckpt_tools.storage.remote import RemoteStore

    return RemoteStore
