"""Verifies a `torch.save` archive by the CRC-32 of each record, which torch never compares.

The bytes around the records are compared too, because a zip stores each fact about a record twice.
A record within an archive's first or last 1.5 KiB is compared at once. The other records are mostly
payloads: the result has their extents and expected checksums.

Source: PKWARE APPNOTE 6.3.9; torch 2.13 `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.core.catalog import RAW, ZIP, Extent
from ckpt_tools.core.checksum import crc32
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.zip.directory import (
    CRC_AT,
    END,
    END64,
    HUGE,
    LOCAL,
    DirectoryEntry,
    entries,
    find_directory,
    slice_archive,
)
from ckpt_tools.formats.zip.read import heads_and_tails
from ckpt_tools.storage import Store

_LOCATOR = struct.Struct("<4sIQI")
_STREAMED = 8  # the flag of a record whose CRC-32 and sizes follow its data
_PADDING, _WIDE = b"FB", b"\x01\x00"


class ArchiveCheck(NamedTuple):
    """The result for one archive, whose large records are still to be read.

    Attributes:
        extent: the archive.
        left: records that the caller must read, each with its CRC-32.
        problem: the problem found so far; "" for none.
        is_sealed: whether all of its records have a checksum. False for an extent that is not an
            archive.
    """

    extent: Extent
    left: tuple[Extent, ...]
    problem: str
    is_sealed: bool


def examine(store: Store, extents: Sequence[Extent]) -> Iterator[ArchiveCheck]:
    """Yields the result for each extent, in the order of the files.

    An extent that is neither packed nor a zip has no checksum.
    """
    for number, head, tail in heads_and_tails(store, extents):
        extent = extents[number]
        if (
            extent.packing == RAW
            and not head.startswith(b"PK")
            and not tail[-END.size :].startswith(b"PK")
        ):
            yield ArchiveCheck(extent, (), "", is_sealed=False)
            continue
        try:
            archive = _Archive(store, extent, head, tail)
            yield _examine_like_last(archive) or _examine(archive)
        except FormatError as error:
            yield ArchiveCheck(extent, (), f"is damaged: {error}", is_sealed=True)
        except struct.error:
            yield ArchiveCheck(extent, (), "is damaged: a zip is truncated", is_sealed=True)


class _Archive(NamedTuple):
    store: Store
    extent: Extent
    head: bytes
    tail: bytes

    @property
    def gap(self) -> range:
        """The bytes that have not been read."""
        return range(len(self.head), max(len(self.head), self.extent.nbytes - len(self.tail)))

    @property
    def at_hand(self) -> bytes:
        """All bytes except the gap."""
        overlap = len(self.head) + len(self.tail) - self.extent.nbytes
        return self.head + self.tail[max(0, overlap) :]

    def has(self, start: int, stop: int) -> bool:
        """Tells whether bytes have been read."""
        return stop <= len(self.head) or start >= self.extent.nbytes - len(self.tail)

    def cut(self, start: int, stop: int) -> bytes:
        """Returns bytes, at most 64 MiB."""
        at = start - (self.extent.nbytes - len(self.tail))
        if at >= 0 and stop <= self.extent.nbytes:
            return self.tail[at : at + stop - start]
        return slice_archive(self.store, self.extent, self.head, start, stop)


class _Known(NamedTuple):
    """The layout of a sound archive. Others of its kind differ only in data and checksums.

    Attributes:
        cuts: the ranges of the bytes at hand that are equal in all of them.
        fixed: the bytes in these ranges.
        records: name, start and length of each record's data, and the positions of its checksum in
            the bytes at hand.
    """

    cuts: tuple[slice, ...]
    fixed: bytes
    records: tuple[tuple[bytes, int, int, tuple[int, ...]], ...]


# by the archive's length; bounded, so that a million different layouts cost time and not memory
_known: dict[int, list[_Known]] = {}
_MAX_KNOWN, _MAX_ALIKE = 4096, 4  # of one length: [342, 1024] and [1024, 342]


def _examine_like_last(archive: _Archive) -> ArchiveCheck | None:
    """Examines an archive with a known layout; None for any other archive.

    A checkpoint has only a few different layouts.
    """
    alike = _known.get(archive.extent.nbytes, [])
    data = archive.at_hand if alike else b""
    known = next((k for k in alike if b"".join([data[c] for c in k.cuts]) == k.fixed), None)
    if known is None:
        return None
    left: list[Extent] = []
    is_sealed = True
    for name, start, nbytes, places in known.records:
        first, second = (
            (data[p : p + 4] for p in places)
            if len(places) == 2
            else (data[places[0] : places[0] + 4],) * 2
        )
        if first != second:
            return None  # the full examination finds the problem
        crc = int.from_bytes(first, "little")
        is_sealed &= _check_record(archive, name, start, nbytes, crc, left)
    return ArchiveCheck(archive.extent, tuple(left), "", is_sealed)


def _check_record(
    archive: _Archive, name: bytes, start: int, nbytes: int, crc: int, left: list[Extent]
) -> bool:
    """Compares a record's data with its checksum, or adds the record to `left`.

    Returns False if there is no checksum.
    """
    if nbytes and not crc:
        return False  # the writer computed no checksum
    if not archive.has(start, start + nbytes):
        left.append(
            Extent(archive.extent.file, archive.extent.start + start, nbytes, RAW, None, crc)
        )
    elif crc32(archive.cut(start, start + nbytes)) != crc:
        raise FormatError(f"the CRC-32 of its record {_shown(name)} is wrong")
    return True


def _examine(archive: _Archive) -> ArchiveCheck:
    count, directory = find_directory(archive.store, archive.extent, archive.tail)
    found = list(entries(directory, count))
    left: list[Extent] = []
    spans: list[tuple[int, int]] = []
    is_sealed, end = True, 0
    for entry in found:
        if entry.method:
            raise FormatError(
                f"a zip record is compressed: {_shown(entry.name)}, method {entry.method}"
            )
        if entry.header != end:
            raise FormatError(
                f"a zip record does not follow the one before it: expected byte {end}, got"
                f" {entry.header}"
            )
        start = _check_header(archive, entry)
        end = start + entry.nbytes + _check_descriptor(archive, entry, start + entry.nbytes)
        is_sealed &= _check_record(archive, entry.name, start, entry.nbytes, entry.crc, left)
        spans.append((start, end))
    _check_end(archive, count, end, len(directory))
    has_folder = archive.extent.packing != ZIP  # torch puts all records into one folder
    if (
        len({(e.name.partition(b"/")[0] if has_folder else b"", e.alike) for e in found}) != 1
        or len({e.name for e in found}) != count
    ):
        raise FormatError(
            "its records lie in several folders, are of several writers, or have one name"
        )
    _remember(archive, found, spans, end)
    return ArchiveCheck(archive.extent, tuple(left), "", is_sealed)


def _remember(
    archive: _Archive,
    entries: Sequence[DirectoryEntry],
    spans: Sequence[tuple[int, int]],
    directory: int,
) -> None:
    """Remembers the layout of a sound archive, if all bytes around its data are at hand."""
    gap = archive.gap
    places = [
        (directory + e.at + CRC_AT, *([start + e.nbytes + 4] if end > start + e.nbytes else []))
        for e, (start, end) in zip(entries, spans, strict=True)
    ]
    holes = sorted(
        [(p, p + 4) for found in places for p in found]
        + [(s, s + e.nbytes) for e, (s, _) in zip(entries, spans, strict=True)]
    )
    edges = [0, *(edge for hole in holes for edge in hole), archive.extent.nbytes]
    fixed = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    if gap and any(
        a < gap.stop and b > gap.start
        for a, b in [*fixed, *((p, p + 4) for found in places for p in found)]
    ):
        return
    if len(_known) >= _MAX_KNOWN:
        _known.clear()

    def here(at: int) -> int:
        return at if at <= gap.start else at - len(gap)

    cuts = tuple(slice(here(a), here(b)) for a, b in fixed)
    kept = b"".join([archive.at_hand[c] for c in cuts])
    records = tuple(
        (e.name, s, e.nbytes, tuple(map(here, found)))
        for e, (s, _), found in zip(entries, spans, places, strict=True)
    )
    alike = _known.setdefault(archive.extent.nbytes, [])
    _known[archive.extent.nbytes] = [_Known(cuts, kept, records), *alike][:_MAX_ALIKE]


def _shown(name: bytes) -> str:
    return printable(name.decode("utf-8", "replace"))


def _check_header(archive: _Archive, entry: DirectoryEntry) -> int:
    """Compares a record's local header with the directory, and returns the start of its data."""
    front = archive.cut(entry.header, entry.header + LOCAL.size)
    magic, *fields = LOCAL.unpack(front)
    crc, packed, nbytes, name_nbytes, extra_nbytes = fields[5:]
    start = entry.header + LOCAL.size + name_nbytes + extra_nbytes
    if magic != b"PK\x03\x04" or tuple(fields[:5]) != entry.common:
        raise FormatError(
            f"the header of its record {_shown(entry.name)} differs from the directory"
        )
    if start + entry.nbytes > archive.extent.nbytes:
        raise FormatError(
            f"a record runs past its archive: {start + entry.nbytes} of {archive.extent.nbytes}"
            " bytes"
        )
    behind = archive.cut(entry.header + LOCAL.size, start)
    known = (
        {(0, 0, 0), (0, HUGE, HUGE)}
        if entry.flags & _STREAMED
        else {(entry.crc, entry.nbytes, entry.nbytes), (entry.crc, HUGE, HUGE)}
    )
    if behind[:name_nbytes] != entry.name or (crc, packed, nbytes) not in known:
        raise FormatError(
            f"a zip record has two names or sizes: {_shown(entry.name)} and"
            f" {_shown(behind[:name_nbytes])}"
        )
    _check_padding(
        behind[name_nbytes:], entry, is_wide=packed == HUGE and not entry.flags & _STREAMED
    )
    return int(start)


