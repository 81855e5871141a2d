"""A store for URLs that fsspec opens: `s3://`, `gs://`, `az://`, `http://`, `memory://`.

It fetches ranges in advance when the engine announces them, in parallel and within a memory budget.
It keeps nothing on the local disk. fsspec itself handles credentials and endpoints.
"""

from __future__ import annotations

import datetime as dt
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckpt_tools.core import ending
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.backend import THREADS, Backend, Entry, FsspecBackend
from ckpt_tools.storage.base import (
    ALL_TRAFFIC,
    Capabilities,
    Data,
    Store,
    StoreDefaults,
    Traffic,
    check_path,
    check_url,
)
from ckpt_tools.storage.kept import KEPT
from ckpt_tools.storage.object_info import ObjectInfo, SmallObject
from ckpt_tools.storage.prefetch import FRUGAL, ROOMY, Prefetcher
from ckpt_tools.storage.retries import ATTEMPTS, error_text, pause, retry
from ckpt_tools.storage.s3.backend import S3Backend
from ckpt_tools.storage.s3.client import S3, check_s3_options
from ckpt_tools.storage.s3.multipart import Upload, UploadOptions
from ckpt_tools.storage.stream import Stream
from ckpt_tools.storage.web import bounded_client

# imported with the first fetch, because `ckpt inspect` of a local path should not wait for it
if TYPE_CHECKING:
    from concurrent.futures import Future

# pages of 1,000 objects. A root with more objects than a run has is listed folder by folder.
_MAX_PAGES = 20


def _file_system(url: str, options: Mapping[str, Any]) -> Any:
    """Returns fsspec's file system of a URL; a host or user of the URL is an option of it."""
    import fsspec

    scheme = url.split("://")[0]
    in_url = fsspec.get_filesystem_class(scheme)._get_kwargs_from_urls(url)
    return fsspec.filesystem(scheme, **(in_url | options))


