"""Lists open multipart uploads and their parts, so that another try can continue them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.s3.client import S3


class SentPart(NamedTuple):
    """A part that the store has.

    The store may not report the CRC-64/NVME of a part that an earlier try has sent.
    """

    etag: str
    nbytes: int
    crc64: int | None

    def holds(self, data: bytes, crc64: int) -> bool:
        """Tells whether the part has these bytes, by its CRC-64/NVME, else by its ETag.

        The ETag is usually an MD5.
        """
        if self.nbytes != len(data) or self.crc64 is not None:
            return self.nbytes == len(data) and self.crc64 == crc64
        return self.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


class OpenUpload(NamedTuple):
    """An open upload: its id, the mark in the new object's metadata, and the sent parts.

    Part numbers start at 0.
    """

    upload_id: str
    mark: str
    parts: Mapping[int, SentPart]


def list_parts(s3: S3, url: str, path: str, upload_id: str) -> dict[int, SentPart] | None:
    """Returns the parts of an upload; None if the upload no longer exists."""
    found: dict[int, SentPart] = {}
    after = 0
    while True:
        page = s3.call(
            "list parts",
            url,
            "list_parts",
            missing={},
            **s3.at(path),
            UploadId=upload_id,
            PartNumberMarker=after,
        )
        if not page:
            return None
        for part in page.get("Parts") or ():
            crc = base64.b64decode(part.get("ChecksumCRC64NVME") or "")
            found[part["PartNumber"] - 1] = SentPart(
                str(part["ETag"]), int(part["Size"]), int.from_bytes(crc, "big") if crc else None
            )
        if not page.get("IsTruncated"):
            return found
        before, after = after, int(page.get("NextPartNumberMarker") or 0)
        if after <= before:
            raise StorageError(
                f"a listing does not end: its next page is missing ({printable(url)})"
            )
