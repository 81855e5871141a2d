"""Sinks: they take the values of batches, and write them, put them into memory, or hash them.

A sink takes batches from several threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ckpt_tools.core.box import Box
from ckpt_tools.core.checksum import crc32, crc64nvme, join_crc32, join_crc64
from ckpt_tools.core.dtypes import MAX_ITEMSIZE
from ckpt_tools.core.plan import CELL_BYTES, Target
from ckpt_tools.engine.fingerprints import Fingerprints, HashedRange, HashedRanges, TensorHashes
from ckpt_tools.engine.kernels import Bytes, gather
from ckpt_tools.engine.schedule import Batch, Tile, Write
from ckpt_tools.engine.statistics import Moments, add_moments, measure, measure_change
from ckpt_tools.engine.trailers import (
    SlotFrame,
    by_file,
    cells_of,
    frames_of,
    payloads,
    with_known_slots,
)
from ckpt_tools.errors import StorageError
from ckpt_tools.storage import MemoryStore, Store, WritableStore, Writer
from ckpt_tools.storage.base import PartsWriter

Checksum = Callable[[memoryview], int]
_JOINS: dict[Checksum, Callable[[Iterable[tuple[int, int]]], int]] = {
    crc64nvme: join_crc64,
    crc32: join_crc32,
}
_FINISHERS = 16  # threads that mostly wait for a store


class SinkState(NamedTuple):
    """The pieces of files that one batch or one rank has written, and the hashes of its tensors.

    `sent` has the parts of uploads that another process has begun.
    """

    files: dict[str, HashedRanges]
    fingerprints: TensorHashes
    sent: Mapping[str, Mapping[int, Any]] = MappingProxyType({})


Note = Callable[[Tile, Bytes], None]


class Sink(Protocol):
    """The protocol of a sink: it takes the values of tiles in any order, each tile once."""

    def room(self, tile: Tile) -> Bytes | None:
        """Returns the memory that may receive the tile's values directly.

        Returns None if the engine must use a buffer of its own.
        """
        ...

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> SinkState | None:
        """Takes a batch: `tiles[i]` holds the values of `batch.tiles[i]`.

        `scratch` has space for the largest of them. Returns the pieces of files that were written;
        None if there are none.
        """
        ...


class HashSink:
    """A sink that computes fingerprints and keeps nothing else.

    It computes CRC-64/NVME, a zip's CRC-32, or both.
    """

    def __init__(self, *checksums: Checksum) -> None:
        """Takes the checksums to compute: `crc64nvme` (the default), `crc32`, or both.

        `found` has the results in the same order.
        """
        self._checksums = checksums or (crc64nvme,)
        self.found = tuple(Fingerprints(_JOINS[checksum]) for checksum in self._checksums)
        self._lock = threading.Lock()

    @property
    def fingerprints(self) -> Fingerprints:
        """The fingerprints by the first checksum."""
        return self.found[0]

    def room(self, tile: Tile) -> Bytes | None:
        del tile
        return None

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> None:
        del scratch
        for checksum, known in zip(self._checksums, self.found, strict=True):
            found = Fingerprints(known.joined)
            for tile, data in zip(batch.tiles, tiles, strict=True):
                found.add(tile, checksum(data.data), data)
            with self._lock:
                known.absorb(found.noted)


class FillSink:
    """A sink that puts values into existing memory."""

    def __init__(self, memory: MemoryStore, note: Note | None = None) -> None:
        """Takes the memory that holds the target's files, and a function of each tile's values."""
        self._memory, self._note = memory, note

    def room(self, tile: Tile) -> Bytes | None:
        if len(tile.writes) != 1 or tile.tensor.src_dtype is not tile.tensor.dst_dtype:
            return None
        write = tile.writes[0]
        return np.frombuffer(self._memory.view(write.file, write.start, write.nbytes), np.uint8)

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> None:
        for tile, data in zip(batch.tiles, tiles, strict=True):
            if self._note is not None:
                self._note(tile, data)
            for write in tile.writes:
                values = (
                    data
                    if write.nbytes == tile.dst_nbytes
                    else _cut_out(tile, data, write, scratch)
                )
                into = np.frombuffer(
                    self._memory.view(write.file, write.start, write.nbytes), np.uint8
                )
                if into.ctypes.data != values.ctypes.data:
                    into[:] = values


class WriteSink:
    """A sink that writes a target's files.

    At the end it knows the checksum of each file without reading it again.
    """

    def __init__(
        self,
        target: Target,
        store: WritableStore,
        name: Callable[[str], str] = str,
        whole: Target | None = None,
        measures: bool = False,
        before: Store | None = None,
        measured: Mapping[str, Moments] | None = None,
    ) -> None:
        """Takes the target that this process writes, its store, and the names of files there.

        `whole` is the whole target if other processes write the rest of it. With `measures`,
        `moments` has the statistics of the tensors. `before` has files of the same layout, from
        which the change is measured. `measured` has tensors whose values were measured before.
        """
        self.moments: dict[str, Moments] = {}
        self._measured = measured or {}
        add_moments(self.moments, self._measured.items())
        self._measures, self._before = measures, before
        self.target, self.store, self._name, self._whole = target, store, name, whole or target
        self.fingerprints = Fingerprints()
        self._ranges: dict[str, list[HashedRange]] = {}
        self._known_slots: dict[str, list[Sequence[HashedRange]]] = {}
        self._pieces: dict[str, HashedRanges] = {name: HashedRanges() for name in target.file_sizes}
        self._with_crc32 = {t.file for t in target.trailers}
        self._is_stream = not store.capabilities.can_write_anywhere
        self._frames: dict[str, list[SlotFrame]] = {}
        self._starts: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._writers: dict[str, Writer] = {}

    def open(self) -> None:
        """Creates all files."""
        for name, nbytes in self.target.file_sizes.items():
            self._writers[name] = self.store.create(self._name(name), nbytes)
        if not self._is_stream:
            return
        self._frames = frames_of(self.target)
        self._starts = {name: [f.start for f in frames] for name, frames in self._frames.items()}
        for literal in self.target.literals:  # a header; a stream must begin with it
            if literal.file not in self._frames:
                self._pieces[literal.file].append(
                    self._put(literal.file, literal.start, literal.data)
                )

    def add_known_slot(self, name: str, slot: Sequence[HashedRange], sent_nbytes: int) -> None:
        """Notes the checksums of a slot, piece by piece, before any of its bytes pass.

        Only `sent_nbytes` bytes of the slot will pass here.
        """
        self._known_slots.setdefault(name, []).append(slot)
        frame = self._frame_of(name, slot[0].start)
        if frame:
            frame.left, frame.crc32 = sent_nbytes, join_crc32((p.crc32, p.nbytes) for p in slot)

    def room(self, tile: Tile) -> Bytes | None:
        del tile
        return None

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> SinkState:
        noted: list[tuple[str, HashedRange]] = []
        fingerprints = Fingerprints()
        measured: list[tuple[str, Moments]] = []
        for tile, data in zip(batch.tiles, tiles, strict=True):
            crc = crc64nvme(data.data)
            fingerprints.add(tile, crc, data)
            if self._measures and len(data) and not tile.tensor.is_object:
                measured.append((tile.tensor.fqn, self._measure(tile, data)))
            for write in tile.writes:
                is_all = write.nbytes == tile.dst_nbytes
                values = data if is_all else _cut_out(tile, data, write, scratch)
                noted.append(
                    (
                        write.file,
                        self._put(write.file, write.start, values.data, crc if is_all else None),
                    )
                )
        full: list[tuple[str, SlotFrame]] = []
        files: dict[str, HashedRanges] = {}
        with self._lock:
            for name, piece in noted:
                files.setdefault(name, HashedRanges()).append(piece)
                self._pieces[name].append(piece)
                frame = self._fill(name, piece)
                full += [(name, frame)] if frame else []
            self.fingerprints.absorb(fingerprints.noted)
            add_moments(self.moments, measured)
        for name, frame in full:
            self._surround(name, frame)
        return SinkState(files, fingerprints.noted)

    def _measure(self, tile: Tile, data: Bytes) -> Moments:
        """Measures a tile, and its change if there are files from before."""
        is_known = tile.tensor.fqn in self._measured
        found = Moments() if is_known else measure(data, tile.tensor.dst_dtype)
        if self._before is not None and len(tile.writes) == 1:
            write = tile.writes[0]
            before = empty_bytes(write.nbytes)
            try:
                self._before.read_into(write.file, write.start, before.data)
            except StorageError:  # removed meanwhile
                self._before = None
                return found
            found.add(measure_change(data, before, tile.tensor.dst_dtype))
        return found

    def _frame_of(self, name: str, start: int) -> SlotFrame | None:
        """Returns the frame of the slot at a byte; None if the slot has no frame."""
        if name not in self._frames:
            return None
        number = bisect_right(self._starts[name], start) - 1
        frame = self._frames[name][number] if number >= 0 else None
        return None if frame is None or start >= frame.end else frame  # an object has no frame

    def _fill(self, name: str, piece: HashedRange) -> SlotFrame | None:
        """Notes a piece of a slot and returns its frame once it is full."""
        frame = self._frame_of(name, piece.start)
        if frame is None:
            return None
        frame.left -= piece.nbytes
        frame.pieces.append(piece)
        return None if frame.left else frame

    def _surround(self, name: str, frame: SlotFrame) -> None:
        pieces = [self._put(name, start, data) for start, data in frame.render()]
        frame.left = -1
        with self._lock:
            self._pieces[name].extend(pieces)

    def _put(
        self, name: str, start: int, data: memoryview | bytes, crc64: int | None = None
    ) -> HashedRange:
        self._writers[name].write_at(start, data)
        return HashedRange(
            start,
            len(data),
            crc64nvme(data) if crc64 is None else crc64,
            crc32(data) if name in self._with_crc32 else 0,
        )

    def finish(self) -> dict[str, int]:
        """Completes every file and returns the CRC-64/NVME of each.

        It writes the frames around payloads and makes the files durable.

        Raises:
            StorageError: a file could not be completed.
        """
        if self._is_stream:
            self._surround_rest()
        literals, trailers = (
            {} if self._is_stream else by_file(self.target.literals),
            by_file(self._whole.trailers),
        )
        checksums, boxes = {}, self._long_boxes()
        for name in list(self._pieces):  # one file at a time: there may be a million payloads
            pieces = with_known_slots(
                sorted(self._pieces.pop(name)), self._known_slots.get(name, ())
            )
            around = [(lit.start, lit.data) for lit in literals.get(name, ())]
            for behind, inside in payloads(trailers.get(name, ()), pieces):
                cells = cells_of(inside, boxes.get((name, behind[0].slot_start)))
                self._ranges.setdefault(name, []).extend(cells)
                if not self._is_stream:  # streams have their trailers already
                    crc = join_crc32((p.crc32, p.nbytes) for p in cells or inside)
                    around += [(trailer.start, trailer.render(crc)) for trailer in behind]
            pieces += [self._put(name, start, data) for start, data in _joined(around)]
            checksums[name] = join_file(name, pieces, self._whole.file_sizes[name])
            if name in self._known_slots and isinstance(writer := self._writers[name], PartsWriter):
                writer.expect(checksums[name])
        self._finish_writers()
        return checksums

    def ranges_of(self, name: str) -> Sequence[HashedRange]:
        """Returns the cells of a finished file's long payloads.

        An object store can copy these ranges itself.
        """
        return self._ranges.get(name, ())

    def _long_boxes(self) -> dict[tuple[str, int], Box]:
        """Returns the boxes of slots that may be long enough for cells, by file and start."""
        least = CELL_BYTES // MAX_ITEMSIZE
        return {
            (s.file, s.start): s.box
            for slots in self._whole.slots.values()
            for s in slots
            if s.box.numel >= least
        }

    def _finish_writers(self) -> None:
        if self._is_stream:
            with ThreadPoolExecutor(_FINISHERS, "ckpt-finish") as pool:
                for done in [pool.submit(writer.finish) for writer in self._writers.values()]:
                    done.result()
        else:
            for writer in self._writers.values():
                writer.finish()

    def _surround_rest(self) -> None:
        """Writes the frames and literals that no slot has written.

        They lie around empty slots and around objects.
        """
        for name, frames in self._frames.items():
            for frame in frames:
                if frame.left == 0:
                    self._surround(name, frame)
        framed = {
            (lit.file, lit.start)
            for frames in self._frames.values()
            for f in frames
            for lit in f.before
        }
        for literal in self.target.literals:
            if literal.file in self._frames and (literal.file, literal.start) not in framed:
                self._pieces[literal.file].append(
                    self._put(literal.file, literal.start, literal.data)
                )

    def export_state(self) -> SinkState:
        """Makes the written bytes durable, and returns the state that another process needs.

        The other process completes the files that several processes write.
        """
        if self._is_stream:
            self._surround_rest()
        self._finish_writers()
        files = {name: pieces for name, pieces in self._pieces.items() if pieces}
        sent = {
            name: writer.sent
            for name, writer in self._writers.items()
            if isinstance(writer, PartsWriter)
        }
        return SinkState(files, self.fingerprints.noted, sent)

    def absorb(self, handed: SinkState) -> None:
        """Adds the state of another process, or an earlier attempt, that wrote the same files."""
        for name, pieces in handed.files.items():
            self._pieces.setdefault(name, HashedRanges()).extend(pieces)
        for name, sent in handed.sent.items():
            if isinstance(writer := self._writers.get(name), PartsWriter):
                writer.absorb(sent)
        self.fingerprints.absorb(handed.fingerprints)

    def abort(self) -> None:
        """Closes all open writers. The owner of the staging directory removes it."""
        for writer in self._writers.values():
            writer.abort()


def _cut_out(tile: Tile, data: Bytes, write: Write, scratch: Bytes) -> Bytes:
    part = scratch[: write.nbytes]
    gather(data, tile.box, part, write.box, tile.tensor.dst_dtype.itemsize)
    return part


def _joined(frames: Iterable[tuple[int, bytes]]) -> Iterable[tuple[int, bytes]]:
    """Joins neighbouring frames: a suffix and the prefix after it become one write."""
    parts: list[bytes] = []
    start = end = 0
    for at, data in sorted(frames):
        if parts and at != end:
            yield start, b"".join(parts)
            parts = []
        if not parts:
            start = end = at
        parts.append(data)
        end += len(data)
    if parts:
        yield start, b"".join(parts)


def join_file(name: str, pieces: list[HashedRange], nbytes: int) -> int:
    """Returns a file's checksum from its pieces.

    The pieces must tile the file: every byte is written exactly once.
    """
    end = 0
    ordered = sorted(pieces)
    for piece in ordered:
        if piece.start != end:
            raise StorageError(
                f"a file was not written in full: expected a piece at byte {end}, got {piece.start}"
                f" ({name})"
            )
        end += piece.nbytes
    if end != nbytes:
        raise StorageError(
            f"a file was not written in full: expected {nbytes} bytes, got {end} ({name})"
        )
    return join_crc64((p.crc64, p.nbytes) for p in ordered)


def empty_bytes(nbytes: int) -> Bytes:
    """Returns an uninitialised buffer; the engine fills every byte that leaves it."""
    return np.empty(nbytes, np.uint8)
