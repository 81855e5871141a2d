"""Stores that show another store differently: one file of a folder, or more files over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.storage.base import Store
from ckpt_tools.storage.overlay import Overlay


class OneFile:
    """A store that shows one file of a directory, for a source given as a file.

    `shown` is the name that readers see: that of a signed URL is without its query.
    """

    def __init__(self, inner: Store, name: str, url: str, shown: str = "") -> None:
        self.inner, self.url, self._real = inner, url, name
        self.name = shown or name
        self.capabilities, self.traffic = inner.capabilities, inner.traffic
        self.folders, self.enter, self.create, self.close = (
            inner.folders,
            inner.enter,
            inner.create,
            inner.close,
        )
        self.strays, self.blob_name = inner.strays, inner.blob_name
        self.stored_crcs = inner.stored_crcs

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        del below
        return {self.name: self.inner.size(self._real)}

    def _of(self, path: str) -> str:
        return self._real if path == self.name else path

    def size(self, path: str) -> int:
        return self.inner.size(self._of(path))

    def version(self, path: str) -> str:
        return self.inner.version(self._of(path))

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.inner.read_into(self._of(path), start, buffer)

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        return self.inner.view(self._of(path), start, nbytes)

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        self.inner.will_read(
            [(self._of(path), start, nbytes) for path, start, nbytes in ranges], is_all
        )


def folder_of(store: Store) -> tuple[Store, str]:
    """Returns the store of a checkpoint's directory, and the name of its only file or ""."""
    if isinstance(store, Overlay):
        return folder_of(store.inner)
    return (store.inner, store.name) if isinstance(store, OneFile) else (store, "")


def overlaid(store: Store, files: Mapping[str, bytes]) -> Store:
    """Returns the store with these files in memory over it, in place of earlier ones."""
    inner = store.inner if type(store) is Overlay else store  # others have files of their own
    return Overlay(inner, files) if files else inner
