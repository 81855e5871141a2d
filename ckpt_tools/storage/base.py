"""The protocol of a store: named files of bytes under one root.

A store knows bytes, not formats. Paths are relative, with `/` between segments, and never leave the
root.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable
from urllib.parse import unquote

from ckpt_tools.errors import FormatError, PlanError, StorageError, printable

Data = bytes | memoryview  # bytes that were read


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a store, by which the schedule decides.

    Attributes:
        can_write_anywhere: a new file accepts writes at any position, in any order.
        fetches_ahead: ranges announced by `will_read` are fetched in the background. So small
            ranges far apart should be announced, too.
        is_remote: each request costs a round trip, and bytes may be damaged on their way.
        has_descriptors: its files are those of the system, and `descriptor` opens them.
    """

    can_write_anywhere: bool
    fetches_ahead: bool = False
    is_remote: bool = False
    has_descriptors: bool = False


@dataclass
class Traffic:
    """Counts of the requests to a store.

    Attributes:
        requests: number of requests. The store's package may have repeated some.
        nbytes, sent_nbytes: bytes of files that were received and sent.
        kinds: requests by kind. For S3: LIST, HEAD, GET, PUT, POST, DELETE. For other stores: the
            operation.
        whole: the total of several stores, which counts these requests, too.
    """

    requests: int = 0
    nbytes: int = 0
    sent_nbytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    whole: Traffic | None = field(default=None, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: str, nbytes: int = 0, sent_nbytes: int = 0) -> None:
        """Counts a request, with its received and sent bytes."""
        with self.lock:
            self.requests, self.nbytes, self.sent_nbytes = (
                self.requests + 1,
                self.nbytes + nbytes,
                self.sent_nbytes + sent_nbytes,
            )
            self.kinds[kind] += 1
        if self.whole is not None:
            self.whole.add(kind, nbytes, sent_nbytes)


ALL_TRAFFIC = Traffic()  # of all object stores of this process


class Writer(Protocol):
    """A new file. Several threads may write disjoint ranges at the same time."""

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        """Writes all of `data` at byte `start`.

        Raises:
            StorageError: the store accepted fewer bytes; the file is unusable.
        """
        ...

    def view(self, start: int, nbytes: int) -> memoryview | None:
        """Returns the memory of a range, to fill in place; None if the file is not in memory."""
        ...

    def finish(self) -> None:
        """Makes the bytes durable and closes the file. A failure is final: there is no retry."""
        ...

    def abort(self) -> None:
        """Discards the file and closes it; never raises."""
        ...


@runtime_checkable
class PartsWriter(Writer, Protocol):
    """A writer of a file in parts, which several processes may send."""

    @property
    def sent(self) -> Mapping[int, Any]:
        """The parts that the store has, by number."""
        ...

    def absorb(self, sent: Mapping[int, Any]) -> None:
        """Adds the parts that another process has sent."""
        ...

    def expect(self, crc64: int) -> None:
        """Sets the expected checksum of the whole file, parts that the store copies included."""
        ...


