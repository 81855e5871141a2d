"""Fingerprints: the CRC-64/NVME of a whole tensor in row-major order, joined from its tiles.

CRCs are linear, so the result does not depend on how the tiles are cut. The CRC of a tensor is the
exclusive-or of the *shares* of its parts. The share of a contiguous range is its CRC, shifted by
the number of bytes after it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, flat_start, is_flat, row_major_strides, whole
from ckpt_tools.core.checksum import combine_crc64nvme, crc32, crc64nvme, join_crc64
from ckpt_tools.core.plan import TensorPlan
from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.schedule import Tile
from ckpt_tools.ranks.base import Group

Words = npt.NDArray[np.uint64]
_SHORT_BYTES = 256  # shorter rows are hashed together in numpy: a call per row costs more
_POLYNOMIAL = 0x9A6C9329AC4BC9B5  # NVM Express 2.0, 5.2.1.3.4: bits reversed
_ONES = np.uint64((1 << 64) - 1)


class HashedRange(NamedTuple):
    """A byte range with its checksums.

    `crc32` is 0 if it is not needed. For a part that is not contiguous, it is the CRC-32 of the
    part's sizes instead: with its start, they tell which elements it has.
    """

    start: int
    nbytes: int
    crc64: int
    crc32: int


class HashedRanges:
    """Hashed ranges in 32 bytes each: a million chunks have two million of them."""

    __slots__ = ("_words",)

    def __init__(self, pieces: Iterable[HashedRange] = ()) -> None:
        self._words = array("Q")
        self.extend(pieces)

    def append(self, piece: HashedRange) -> None:
        """Adds one range."""
        self._words.extend(piece)

    def extend(self, pieces: Iterable[HashedRange]) -> None:
        """Adds several ranges."""
        if isinstance(pieces, HashedRanges):
            self._words.extend(pieces._words)
        else:
            for piece in pieces:
                self._words.extend(piece)

    def __len__(self) -> int:
        return len(self._words) // 4

    def __iter__(self) -> Iterator[HashedRange]:
        return map(HashedRange, *(self._words[number::4] for number in range(4)))


class TensorHashes(NamedTuple):
    """The checksums noted so far, by tensor name.

    Attributes:
        pieces: the contiguous ranges that passed.
        shares: parts that are not contiguous, each with its start, its bytes, and its share of the
            fingerprint.
        sizes: bytes of the whole tensor.
    """

    pieces: dict[str, HashedRanges]
    shares: dict[str, HashedRanges]
    sizes: dict[str, int]


@dataclass
class Fingerprints:
    """The fingerprints of whole tensors, joined from their tiles.

    `joined` may join another checksum instead.
    """

    joined: Callable[[Iterable[tuple[int, int]]], int] = join_crc64
    noted: TensorHashes = field(default_factory=lambda: TensorHashes({}, {}, {}))

    def add(self, tile: Tile, crc: int, data: Bytes) -> None:
        """Notes one tile of a tensor: its checksum, or its share computed from its values."""
        tensor = tile.tensor
        itemsize = tensor.dst_dtype.itemsize
        start = flat_start(tile.box, tensor.shape) * itemsize
        if is_flat(tile.box, tensor.shape):
            self.add_range(tensor, start, tile.dst_nbytes, crc)
            return
        if self.joined is join_crc64:
            share = share_of(data, tile.box, tensor.shape, itemsize)
            sizes = crc32(np.array(tile.box.sizes, np.int64).tobytes())
            self.noted.shares.setdefault(tensor.fqn, HashedRanges()).append(
                HashedRange(start, tile.dst_nbytes, share, sizes)
            )
            self.noted.sizes[tensor.fqn] = whole(tensor.shape).numel * itemsize

    def add_range(self, tensor: TensorPlan, start: int, nbytes: int, crc: int) -> None:
        """Notes the checksum of a range of a tensor's row-major bytes."""
        pieces = self.noted.pieces.setdefault(tensor.fqn, HashedRanges())
        pieces.append(HashedRange(start, nbytes, crc, 0))
        self.noted.sizes[tensor.fqn] = whole(tensor.shape).numel * tensor.dst_dtype.itemsize

    def share(self, group: Group) -> None:
        """Merges the notes of all ranks of a group."""
        found = group.all_gather(self.noted, "gather checksums")
        self.noted = TensorHashes({}, {}, {})
        for noted in found:
            self.absorb(noted)

    def absorb(self, noted: TensorHashes) -> None:
        """Adds the notes of another process."""
        self.noted.sizes.update(noted.sizes)
        for mine, theirs in ((self.noted.pieces, noted.pieces), (self.noted.shares, noted.shares)):
            for fqn, more in theirs.items():
                mine.setdefault(fqn, HashedRanges()).extend(more)

    def join(self) -> dict[str, int]:
        """Returns the fingerprint of every tensor whose tiles have all passed.

        A tile may have passed twice.
        """
        joined = {}
        for fqn, nbytes in self.noted.sizes.items():
            ordered = sorted(set(self.noted.pieces.get(fqn, ())))
            if fqn in self.noted.shares:
                parts = (*ordered, *set(self.noted.shares[fqn]))
                if sum(p.nbytes for p in parts) == nbytes and all(
                    p.start + p.nbytes <= nbytes for p in parts
                ):
                    joined[fqn] = self.share_of(fqn)
                continue
            ends = [p.start + p.nbytes for p in ordered]
            if [p.start for p in ordered] == [0, *ends[:-1]] and ends[-1] == nbytes:
                joined[fqn] = self.joined((p.crc64, p.nbytes) for p in ordered)
        return joined

    def differing(self) -> list[str]:
        """Returns the tensors of which a part was read twice, with other bytes."""
        found = []
        for fqn in self.noted.sizes:
            pieces = set(self.noted.pieces.get(fqn, ()))
            shares = set(self.noted.shares.get(fqn, ()))
            parts = {(p.start, p.nbytes) for p in pieces}, {(*s[:2], s.crc32) for s in shares}
            if (len(parts[0]), len(parts[1])) != (len(pieces), len(shares)):
                found.append(fqn)
        return found

    def share_of(self, fqn: str) -> int:
        """Returns the share of a tensor's fingerprint from the parts noted so far; 0 for none."""
        share, nbytes = 0, self.noted.sizes.get(fqn, 0)
        for piece in set(self.noted.pieces.get(fqn, ())):
            share ^= combine_crc64nvme(piece.crc64, 0, nbytes - piece.start - piece.nbytes)
        for piece in set(self.noted.shares.get(fqn, ())):
            share ^= piece.crc64
        return share


