"""Reads bytes that several ranks need once, and sends them to these ranks.

This pays where the store is slower than the network between the ranks. The work goes in rounds: one
round is sent while the next is read. So it needs the memory of two rounds, whatever the size of the
load.

Imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from ckpt_tools.core.box import Box, flat_span, flat_start, row_major_strides
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.plan import Plan, Slot, Target, plan_transfer
from ckpt_tools.engine.crc_watch import CrcWatch, RangeCrcs, is_watched
from ckpt_tools.engine.execute import Totals, execute_batches
from ckpt_tools.engine.kernels import Bytes, gather, scatter
from ckpt_tools.engine.schedule import Batch, Tile, schedule, tile_bytes
from ckpt_tools.engine.sinks import FillSink, Note, empty_bytes
from ckpt_tools.errors import CheckpointError, FormatError, IntegrityError
from ckpt_tools.formats.registry import Source
from ckpt_tools.loop.loading.divide import ReadPlan, Round, RoundRead, SharedArea, WantedBox
from ckpt_tools.loop.loading.proof import LoadProof
from ckpt_tools.loop.state.shards import Shard, as_bytes
from ckpt_tools.ranks.gloo import RankSet
from ckpt_tools.storage import MemoryStore

_BUFFERS = range(2)


class _RoundSink(FillSink):
    """A sink with the buffers of two rounds. No thread writes into one before it has been sent."""

    def __init__(self, rounds: Sequence[int], note: Note) -> None:
        """Allocates the buffers; `rounds` has the number of bytes of each round."""
        self._left, self._num_free, self._is_over = list(rounds), len(_BUFFERS), False
        self._changed = threading.Condition()
        buffers = [empty_bytes(max(rounds, default=0)) for _ in _BUFFERS]
        self.buffers = [
            buffers[number % len(buffers)][:nbytes] for number, nbytes in enumerate(rounds)
        ]
        super().__init__(
            MemoryStore({str(number): buffer.data for number, buffer in enumerate(self.buffers)}),
            note,
        )

    def room(self, tile: Tile) -> Bytes | None:
        self._wait(tile)
        return super().room(tile)

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> None:
        for tile in batch.tiles:
            self._wait(tile)
        super().take(batch, tiles, scratch)
        with self._changed:
            for write in (w for t in batch.tiles for w in t.writes):
                self._left[int(write.file)] -= write.nbytes
            self._changed.notify_all()

    def _wait(self, tile: Tile) -> None:
        last = max(int(write.file) for write in tile.writes)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or last < self._num_free)
        if self._is_over:
            raise CheckpointError("another rank failed")

    def wait_for(self, number: int, reading: Future[Totals]) -> None:
        """Waits until a round is in its buffer, or the reading has ended."""
        with self._changed:
            while self._left[number] and not reading.done():
                self._changed.wait(0.02)

    def sent(self) -> None:
        """Releases the buffer of the oldest round."""
        with self._changed:
            self._num_free += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the reading."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class SharedReadStats(NamedTuple):
    """Counts of a shared read on this rank: bytes read, needed and received, and chunks proved."""

    read_nbytes: int
    needed_nbytes: int
    received_nbytes: int
    num_proved: int


def read_together(
    group: RankSet,
    source: Source,
    division: ReadPlan,
    shards: Mapping[int, Shard],
    jobs: int,
    memory_bytes: int,
    proof: LoadProof,
) -> SharedReadStats | None:
    """Reads this rank's part and sends it to the other ranks. All ranks of the group call it.

    Args:
        group: as for `divide`.
        source: the checkpoint.
        division: the part of each rank.
        shards: the shards that this rank does not read alone, by number.
        jobs, memory_bytes: threads, and the budget of their buffers.
        proof: takes the fingerprints of what was read.

    Returns:
        The counts. None on all ranks if bytes were wrong or were not at the assumed position: then
        each rank should read by itself.

    Raises:
        CheckpointError: it cannot be read; or another rank failed.
    """
    with group.phase("begin to read together"):
        part = proof.named({})
        reading = _Reading(group, source, division, jobs, memory_bytes, part.note)
    received_nbytes, rooms = 0, {number: _Room(shard) for number, shard in shards.items()}
    try:
        for number, pieces in enumerate(division.rounds()):
            with group.phase("read together"):
                buffer = reading.get(number)
            received_nbytes += _send_around(group, pieces, buffer, rooms)
            reading.sink.sent()
    finally:
        reading.end()
    num_proved = reading.prove()
    if any(group.all_gather(reading.is_spoiled, "compare what was read")):
        return None
    proof.absorb(part)
    return SharedReadStats(
        reading.result.read_nbytes, reading.needed_nbytes, received_nbytes, num_proved
    )


class _Reading:
    """This rank's own reading, in a separate thread."""

    def __init__(
        self,
        group: RankSet,
        source: Source,
        division: ReadPlan,
        jobs: int,
        memory_bytes: int,
        note: Note,
    ) -> None:
        self._group, self._source, self._division = group, source, division
        mine = [pieces[group.rank] for pieces in division.rounds()]
        areas = {piece.area.chunk.extent: piece.area for pieces in mine for piece in pieces}
        self._entries = _entries(areas.values())
        self._assumed = source.assume(self._entries)
        places = {
            self._assumed.get(extent, extent): (extent, area) for extent, area in areas.items()
        }
        self._crc_watch = CrcWatch(
            {
                p: a.entry.fqn
                for p, (stored, a) in places.items()
                if a.box == a.chunk.box and is_watched(stored, p)
            },
            source.store,
        )
        self.needed_nbytes = sum(
            p.box.numel * p.area.entry.dtype.itemsize for pieces in mine for p in pieces
        )
        self.sink = _RoundSink([sum(piece.nbytes for piece in pieces) for pieces in mine], note)
        self.is_spoiled = False
        tiles = tile_bytes(memory_bytes, jobs)
        batches = chain.from_iterable(
            schedule(_plan(pieces, str(number)), self._assumed, *tiles)
            for number, pieces in enumerate(mine)
        )
        self._thread = ThreadPoolExecutor(1, "ckpt-together")
        self._future = self._thread.submit(
            execute_batches, batches, source.store, self.sink, jobs, crc_watch=self._crc_watch
        )

    def get(self, number: int) -> Bytes:
        """Returns the buffer of a round once it is full, or as it is if bytes were wrong."""
        self.sink.wait_for(number, self._future)
        if self._future.done():
            error = self._future.exception()
            self.is_spoiled = isinstance(error, IntegrityError | FormatError)
            if error is not None and not self.is_spoiled:
                raise error
        return self.sink.buffers[number]

    def end(self) -> None:
        """Stops the reading and waits for its thread."""
        self.sink.stop()
        self._thread.shutdown()

    @property
    def result(self) -> Totals:
        """Returns the totals of the reading."""
        return self._future.result()

    def prove(self) -> int:
        """Checks where payloads lie, compares checksums, and returns the number of proved chunks.

        This includes chunks that several ranks have read together.
        """
        crcs: dict[Extent, int] = {}
        parts: list[RangeCrcs] = []
        with self._group.phase("check what was read"):
            if not self.is_spoiled:
                real = self._source.compare(self._entries, self._assumed)
                self.is_spoiled = bool(real.moved)
                crcs = dict(real.crcs)
                parts = self._crc_watch.partial_ranges(crcs) if self._group.rank else []
        for theirs in self._group.gather(parts, "gather checksums"):
            self._crc_watch.absorb(theirs, crcs)
        try:
            return self._crc_watch.prove(crcs)
        except IntegrityError:
            self.is_spoiled = True
            return 0


