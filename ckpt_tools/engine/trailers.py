"""The bytes around the payloads of a file, and the checksums of these payloads.

Literals stand before a payload. Trailers stand after it and hold its CRC-32. A long payload has one
checksum per cell. This module does no I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from ckpt_tools.core.box import Box
from ckpt_tools.core.checksum import join_crc32, join_crc64
from ckpt_tools.core.plan import Literal, Target, Trailer, num_cells
from ckpt_tools.engine.fingerprints import HashedRange


class SlotFrame:
    """The bytes around a slot: literals before it, trailers after it.

    In a streamed file they are written as soon as the slot is full. `left` is the number of bytes
    of the slot that have yet to pass. `crc32` is its checksum, if known beforehand.
    """

    def __init__(self, trailers: list[Trailer], before: list[Literal]) -> None:
        self.trailers, self.before = trailers, before
        self.start, self.end = trailers[0].slot_start, trailers[0].start
        self.left = self.end - self.start
        self.pieces: list[HashedRange] = []
        self.crc32: int | None = None

    def render(self) -> list[tuple[int, bytes]]:
        """Returns the bytes to write, each with its start."""
        crc = (
            join_crc32((p.crc32, p.nbytes) for p in sorted(self.pieces))
            if self.crc32 is None
            else self.crc32
        )
        return [
            *((lit.start, lit.data) for lit in self.before),
            *((t.start, t.render(crc)) for t in self.trailers),
        ]


P = TypeVar("P", Literal, Trailer)


def by_file(parts: Iterable[P]) -> dict[str, list[P]]:
    """Groups parts of a target by file."""
    found: dict[str, list[P]] = {}
    for part in parts:
        found.setdefault(part.file, []).append(part)
    return found


def _by_slot(trailers: Iterable[Trailer]) -> Iterator[list[Trailer]]:
    """Yields the trailers of each slot of a file, in the file's order.

    The first trailer begins at the end of the slot.
    """
    ordered = sorted(trailers, key=lambda t: (t.slot_start, t.start))
    return (list(group) for _, group in groupby(ordered, key=lambda t: t.slot_start))


def payloads(
    trailers: Iterable[Trailer], ordered: Sequence[HashedRange]
) -> Iterator[tuple[list[Trailer], Sequence[HashedRange]]]:
    """Yields the trailers of every slot of a file, with the pieces that lie in the slot."""
    at = 0
    for behind in _by_slot(trailers):
        start, end = behind[0].slot_start, behind[0].start
        while at < len(ordered) and ordered[at].start < start:
            at += 1
        first = at
        while at < len(ordered) and ordered[at].start < end:
            at += 1
        yield behind, ordered[first:at]


def cells_of(payload: Sequence[HashedRange], box: Box | None) -> list[HashedRange]:
    """Returns the cells of a payload, joined from its pieces; none for a short payload.

    If a piece reaches across a cell boundary, the cells are larger.
    """
    nbytes = sum(piece.nbytes for piece in payload)
    count = num_cells(box, nbytes) if box else 0
    if not count:
        return []
    low, starts = payload[0].start, {piece.start for piece in payload}
    while any(low + number * nbytes // count not in starts for number in range(count)):
        count //= 2
    size = nbytes // count
    groups = (
        list(group) for _, group in groupby(payload, lambda piece: (piece.start - low) // size)
    )
    return [
        HashedRange(
            g[0].start,
            size,
            join_crc64((p.crc64, p.nbytes) for p in g),
            join_crc32((p.crc32, p.nbytes) for p in g),
        )
        for g in groups
    ]


def with_known_slots(
    ordered: list[HashedRange], slots: Iterable[Sequence[HashedRange]]
) -> list[HashedRange]:
    """Returns the pieces of a file, with the known pieces of each slot in place of its own.

    A known slot has checksums from elsewhere, because not all of its bytes pass here.
    """
    for slot in slots:
        first, last = (
            bisect_left(ordered, at, key=lambda p: p.start)
            for at in (slot[0].start, slot[-1].start + slot[-1].nbytes)
        )
        ordered[first:last] = slot
    return ordered


def frames_of(target: Target) -> dict[str, list[SlotFrame]]:
    """Returns the frames of each file's slots, in the order of the file."""
    literals = by_file(sorted(target.literals, key=lambda lit: -lit.start))
    frames: dict[str, list[SlotFrame]] = {}
    for file, found in by_file(target.trailers).items():
        mine = literals.get(file, [])
        for trailers in _by_slot(found):
            before = []
            while mine and mine[-1].start < trailers[0].start:
                before.append(mine.pop())
            frames.setdefault(file, []).append(SlotFrame(trailers, before))
    return frames