def share_rows(noted: TensorHashes, numbers: Mapping[str, int]) -> Words:
    """Returns what a rank has noted as numbers, so that the notes of many ranks are small.

    Args:
        noted: the notes. Neighbouring pieces are joined.
        numbers: the number of each tensor, the same on all ranks.

    Returns:
        `[n, 5]`: twice the number of the tensor, plus 1 if the part is not contiguous; start and
        bytes of the part; the checksum of its sizes, if it is not contiguous, else 0; its share of
        the fingerprint.
    """
    rows = array("Q")
    for name, nbytes in noted.sizes.items():
        key = 2 * numbers[name]
        for piece in _neighbours(noted.pieces.get(name, ())):
            behind = nbytes - piece.start - piece.nbytes
            share = combine_crc64nvme(piece.crc64, 0, behind)
            rows.extend((key, piece.start, piece.nbytes, 0, share))
        for piece in noted.shares.get(name, ()):
            rows.extend((key + 1, piece.start, piece.nbytes, piece.crc32, piece.crc64))
    return np.frombuffer(rows, np.uint64).reshape(-1, 5)


def deal_rows(rows: Words, num_ranks: int) -> list[Words]:
    """Returns the rows of `share_rows` for each rank that joins them.

    Of `n` ranks, rank `r` joins the tensors `r`, `r + n`, `r + 2 * n`, …, and numbers them anew.
    """
    tensors, kinds = np.divmod(rows[:, 0], np.uint64(2))
    numbers, ranks = np.divmod(tensors, np.uint64(num_ranks))
    order = np.argsort(ranks, kind="stable")
    dealt = rows[order]
    dealt[:, 0] = (2 * numbers + kinds)[order]
    return np.split(dealt, np.searchsorted(ranks[order], np.arange(1, num_ranks, dtype=np.uint64)))


class JoinedRows(NamedTuple):
    """What the parts of all ranks make.

    Attributes:
        fingerprints: of each tensor, by its number; None if parts are missing or overlap.
        differing: numbers of tensors of which two ranks have read the same part, with other bytes.
    """

    fingerprints: dict[int, int | None]
    differing: set[int]


def join_rows(rows: Words, nbytes: Words) -> JoinedRows:
    """Joins the parts of tensors.

    Args:
        rows: `[n, 5]`, as of `share_rows`, from all ranks. A part may be in it several times.
        nbytes: bytes of each tensor, by number.
    """
    number = rows[:, 0] >> np.uint64(1)
    rows = rows[np.lexsort((rows[:, 4], rows[:, 3], rows[:, 0], rows[:, 2], rows[:, 1], number))]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    rows = rows[is_new]
    if not len(rows):
        return JoinedRows({}, set())
    is_again = (rows[1:, :4] == rows[:-1, :4]).all(axis=1)
    differing = (rows[1:, 0][is_again] >> np.uint64(1)).tolist()
    number = (rows[:, 0] >> np.uint64(1)).astype(np.int64)
    starts, sizes = rows[:, 1], rows[:, 2]
    ends, first = starts + sizes, np.flatnonzero(np.diff(number, prepend=-1))
    expected = np.concatenate(([np.uint64(0)], ends[:-1]))
    expected[first] = 0
    found, has_shares = number[first], np.logical_or.reduceat(rows[:, 0] % 2 == 1, first)
    is_whole = (
        (np.add.reduceat(sizes, first) == nbytes[found])
        & np.logical_and.reduceat(ends <= nbytes[number], first)
        & (has_shares | np.logical_and.reduceat(starts == expected, first))
    )
    joined = np.bitwise_xor.reduceat(rows[:, 4], first)
    fingerprints = {
        tensor: crc if ok else None
        for tensor, crc, ok in zip(found.tolist(), joined.tolist(), is_whole.tolist(), strict=True)
    }
    return JoinedRows(fingerprints, set(differing))


