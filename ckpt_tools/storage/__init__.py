"""Stores: read and write files of bytes, on disks, in memory and in object stores."""

from ckpt_tools.storage.base import (
    Capabilities,
    Store,
    WritableStore,
    Writer,
    check_path,
    check_url,
    is_url,
    local_path,
    read,
    write_file,
)
from ckpt_tools.storage.local import LocalStore, SharedStore
from ckpt_tools.storage.memory import MemoryStore
from ckpt_tools.storage.overlay import Overlay
from ckpt_tools.storage.remote import RemoteStore

__all__ = [
    "Capabilities",
    "LocalStore",
    "MemoryStore",
    "Overlay",
    "RemoteStore",
    "SharedStore",
    "Store",
    "WritableStore",
    "Writer",
    "check_path",
    "check_url",
    "is_url",
    "local_path",
    "read",
    "write_file",
]