def _entries(areas: Iterable[SharedArea]) -> list[TensorEntry]:
    """Returns the tensors of some areas, with only the chunks of these areas."""
    chunks: dict[str, dict[Chunk, None]] = {}
    entries = {}
    for area in areas:
        entries[area.entry.fqn] = area.entry
        chunks.setdefault(area.entry.fqn, {})[area.chunk] = None
    return [replace(entry, chunks=ChunkList(chunks[name])) for name, entry in entries.items()]


def _plan(pieces: Sequence[RoundRead], file: str) -> Plan:
    """Returns the plan that reads a round's boxes into a file of that name."""
    slots: dict[str, list[Slot]] = {}
    for piece in pieces:
        slots.setdefault(piece.area.entry.fqn, []).append(Slot(piece.box, file, piece.start))
    target = Target(
        "memory",
        {file: sum(p.nbytes for p in pieces)},
        {name: tuple(s) for name, s in slots.items()},
    )
    entries = {entry.fqn: entry for entry in _entries(p.area for p in pieces)}
    return plan_transfer(
        Catalog("pieces", entries), target, {p.area.entry.fqn: p.area.dtype for p in pieces}
    )


class _Room:
    """The memory of one shard."""

    def __init__(self, shard: Shard) -> None:
        self.box, self._tensor, self._itemsize = shard.box, shard.tensor, shard.dtype.itemsize
        memory = as_bytes(shard.tensor)
        self._memory = None if memory is None else np.frombuffer(memory, np.uint8)

    def flat(self, box: Box) -> Bytes | None:
        """Returns the memory of the elements of `box`; None if not contiguous host memory."""
        return None if self._memory is None else _flat(self._memory, self.box, box, self._itemsize)

    def take(self, data: Bytes, frame: Box, box: Box) -> None:
        """Copies the elements of `box` out of `data`, the row-major elements of `frame`."""
        if self._memory is not None:
            start = flat_start(box.within(frame), frame.sizes) * self._itemsize
            scatter(
                data[start:],
                box,
                self._memory,
                self.box,
                self._itemsize,
                row_major_strides(frame.sizes),
            )
            return
        values = (
            torch.from_numpy(_packed(data, frame, box, self._itemsize))
            .view(self._tensor.dtype)
            .view(box.sizes)
        )
        inner = box.within(self.box)
        self._tensor[
            tuple(slice(o, e) for o, e in zip(inner.offsets, inner.ends, strict=True))
        ].copy_(values)


