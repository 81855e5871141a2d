"""The directory of a zip: where it lies, and its records.

Source: PKWARE APPNOTE 6.3.9.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckpt_tools.core.catalog import Extent
from ckpt_tools.errors import FormatError
from ckpt_tools.storage import Store

LOCAL, CENTRAL, END = (
    struct.Struct("<4s5H3I2H"),
    struct.Struct("<4s6H3I5H2I"),
    struct.Struct("<4s4H2IH"),
)
END64 = struct.Struct("<4sQ2H2I4Q")
HUGE = 0xFFFFFFFF
CRC_AT = 16  # position of a record's CRC-32 in its entry of the directory
_MAX_CUT = 64 << 20  # enough for a directory of a million records


class DirectoryEntry(NamedTuple):
    """A record from the directory of a zip.

    `at` is the position of the entry in the directory. `nbytes` is the size of the uncompressed
    data.
    """

    at: int
    name: bytes
    flags: int
    # version needed, flags, method, time, date: the local header repeats them
    common: tuple[int, ...]
    alike: tuple[int, ...]  # version made by, and attributes: equal in all records of one writer
    crc: int
    nbytes: int
    header: int

    @property
    def method(self) -> int:
        """The compression method; 0 for none."""
        return self.common[2]


def find_directory(store: Store, extent: Extent, tail: bytes) -> tuple[int, bytes]:
    """Returns the number of records in a zip's directory, and the raw directory."""
    end = END.unpack(tail[-END.size :]) if len(tail) >= END.size else None
    if end is None or end[0] != b"PK\x05\x06":
        raise FormatError(
            "no zip directory at its end", hint="the file is truncated or was overwritten"
        )
    count, nbytes, start = end[4], end[5], end[6]
    if count == 0xFFFF or nbytes == HUGE or start == HUGE:
        at = len(tail) - END.size - 20 - END64.size
        end64 = END64.unpack_from(tail, at) if at >= 0 else (b"",)
        if end64[0] != b"PK\x06\x06":
            raise FormatError("a zip64 directory is missing")
        count, nbytes, start = end64[7], end64[8], end64[9]
    if start + nbytes > extent.nbytes or nbytes > _MAX_CUT:
        raise FormatError(
            f"a zip directory lies outside its archive: {start}:{start + nbytes} of {extent.nbytes}"
            " bytes"
        )
    at = start - (extent.nbytes - len(tail))
    return count, (
        tail[at : at + nbytes]
        if at >= 0
        else slice_archive(store, extent, b"", start, start + nbytes)
    )


def entries(directory: bytes, count: int, is_exact: bool = True) -> Iterator[DirectoryEntry]:
    """Yields the records of a directory.

    Args:
        directory: its bytes.
        count: of its records.
        is_exact: refuse what torch does not write: comments, several disks, and bytes at its end.
            A reader accepts them, because they hide nothing from it.

    Raises:
        FormatError: the directory is malformed, or truncated.
    """
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > len(directory):
            raise FormatError("a zip directory is truncated")
        fields = CENTRAL.unpack_from(directory, at)
        (
            needed,
            flags,
            method,
            time,
            date,
            crc,
            packed,
            nbytes,
            name_nbytes,
            extra_nbytes,
            comment_nbytes,
            disk,
        ) = fields[2:14]
        name_at = at + CENTRAL.size
        extra = directory[name_at + name_nbytes : name_at + name_nbytes + extra_nbytes]
        nbytes, packed, header = widen(extra, nbytes, packed, fields[16])
        alike = (fields[1], *fields[14:16])
        if fields[0] != b"PK\x01\x02" or (method == 0 and packed != nbytes):
            raise FormatError(f"a zip directory is malformed: its entry at byte {at}")
        if is_exact and (disk or comment_nbytes):
            raise FormatError("a zip directory refers to another disk, or has a comment")
        yield DirectoryEntry(
            at,
            directory[name_at : name_at + name_nbytes],
            flags,
            (needed, flags, method, time, date),
            alike,
            crc,
            nbytes,
            header,
        )
        at = name_at + name_nbytes + extra_nbytes + comment_nbytes
    if is_exact and at != len(directory):
        raise FormatError(
            f"a zip directory is longer than its entries: {at} of {len(directory)} bytes"
        )


def widen(extra: bytes, *values: int) -> list[int]:
    """Returns sizes and positions, with values beyond 32 bits taken from the zip64 field."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        tag, nbytes = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            body = extra[at + 4 : at + 4 + nbytes]
            wide = [v for (v,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        at += 4 + nbytes
    return [wide.pop(0) if v == HUGE and wide else v for v in values]


def slice_archive(store: Store, extent: Extent, head: bytes, start: int, stop: int) -> bytes:
    """Returns bytes of an archive, from its head if they lie there."""
    if stop <= len(head):
        return head[start:stop]
    if not 0 <= start <= stop <= extent.nbytes or stop - start > _MAX_CUT:
        raise FormatError(
            f"a record lies outside its archive: {start}:{stop} of {extent.nbytes} bytes"
        )
    buffer = bytearray(stop - start)
    store.read_into(extent.file, extent.start + start, memoryview(buffer))
    return bytes(buffer)
