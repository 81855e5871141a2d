"""Object stores and whatever else fsspec knows, as a store: `s3://`, `gs://`, `az://`, `http://`, `memory://`.

Ranges are fetched ahead, as the engine announces them, in parallel and within a budget; nothing is kept on the local disk.
Credentials, endpoints and the like are fsspec's own business. May import errors, storage.base and storage.ranges.
"""

from __future__ import annotations

import functools
import posixpath
import random
import re
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import Capabilities, Traffic, Writer, check_path
from ckpt_tools.storage.ranges import Range, Window, coalesce

if TYPE_CHECKING:  # imported when something is fetched: `ckpt inspect` of a local path should not wait for it
    from concurrent.futures import Future, ThreadPoolExecutor

_GAP_BYTES = 256 << 10  # a hole that is cheaper to fetch along than to ask twice for
_WINDOW_BYTES = 8 << 20
_AHEAD_BYTES = 192 << 20
_MARGIN_BYTES, _MARGINS_BYTES = 4 << 10, 64 << 20
_BATCH_BYTES, _BATCH = 32 << 20, 1024  # announced bytes and ranges that are looked at together
_ATTEMPTS = 4
_THREADS = 16
_SECRET = re.compile(r"(?i)([\w-]*(?:secret|token|password|credential|signature|key)[\w-]*)([\"']?\s*[=:]\s*[\"']?)[^\s\"'&,)]+")
_HINTS = (
    (("NoCredentials", "Unable to locate credentials"), "give credentials as s3fs takes them: environment, ~/.aws, or --storage-option"),
    (("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"), "the credentials are wrong or have expired"),
    (("RequestTimeTooSkewed",), "this machine's clock is wrong"),
    (("PreconditionFailed", "status=412"), "the object was replaced while it was read: start again"),
    (("NoSuchBucket", "bucket does not exist"), "there is no such bucket"),
    (
        ("AccessDenied", "Forbidden", "Access Denied", "PermissionError"),
        "the credentials are wrong, or do not permit reading or listing this",
    ),
    (("Could not connect", "Cannot connect", "Name or service not known"), "is the endpoint right? --storage-option endpoint_url=…"),
)


