"""A store whose files are weighted means of tensors: to read a range is to compute it.

An operation that reads it works as with any checkpoint, in the same constant memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy import typing as npt

from ckpt_tools.core.box import Box, bands, flat_range_boxes, flat_start
from ckpt_tools.core.catalog import Payloads
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.plan import TensorPlan
from ckpt_tools.engine.crc_watch import CrcWatch
from ckpt_tools.engine.execute import Reader, check_filled
from ckpt_tools.engine.fingerprints import Fingerprints
from ckpt_tools.engine.kernels import Bytes, keep_freed_memory, round_to_bfloat16, to_float64
from ckpt_tools.engine.schedule import Sources, Tile
from ckpt_tools.engine.sinks import empty_bytes
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store, Writer
from ckpt_tools.storage.base import Capabilities, StoreDefaults, Traffic

_PIECE_NUMEL = 1 << 17  # its sums, and what is read of one checkpoint, stay in a processor's cache
_BLOCK_NUMEL = 1 << 17  # of one operation of numpy: see `kernels`
_MAX_RUNS = 64
Doubles = npt.NDArray[np.float64]


@dataclass
class MeanTerm:
    """One checkpoint of a mean.

    Attributes:
        name: for messages.
        store: its files.
        tensors: its tensors, by the names of the mean.
        located: the positions of its payloads.
        weight: of its values. The sum is divided at the end, so that simple weights are exact.
        watch: compares the CRC-32 of its payloads.
        fingerprints: of the bytes that were read.
    """

    name: str
    store: Store
    tensors: Mapping[str, TensorPlan]
    located: Payloads
    weight: float
    watch: CrcWatch
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


@dataclass
class MeanNotes:
    """Remarks on boxes of tensors. A box that is read a second time replaces its remark.

    Attributes:
        overflowed: number of finite values that became infinite.
        differing: boxes of integers that differ between the checkpoints.
    """

    overflowed: dict[tuple[str, Box], int] = field(default_factory=dict)
    differing: set[tuple[str, Box]] = field(default_factory=set)

    def num_overflowed(self) -> dict[str, int]:
        """Returns the numbers of values that became infinite, by tensor."""
        found: dict[str, int] = {}
        for (path, _), number in sorted(self.overflowed.items()):
            found[path] = found.get(path, 0) + number
        return found


class MeanStore(StoreDefaults):
    """The mean of several checkpoints. The file of a tensor has its name.

    Tensors that are not floating-point numbers must be equal in all terms, or come from the last.
    """

    url = "the mean"
    traffic: Traffic | None = None

    def __init__(
        self,
        terms: Sequence[MeanTerm],
        divisor: float,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, DType],
    ) -> None:
        """Takes the checkpoints, oldest first.

        Args:
            terms: the checkpoints.
            divisor: of their weighted sum.
            shapes, dtypes: of each tensor of the mean.
        """
        self._terms, self._divisor = terms, divisor
        self._shapes, self._dtypes = shapes, dtypes
        self.notes = MeanNotes()
        self._own = threading.local()  # each thread has its own readers and buffers
        kinds = [term.store.capabilities for term in terms]
        self.capabilities = Capabilities(
            can_write_anywhere=False,
            fetches_ahead=any(kind.fetches_ahead for kind in kinds),
            is_remote=any(kind.is_remote for kind in kinds),
        )

    # ---- files -----------------------------------------------------------------------------------

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        del below
        return {}  # no other format may find something here

    def folders(self) -> list[str]:
        return []

    def enter(self, name: str) -> Store:
        raise StorageError(f"no such folder: {printable(name)}")

    def size(self, path: str) -> int:
        numel = Box((0,) * len(self._shapes[path]), self._shapes[path]).numel
        return numel * self._dtypes[path].itemsize

    def version(self, path: str) -> str:
        return " ".join(
            term.store.version(file)
            for term in self._terms
            for file in sorted({chunk.extent.file for chunk in term.tensors[path].chunks})
        )

    def create(self, path: str, nbytes: int) -> Writer:
        raise StorageError(f"a mean cannot be written to: {printable(path)} ({nbytes} bytes)")

    def close(self) -> None:
        for term in self._terms:
            term.store.close()
            term.fingerprints = Fingerprints()  # a second try reads everything again

    # ---- reading ---------------------------------------------------------------------------------

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        wanted = list(ranges) if self.capabilities.fetches_ahead else []
        for term in self._terms:
            reads = (
                (read.file, read.start, read.nbytes)
                for path, start, nbytes in wanted
                for box in self._boxes(path, start, nbytes)
                for piece in bands(box, _PIECE_NUMEL)
                for read in Sources(term.tensors[path], term.located).reads(piece)
            )
            term.store.will_read(reads, is_all)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        into, itemsize = np.frombuffer(buffer, np.uint8), self._dtypes[path].itemsize
        at = 0
        for box in self._boxes(path, start, len(into)):
            nbytes = box.numel * itemsize
            self._compute(path, box, into[at : at + nbytes])
            at += nbytes

    def _boxes(self, path: str, start: int, nbytes: int) -> list[Box]:
        """Returns the contiguous boxes of a range of bytes."""
        itemsize = self._dtypes[path].itemsize
        first, stop = start // itemsize, (start + nbytes) // itemsize
        if start % itemsize or nbytes % itemsize:
            raise StorageError(f"a range of {printable(path)} cuts an element: {start}, {nbytes}")
        return flat_range_boxes(self._shapes[path], first, stop)

    def _compute(self, path: str, box: Box, into: Bytes) -> None:
        """Fills a buffer with the mean of the elements of a contiguous box, piece by piece."""
        dtype, at = self._dtypes[path], 0
        readers = self._begin(path, box)
        for piece in bands(box, _PIECE_NUMEL):
            nbytes = piece.numel * dtype.itemsize
            if dtype.is_castable:
                with np.errstate(invalid="ignore", over="ignore"):  # _check_finite tells
                    self._sum(path, piece, readers, into[at : at + nbytes])
            else:
                self._take_last(path, piece, readers, into[at : at + nbytes])
            at += nbytes
        for reader in readers:
            reader.note()

    def _sum(self, path: str, box: Box, readers: Sequence[_TermReader], into: Bytes) -> None:
        total = self._room(box.numel)
        for number, reader in enumerate(readers):
            add_scaled(total, *reader.read(box), reader.term.weight, is_first=number == 0)
        if math.frexp(self._divisor)[0] == 0.5:  # a power of two: its inverse is exact, and faster
            total *= 1.0 / self._divisor
        else:
            total /= self._divisor
        overflowed = round_once(total, self._dtypes[path], into)
        self.notes.overflowed.pop((path, box), None)
        if overflowed is not None:
            self._check_finite(path, box, total)
        if overflowed:
            self.notes.overflowed[path, box] = overflowed

    def _take_last(self, path: str, box: Box, readers: Sequence[_TermReader], into: Bytes) -> None:
        """Takes the last term's elements, and notes whether another term has other ones."""
        data, _ = readers[-1].read(box)
        into[:] = data
        self.notes.differing.discard((path, box))
        for reader in readers[:-1]:
            if not np.array_equal(reader.read(box)[0], into):
                self.notes.differing.add((path, box))

    def _begin(self, path: str, box: Box) -> list[_TermReader]:
        """Returns this thread's readers of all terms, set to a contiguous box of a tensor."""
        if not hasattr(self._own, "readers"):
            self._own.readers = [_TermReader(term) for term in self._terms]
        readers: list[_TermReader] = self._own.readers
        for reader in readers:
            reader.begin(path, box)
        return readers

    def _room(self, numel: int) -> Doubles:
        """Returns this thread's buffer for sums."""
        if len(getattr(self._own, "sums", ())) < numel:
            self._own.sums = empty_bytes(numel * 8).view(np.float64)
        found: Doubles = self._own.sums[:numel]
        return found

    def _check_finite(self, path: str, box: Box, total: Doubles) -> None:
        """Refuses NaN: no mean of such checkpoints is of use. Infinite masks may stay.

        Raises:
            PlanError: it names the first term that is not finite.
        """
        if not np.isnan(total).any():
            return
        for term in self._terms:
            again = _TermReader(term)
            again.begin(path, box)
            if not np.isfinite(to_float64(*again.read(box))).all():
                raise PlanError(
                    f"no mean: {printable(path)!r} has NaN or infinity in {printable(term.name)}",
                    hint="leave the checkpoint out, or the tensor with --exclude (ckpt stats)",
                )

    def share(self, group: Group) -> None:
        """Merges what all ranks of a group have noted."""
        for term in self._terms:
            term.fingerprints.share(group)
        found: list[MeanNotes] = group.all_gather(self.notes, "gather notes")
        self.notes = MeanNotes()
        for notes in found:
            self.notes.differing |= notes.differing
            self.notes.overflowed |= notes.overflowed


