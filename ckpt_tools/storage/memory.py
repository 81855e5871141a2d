"""Memory as a store, for shards in RAM and for tests."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import Capabilities, StoreDefaults, Writer, check_path


class MemoryStore(StoreDefaults):
    """Named buffers. Given buffers are read in place; new files are bytearrays."""

    capabilities, traffic = Capabilities(can_write_anywhere=True), None

    def __init__(
        self,
        files: Mapping[str, bytes | bytearray | memoryview] | None = None,
        url: str = "memory:",
    ) -> None:
        self.url = url
        self.files = {name: memoryview(data).cast("B") for name, data in (files or {}).items()}

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        return {
            name: len(view) for name, view in sorted(self.files.items()) if name.count("/") <= below
        }

    def folders(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.files if "/" in name})

    def enter(self, name: str) -> MemoryStore:
        prefix = f"{name}/"
        inner = {
            path.removeprefix(prefix): view
            for path, view in self.files.items()
            if path.startswith(prefix)
        }
        return MemoryStore(inner, f"{self.url}/{name}")

    def size(self, path: str) -> int:
        return len(self._view(path))

    def version(self, path: str) -> str:
        return hex64(crc64nvme(self._view(path)))

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        buffer[:] = self.view(path, start, len(buffer))

    def view(self, path: str, start: int, nbytes: int) -> memoryview:
        view = self._view(path)
        if start + nbytes > len(view):
            raise StorageError(
                f"a file ended early: expected bytes {start}:{start + nbytes}, got up to"
                f" {len(view)} ({printable(path)})"
            )
        return view[start : start + nbytes]

    def create(self, path: str, nbytes: int) -> Writer:
        if check_path(path, self.url) in self.files:
            raise StorageError(f"cannot create: file exists ({printable(path)})")
        self.files[path] = memoryview(bytearray(nbytes))
        return _MemoryWriter(self, path)

    def _view(self, path: str) -> memoryview:
        try:
            return self.files[path]
        except KeyError:
            raise StorageError(
                f"cannot open: no such file ({printable(path)})", is_missing=True
            ) from None


class NoStore:
    """A store that keeps nothing. A sink that writes to it computes the checksums of files."""

    capabilities = Capabilities(can_write_anywhere=True)

    def create(self, path: str, nbytes: int) -> Writer:
        del path, nbytes
        return _NoWriter()


class _NoWriter:
    def write_at(self, start: int, data: memoryview | bytes) -> None:
        """Does nothing."""

    def view(self, start: int, nbytes: int) -> memoryview | None:
        del start, nbytes
        return None

    def finish(self) -> None:
        """Does nothing."""

    def abort(self) -> None:
        """Does nothing."""


class _MemoryWriter:
    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path = store, path

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        self.view(start, len(data))[:] = data

    def view(self, start: int, nbytes: int) -> memoryview:
        view = self._store.files[self._path]
        if start + nbytes > len(view):
            raise StorageError(
                f"cannot write: {start + nbytes} is past the end of the file"
                f" ({printable(self._path)})"
            )
        return view[start : start + nbytes]

    def finish(self) -> None:
        """Does nothing: memory needs no flush."""

    def abort(self) -> None:
        self._store.files.pop(self._path, None)