class RemoteStore(StoreDefaults):
    """The objects under one prefix of a store that fsspec opens."""

    capabilities = Capabilities(can_write_anywhere=False, fetches_ahead=True, is_remote=True)

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        fs: Any = None,
        traffic: Traffic | None = None,
        given: str = "",
    ) -> None:
        """Opens the store of a URL.

        Args:
            url: such as `s3://bucket/run/step-00000500`.
            options: as `fsspec.filesystem` takes them. Other options come from its own
                configuration and the environment. With `chained`, it also opens wrappers such as
                `filecache::s3://…`. Then the options of each wrapper are under its protocol.
            fs, traffic: file system and counts of the store that contains this one.
            given: name of a file below the URL that the user gave. It may have a query.

        Raises:
            StorageError: the URL is chained, or fsspec has no package for it.
        """
        from fsspec.core import url_to_fs

        check_url(url)
        options = dict(options or {})
        wrappers, _, inner = url.rpartition("::")
        if (wrappers and not (fs or options.pop("chained", False))) or "://" in wrappers:
            hint = (
                "give the URL of the checkpoint itself; a wrapper without a path of its own is"
                " opened with --storage-option chained=true"
            )
            raise StorageError(f"a chained URL is not opened: {printable(url)}", hint=hint)
        self.url, self.traffic = url.rstrip("/"), traffic or Traffic(whole=ALL_TRAFFIC)
        # a wrapper passes unknown calls to the inner store, and so bypasses its own function
        self._is_wrapped = bool(wrappers)
        try:
            # a cached listing would stay in use for ever
            fresh: dict[str, Any] = {"use_listings_cache": False}
            if url.startswith(("http://", "https://")):
                fresh["get_client"] = bounded_client
            self._fs = fs or (
                url_to_fs(url, **options)[0] if wrappers else _file_system(url, fresh | options)
            )
        except Exception as error:  # every package has exceptions of its own
            is_missing = isinstance(error, ImportError | ValueError)
            hint = (
                "is the store's package installed?"
                if is_missing
                else "its own options go by --storage-option key=value"
            )
            scheme = url.split("://")[0]
            hint = f"in small letters: {scheme.lower()}://…" if scheme != scheme.lower() else hint
            raise StorageError(
                f"cannot open {printable(self.url)}: {error_text(error, url)}", hint=hint
            ) from error
        if fs is None and not wrappers and hasattr(self._fs, "call_s3"):
            check_s3_options(options, type(self._fs).__init__)
        self._root = self._fs._strip_protocol(inner.rstrip("/"))
        self._sizes: dict[str, int] = {}
        self._modified: dict[str, Any] = {}
        # of S3 objects: every read asks for the listed version
        self._etags: dict[str, str] = {}
        self._folders: list[str] | None = None
        self._tree: dict[str, int] | None = None
        # the calls of S3 itself, which tell about uploads and copy on the server
        self.s3 = (
            S3(self._fs, self.traffic) if hasattr(self._fs, "call_s3") and not wrappers else None
        )
        self._backend: Backend = (
            S3Backend(self.s3, self.traffic)
            if self.s3 is not None
            else FsspecBackend(self._fs, self.traffic, bool(wrappers))
        )
        memory = FRUGAL if self._backend.has_few_threads else ROOMY
        self._ahead = Prefetcher(self._submit, self.size, memory)
        self.written: dict[str, Upload | Stream] = {}
        self._given, self._is_web = (
            given,
            inner.startswith(("http://", "https://")) or url.startswith(("http://", "https://")),
        )

    # ---- names -----------------------------------------------------------------------------------

    def is_file(self) -> bool:
        """Tells whether the root is an object and not a prefix."""
        return self._backend.is_file(self.url, self._root)

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

    def beside(self, name: str) -> RemoteStore:
        """Returns the store of another prefix beside this one."""
        folder = self.url.rpartition("/")[0]
        return RemoteStore(f"{folder}/{name}", None, self._fs, self.traffic)

    def enter_all(self) -> dict[str, RemoteStore]:
        """Returns the stores of all prefixes directly under the root.

        In S3, they are listed together, with one request per 1,000 objects. So no prefix needs its
        own listing.
        """
        keys = self._list_tree()
        if keys is None:
            return {name: self.enter(name) for name in self.folders()}
        top = len(f"{self._root}/")
        stores: dict[str, RemoteStore] = {}
        for path, entry in keys:
            folder, slash, name = path[top:].partition("/")
            if not slash:
                if folder:  # skip the prefix itself, which may be an empty object
                    self._note(folder, entry)
                continue
            if folder not in stores:
                stores[folder] = self.enter(folder)
                stores[folder]._folders, stores[folder]._tree = [], {}
            store = stores[folder]
            if store._tree is not None and name and not name.endswith("/"):
                store._tree[name] = int(entry["size"] or 0)
            inner, slash, _ = name.partition("/")
            if not slash:
                if name:
                    store._note(name, entry)
            elif inner not in (known := store.folders()):
                store._folders = [*known, inner]
        self._folders = sorted(stores)
        return stores

    def list_deep(self) -> Mapping[str, int]:
        """Returns all objects at any depth below the root, with their bytes.

        They are listed once, as for `list_files`: `fresh` lists anew. If `enter_all` created this
        store, these are the objects that it listed.
        """
        if self._tree is None:
            top, self._tree, folders = len(f"{self._root}/"), {}, set[str]()
            for entry in chain.from_iterable(self._backend.pages(self.url, self._root)):
                name = entry["name"][top:]
                if not name or name.endswith("/"):
                    continue
                self._tree[name] = int(entry["size"] or 0)
                folder, slash, _ = name.partition("/")
                if slash:
                    folders.add(folder)
                else:
                    self._note(name, entry)
            self._folders = sorted(folders)
        return self._tree

    def copy_to(self, path: str, to: RemoteStore) -> None:
        """Makes the file system copy an object to the same name in another store."""
        to.check_writable()
        self._call("copy", path, lambda: self._fs.cp_file(self._full(path), to._full(path)))

    def _list_tree(self) -> list[tuple[str, Entry]] | None:
        """Returns bucket and key of all objects below the root.

        Returns None if that needs too many requests.
        """
        if not self._backend.lists_in_pages:
            return None
        found: list[tuple[str, Entry]] = []
        for number, page in enumerate(self._backend.pages(self.url, self._root)):
            if number == _MAX_PAGES:
                return None
            found += [(str(entry["name"]), entry) for entry in page]
        return found

    def _list(self, folder: str) -> None:
        full = f"{self._root}/{folder}" if folder else self._root
        entries = self._backend.list_folder(f"{self.url}/{folder}".rstrip("/"), full)
        folders = []
        for entry in entries:
            name = posixpath.relpath(entry["name"].rstrip("/"), self._root)
            if self._is_web and any(c in name for c in "?#"):
                continue  # a link to sort the listing; no name of a file has these characters
            if entry["type"] == "directory":
                folders.append(name)
            # Some stores list the prefix itself as an empty object. A web server's listing has no
            # sizes.
            elif name != ".":
                self._note(
                    name,
                    (
                        entry
                        if entry.get("size") is not None
                        else self._call("look at", name, partial(self._fs.info, entry["name"]))
                    ),
                )
        if not folder:
            self._folders = sorted(folders)

    def size(self, path: str) -> int:
        check_path(path, self.url)
        if path not in self._sizes:
            self._note(path, self._call("open", path, lambda: self._fs.info(self._full(path))))
        return self._sizes[path]

    def _note(self, path: str, entry: Mapping[str, Any]) -> None:
        nbytes = int(entry["size"] or 0)
        if not 0 <= nbytes < 1 << 62:
            raise StorageError(
                f"the store gives an impossible size: {nbytes} bytes ({printable(path)} in"
                f" {printable(self.url)})"
            )
        self._sizes[path], self._modified[path] = nbytes, entry.get("LastModified")
        if entry.get("ETag"):
            self._etags[path] = str(entry["ETag"])

    def _full(self, path: str) -> str:
        if self._is_web and path != self._given and any(c in path for c in "%?#"):
            raise StorageError(
                f"a file name that a web server would read as another: {printable(path)!r}"
                f" ({printable(self.url)})",
                hint="copy the checkpoint to a disk first",
            )
        return f"{self._root}/{check_path(path, self.url)}"

    # ---- bytes -----------------------------------------------------------------------------------

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        version = self._kept_as(path, start, len(buffer))
        if version is not None and (data := KEPT.get(version)) is not None:
            buffer[:] = data
            return
        self._read_into(path, start, buffer)
        if version is not None:
            KEPT.put(version, bytes(buffer))

    def _kept_as(self, path: str, start: int, nbytes: int) -> tuple[str, str] | None:
        """Returns the version of a whole index or note, whose bytes may be kept; else None."""
        etag = self._etags.get(path)
        is_whole = start == 0 and nbytes == self._sizes.get(path)
        is_record = path.endswith((".json", ".metadata"))
        return (f"{self.url}/{path}", etag) if etag and is_whole and is_record else None

    def _read_into(self, path: str, start: int, buffer: memoryview) -> None:
        window = self._ahead.take(path, start, len(buffer))
        if (
            window is None
            and (margin := self._ahead.margins.find(path, start, len(buffer))) is not None
        ):
            buffer[:] = margin
            return
        if window is not None:
            try:
                data = ending.result(window.future)
            except BaseException as error:  # read again below, which raises the error
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                data = b""
            if len(data) == window.nbytes:
                buffer[:] = memoryview(data)[
                    start - window.start : start - window.start + len(buffer)
                ]
                return
        buffer[:] = self._fetch(path, start, len(buffer))

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        ranges = list(ranges)
        for file in {file for file, _, _ in ranges}:
            # ask now: a window may start on the event loop, which would have to answer the request
            # itself
            self.size(file)
        self._ahead.announce(ranges, is_all)

    def _submit(self, path: str, start: int, nbytes: int) -> Future[Data]:
        """Starts to fetch a range."""
        return self._backend.start_read(self._full(path), start, nbytes, self._etags.get(path))

    def _fetch(self, path: str, start: int, nbytes: int) -> Data:
        """Fetches a range, with retries after temporary failures of the store."""
        got = 0
        for attempt in range(ATTEMPTS):
            data: Data = self._call(
                "read", path, lambda: ending.result(self._submit(path, start, nbytes))
            )
            if len(data) == nbytes:
                return data
            got = len(data)
            if start + nbytes > self.size(path):
                break
            pause(attempt)
        raise StorageError(
            f"a file ended early: expected bytes {start}:{start + nbytes}, got up to {start + got}"
            f" ({printable(path)})",
            hint="the object is truncated, or was replaced while it was read",
            is_unreadable=start + nbytes <= self.size(path),
        )

    def _call(self, operation: str, path: str, call: Any, missing: Any = None) -> Any:
        """Calls the file system with the retries of `retries.retry`."""
        count = None if operation == "read" else self.traffic
        return retry(operation, f"{self.url}/{path}" if path else self.url, call, missing, count)

    # ---- writing ---------------------------------------------------------------------------------

    def create(self, path: str, nbytes: int, how: UploadOptions | None = None) -> Upload | Stream:
        self.check_writable()
        writer = self._backend.create(self._url(path), self._full(path), nbytes, how)
        self.written[path] = writer
        return writer

    def put(self, path: str, data: bytes, is_exclusive: bool = False, replaces: str = "") -> None:
        """Writes a small object in one step.

        Args:
            path: its name.
            data: its contents.
            is_exclusive: only if there is no object of that name. Some stores cannot check this.
            replaces: replace only this version of the object.

        Raises:
            StorageError: another writer was first, or the store refuses.
        """
        self.check_writable()
        self._backend.put(self._url(path), self._full(path), data, is_exclusive, replaces)

    def _url(self, path: str) -> str:
        return f"{self.url}/{path}"

    def check_writable(self) -> None:
        """Refuses a store that is only read, before anything is written, copied or removed there.

        Raises:
            StorageError: its URL is chained, or that of a web server.
        """
        if self._is_wrapped:
            raise StorageError(
                f"a chained URL is read-only: {printable(self.url)}",
                hint="write to the store itself",
            )
        if self.url.startswith(("http://", "https://")):
            raise StorageError(
                f"a web server is read-only: {printable(self.url)}",
                hint="copy the checkpoint to a disk or an object store first",
            )

    def excludes(self, path: str, data: bytes, writer: Upload | Stream | None) -> bool:
        """Tells whether the store refuses the second of two writers of one name.

        It tries to write an existing object again, with the same contents.
        """
        return self._backend.excludes(self._url(path), self._full(path), data, writer)

    def version(self, path: str) -> str:
        """Returns the ETag of a listed object; "" if there is none."""
        return self._etags.get(path, "")

    def modified(self, path: str) -> Any:
        """Returns when a listed object was written, by the store's clock; None if unknown."""
        return self._modified.get(path)

    def object_info(self, path: str) -> ObjectInfo:
        """Asks the store for the properties of an object."""
        return self._backend.object_info(self._url(path), self._full(path))

    def object_infos(self, paths: Iterable[str]) -> dict[str, ObjectInfo]:
        """Asks the store for the properties of several objects, in parallel."""
        from concurrent.futures import ThreadPoolExecutor

        paths = list(paths)
        with ThreadPoolExecutor(THREADS, "ckpt-ask") as pool:
            return dict(zip(paths, pool.map(self.object_info, paths), strict=True))

    def stored_crcs(self, paths: Iterable[str]) -> Mapping[str, int]:
        found = {path: about.crc64 for path, about in self.object_infos(paths).items()}
        return {path: crc for path, crc in found.items() if crc is not None}

    def read_small(self, path: str) -> SmallObject | None:
        """Reads the current version of a small object; None if there is none."""
        return self._backend.read_small(self._url(path), self._full(path))

    def current_version(self, path: str) -> str:
        """Asks the store for the current ETag of an object; "" if there is none."""
        found = self._backend.state(self._url(path), self._full(path))
        return found[1] if found else ""

    def has(self, path: str) -> bool:
        """Asks the store, without a cached listing, whether an object exists."""
        return self._backend.state(self._url(path), self._full(path)) is not None

    def sizes_of(self, paths: Sequence[str]) -> dict[str, int]:
        """Asks the store for the current sizes of objects; leaves out missing ones."""
        found = {p: self._backend.state(self._url(p), self._full(p)) for p in paths}
        return {path: state[0] for path, state in found.items() if state}

    def now(self) -> dt.datetime | None:
        """Returns the time by the store's own clock; None if the store does not tell it."""
        return self._backend.now(self.url, self._root)

    def copy_source(self, other: Store) -> RemoteStore | None:
        """Returns the other store if both are in one S3, which can copy on the server; else None.

        Names with `%` are excluded: Ceph's RadosGW (16.2) decodes a source's name twice. It would
        look for another object, or crash.
        """
        if self.s3 is None or not isinstance(other, RemoteStore) or self._fs is not other._fs:
            return None
        return other if "%" not in other.root else None

    @property
    def root(self) -> str:
        """Returns bucket and prefix."""
        return str(self._root)

    def fresh(self) -> RemoteStore:
        """Returns a new instance of this store, without cached listings."""
        return RemoteStore(self.url, None, self._fs, self.traffic)

    def remove(self, paths: Sequence[str]) -> None:
        """Removes objects, up to 1,000 per request if possible; ignores missing ones."""
        if paths:
            self.check_writable()
        full = [self._full(path) for path in paths]
        for at in range(0, len(full), 1000):
            self._backend.remove(self.url, full[at : at + 1000])

    def close(self) -> None:
        self._ahead.close()
        self._backend.close()