def _neighbours(ranges: Iterable[HashedRange]) -> Iterator[HashedRange]:
    last: HashedRange | None = None
    for piece in sorted(set(ranges)):
        if last is not None and piece.start == last.start + last.nbytes:
            crc = combine_crc64nvme(last.crc64, piece.crc64, piece.nbytes)
            last = HashedRange(last.start, last.nbytes + piece.nbytes, crc, 0)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def share_of(data: Bytes, box: Box, shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the share of a tensor's fingerprint that belongs to a box.

    Args:
        data: the values of the box, row-major.
        box: which elements.
        shape: shape of the tensor.
        itemsize: bytes of an element.
    """
    dim = len(shape) - 1
    while dim > 0 and box.sizes[dim] == shape[dim]:
        dim -= 1  # all later dims are whole, so they belong to the contiguous rows
    strides = row_major_strides(shape)
    values = _crcs(data.reshape(-1, box.sizes[dim] * strides[dim] * itemsize))
    for outer in range(dim - 1, -1, -1):
        values = _fold(values.reshape(-1, box.sizes[outer]), strides[outer] * itemsize)
    last = sum(
        (o + n - 1) * s
        for o, n, s in zip(box.offsets[:dim], box.sizes[:dim], strides, strict=False)
    )
    behind = math.prod(shape) - last - (box.offsets[dim] + box.sizes[dim]) * strides[dim]
    return int(combine_crc64nvme(int(values[0]), 0, behind * itemsize))


def _crcs(rows: npt.NDArray[np.uint8]) -> Words:
    """Returns the CRC-64/NVME of each row: `[n]` for `[n, nbytes]`."""
    num_rows, nbytes = rows.shape
    if nbytes >= _SHORT_BYTES:
        return np.fromiter((crc64nvme(row) for row in _each(rows)), np.uint64, num_rows)
    crcs, table = np.full(num_rows, _ONES), _byte_table()
    num_words = nbytes // 8
    for word in np.ascontiguousarray(np.ascontiguousarray(rows[:, : num_words * 8]).view("<u8").T):
        crcs = _shift(crcs ^ word, 8)
    for column in rows[:, num_words * 8 :].T:
        crcs = table[(crcs ^ column) & np.uint64(255)] ^ (crcs >> np.uint64(8))
    return crcs ^ _ONES


def _each(rows: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    view, nbytes = rows.reshape(-1).data, rows.shape[1]
    return (view[at : at + nbytes] for at in range(0, len(view), nbytes))


def _fold(values: Words, pitch: int) -> Words:
    """Returns the share of each row of values, relative to the end of its last value.

    The values of a row end `pitch` bytes apart. The shape is `[m]` for `[m, n]`.
    """
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = np.concatenate([np.zeros((len(values), 1), np.uint64), values], axis=1)
        values = _shift(values[:, 0::2], pitch) ^ values[:, 1::2]
        pitch *= 2
    return values[:, 0]


def _shift(values: Words, nbytes: int) -> Words:
    """Returns CRCs shifted by `nbytes` bytes."""
    tables = _shift_tables(nbytes)
    octets = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(*values.shape, 8)
    result: Words = tables[0].take(octets[..., 0])
    for number in range(1, 8):
        result ^= tables[number].take(octets[..., number])
    return result


@lru_cache(maxsize=256)
def _shift_tables(nbytes: int) -> Words:
    """Returns the shifted value of each possible byte of a CRC: `[8, 256]`, by byte position."""
    bits = np.array([combine_crc64nvme(1 << bit, 0, nbytes) for bit in range(64)], np.uint64)
    tables = np.zeros((8, 256), np.uint64)
    for bit in range(64):
        number, low = divmod(bit, 8)
        tables[number, 1 << low : 2 << low] = tables[number, : 1 << low] ^ bits[bit]
    return tables


@lru_cache(maxsize=1)
def _byte_table() -> Words:
    """Returns the CRC register after each byte value, without its first and last inversion."""
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = (table >> np.uint64(1)) ^ np.where(
            table & np.uint64(1), np.uint64(_POLYNOMIAL), np.uint64(0)
        )
    return table
