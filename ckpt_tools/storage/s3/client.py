"""The S3 API as far as s3fs has no words for it: conditions, checksums, multipart uploads; on
s3fs's own session and event loop.
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

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import Data, Traffic
from ckpt_tools.storage.retries import retry, translated
from ckpt_tools.storage.s3.obstore_client import OBSTORE, WORTH_BYTES, ObstoreClients, reader

_MAX_LISTED = 2_000_000  # an endless listing of a hostile server ends here
_KINDS = {
    "list_objects_v2": "LIST",
    "list_multipart_uploads": "LIST",
    "list_parts": "LIST",
    "head_object": "HEAD",
    "head_bucket": "HEAD",
    "get_object": "GET",
    "put_object": "PUT",
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
)


def check_options(options: Mapping[str, Any], initialise: Callable[..., None]) -> None:
    """Refuses options that s3fs does not know: it takes any, and ignores a misspelt one.

    Args:
        options: of the store.
        initialise: the `__init__` of its class in fsspec.

    Raises:
        StorageError: it has no such option.
    """
    known = [*inspect.signature(initialise).parameters, *_GENERAL_OPTIONS]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else "its options are those of S3FileSystem"
            raise StorageError(f"s3fs has no option {printable(name)!r}", hint=advice)


class ServerFacts:
    """What has been learnt of a server, and how much is on its way to it."""

    def __init__(self) -> None:
        self.checks_crc = False  # seen to compare CRC-64/NVME; until then an MD5 goes along
        # whether it refuses to write over an object: in one request, in many
        self.excludes: dict[str, bool] = {}
        self.flight = _Flight(_FLIGHT_BYTES)
        self.fast = ObstoreClients()


_SERVERS: WeakKeyDictionary[Any, ServerFacts] = WeakKeyDictionary()


class S3:
    """The calls of an s3fs file system with conditions and checksums, for which s3fs has no
    words.
    """

    def __init__(self, fs: Any, traffic: Traffic) -> None:
        self.fs, self.traffic = fs, traffic
        self.server, self._reader = _SERVERS.setdefault(fs, ServerFacts()), reader()

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Starts a coroutine on the file system's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.fs.loop)

    def at(self, path: str) -> dict[str, str]:
        """Returns bucket and key as the API wants them."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def at_prefix(self, path: str) -> dict[str, str]:
        """Returns bucket and prefix of everything below a path."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/" if key else ""}

    def reads_fast(self, nbytes: int) -> bool:
        """Tells whether `fetch_fast` is to be called for a range of so many bytes, and not
        `fetch`.
        """
        return self._reader == OBSTORE or (self._reader == "" and nbytes >= WORTH_BYTES)

    def fetch_fast(self, path: str, start: int, nbytes: int, etag: str | None) -> Data:
        """Does as `fetch` with the second client, on the thread that calls; and what that does not
        get, with s3fs.
        """
        bucket, key, _ = self.fs.split_path(path)
        data = self.server.fast.get(self.fs, bucket, key, start, nbytes, etag)
        return self.run(self.fetch(path, start, nbytes, etag)).result() if data is None else data

    async def fetch(self, path: str, start: int, nbytes: int, etag: str | None) -> Data:
        """Fetches a range of an object, of one version if told: s3fs's own call takes no condition.

        Args:
            path: bucket and key.
            start, nbytes: the range in bytes.
            etag: of the version.
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
            body: bytes = await response["Body"].read()
            return body
        finally:
            response["Body"].close()

    async def ask(self, method: str, **kwargs: Any) -> Any:
        """Calls one operation of the S3 API; a body goes past s3fs, which would send it from its
        end when it tries again.
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
        """Does the same, waits for the answer, and tries again what may pass.

        Raises:
            StorageError: it failed.
        """
        return retry(operation, url, lambda: self.run(self.ask(method, **kwargs)).result(), missing)

    def get(self, url: str, path: str) -> dict[str, Any]:
        """Returns a small object: `Body` as bytes and what the answer says of it; {} where there is
        none.
        """

        async def fetch() -> dict[str, Any]:
            answer = await self.ask("get_object", **self.at(path))
            try:
                return {**answer, "Body": await answer["Body"].read()}
            finally:
                answer["Body"].close()

        return dict(retry("read", url, lambda: self.run(fetch()).result(), missing={}))

    def pages(self, url: str, path: str, delimiter: str = "") -> Iterator[list[dict[str, Any]]]:
        """Yields what lies below a prefix, up to 1,000 entries for each request, as `fsspec` lists
        it: name, type, size, and S3's own.

        Args:
            url: for messages.
            path: bucket and prefix.
            delimiter: `/` for the objects and folders directly below, "" for all objects.
        """
        where, more = self.at_prefix(path), dict[str, str]()
        seen, num_listed = set[str](), 0
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
                    f"a listing names what was not asked for: {printable(outside[0])}"
                    f" ({printable(url)})"
                )
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
        """Returns the checksums that go with a body."""
        sums = {"ChecksumCRC64NVME": encoded(crc64.to_bytes(8, "big"))}
        if not self.server.checks_crc:
            sums["ContentMD5"] = encoded(hashlib.md5(data, usedforsecurity=False).digest())
        return sums

    def note(self, answer: Any) -> None:
        """Learns from an answer whether the server compares CRC-64/NVME."""
        self.server.checks_crc |= "ChecksumCRC64NVME" in answer

    def head(self, url: str, path: str) -> dict[str, Any]:
        """Returns what is known of an object, {} where there is none."""
        return dict(
            self.call(
                "look at", url, "head_object", missing={}, **self.at(path), ChecksumMode="ENABLED"
            )
        )


def next_page(
    answer: Mapping[str, Any], keys: Sequence[str], seen: set[str], url: str
) -> tuple[str, ...]:
    """Returns where the next page of a listing begins.

    Args:
        answer: a page that says that there are more.
        keys: what names the next one in it.
        seen: where pages have begun; this one is added.
        url: of the listing, for messages.

    Raises:
        StorageError: the answer does not say it, or says the same as before: it would never end.
    """
    found = tuple(str(answer.get(key) or "") for key in keys)
    token = "\0".join(found)
    if not found[0] or token in seen:
        raise StorageError(f"a listing does not end: its next page is missing ({printable(url)})")
    seen.add(token)
    return found


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def stored_crc64(head: dict[str, Any]) -> int | None:
    """Returns the CRC-64/NVME of a whole object as the store knows it, None where it does not."""
    text = head.get("ChecksumCRC64NVME", "")
    return int.from_bytes(base64.b64decode(text), "big") if text and "-" not in text else None


class _Flight:
    """Bytes that are on their way: a bound on memory. One that is larger than the bound goes
    alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._free = limit, 0, threading.Condition()

    def enter(self, nbytes: int) -> None:
        with self._free:
            while self._used and self._used + nbytes > self._limit:
                self._free.wait(1.0)
            self._used += nbytes

    def leave(self, nbytes: int) -> None:
        with self._free:
            self._used -= nbytes
            self._free.notify_all()


def server_time(answer: dict[str, Any]) -> dt.datetime:
    """Returns the store's own time of an answer to any request: this machine's clock may be
    wrong.
    """
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