class _Run(NamedTuple):
    """The bytes `low:high` of a box, which lie together in a file."""

    low: int
    high: int
    file: str
    start: int


class _TermReader:
    """One thread's reader of one term: contiguous boxes of its tensors, piece by piece.

    The chunks of a box are looked up once for all of its pieces.
    """

    def __init__(self, term: MeanTerm) -> None:
        self.term, self._reader = term, Reader(term.store, term.watch)
        self._path, self._buffer = "", empty_bytes(0)

    def begin(self, path: str, box: Box) -> None:
        """Starts at a contiguous box of a tensor."""
        if path != self._path:
            self._path, self._tensor = path, self.term.tensors[path]
            self._sources = Sources(self._tensor, self.term.located)
        self._runs = self._contiguous(box)
        self._start = flat_start(box, self._tensor.shape) * self._tensor.src_dtype.itemsize
        self._nbytes, self._crc = 0, 0

    def _contiguous(self, box: Box) -> list[_Run]:
        """Returns the reads of a box in their order.

        Returns none if one of them is strided in the box, or if there are too many: small reads
        are better joined.
        """
        tile = Tile(self._tensor, box, self._sources.reads(box), ())
        check_filled(tile)
        runs: list[_Run] = []
        for read in tile.reads if len(tile.reads) <= _MAX_RUNS else ():
            at = tile.flat_range(read.box) if read.strides is None else None
            if at is None:
                return []
            runs.append(_Run(*at, read.file, read.start))
        return sorted(runs)

    def read(self, piece: Box) -> tuple[Bytes, DType]:
        """Returns the elements of the next piece of the box, until the next call."""
        nbytes = piece.numel * self._tensor.src_dtype.itemsize
        if len(self._buffer) < nbytes:
            self._buffer = empty_bytes(nbytes)
        data = self._buffer[:nbytes]
        if self._runs:
            self._read_runs(data)
        else:
            tile = Tile(self._tensor, piece, self._sources.reads(piece), ())
            check_filled(tile)
            self._reader.fill([(tile, data)])
        self._crc = crc64nvme(data.data, self._crc)
        self._nbytes += nbytes
        return data, self._tensor.src_dtype

    def _read_runs(self, data: Bytes) -> None:
        low, high = self._nbytes, self._nbytes + len(data)
        for run in self._runs:
            start, stop = max(low, run.low), min(high, run.high)
            if start < stop:
                part = data[start - low : stop - low]
                self._reader.read(run.file, run.start + start - run.low, part)

    def note(self) -> None:
        """Notes the checksum of the pieces that were read."""
        with self.term.lock:
            self.term.fingerprints.add_range(self._tensor, self._start, self._nbytes, self._crc)


