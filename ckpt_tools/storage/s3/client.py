"""Calls of the S3 API that s3fs lacks: conditions, checksums, multipart uploads.

They use s3fs's session and event loop.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import difflib
import hashlib
import inspect
import io
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

from ckpt_tools.core import ending
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import Data, Traffic
from ckpt_tools.storage.retries import retry, translated
from ckpt_tools.storage.s3.obstore_client import OBSTORE, WORTH_BYTES, ObstoreClients, reader

# limits for an endless listing of a hostile server
_MAX_LISTED, _MAX_EMPTY_PAGES, _MAX_TOKENS = 2_000_000, 100, 20_000
_MAX_SMALL_BYTES = 1 << 20  # of an object that is read whole, such as a lease
_KINDS = {
    "list_objects_v2": "LIST",
    "list_multipart_uploads": "LIST",
    "list_parts": "LIST",
    "head_object": "HEAD",
    "head_bucket": "HEAD",
    "get_object": "GET",
    "put_object": "PUT",
    "copy_object": "PUT",
    "upload_part": "PUT",
    "upload_part_copy": "PUT",
    "create_multipart_upload": "POST",
    "complete_multipart_upload": "POST",
    "delete_objects": "POST",
    "delete_object": "DELETE",
    "abort_multipart_upload": "DELETE",
}
_FLIGHT_BYTES = 48 << 20  # 64 MiB takes 9 % more memory and no less time


_GENERAL_OPTIONS = (
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "asynchronous",
    "loop",
    "batch_size",
    "profile",  # of the AWS configuration; s3fs passes it on to its session
)


def check_s3_options(options: Mapping[str, Any], initialise: Callable[..., None]) -> None:
    """Refuses unknown options, because s3fs ignores misspelt ones.

    Args:
        options: options of the store.
        initialise: the `__init__` of its class in fsspec.

    Raises:
        StorageError: s3fs has no such option.
    """
    known = [*inspect.signature(initialise).parameters, *_GENERAL_OPTIONS]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else "its options are those of S3FileSystem"
            raise StorageError(f"s3fs has no option {printable(name)!r}", hint=advice)


class ServerFacts:
    """Known facts about a server, and the bytes being sent to it."""

    def __init__(self) -> None:
        # the server has compared a CRC-64/NVME; until then, an MD5 is sent, too
        self.checks_crc = False
        # whether it refuses to overwrite an object: "one" for a PUT, "many" for a multipart upload
        self.excludes: dict[str, bool] = {}
        self.flight = _SendBudget(_FLIGHT_BYTES)
        self.fast = ObstoreClients()


_SERVERS: WeakKeyDictionary[Any, ServerFacts] = WeakKeyDictionary()


class S3:
    """Calls of an s3fs file system with conditions and checksums, which s3fs does not offer."""

    def __init__(self, fs: Any, traffic: Traffic) -> None:
        self.fs, self.traffic = fs, traffic
        self.server, self._reader = _SERVERS.setdefault(fs, ServerFacts()), reader()

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Starts a coroutine on the file system's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.fs.loop)

    def at(self, path: str) -> dict[str, str]:
        """Returns bucket and key as arguments of the API."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def at_prefix(self, path: str) -> dict[str, str]:
        """Returns bucket and prefix of all objects below a path."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/" if key else ""}

    def reads_fast(self, nbytes: int) -> bool:
        """Tells whether to call `fetch_fast`, not `fetch`, for a range of `nbytes` bytes."""
        return self._reader == OBSTORE or (self._reader == "" and nbytes >= WORTH_BYTES)

    def fetch_fast(self, path: str, start: int, nbytes: int, etag: str | None) -> Data:
        """Fetches a range with the second client on this thread; if that fails, with s3fs."""
        bucket, key, _ = self.fs.split_path(path)
        data = self.server.fast.get(self.fs, bucket, key, start, nbytes, etag)
        return (
            ending.result(self.run(self.fetch(path, start, nbytes, etag))) if data is None else data
        )

    async def fetch(self, path: str, start: int, nbytes: int, etag: str | None) -> Data:
        """Fetches a range of an object, or of one version of it.

        s3fs's own call accepts no condition.

        Args:
            path: bucket and key.
            start, nbytes: the range in bytes.
            etag: ETag of the version; any version if None.
        """
        bucket, key, _ = self.fs.split_path(path)
        condition = {"IfMatch": etag} if etag else {}
        response = await self.fs._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{start + nbytes - 1}",
            **condition,
            **self.fs.req_kw,
        )
        try:
            return await _read_body(response["Body"], nbytes, path)
        finally:
            response["Body"].close()

    async def ask(self, method: str, **kwargs: Any) -> Any:
        """Calls one operation of the S3 API.

        A request with a body bypasses s3fs: in a retry, s3fs would send the body from its end.
        """
        self.traffic.add(_KINDS[method], sent_nbytes=len(kwargs.get("Body", b"")))
        if "Body" not in kwargs:
            return await self.fs._call_s3(method, **kwargs, **self.fs.req_kw)
        await self.fs.set_session()
        client = await self.fs.get_s3(kwargs["Bucket"])
        call = getattr(client, method)
        try:
            return await call(
                **self.fs._get_s3_method_kwargs(
                    call, {**kwargs, "Body": io.BytesIO(kwargs["Body"])}, **self.fs.req_kw
                )
            )
        except Exception as error:
            raise translated(error) from error

    def call(
        self, operation: str, url: str, method: str, missing: Any = None, **kwargs: Any
    ) -> Any:
        """Calls `ask`, waits for the answer, and retries temporary failures.

        Raises:
            StorageError: it failed.
        """
        return retry(
            operation, url, lambda: ending.result(self.run(self.ask(method, **kwargs))), missing
        )

    def get(self, url: str, path: str) -> dict[str, Any]:
        """Returns a small object: `Body` as bytes, and the answer's other fields; {} if missing."""

        async def fetch() -> dict[str, Any]:
            answer = await self.ask("get_object", **self.at(path))
            try:
                return {**answer, "Body": await _read_body(answer["Body"], _MAX_SMALL_BYTES, path)}
            finally:
                answer["Body"].close()

        return dict(retry("read", url, lambda: ending.result(self.run(fetch())), missing={}))

    def pages(self, url: str, path: str, delimiter: str = "") -> Iterator[list[dict[str, Any]]]:
        """Yields the entries below a prefix, up to 1,000 for each request.

        An entry has the fields of fsspec (name, type, size) and those of S3.

        Args:
            url: for messages.
            path: bucket and prefix.
            delimiter: `/` for objects and folders directly below, "" for objects at any depth.
        """
        where, more = self.at_prefix(path), dict[str, str]()
        seen, num_listed, num_empty, largest = set[str](), 0, 0, ""
        while True:
            answer = self.call(
                "list",
                url,
                "list_objects_v2",
                missing={},
                **where,
                **more,
                **({"Delimiter": delimiter} if delimiter else {}),
            )
            top = f"{where['Bucket']}/"
            folders = [
                {"name": top + found["Prefix"].rstrip("/"), "type": "directory"}
                for found in answer.get("CommonPrefixes") or ()
            ]
            objects = [
                {**found, "name": top + found["Key"], "type": "file", "size": found["Size"]}
                for found in answer.get("Contents") or ()
            ]
            outside = [
                entry["name"]
                for entry in (*folders, *objects)
                if not f"{entry['name']}/".startswith(top + where["Prefix"])
            ]
            if outside:
                raise StorageError(
                    f"a listing has names outside of its prefix: {printable(outside[0])}"
                    f" ({printable(url)})"
                )
            largest = _larger(largest, [*folders, *objects], where["Bucket"], url)
            num_empty = 0 if folders or objects else num_empty + 1
            if num_empty > _MAX_EMPTY_PAGES:
                raise StorageError(f"a listing does not end: it has empty pages ({printable(url)})")
            num_listed += len(objects)
            if num_listed > _MAX_LISTED:
                raise StorageError(
                    f"more than {_MAX_LISTED} objects are listed ({printable(url)})",
                    hint="give the prefix of one run, or of one checkpoint",
                )
            yield folders + objects
            if not answer.get("IsTruncated"):
                return
            (token,) = next_page(answer, ("NextContinuationToken",), seen, url)
            more = {"ContinuationToken": token}

    def seal(self, data: bytes | bytearray, crc64: int) -> dict[str, str]:
        """Returns the checksums to send with a body."""
        sums = {"ChecksumCRC64NVME": encoded(crc64.to_bytes(8, "big"))}
        if not self.server.checks_crc:
            sums["ContentMD5"] = encoded(hashlib.md5(data, usedforsecurity=False).digest())
        return sums

    def note(self, answer: Any) -> None:
        """Notes from an answer whether the server compares CRC-64/NVME."""
        self.server.checks_crc |= "ChecksumCRC64NVME" in answer

    def head(self, url: str, path: str) -> dict[str, Any]:
        """Returns the properties of an object; {} if there is none."""
        return dict(
            self.call(
                "look at", url, "head_object", missing={}, **self.at(path), ChecksumMode="ENABLED"
            )
        )


