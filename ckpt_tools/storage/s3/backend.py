"""The requests of a store, with the calls of S3. See `storage.backend.Backend`."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ckpt_tools.errors import StorageError
from ckpt_tools.storage.backend import Entry, Readers, counted
from ckpt_tools.storage.base import Data, Traffic
from ckpt_tools.storage.object_info import ObjectInfo, SmallObject
from ckpt_tools.storage.prefetch import WINDOW_BYTES
from ckpt_tools.storage.s3.client import S3, server_time, stored_crc64
from ckpt_tools.storage.s3.multipart import CLAIM, MARK, OWNER, Upload, UploadOptions, refuses
from ckpt_tools.storage.stream import Stream

if TYPE_CHECKING:
    from concurrent.futures import Future

_CRC64 = re.compile("[0-9a-f]{16}")
_READERS = 8  # each keeps memory for the bytes that it reads


class S3Backend:
    """See `Backend`: S3, and stores that speak its protocol."""

    lists_in_pages = True

    def __init__(self, s3: S3, traffic: Traffic) -> None:
        self._s3, self._traffic = s3, traffic
        self._readers = Readers(_READERS)

    @property
    def has_few_threads(self) -> bool:
        return self._s3.reads_fast(WINDOW_BYTES)

    def is_file(self, url: str, path: str) -> bool:
        # a HEAD; if there is no such object, s3fs would also list
        return "/" in path and bool(self._s3.head(url, path))

    def list_folder(self, url: str, path: str) -> Iterable[Entry]:
        # if there is no such folder, s3fs also lists the folder above
        return chain.from_iterable(self._s3.pages(url, path, delimiter="/"))

    def pages(self, url: str, path: str) -> Iterator[Sequence[Entry]]:
        return self._s3.pages(url, path)

    def start_read(self, path: str, start: int, nbytes: int, etag: str | None) -> Future[Data]:
        if self._s3.reads_fast(nbytes):
            found = self._readers.submit(partial(self._s3.fetch_fast, path, start, nbytes, etag))
        else:
            found = self._s3.run(self._s3.fetch(path, start, nbytes, etag))
        return counted(found, self._traffic, "GET")

    def create(
        self, url: str, path: str, nbytes: int, how: UploadOptions | None
    ) -> Upload | Stream:
        return Upload(self._s3, path, url, nbytes, how)

    def put(self, url: str, path: str, data: bytes, is_exclusive: bool, replaces: str) -> None:
        how = UploadOptions((0,), True, is_exclusive, replaces)
        writer = Upload(self._s3, path, url, len(data), how)
        writer.write_at(0, data)
        writer.complete()

    def excludes(self, url: str, path: str, data: bytes, writer: Upload | Stream | None) -> bool:
        is_small = not isinstance(writer, Upload) or writer.is_small
        return refuses(self._s3, path, url, data, is_small)

    def object_info(self, url: str, path: str) -> ObjectInfo:
        head = self._s3.head(url, path)
        notes, stored = head.get("Metadata", {}), stored_crc64(head)
        claim = notes.get(CLAIM, "") if stored is None and MARK in notes else ""
        if not _CRC64.fullmatch(claim):  # whoever may write there can forge it
            claim = ""
        return ObjectInfo(
            int(claim, 16) if claim else stored,
            MARK in notes,
            str(notes.get(OWNER, "")),
            bool(claim),
        )

    def state(self, url: str, path: str) -> tuple[int, str] | None:
        head = self._s3.head(url, path)
        return (int(head["ContentLength"]), str(head.get("ETag", ""))) if head else None

    def read_small(self, url: str, path: str) -> SmallObject | None:
        """See `Backend`. This takes one request."""
        answer = self._s3.get(url, path)
        if not answer:
            return None
        age = server_time(answer) - answer["LastModified"]
        return SmallObject(answer["Body"], str(answer["ETag"]), age.total_seconds())

    def now(self, url: str, path: str) -> dt.datetime | None:
        bucket = self._s3.at_prefix(path)["Bucket"]
        return server_time(self._s3.call("look at", url, "head_bucket", Bucket=bucket))

    def remove(self, url: str, paths: Sequence[str]) -> None:
        where = [self._s3.at(path) for path in paths]
        what = {"Objects": [{"Key": w["Key"]} for w in where], "Quiet": True}
        try:
            answer = self._s3.call(
                "remove", url, "delete_objects", Bucket=where[0]["Bucket"], Delete=what
            )
            refused = bool(answer.get("Errors"))
        except StorageError as error:
            if error.is_transient:
                raise
            refused = True
        # RadosGW needs another permission to remove several objects in one request
        for place in where if refused else ():
            self._s3.call(
                "remove",
                f"s3://{place['Bucket']}/{place['Key']}",
                "delete_object",
                missing={},
                **place,
            )

    def close(self) -> None:
        self._readers.close()
