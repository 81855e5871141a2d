"""A store with additional files in memory.

These files hold values from metadata, or act as files beside the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.storage.base import Store
from ckpt_tools.storage.memory import MemoryStore


class Overlay:
    """The inner store with files in memory over it. They are listed only with `is_listed`."""

    def __init__(self, inner: Store, files: Mapping[str, bytes], is_listed: bool = False) -> None:
        self.inner, self._memory = inner, MemoryStore(files, inner.url)
        self.url, self.capabilities, self.traffic = inner.url, inner.capabilities, inner.traffic
        self._listed = {name: len(data) for name, data in files.items()} if is_listed else {}
        self.folders, self.enter = inner.folders, inner.enter
        self.strays, self.blob_name = inner.strays, inner.blob_name
        self.stored_crcs = inner.stored_crcs
        self.create, self.close = inner.create, inner.close

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        return (
            {**self.inner.list_files(below), **self._listed}
            if self._listed
            else self.inner.list_files(below)
        )

    def size(self, path: str) -> int:
        return self._of(path).size(path)

    def version(self, path: str) -> str:
        return self._of(path).version(path)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._of(path).read_into(path, start, buffer)

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        return self._of(path).view(path, start, nbytes)

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        self.inner.will_read((r for r in ranges if r[0] not in self._memory.files), is_all)

    def _of(self, path: str) -> Store:
        return self._memory if path in self._memory.files else self.inner
