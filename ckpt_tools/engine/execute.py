"""Carries out batches with a few threads; each thread has its own buffers.

The memory is threads times buffers, whatever the checkpoint's size. The first error stops all
threads and is raised.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.engine.crc_watch import CrcWatch
from ckpt_tools.engine.kernels import Bytes, cast, scatter
from ckpt_tools.engine.schedule import Batch, Read, Tile
from ckpt_tools.engine.sinks import Sink, SinkState, empty_bytes
from ckpt_tools.errors import CatalogError, printable
from ckpt_tools.storage import Store
from ckpt_tools.storage.ranges import Range, coalesce

Progress = Callable[[int], None]
# changes the values of a box, in the tensor's coordinates, in place
Alter = Callable[[Box, npt.NDArray[np.float32]], None]
_SINGLE = BY_NAME["float32"]
_DIRECT_NBYTES = 256 << 10
_ALONE_NBYTES = 1 << 20  # of a disk: starting a thread takes longer than to read them
_GAP_NBYTES = 8 << 10
_AHEAD_NBYTES, _KNOWN_AHEAD_NBYTES = 96 << 20, 224 << 20
_AHEAD_READS = 32 << 10  # about 8 MiB of objects


class BatchResult(NamedTuple):
    """The outcome of one batch.

    Attributes:
        read_nbytes: bytes read.
        overflowed: by tensor, how many finite values a cast made infinite.
        seen: file, start, length and CRC-32 of each piece read from a watched range.
        wrote: the pieces written to files.
    """

    read_nbytes: int
    overflowed: dict[str, int]
    seen: list[tuple[str, int, int, int]]
    wrote: SinkState | None


@dataclass
class Totals:
    """The totals of some batches.

    They are the bytes read, written and copied by a store itself. `overflowed` counts, by tensor,
    the finite values that a cast made infinite.
    """

    read_nbytes: int = 0
    written_nbytes: int = 0
    store_nbytes: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, batch: Batch, moved: BatchResult) -> None:
        """Adds a finished batch."""
        with self.lock:
            self.read_nbytes += moved.read_nbytes
            self.written_nbytes += sum(w.nbytes for t in batch.tiles for w in t.writes)
            for fqn, count in moved.overflowed.items():
                self.overflowed[fqn] = self.overflowed.get(fqn, 0) + count


def execute_batches(
    batches: Iterable[Batch],
    store: Store,
    sink: Sink,
    jobs: int,
    progress: Progress | None = None,
    looks_ahead: bool = True,
    crc_watch: CrcWatch | None = None,
    alter: Mapping[str, Alter] | None = None,
    note: Callable[[BatchResult], None] | None = None,
) -> Totals:
    """Moves every batch's tiles from a store into a sink.

    Args:
        batches: batches from `schedule`; taken lazily.
        store: the store to read from.
        sink: receives the values.
        jobs: number of threads.
        progress: called with the target bytes of each finished batch, from any thread.
        looks_ahead: tell the store about the reads of each batch ahead of time. False if the store
            knows them already.
        crc_watch: checks the CRC-32 of the bytes that are read.
        alter: by tensor, a function that changes its values on the way, in float32.
        note: called with the result of each batch, from any thread.

    Raises:
        CheckpointError: the first error of any thread; the others stop before their next batch.
    """
    totals, stop = Totals(), threading.Event()
    batches = iter(batches)
    first = list(islice(batches, 2))
    feed = _BatchQueue(chain(first, batches), store, looks_ahead)

    def work() -> None:
        worker = _Worker(sink, Reader(store, crc_watch), alter or {})
        while not stop.is_set() and (batch := feed.take()) is not None:
            moved = worker.do(batch)
            totals.add(batch, moved)
            if note is not None:
                note(moved)
            if progress is not None:
                progress(sum(t.dst_nbytes for t in batch.tiles))

    is_small = len(first) < 2 and sum(batch.read_nbytes for batch in first) <= _ALONE_NBYTES
    if is_small and not store.capabilities.is_remote:
        work()
        return totals
    with ThreadPoolExecutor(jobs, "ckpt") as pool:
        futures = [pool.submit(work) for _ in range(jobs)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in [*done, *futures]:
        future.result()
    return totals


class _BatchQueue:
    """Hands batches to threads, and tells the store ahead of time what they will read."""

    def __init__(self, batches: Iterable[Batch], store: Store, looks_ahead: bool) -> None:
        self._batches: Iterator[Batch] = iter(batches)
        self._looks_ahead = looks_ahead
        self._store, self._lock = store, threading.Lock()
        self._ahead: deque[Batch] = deque()
        self._ahead_nbytes = self._ahead_reads = 0
        self._is_over = False
        # a store that prefetches has its own limit; if it knows the last reads early, it can
        # spread them better over its requests
        self._most_nbytes = (
            _KNOWN_AHEAD_NBYTES if store.capabilities.fetches_ahead else _AHEAD_NBYTES
        )

    def take(self) -> Batch | None:
        with self._lock:
            while self._has_room() and not self._is_over:
                batch = next(self._batches, None)
                if batch is None:
                    self._is_over = True
                    if self._looks_ahead:
                        self._store.will_read((), is_all=True)
                    break
                if self._looks_ahead:
                    self._store.will_read(
                        (r.file, r.start, r.nbytes) for t in batch.tiles for r in t.reads
                    )
                self._ahead.append(batch)
                self._ahead_nbytes += batch.read_nbytes
                self._ahead_reads += batch.num_reads + 1
            if not self._ahead:
                return None
            batch = self._ahead.popleft()
            self._ahead_nbytes -= batch.read_nbytes
            self._ahead_reads -= batch.num_reads + 1
            return batch

    def _has_room(self) -> bool:
        return self._ahead_nbytes < self._most_nbytes and self._ahead_reads < _AHEAD_READS


class Reader:
    """Fills the tiles of a batch from a store. Each thread has its own reader and buffers."""

    def __init__(self, store: Store, crc_watch: CrcWatch | None = None) -> None:
        self.store, self._crc_watch = store, crc_watch
        self._buffers: dict[str, Bytes] = {}
        self.seen: list[tuple[str, int, int, int]] = []

    def read(self, file: str, start: int, into: Bytes) -> None:
        """Reads one range of a file."""
        self.store.read_into(file, start, into.data)
        self._note(file, start, into)

    def _note(self, file: str, start: int, data: Bytes) -> None:
        crc = self._crc_watch.note(file, start, data) if self._crc_watch is not None else None
        if crc is not None:
            self.seen.append((file, start, len(data), crc))

    def room(self, name: str, nbytes: int) -> Bytes:
        """Returns a buffer, which is kept for the next call with this name."""
        found = self._buffers.get(name)
        if found is None or len(found) < nbytes:
            found = self._buffers[name] = empty_bytes(nbytes)
        return found

    def fill(self, wanted: list[tuple[Tile, Bytes]]) -> int:
        """Reads all pieces, and returns the number of bytes read.

        Large reads go straight into place. Small neighbours are read together as one window.
        """
        small: list[Range] = []
        pieces: list[tuple[Tile, Read, Bytes]] = []
        read_nbytes = 0
        for tile, data in wanted:
            for read in tile.reads:
                if read.nbytes < _DIRECT_NBYTES:
                    small.append(Range(read.file, read.start, read.nbytes, len(pieces)))
                    pieces.append((tile, read, data))
                    continue
                read_nbytes += read.nbytes
                into = _in_place(tile, read, data)
                if into is not None:
                    self.read(read.file, read.start, into)
                else:
                    part = self.room("scratch", read.nbytes)[: read.nbytes]
                    self.read(read.file, read.start, part)
                    _place(tile, read, part, data)
        for window in coalesce(small, _GAP_NBYTES, max(_DIRECT_NBYTES, 1 << 20)):
            read_nbytes += window.nbytes
            if len(window.ranges) == 1:
                tile, read, data = pieces[window.ranges[0].tag]
                into = _in_place(tile, read, data)
                if into is not None:
                    self.read(read.file, read.start, into)
                    continue
            part = self.room("scratch", window.nbytes)[: window.nbytes]
            self.store.read_into(window.file, window.start, part.data)
            for item in window.ranges:
                tile, read, data = pieces[item.tag]
                piece = part[item.start - window.start :][: item.nbytes]
                self._note(read.file, read.start, piece)
                _place(tile, read, piece, data)
        return read_nbytes


class _Worker:
    """One thread's work on a batch: reads, casts, and passes the tiles to the sink.

    Buffers hold the tiles of a batch side by side, also before a cast.
    """

    def __init__(self, sink: Sink, reader: Reader, alter: Mapping[str, Alter]) -> None:
        self.store, self.sink, self.reader, self._alter = reader.store, sink, reader, alter

    def do(self, batch: Batch) -> BatchResult:
        """Moves one batch."""
        self.reader.seen = []
        for tile in batch.tiles:
            check_filled(tile)
        is_cast = [
            t.tensor.src_dtype is not t.tensor.dst_dtype or t.tensor.fqn in self._alter
            for t in batch.tiles
        ]
        views = [None if c else self._view(t) for t, c in zip(batch.tiles, is_cast, strict=True)]
        rooms = [
            self.sink.room(t) if v is None else v for t, v in zip(batch.tiles, views, strict=True)
        ]
        own_nbytes = [
            t.dst_nbytes if r is None else 0 for t, r in zip(batch.tiles, rooms, strict=True)
        ]
        own = split_buffer(self.reader.room("tiles", sum(own_nbytes)), own_nbytes)
        tiles = [o if r is None else r for o, r in zip(own, rooms, strict=True)]
        raw_nbytes = [t.src_nbytes if c else 0 for t, c in zip(batch.tiles, is_cast, strict=True)]
        raw = split_buffer(self.reader.room("raw", sum(raw_nbytes)), raw_nbytes)
        stored = [r if c else t for r, t, c in zip(raw, tiles, is_cast, strict=True)]
        read_nbytes = self.reader.fill(
            [(t, s) for t, s, v in zip(batch.tiles, stored, views, strict=True) if v is None]
        )
        read_nbytes += sum(len(v) for v in views if v is not None)
        overflowed: dict[str, int] = {}
        for tile, before, after in zip(batch.tiles, stored, tiles, strict=True):
            if before is not after:
                count = self._cast(tile, before, after)
                if count:
                    overflowed[tile.tensor.fqn] = overflowed.get(tile.tensor.fqn, 0) + count
        wrote = self.sink.take(
            batch, tiles, self.reader.room("scratch", max(t.dst_nbytes for t in batch.tiles))
        )
        return BatchResult(read_nbytes, overflowed, self.reader.seen, wrote)

    def _cast(self, tile: Tile, before: Bytes, after: Bytes) -> int:
        """Converts a tile's values to the target's type, and returns how many overflowed.

        Tensors in `alter` are changed on the way, in float32.
        """
        alter = self._alter.get(tile.tensor.fqn)
        if alter is None:
            return cast(before, tile.tensor.src_dtype, after, tile.tensor.dst_dtype)
        singles = self.reader.room("singles", tile.box.numel * _SINGLE.itemsize)[
            : tile.box.numel * _SINGLE.itemsize
        ]
        cast(before, tile.tensor.src_dtype, singles, _SINGLE)
        alter(tile.box, singles.view(np.float32).reshape(tile.box.sizes))
        return cast(singles, _SINGLE, after, tile.tensor.dst_dtype)

    def _view(self, tile: Tile) -> Bytes | None:
        """Returns the store's own memory for the values if they are contiguous there, else None."""
        if (
            len(tile.reads) != 1
            or tile.reads[0].strides is not None
            or tile.reads[0].nbytes != tile.src_nbytes
        ):
            return None
        read = tile.reads[0]
        view = self.store.view(read.file, read.start, read.nbytes)
        return None if view is None else np.frombuffer(view, np.uint8)


def split_buffer(buffer: Bytes, sizes: Iterable[int]) -> list[Bytes]:
    """Returns consecutive pieces of a buffer, of these sizes."""
    parts, at = [], 0
    for nbytes in sizes:
        parts.append(buffer[at : at + nbytes])
        at += nbytes
    return parts


def check_filled(tile: Tile) -> None:
    """Makes sure that the reads fill the tile, so that no uninitialised byte is written."""
    if sum(r.box.numel for r in tile.reads) != tile.box.numel:
        raise CatalogError(
            f"no source for some elements of {printable(tile.tensor.fqn)!r} {tile.box}"
        )


def _in_place(tile: Tile, read: Read, data: Bytes) -> Bytes | None:
    """Returns the part of a tile's buffer that a read can fill directly; None if there is none."""
    at = tile.flat_range(read.box) if read.strides is None else None
    return None if at is None else data[at[0] : at[1]]


def _place(tile: Tile, read: Read, part: Bytes, data: Bytes) -> None:
    at = tile.flat_range(read.box) if read.strides is None else None
    if at is not None:
        data[at[0] : at[1]] = part
    else:
        scatter(part, read.box, data, tile.box, tile.tensor.src_dtype.itemsize, read.strides)
