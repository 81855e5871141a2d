"""Bytes, and nothing but bytes: where they are kept and how they are read and written."""

from ckpt_tools.storage.base import Capabilities, Store, Writer, check_path, read, write_file
from ckpt_tools.storage.local import LocalStore
from ckpt_tools.storage.memory import MemoryStore

__all__ = ["Capabilities", "LocalStore", "MemoryStore", "Store", "Writer", "check_path", "read", "write_file"]