async def _read_body(body: Any, most: int, path: str) -> bytes:
    """Reads the body of an answer, up to the length that was asked for.

    Raises:
        StorageError: it is longer.
    """
    pieces: list[bytes] = []
    left = most + 1
    while left > 0 and (piece := await body.read(left)):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        raise StorageError(
            f"an answer is longer than what was asked for: expected at most {most} bytes"
            f" ({printable(path)})"
        )
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _larger(before: str, entries: Sequence[Mapping[str, Any]], bucket: str, url: str) -> str:
    """Returns the largest name of a listing so far.

    Raises:
        StorageError: a page has no larger name than those before: it is repeated for ever. Express
            buckets list in no order, so their pages are only counted.
    """
    largest = max((str(entry["name"]) for entry in entries), default=before)
    if entries and largest <= before and not bucket.endswith("--x-s3"):
        raise StorageError(f"a listing does not end: a page comes again ({printable(url)})")
    return max(before, largest)


def next_page(
    answer: Mapping[str, Any], keys: Sequence[str], seen: set[str], url: str
) -> tuple[str, ...]:
    """Returns the token of a listing's next page.

    Args:
        answer: a page of a listing that is not the last one.
        keys: the fields with the token of the next page.
        seen: tokens of earlier pages. This one is added.
        url: URL of the listing, for messages.

    Raises:
        StorageError: the token is missing or repeated, so the listing would never end.
    """
    found = tuple(str(answer.get(key) or "") for key in keys)
    token = "\0".join(found)
    if not found[0] or token in seen or len(seen) >= _MAX_TOKENS:
        raise StorageError(f"a listing does not end: its next page is missing ({printable(url)})")
    seen.add(token)
    return found


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def stored_crc64(head: dict[str, Any]) -> int | None:
    """Returns the store's CRC-64/NVME of a whole object; None if it has none."""
    text = head.get("ChecksumCRC64NVME", "")
    return int.from_bytes(base64.b64decode(text), "big") if text and "-" not in text else None


class _SendBudget:
    """Bytes that are being sent, with a limit on memory.

    A request that is larger than the limit is sent alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._free = limit, 0, threading.Condition()

    def enter(self, nbytes: int) -> None:
        is_cleaning = ending.has_begun()
        with self._free:
            while self._used and self._used + nbytes > self._limit:
                self._free.wait(0.2)
                ending.refuse_wait(is_cleaning)
            self._used += nbytes

    def leave(self, nbytes: int) -> None:
        with self._free:
            self._used -= nbytes
            self._free.notify_all()


def server_time(answer: dict[str, Any]) -> dt.datetime:
    """Returns the server's time of an answer, because this machine's clock may be wrong."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