def _check_padding(extra: bytes, entry: DirectoryEntry, is_wide: bool) -> None:
    """Makes sure that extra fields fill their space.

    Every byte of torch's alignment padding and of zip64's sizes is known and compared.
    """
    at, sizes = 0, b""
    while at < len(extra):
        tag, nbytes = struct.unpack_from("<2sH", extra.ljust(at + 4, b"\0"), at)
        body = extra[at + 4 : at + 4 + nbytes]
        if len(body) != nbytes or (tag == _PADDING and body.strip(b"Z")):
            raise FormatError(
                f"the bytes before the data of its record {_shown(entry.name)} are not padding"
            )
        sizes = body if tag == _WIDE else sizes
        at += 4 + nbytes
    if is_wide and sizes != struct.pack("<2Q", entry.nbytes, entry.nbytes):
        raise FormatError(
            f"the header of its record {_shown(entry.name)} has other sizes than the directory"
        )


def _check_descriptor(archive: _Archive, entry: DirectoryEntry, at: int) -> int:
    """Compares the bytes after a streamed record with the directory, and returns their length."""
    if not entry.flags & _STREAMED:
        return 0
    code = "<4sIQQ" if entry.nbytes >= HUGE else "<4sIII"
    size = struct.calcsize(code)
    if archive.cut(at, at + size) != struct.pack(
        code, b"PK\x07\x08", entry.crc, entry.nbytes, entry.nbytes
    ):
        raise FormatError(
            f"the bytes after its record {_shown(entry.name)} differ from the directory"
        )
    return size


def _check_end(archive: _Archive, count: int, start: int, nbytes: int) -> None:
    """Compares the end of an archive with its directory, which begins after the last record."""
    total = archive.extent.nbytes
    end = END.unpack(archive.cut(total - END.size, total))
    at = start + nbytes
    few = (min(count, 0xFFFF), min(count, 0xFFFF), min(nbytes, HUGE))
    is_sound = end[1:3] == (0, 0) and end[3:6] == few and end[6] in (start, HUGE) and not end[7]
    if at + END.size != total:
        if at + END64.size + _LOCATOR.size + END.size != total:
            raise FormatError(
                f"a zip directory does not fill its place: it ends at byte {at} of {total}"
            )
        end64 = END64.unpack(archive.cut(at, at + END64.size))
        locator = _LOCATOR.unpack(archive.cut(at + END64.size, at + END64.size + _LOCATOR.size))
        is_sound &= end64[:2] == (b"PK\x06\x06", END64.size - 12) and end64[4:] == (
            0,
            0,
            count,
            count,
            nbytes,
            start,
        )
        is_sound &= locator == (b"PK\x06\x07", 0, at, 1)
    elif end[6] == HUGE:
        is_sound = False
    if not is_sound:
        raise FormatError("the end of a zip is not what its directory says")
