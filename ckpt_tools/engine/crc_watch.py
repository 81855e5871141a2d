"""Compares the bytes read of a range with the CRC-32 that its writer noted."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.core.catalog import RAW, Extent, Payloads
from ckpt_tools.core.checksum import crc32, join_crc32
from ckpt_tools.core.plan import Plan
from ckpt_tools.errors import IntegrityError, printable
from ckpt_tools.storage import Store, read

if TYPE_CHECKING:
    from ckpt_tools.engine.kernels import Bytes  # `ckpt inspect` does not import numpy


_PIECE_BYTES = 4 << 20


class RangeCrcs(NamedTuple):
    """The pieces of a range that one process has read, and the CRC-32 of the whole range.

    Each piece is (start, length, CRC-32).
    """

    extent: Extent
    fqn: str
    pieces: set[tuple[int, int, int]]
    crc: int


class CrcWatch:
    """A checker of ranges: it collects the checksums of reads and proves every range read in full.

    Reads come in any order and from several threads.
    """

    def __init__(self, owners: dict[Extent, str], store: Store) -> None:
        """Takes the ranges to watch, with the names of their tensors for messages.

        A payload that is not row-major is not read in its order. At its first read, the watch reads
        all of it once more from `store`.
        """
        self._owners, self._store = owners, store
        self._proved_apart: set[Extent] = set()
        self._sealed: dict[str, list[Extent]] = {}
        for extent in self._owners:
            self._sealed.setdefault(extent.file, []).append(extent)
        for extents in self._sealed.values():
            # of tensors in one storage, one that is proved apart comes last: it proves all bytes
            extents.sort(key=lambda e: (e.start, e.strides is not None, e.nbytes))
        self._starts = {file: [e.start for e in extents] for file, extents in self._sealed.items()}
        self._pieces: dict[Extent, set[tuple[int, int, int]]] = {}
        self._num_proved = 0
        self._lock = threading.Lock()

    def note(self, file: str, start: int, data: Bytes) -> int | None:
        """Notes bytes read from a file, if they lie in a watched range.

        Returns their CRC-32 if the range is not yet decided.

        Raises:
            IntegrityError: the bytes are the whole range, and differ from the bytes that were
                written.
        """
        extent = self._around(file, start, len(data))
        if extent is None:
            return None
        if extent.strides is not None:
            self._prove_apart(extent)
            return None
        crc = crc32(data.data)
        if extent.crc32 is not None and len(data) == extent.nbytes:
            self._compare(extent, crc, extent.crc32)
            return None
        with self._lock:
            self._pieces.setdefault(extent, set()).add((start, len(data), crc))
        return crc

    def _prove_apart(self, extent: Extent) -> None:
        """Reads a payload that is not row-major, and compares it with its CRC-32."""
        with self._lock:
            if extent in self._proved_apart or extent.crc32 is None:
                return
            self._proved_apart.add(extent)
        crc = 0
        for at in range(0, extent.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, extent.nbytes - at)
            crc = crc32(read(self._store, extent.file, extent.start + at, nbytes), crc)
        self._compare(extent, crc, extent.crc32)

    def take(self, file: str, start: int, nbytes: int, crc: int) -> None:
        """Notes the CRC-32 of bytes that an earlier attempt read, if a watched range holds them."""
        extent = self._around(file, start, nbytes)
        if extent is not None:
            self._pieces.setdefault(extent, set()).add((start, nbytes, crc))

    def _around(self, file: str, start: int, nbytes: int) -> Extent | None:
        number = bisect_right(self._starts.get(file, []), start) - 1
        extent = self._sealed[file][number] if number >= 0 else None
        return (
            extent
            if extent is not None and start + nbytes <= extent.start + extent.nbytes
            else None
        )

    def partial_ranges(self, crcs: Mapping[Extent, int]) -> list[RangeCrcs]:
        """Returns the reads of ranges that this process read only in part.

        Another process may have read the rest. Ranges without a known CRC-32 are left out.
        """
        parts = [
            (e, pieces, _known(e, crcs))
            for e, pieces in self._pieces.items()
            if sum(n for _, n, _ in pieces) < e.nbytes
        ]
        return [
            RangeCrcs(extent, self._owners[extent], pieces, crc)
            for extent, pieces, crc in parts
            if crc is not None
        ]

    def absorb(self, parts: Iterable[RangeCrcs], crcs: dict[Extent, int]) -> None:
        """Adds another process's partial reads of ranges, and the CRC-32 of these ranges."""
        for part in parts:
            self._owners[part.extent] = part.fqn
            self._pieces.setdefault(part.extent, set()).update(part.pieces)
            crcs[part.extent] = part.crc

    def prove(self, crcs: Mapping[Extent, int]) -> int:
        """Compares checksums, and returns the number of proved ranges.

        A range read in part, or with gaps, is skipped.

        Args:
            crcs: CRC-32 of ranges whose extent does not carry it, as far as known.

        Raises:
            IntegrityError: bytes on disk differ from the bytes that were written.
        """
        for extent, pieces in self._pieces.items():
            ordered, end = sorted(pieces), extent.start
            for start, nbytes, _ in ordered:
                end = end + nbytes if start == end else -1
            known = _known(extent, crcs)
            if known is not None and end == extent.start + extent.nbytes:
                self._compare(
                    extent, join_crc32((crc, nbytes) for _, nbytes, crc in ordered), known
                )
        return self._num_proved

    def _compare(self, extent: Extent, crc: int, known: int) -> None:
        if crc != known:
            raise IntegrityError(
                f"bytes were damaged since they were written: expected CRC-32 {known:08x}, got"
                f" {crc:08x} ({printable(self._owners[extent])!r} in {printable(extent.file)},"
                f" bytes {extent.start}:{extent.start + extent.nbytes})",
                hint="take an older step, restore the file, or save the rest: ckpt salvage",
            )
        with self._lock:
            self._num_proved += 1


