"""Writes to stores other than S3: a file is written in order, and is visible once closed."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from typing import Any

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.retries import appeared, failure
from ckpt_tools.storage.s3.multipart import UploadOptions


class Stream:
    """A new object in a store other than S3. It is visible once closed.

    It is written in order, so data that comes early waits in memory.
    """

    def __init__(
        self, fs: Any, path: str, url: str, nbytes: int, how: UploadOptions | None = None
    ) -> None:
        """Prepares the stream, with arguments as for `Upload`; `fs` is any fsspec file system."""
        self._fs, self._path, self._url, self.nbytes, self._how = (
            fs,
            path,
            url,
            nbytes,
            how or UploadOptions(),
        )
        # some stores show files that are still being written
        self._written = f"{path}.{uuid.uuid4().hex[:8]}.part" if self._how.is_held else path
        self._early: dict[int, bytes] = {}
        self._at, self._file, self._is_over, self.is_complete = 0, None, False, False
        self._lock = threading.Lock()

    _file: Any

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        with self._lock:
            self._early[start] = bytes(data)
            while self._at in self._early:
                piece = self._early.pop(self._at)
                self._do("write", lambda piece=piece: self._open().write(piece))
                self._at += len(piece)

    def _open(self) -> Any:
        if self._file is None:
            self._refuse_other()
            self._file = self._fs.open(self._written, "wb")
        return self._file

    def _refuse_other(self) -> None:
        """Raises if another writer was first.

        Some stores show our own file as soon as it is opened.
        """
        if self._how.is_exclusive and self._fs.exists(self._path):
            raise appeared(self._url)

    def view(self, start: int, nbytes: int) -> None:
        del start, nbytes

    def _do(self, operation: str, call: Any) -> None:
        try:
            call()
        except NotImplementedError:
            raise StorageError(
                f"cannot {operation}: this kind of store is read-only ({printable(self._url)})"
            ) from None
        except Exception as error:  # noqa: BLE001  # every package has exceptions of its own
            raise failure(operation, self._url, error) from None

    def finish(self) -> None:
        if not self._how.is_held:
            self.complete()

    def complete(self) -> None:
        """Makes the object visible, as `Upload.complete`; notices only an earlier writer."""
        if self._written != self._path:
            self._refuse_other()
        self._do("write", lambda: self._open().close())
        if self._written != self._path:
            self._do("rename", lambda: self._fs.mv(self._written, self._path))
        self._is_over = self.is_complete = True

    def abort(self) -> None:
        if self._is_over or self._file is None:
            return
        self._is_over = True
        file, self._file = self._file, None
        with suppress(Exception):  # not every file system can discard
            file.discard()
        with suppress(AttributeError):
            file.closed = True  # otherwise the destructor would publish its contents
        with suppress(Exception):
            self._fs.rm_file(self._written)
