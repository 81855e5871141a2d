"""The requests that S3 answers in its own way, and fsspec in one way for all other stores.

`RemoteStore` asks a `Backend` and adds names, listings and prefetching. `s3/backend.py` implements
it with the calls of S3.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_tools.errors import StorageError
from ckpt_tools.storage.base import Data, Traffic
from ckpt_tools.storage.object_info import ObjectInfo, SmallObject
from ckpt_tools.storage.retries import appeared, retry
from ckpt_tools.storage.s3.multipart import Upload, UploadOptions
from ckpt_tools.storage.stream import Stream

# imported with the first fetch, because `ckpt inspect` of a local path should not wait for it
if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

THREADS = 16
# protocols whose packages send a condition with a PUT that must create the object
_CREATE_ONCE = {"az", "abfs", "gs", "gcs"}
Entry = Mapping[str, Any]  # of a listing, with fsspec's fields: name, type, size


class Backend(Protocol):
    """The requests of one kind of store.

    Each takes the URL of an object or prefix for messages, and its path: bucket and key.
    """

    @property
    def has_few_threads(self) -> bool:
        """Tells whether threads read, each of which keeps memory for the bytes that it reads."""
        ...

    def is_file(self, url: str, path: str) -> bool:
        """Tells whether a path is an object and not a prefix."""
        ...

    def list_folder(self, url: str, path: str) -> Iterable[Entry]:
        """Returns the objects and folders directly below a prefix."""
        ...

    def pages(self, url: str, path: str) -> Iterator[Sequence[Entry]]:
        """Yields all objects below a prefix."""
        ...

    @property
    def lists_in_pages(self) -> bool:
        """Tells whether `pages` takes one request for each page, however many folders there are."""
        ...

    def start_read(self, path: str, start: int, nbytes: int, etag: str | None) -> Future[Data]:
        """Starts to fetch a range of an object, of the version with this ETag."""
        ...

    def create(
        self, url: str, path: str, nbytes: int, how: UploadOptions | None
    ) -> Upload | Stream:
        """Starts to write an object."""
        ...

    def put(self, url: str, path: str, data: bytes, is_exclusive: bool, replaces: str) -> None:
        """Writes a small object in one step; see `RemoteStore.put`."""
        ...

    def excludes(self, url: str, path: str, data: bytes, writer: Upload | Stream | None) -> bool:
        """Tells whether the store refuses the second of two writers; see `RemoteStore.excludes`."""
        ...

    def object_info(self, url: str, path: str) -> ObjectInfo:
        """Returns what the store keeps with an object; nothing if it keeps no metadata."""
        ...

    def state(self, url: str, path: str) -> tuple[int, str] | None:
        """Returns the current size and ETag of an object; None if there is none."""
        ...

    def read_small(self, url: str, path: str) -> SmallObject | None:
        """Reads the current version of a small object; None if there is none."""
        ...

    def now(self, url: str, path: str) -> dt.datetime | None:
        """Returns the time by the store's own clock; None if the store does not tell it."""
        ...

    def remove(self, url: str, paths: Sequence[str]) -> None:
        """Removes up to 1,000 objects; ignores missing ones."""
        ...

    def close(self) -> None:
        """Ends the threads. A later read starts new ones."""
        ...