def add_scaled(
    total: Doubles, data: Bytes, dtype: DType, weight: float, is_first: bool = False
) -> None:
    """Adds values times a weight to a sum, in float64. If `is_first`, the sum was undefined."""
    keep_freed_memory()
    for start in range(0, len(total), _BLOCK_NUMEL):
        block = data[start * dtype.itemsize : (start + _BLOCK_NUMEL) * dtype.itemsize]
        into = total[start : start + _BLOCK_NUMEL]
        if weight == 1.0 and dtype.name == "float32":
            values: npt.NDArray[Any] = block.view(np.float32)  # numpy converts them
        else:
            values = to_float64(block, dtype)
            values *= weight
        if is_first:
            np.add(values, 0.0, into)  # as a sum from 0: -0.0 becomes 0.0
        else:
            into += values


def round_once(values: Doubles, dtype: DType, into: Bytes) -> int | None:
    """Rounds float64 values to the nearest of another type, to even if two are equally near.

    Returns the number of finite values that became infinite; None if all results are finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.name == "bfloat16":
            result: npt.NDArray[Any] = into.view(np.uint16)
            round_to_bfloat16(_rounded_to_odd(values), result)
            is_inf = (result & np.uint16(0x7FFF)) == np.uint16(0x7F80)
        else:
            result = into.view(dtype.name)
            result[:] = values
            # one pass; NaN and infinity would be in the sum
            if np.isfinite(result.sum(dtype=np.float32 if dtype.itemsize == 2 else None)):
                return None
            is_inf = np.isinf(result)
    num_inf = int(np.count_nonzero(is_inf))
    return num_inf - int(np.count_nonzero(np.isinf(values))) if num_inf else 0


def _rounded_to_odd(values: Doubles) -> npt.NDArray[np.float32]:
    """Rounds to float32 so that a second rounding gives what one rounding would have given.

    An inexact value gets the neighbour with an odd last bit. Source: Boldo and Melquiond, "When
    double rounding is odd", 2005.
    """
    singles = values.astype(np.float32)
    back = singles.astype(np.float64)
    bits = singles.view(np.uint32)
    is_inexact = (back != values) & ~np.isnan(values)
    bits -= (is_inexact & (np.abs(back) > np.abs(values))).astype(np.uint32)
    bits |= is_inexact.astype(np.uint32)
    return singles