def is_url(path: object) -> TypeGuard[str]:
    """Tells whether a path is one of a store that fsspec opens, and not of the local file system."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", path) is not None and not path.startswith("file://")


class RemoteStore:
    """Objects under one prefix of a store that fsspec opens; read only."""

    capabilities = Capabilities(can_write_anywhere=False, can_rename=False, fetches_ahead=True)

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, fs: Any = None, traffic: Traffic | None = None) -> None:
        """Opens the store of a URL.

        Args:
            url: such as `s3://bucket/run/step-00000500`.
            options: as `fsspec.filesystem` takes them; what is left out comes from its own configuration and the environment.
            fs, traffic: of the store that this is a part of.

        Raises:
            StorageError: the URL is chained, or fsspec has no package for it.
        """
        import fsspec

        if "::" in url:
            raise StorageError(f"a chained URL is not opened: {printable(url)}", hint="give the URL of the checkpoint itself")
        self.url, self.traffic = url.rstrip("/"), traffic or Traffic()
        try:
            self._fs = fs or fsspec.filesystem(url.split("://")[0], **(options or {}))
        except (ImportError, ValueError) as error:
            raise StorageError(f"cannot open {printable(self.url)}: {_plain(error)}", hint="is the store's package installed?") from error
        self._root = self._fs._strip_protocol(self.url)
        self._sizes: dict[str, int] = {}
        self._etags: dict[str, str] = {}  # of S3 objects: every read asks for the very one that was listed
        self._folders: list[str] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._windows: OrderedDict[tuple[str, int, int], _Window] = OrderedDict()
        self._margins = _Margins()
        self._announced: list[Range] = []
        self._announced_nbytes = 0

    # ---- names ---------------------------------------------------------------------------------------------------------

    def is_file(self) -> bool:
        """Tells whether the root is an object and not a prefix."""
        info = self._call("look at", "", lambda: self._fs.info(self._root), missing={})
        return bool(info) and info["type"] == "file" and not self._root.endswith("/")

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        if self._folders is None:
            self._list("")
        for folder in (self._folders or []) if below else ():
            self._list(folder)
        return {name: self._sizes[name] for name in sorted(self._sizes) if name.count("/") <= below}

    def folders(self) -> list[str]:
        """Returns the names of the prefixes directly under the root."""
        if self._folders is None:
            self._list("")
        return list(self._folders or [])

    def enter(self, name: str) -> RemoteStore:
        """Returns the store of a prefix directly under the root."""
        return RemoteStore(f"{self.url}/{name}", None, self._fs, self.traffic)

    def _list(self, folder: str) -> None:
        full = f"{self._root}/{folder}" if folder else self._root
        entries = self._call("list", folder, lambda: self._fs.ls(full, detail=True, refresh=True), missing=[])
        folders = []
        for entry in entries:
            name = posixpath.relpath(entry["name"].rstrip("/"), self._root)
            if entry["type"] == "directory":
                folders.append(name)
            elif name != ".":  # some stores list the prefix itself, as an empty object
                self._note(name, entry)
        if not folder:
            self._folders = sorted(folders)

    def size(self, path: str) -> int:
        check_path(path, self.url)
        if path not in self._sizes:
            self._note(path, self._call("open", path, lambda: self._fs.info(self._full(path))))
        return self._sizes[path]

    def _note(self, path: str, entry: Mapping[str, Any]) -> None:
        self._sizes[path] = int(entry["size"] or 0)
        if entry.get("ETag"):
            self._etags[path] = str(entry["ETag"])

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_path(path, self.url)}"

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        window = self._take(path, start, len(buffer))
        if window is None and (margin := self._margins.find(path, start, len(buffer))) is not None:
            buffer[:] = margin
            return
        if window is not None:
            try:
                data = window.future.result()
            except BaseException as error:  # asked for again, and told from there
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                data = b""
            if len(data) == window.nbytes:
                buffer[:] = memoryview(data)[start - window.start : start - window.start + len(buffer)]
                return
        buffer[:] = self._fetch(path, start, len(buffer))

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        del path, start, nbytes
        return None

    def will_read(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        with self._lock:
            for file, start, nbytes in (r for r in ranges if self._margins.find(*r) is None):
                self._announced.append(Range(file, start, nbytes, 0))
                self._announced_nbytes += nbytes
            if self._announced_nbytes >= _BATCH_BYTES or len(self._announced) >= _BATCH:
                self._start()

    def _start(self) -> None:
        """Begins to fetch what was announced: the more at once, the more neighbours become one request."""
        ranges, self._announced, self._announced_nbytes = self._announced, [], 0
        for window in coalesce((r for r in ranges if r.nbytes), _GAP_BYTES, _WINDOW_BYTES):
            start = max(0, window.start - _MARGIN_BYTES)
            nbytes = min(window.start + window.nbytes + _MARGIN_BYTES, self.size(window.file)) - start
            if (window.file, start, nbytes) not in self._windows and nbytes > 0:
                future = self._submit(window.file, start, nbytes)
                future.add_done_callback(functools.partial(self._margins.keep, window, start))
                self._windows[window.file, start, nbytes] = _Window(start, nbytes, sum(r.nbytes for r in window.ranges), future)
        held = sum(w.nbytes for w in self._windows.values())
        while held > _AHEAD_BYTES and len(self._windows) > 1:  # announced and never read
            _, forgotten = self._windows.popitem(last=False)
            forgotten.future.cancel()
            held -= forgotten.nbytes

    def _take(self, path: str, start: int, nbytes: int) -> _Window | None:
        """Returns the window that holds a range, and lets go of it with its last byte."""
        with self._lock:
            window = self._find(path, start, nbytes)
            if window is None and any(r.file == path and r.start <= start < r.start + r.nbytes for r in self._announced):
                self._start()
                window = self._find(path, start, nbytes)
            return window

    def _find(self, path: str, start: int, nbytes: int) -> _Window | None:
        for key, window in self._windows.items():
            if key[0] == path and key[1] <= start and start + nbytes <= key[1] + key[2]:
                window.left -= nbytes
                if window.left <= 0:
                    del self._windows[key]
                return window
        return None

    def _submit(self, path: str, start: int, nbytes: int) -> Future[bytes]:
        """Starts fetching a range: on the file system's own event loop, or where it has none, on a thread."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        full = self._full(path)
        future: Future[bytes]
        if getattr(self._fs, "async_impl", False) and not self._fs.asynchronous:
            if hasattr(self._fs, "call_s3"):
                get = _get_s3(self._fs, full, start, nbytes, self._etags.get(path))
            else:
                get = self._fs._cat_file(full, start=start, end=start + nbytes)
            future = asyncio.run_coroutine_threadsafe(get, self._fs.loop)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "ckpt-get")
            future = self._pool.submit(self._fs.cat_file, full, start=start, end=start + nbytes)
        future.add_done_callback(lambda done: self.traffic.add(0 if done.cancelled() or done.exception() else len(done.result())))
        return future

    def _fetch(self, path: str, start: int, nbytes: int) -> bytes:
        """Fetches a range, several times where the store fails in a way that may pass."""
        got = 0
        for attempt in range(_ATTEMPTS):
            data: bytes = self._call("read", path, lambda: self._submit(path, start, nbytes).result())
            if len(data) == nbytes:
                return data
            got = len(data)
            if start + nbytes > self.size(path):
                break
            time.sleep(random.random() * 0.2 * 2**attempt)  # noqa: S311
        raise StorageError(
            f"a file ended early: expected bytes {start}:{start + nbytes}, got up to {start + got} ({printable(path)})",
            hint="the object is truncated, or was replaced while it was read",
        )

    def _call(self, operation: str, path: str, call: Any, missing: Any = None) -> Any:
        """Calls the file system; what may pass is tried again, anything else becomes a StorageError without secrets."""
        full = printable(f"{self.url}/{path}" if path else self.url)
        for attempt in range(_ATTEMPTS):
            if operation != "read":
                self.traffic.add(0)
            try:
                return call()
            except FileNotFoundError as error:
                if missing is not None and "bucket does not exist" not in str(error):
                    return missing
                raise StorageError(f"cannot {operation}: no such object ({full})", hint=_hint(error), is_missing=True) from None
            except Exception as error:  # noqa: BLE001  # every package has exceptions of its own
                if attempt + 1 < _ATTEMPTS and _may_pass(error):
                    time.sleep(random.random() * 0.2 * 2**attempt)  # noqa: S311
                    continue
                raise StorageError(f"cannot {operation}: {_plain(error)} ({full})", hint=_hint(error)) from None
        raise AssertionError

    def create(self, path: str, nbytes: int) -> Writer:
        del nbytes
        raise StorageError(f"cannot create {printable(check_path(path, self.url))}: writing to {printable(self.url)} is not possible yet")

    def close(self) -> None:
        with self._lock:
            self._announced.clear()
            while self._windows:
                self._windows.popitem()[1].future.cancel()
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None