class Readers:
    """Threads that read, started with the first read."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, get: Callable[[], Data]) -> Future[Data]:
        from concurrent.futures import ThreadPoolExecutor

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._number, "ckpt-get")
        return self._pool.submit(get)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class FsspecBackend:
    """See `Backend`: any file system of fsspec."""

    lists_in_pages = False
    has_few_threads = False

    def __init__(self, fs: Any, traffic: Traffic, is_wrapped: bool) -> None:
        """Uses a file system.

        Args:
            fs: the file system.
            traffic: counts the requests.
            is_wrapped: whether it is one of fsspec's caches. They are not safe for several threads.
        """
        self._fs, self._traffic = fs, traffic
        self._readers = Readers(1 if is_wrapped else THREADS)
        self._has_loop = not is_wrapped and getattr(fs, "async_impl", False) and not fs.asynchronous

    def _call(self, operation: str, url: str, call: Callable[[], Any], missing: Any = None) -> Any:
        return retry(operation, url, call, missing, self._traffic)

    def is_file(self, url: str, path: str) -> bool:
        info = self._call("look at", url, lambda: self._fs.info(path), missing={})
        return bool(info) and info["type"] == "file" and not path.endswith("/")

    def list_folder(self, url: str, path: str) -> Iterable[Entry]:
        found: Iterable[Entry] = self._call(
            "list", url, lambda: self._fs.ls(path, detail=True, refresh=True), missing=[]
        )
        return found

    def pages(self, url: str, path: str) -> Iterator[Sequence[Entry]]:
        found = self._call("list", url, lambda: self._fs.find(path, detail=True), missing={})
        yield list(found.values())

    def start_read(self, path: str, start: int, nbytes: int, etag: str | None) -> Future[Data]:
        import asyncio

        del etag
        if self._has_loop:
            get = self._fs._cat_file(path, start=start, end=start + nbytes)
            found: Future[Data] = asyncio.run_coroutine_threadsafe(get, self._fs.loop)
        else:
            found = self._readers.submit(
                partial(self._fs.cat_file, path, start=start, end=start + nbytes)
            )
        return counted(found, self._traffic, "read")

    def create(
        self, url: str, path: str, nbytes: int, how: UploadOptions | None
    ) -> Upload | Stream:
        return Stream(self._fs, path, url, nbytes, how)

    def put(self, url: str, path: str, data: bytes, is_exclusive: bool, replaces: str) -> None:
        del replaces
        mode = "create" if is_exclusive else "overwrite"
        try:
            self._call("write", url, lambda: self._fs.pipe_file(path, data, mode=mode))
        except StorageError:
            if is_exclusive and self._fs.exists(path):
                raise appeared(url) from None
            raise

    def excludes(self, url: str, path: str, data: bytes, writer: Upload | Stream | None) -> bool:
        """See `Backend`. Most packages only check before they write."""
        del url
        protocol = self._fs.protocol
        kinds = {protocol} if isinstance(protocol, str) else set(protocol)
        if writer is not None or not kinds & _CREATE_ONCE:
            return False
        try:
            self._fs.pipe_file(path, data, mode="create")
        except Exception as error:  # noqa: BLE001  # every package has exceptions of its own; anything else says nothing of the condition
            return isinstance(error, FileExistsError) or getattr(error, "code", None) in (409, 412)
        return False

    def object_info(self, url: str, path: str) -> ObjectInfo:
        del url, path
        return ObjectInfo(None, False, "")

    def state(self, url: str, path: str) -> tuple[int, str] | None:
        info = self._call("look at", url, lambda: self._fs.info(path), missing={})
        if not info or info.get("type") != "file":
            return None
        return int(info["size"] or 0), str(info.get("ETag") or "")

    def read_small(self, url: str, path: str) -> SmallObject | None:
        found = self.state(url, path)
        if found is None:
            return None
        data = self._call("read", url, lambda: [self._fs.cat_file(path)], missing=[])
        return SmallObject(data[0], found[1], None) if data else None

    def now(self, url: str, path: str) -> dt.datetime | None:
        del url, path
        return None

    def remove(self, url: str, paths: Sequence[str]) -> None:
        for path in paths:
            name = path.rpartition("/")[2]
            self._call("remove", f"{url}/{name}", partial(self._fs.rm_file, path), missing=0)

    def close(self) -> None:
        self._readers.close()


def counted(found: Future[Data], traffic: Traffic, operation: str) -> Future[Data]:
    """Counts the bytes of a read when it ends."""
    found.add_done_callback(
        lambda done: traffic.add(
            operation, 0 if done.cancelled() or done.exception() else len(done.result())
        )
    )
    return found