class WritableStore(Protocol):
    """A store that accepts new files."""

    @property
    def capabilities(self) -> Capabilities:
        """Returns the abilities of this store."""
        ...

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts a new file of exactly `nbytes` bytes.

        Raises:
            StorageError: the file exists already, or there is no room.
        """
        ...


class Store(WritableStore, Protocol):
    """Files under one root.

    Guarantees: a read sees a file as it was at one moment, or raises. Ranges are half-open. A
    zero-length range reads nothing, and is valid up to the end of the file. A file that is being
    written may or may not be visible.
    """

    @property
    def url(self) -> str:
        """Returns the path or URL of the root, for messages."""
        ...

    @property
    def traffic(self) -> Traffic | None:
        """Returns the counts of requests; None if requests cost nothing."""
        ...

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        """Returns the files directly under the root with their sizes in bytes.

        It omits devices, and links that lead out of the root.

        With `below`, also those in the folders directly under it, as `folder/name`.
        """
        ...

    def folders(self) -> list[str]:
        """Returns the names of the folders directly under the root; links are omitted."""
        ...

    def enter(self, name: str) -> Store:
        """Returns the store of a folder directly under the root."""
        ...

    def strays(self) -> Mapping[str, str]:
        """Returns the links directly under the root that lead out of it or nowhere, with targets.

        Listings omit these links.
        """
        ...

    def blob_name(self, path: str) -> str:
        """Returns the name of the blob of a Hugging Face snapshot's file; "" for any other file."""
        ...

    def stored_crcs(self, paths: Iterable[str]) -> Mapping[str, int]:
        """Returns the CRC-64/NVME of files, as far as the store itself keeps it."""
        ...

    def size(self, path: str) -> int:
        """Returns the bytes of a file.

        Raises:
            StorageError: there is no such regular file within the root.
        """
        ...

    def version(self, path: str) -> str:
        """Returns an opaque version string that changes when the file changes; "" if unknown."""
        ...

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of a file.

        Raises:
            StorageError: the file ends before the buffer is full, or cannot be read.
        """
        ...

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        """Returns the memory of a range; None if the file is not in memory."""
        ...

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        """Announces `(path, start, nbytes)` ranges that will be read soon; may do nothing.

        `is_all` means that no more ranges will follow.
        """
        ...

    def close(self) -> None:
        """Closes files and connections."""
        ...


class StoreDefaults:
    """The answers of a store without links, blobs, checksums, files in memory or read-ahead."""

    def strays(self) -> Mapping[str, str]:
        return {}

    def blob_name(self, path: str) -> str:
        return ""

    def stored_crcs(self, paths: Iterable[str]) -> Mapping[str, int]:
        return {}

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        return None

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


# longer ranges are checked against the file's size before memory is allocated
_TRUSTED_BYTES = 1 << 20
# Metadata files are read whole. A `.metadata` of a million chunks has 0.1 GiB.
MAX_WHOLE_BYTES = 1 << 30
MAX_NOTE_BYTES = 16 << 20  # of a note in JSON, which takes up to 25 times as much memory


def read(store: Store, path: str, start: int = 0, nbytes: int | None = None) -> bytes:
    """Returns `nbytes` bytes of a file from `start`; the rest of the file if None.

    A false length from a hostile header or a sparse file allocates no memory.

    Raises:
        StorageError: the file ends too early.
        FormatError: `nbytes` is None, and the rest is longer than `MAX_WHOLE_BYTES`.
    """
    if nbytes is None:
        nbytes = store.size(path) - start
        if nbytes > MAX_WHOLE_BYTES:
            raise FormatError(
                f"a file is too long to be read whole: expected at most {MAX_WHOLE_BYTES} bytes,"
                f" got {nbytes} ({printable(path)})"
            )
    elif nbytes > _TRUSTED_BYTES and not 0 <= start <= (size := store.size(path)) - nbytes:
        raise StorageError(
            f"a file ends early: expected {nbytes} bytes from byte {start}, got a file of {size}"
            f" ({printable(path)})",
            hint="the file is truncated, or its header is damaged",
        )
    buffer = bytearray(nbytes)
    store.read_into(path, start, memoryview(buffer))
    return bytes(buffer)


def write_file(store: WritableStore, path: str, data: bytes) -> None:
    """Writes a whole small file and makes it durable."""
    writer = store.create(path, len(data))
    try:
        writer.write_at(0, data)
        writer.finish()
    finally:
        writer.abort()


# schemes whose paths may begin with a slash
_WITHOUT_HOST = ("memory", "hdfs", "sftp", "ssh", "ftp", "webhdfs", "dbfs")
_SEGMENT = re.compile(r"[^/\x00]{1,255}")


def check_path(path: str, where: str) -> str:
    """Returns `path` if it names a file within a root.

    Raises:
        StorageError: it is absolute, contains `..` (also between backslashes) or a NUL, or looks
            like a URL or a drive.
    """
    segments = path.split("/")
    if not path.isascii():
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise StorageError(
                f"a file name has half of a character: {printable(path)!r} ({where})"
            ) from None
    plain = all(_SEGMENT.fullmatch(s) and s != "." and ".." not in s.split("\\") for s in segments)
    if (
        not plain
        or "://" in path
        or "::" in path
        or path.startswith("\\")
        or re.match(r"[A-Za-z]:\\", path)
    ):
        raise StorageError(
            f"a file name points outside the checkpoint: {printable(path)!r} ({where})"
        )
    return path


def local_path(path: str | os.PathLike[str]) -> str:
    """Returns a local path, or the path of a `file://` URL.

    It does not decode `%2D` and the like: these are characters of the name.

    Raises:
        PlanError: it is empty, or of bytes. An empty variable of a shell does not mean the present
            directory.
        StorageError: it is a URL that is not well formed.
    """
    where = os.fspath(path)
    if not isinstance(where, str) or not where:
        raise PlanError(
            f"expected a path or a URL that is not empty, got {where!r}",
            hint="a variable of the shell may be empty",
        )
    slip = re.match(r"(s3a?|gs|gcs|az|abfs|https?|memory|file):/(?!/)", where)
    if slip and not os.path.lexists(where):
        raise StorageError(
            f"a URL has two slashes after its scheme: expected {slip[1]}://, got {slip[1]}:/",
            hint=f"{slip[1]}://{printable(where[slip.end() :])}",
        )
    if not where.startswith("file://"):
        return where
    host, slash, rest = where.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        raise StorageError(
            f"a file:// URL has no host, and an absolute path: {printable(where)!r}",
            hint="such as file:///data/run",
        )
    return unquote(f"/{rest}")


def check_url(url: str) -> None:
    """Refuses a URL with an empty segment.

    `s3://bucket//run` and `s3://bucket/run` differ, but some tools treat them as equal.

    Raises:
        StorageError: it has an empty segment, a segment `.` or `..`, or no bucket.
    """
    scheme, separator, path = url.rpartition("::")[2].partition("://")
    if scheme in ("s3", "s3a", "gs", "gcs") and "@" in path.partition("/")[0]:
        raise StorageError(
            f"a URL must not contain credentials: {printable(url)}",
            hint="give them by the environment or a file",
        )
    has_host = scheme not in _WITHOUT_HOST
    path = path if has_host else path.removeprefix("/")
    segments = path.rstrip("/").split("/")  # slashes at the end have no meaning
    if separator and path.strip("/") and any(segment in ("", ".", "..") for segment in segments):
        named = "/".join(segment for segment in segments if segment not in ("", "."))
        clean = url[: len(url) - len(path)] + named
        raise StorageError(
            f"a URL with an empty segment, or one of dots: {printable(url)}",
            hint=(
                "name the bucket"
                if not segments[0]
                else f"write it as {printable(clean)}"
                if ".." not in segments
                else None
            ),
        )


def place_of(path: str | os.PathLike[str]) -> Path | str:
    """Returns a local path as a `Path`, and a URL unchanged."""
    where = os.fspath(path)
    return where if is_url(where) else Path(local_path(where))


def is_url(path: object) -> TypeGuard[str]:
    """Tells whether a path is a URL for fsspec, and not a local path."""
    return (
        isinstance(path, str)
        and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", path) is not None
        and not path.startswith("file://")
    )