async def _get_s3(fs: Any, path: str, start: int, nbytes: int, etag: str | None) -> bytes:
    """Fetches a range of an S3 object, of the version that was listed: s3fs's own call takes no condition."""
    bucket, key, _ = fs.split_path(path)
    condition = {"IfMatch": etag} if etag else {}
    response = await fs._call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{start + nbytes - 1}", **condition, **fs.req_kw
    )
    try:
        data: bytes = await response["Body"].read()
        return data
    finally:
        response["Body"].close()


class _Margins:
    """What was fetched around and between the ranges that were asked for, as far as there is room.

    In a packed format that is what frames the payloads: to be proved later without asking for it again.
    """

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._nbytes, self._lock = 0, threading.Lock()

    def keep(self, window: Window, start: int, done: Future[bytes]) -> None:
        """Keeps the holes of a window that was fetched from byte `start`, each with a margin on both sides."""
        if done.cancelled() or done.exception() is not None or self._nbytes > _MARGINS_BYTES:
            return
        data, end = done.result(), start
        for item in (*window.ranges, Range(window.file, start + len(done.result()), 0, 0)):
            if item.start > end:
                first, last = max(start, end - _MARGIN_BYTES), min(start + len(data), item.start + _MARGIN_BYTES)
                self._add(window.file, first, data[first - start : last - start])
            end = max(end, item.start + item.nbytes)

    def _add(self, path: str, start: int, data: bytes) -> None:
        with self._lock:
            starts, parts = self._starts.setdefault(path, []), self._parts.setdefault(path, [])
            at = bisect_right(starts, start)
            starts.insert(at, start)
            parts.insert(at, data)
            self._nbytes += len(data)

    def find(self, path: str, start: int, nbytes: int) -> bytes | None:
        """Returns a range that was kept."""
        with self._lock:
            at = bisect_right(self._starts.get(path, []), start) - 1
            if at < 0:
                return None
            first, data = self._starts[path][at], self._parts[path][at]
            return data[start - first : start - first + nbytes] if start + nbytes <= first + len(data) else None


@dataclass
class _Window:
    """A range that is being fetched, and how many of its announced bytes nobody has read yet."""

    start: int
    nbytes: int
    left: int
    future: Future[bytes]


def _may_pass(error: Exception) -> bool:
    """Tells whether asking again may help: the connection broke, or the store was busy."""
    text = _text(error)
    if isinstance(error, (PermissionError, ValueError, NotImplementedError)) or _hint(error):
        return False  # s3fs itself has tried an endpoint several times
    return isinstance(error, (OSError, TimeoutError, EOFError)) or any(
        word in text for word in ("Timeout", "Connection", "Payload", "Disconnected", "SlowDown", "status=50", "Incomplete")
    )


def _hint(error: Exception) -> str | None:
    text = _text(error)
    return next((hint for words, hint in _HINTS if any(word in text for word in words)), None)


def _text(error: BaseException) -> str:
    """Returns everything that an error says of its kind; s3fs leaves the store's own code in the cause."""
    answer = getattr(error.__cause__, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = f"{answer.get('Error', {}).get('Code', '')} status={status}" if status else ""
    return f"{type(error).__name__} {error} {code}"


def _plain(error: BaseException) -> str:
    """Returns an error's text on one line, what looks like a secret blotted out."""
    text = " ".join(str(error).split())
    if text in ("", "None") or text.endswith("] None"):
        text = _text(error).replace("None", "").strip()
    return printable(_SECRET.sub(r"\1\2***", " ".join(text.split())))[:300]