def _send_around(group: RankSet, pieces: Round, buffer: Bytes, rooms: Mapping[int, _Room]) -> int:
    """Sends a round's bytes to the ranks that need them; returns the number of bytes received."""
    sends: list[tuple[int, int, torch.Tensor]] = []
    receives: list[tuple[int, int, torch.Tensor]] = []
    packed: list[tuple[Bytes, Box, _Room]] = []
    tag = 0  # the same at both ends
    for reader, piece, wanted, box in _parts(pieces):
        tag += 1
        itemsize = piece.area.dtype.itemsize
        data = buffer[piece.start : piece.start + piece.nbytes] if reader == group.rank else None
        if wanted.rank == group.rank:
            room = rooms[wanted.number]
            if data is not None:
                room.take(data, piece.box, box)
                continue
            there = room.flat(box)
            if there is None:
                there = empty_bytes(box.numel * itemsize)
                packed.append((there, box, room))
            receives.append((reader, tag, torch.from_numpy(there)))
        elif data is not None:
            sends.append(
                (wanted.rank, tag, torch.from_numpy(_packed(data, piece.box, box, itemsize)))
            )
    group.exchange(sends, receives, "send what was read")
    for values, box, room in packed:
        room.take(values, box, box)
    return sum(values.numel() for _, _, values in receives)


def _parts(pieces: Round) -> Iterator[tuple[int, RoundRead, WantedBox, Box]]:
    """Yields the reader, its read, the rank that needs a part of it, and the part's box.

    The order is the same on all ranks.
    """
    for reader, own in enumerate(pieces):
        for piece in own:
            for wanted in piece.area.wanted:
                box = piece.box.intersect(wanted.box)
                if box is not None:
                    yield reader, piece, wanted, box


def _packed(data: Bytes, frame: Box, box: Box, itemsize: int) -> Bytes:
    """Returns the elements of `box` within `frame`, a row-major buffer, packed together."""
    part = _flat(data, frame, box, itemsize)
    if part is None:
        part = empty_bytes(box.numel * itemsize)
        gather(data, frame, part, box, itemsize)
    return part


def _flat(data: Bytes, frame: Box, box: Box, itemsize: int) -> Bytes | None:
    """Returns the elements of `box` within `frame`, a row-major buffer; None if not contiguous."""
    span = flat_span(box, frame)
    return None if span is None else data[span[0] * itemsize : span[1] * itemsize]