class RecordCrcWatch(CrcWatch):
    """A watch for reads that span several ranges: it cuts each read at the ends of ranges."""

    def note(self, file: str, start: int, data: Bytes) -> int | None:
        """Notes bytes of a file; each watched range takes its part of them."""
        end, extents = start + len(data), self._sealed.get(file, [])
        for extent in extents[max(0, bisect_right(self._starts.get(file, []), start) - 1) :]:
            if extent.start >= end:
                break
            a, b = max(start, extent.start), min(end, extent.start + extent.nbytes)
            if a < b:
                super().note(file, a, data[a - start : b - start])
        return None


def _known(extent: Extent, crcs: Mapping[Extent, int]) -> int | None:
    return extent.crc32 if extent.crc32 is not None else crcs.get(extent)


def read_whole(plan: Plan, located: Payloads, proved: Container[str] = ()) -> dict[Extent, str]:
    """Returns the payloads that a plan reads in full, with the names of their tensors.

    Only payloads whose CRC-32 is known, or may become known, are included. Tensors in `proved` are
    left out, because their bytes are proved in another way.
    """
    whole: dict[Extent, str] = {}
    for tensor in plan.tensors:
        if tensor.fqn in proved:
            continue
        chunks = list(tensor.chunks)
        for number, numel in tensor.overlaps.taken().items():
            box, stored = chunks[number]
            extent = located.get(stored, stored)
            if numel == box.numel and is_watched(stored, extent):
                whole[extent] = tensor.fqn
    return whole


def is_watched(stored: Extent, extent: Extent) -> bool:
    """Tells whether the CRC-32 of a payload is known, or may become known.

    `stored` is the extent in the catalog, `extent` the located payload.
    """
    if extent.strides is not None:
        return extent.crc32 is not None
    return stored.packing != RAW or extent.crc32 is not None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing assumed positions of payloads with the real ones.

    Attributes:
        found: the real position of each payload, by its stored extent.
        moved: stored extents of payloads that were not at the assumed position.
        crcs: CRC-32 of the other payloads by assumed position, if their writer noted one.
    """

    found: Payloads
    moved: frozenset[Extent]
    crcs: Mapping[Extent, int]


def compare_positions(assumed: Payloads, found: Payloads) -> Comparison:
    """Compares the positions at which payloads were read with those that the files name.

    Both are by stored extent. The CRC-32 is not part of a position.
    """
    moved = frozenset(at for at, e in found.items() if at in assumed and e[:5] != assumed[at][:5])
    crcs = {
        assumed[at]: extent.crc32
        for at, extent in found.items()
        if at in assumed and at not in moved and extent.crc32 is not None
    }
    return Comparison(found, moved, crcs)
