"""Finds where a rank's part of the model differs from the version before.

Each rank compares its boxes with the old bytes there, and compresses the difference. The pieces of
a tensor then go to one rank, which makes a frame of them (`delta_join`). No rank ever has all new
bytes of a tensor that several ranks hold.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, flat_start, is_flat, row_major_strides
from ckpt_tools.core.catalog import TensorEntry
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.plan import Target
from ckpt_tools.engine.fingerprints import Fingerprints, HashedRange
from ckpt_tools.engine.kernels import Bytes, gather
from ckpt_tools.engine.schedule import Batch, Tile
from ckpt_tools.engine.sinks import SinkState, WriteSink, empty_bytes, join_file
from ckpt_tools.formats.deltas.joined_frames import BlockCompressor, Blocks
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.delta_frames import wrong_before
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import WritableStore

ADLER_BASE = 65521  # RFC 1950, 8.2


class Baseline:
    """This rank's part of the newest version, in memory, by tensor and box.

    It becomes that of the next version when that is published, and not before.
    """

    def __init__(self) -> None:
        self._attempt = ""
        self._now: dict[tuple[str, Box], Bytes] = {}
        self._next: dict[tuple[str, Box], Bytes] = {}

    def begin(self, attempt: str) -> None:
        """Forgets all, unless it is the version of this attempt."""
        if not attempt or attempt != self._attempt or self._next:
            self.forget()

    def take(self, name: str, box: Box) -> Bytes | None:
        """Returns the bytes of a box and gives up their memory; None if they are not here."""
        return self._now.pop((name, box), None)

    def put(self, name: str, box: Box, data: Bytes) -> None:
        """Takes the bytes of a box of the next version."""
        self._next[name, box] = data

    def advance(self, attempt: str) -> None:
        """Notes that the next version is published, and the attempt that did it."""
        self._attempt, self._now, self._next = attempt, self._next, {}

    def forget(self) -> None:
        """Gives up all bytes. The next ones are read from the version before."""
        self._attempt, self._now, self._next = "", {}, {}


class Piece(NamedTuple):
    """The difference of a box of a tensor, row-major and compressed."""

    box: Box
    blocks: Blocks


@dataclass
class TensorChange:
    """The change of a tensor, as far as one rank knows it.

    Attributes:
        pieces: the boxes that have changed.
        num_changed: bytes that have changed.
        sums: this rank's part of the two sums of Adler-32, of the new bytes.
    """

    pieces: list[Piece] = field(default_factory=list)
    num_changed: int = 0
    sums: tuple[int, int] = (0, 0)


class ChangeFinder:
    """Takes this rank's boxes of the new version, and keeps what differs from the one before."""

    def __init__(self, before: Source, baseline: Baseline | None) -> None:
        self._before, self._baseline = before, baseline
        self._lock, self._own = threading.Lock(), threading.local()
        self._old = Fingerprints()
        self.changes: dict[str, TensorChange] = {}

    def put(self, tile: Tile, data: Bytes) -> None:
        """Takes a box of a tensor."""
        name, box = tile.tensor.fqn, tile.box
        entry, kept = self._before.catalog.tensors[name], self._baseline
        old = None if kept is None else kept.take(name, box)
        if old is None:
            old = self._read(entry, box)
        noted = Fingerprints()
        noted.add(tile, _crc64(tile, old), old)
        diff = np.bitwise_xor(data, old, out=old)
        num_changed = int(np.count_nonzero(diff))
        piece = Piece(box, self._compressor.compress(diff)) if num_changed else None
        sums = _sums(data, box, entry)
        if kept is not None:
            old[:] = data
            kept.put(name, box, old)
        with self._lock:
            self._old.absorb(noted.noted)
            change = self.changes.setdefault(name, TensorChange())
            both = zip(change.sums, sums, strict=True)
            change.sums = tuple((a + b) % ADLER_BASE for a, b in both)  # type: ignore[assignment]
            change.num_changed += num_changed
            if piece is not None:
                change.pieces.append(piece)

    def _read(self, entry: TensorEntry, box: Box) -> Bytes:
        """Reads the old bytes of a box; if they do not follow each other, with those between."""
        extent, itemsize, dim = entry.chunks[0].extent, entry.dtype.itemsize, 0
        if not is_flat(box, entry.shape):
            while box.sizes[dim] == 1:
                dim += 1
            # whole rows of this dim
            rows = Box(
                (*box.offsets[: dim + 1], *(0 for _ in box.sizes[dim + 1 :])),
                (*box.sizes[: dim + 1], *entry.shape[dim + 1 :]),
            )
            data = empty_bytes(box.numel * itemsize)
            gather(self._read(entry, rows), rows, data, box, itemsize)
            return data
        data = empty_bytes(box.numel * itemsize)
        start = extent.start + flat_start(box, entry.shape) * itemsize
        self._before.store.read_into(extent.file, start, data.data)
        return data

    @property
    def _compressor(self) -> BlockCompressor:
        """Returns this thread's compressor."""
        if (found := getattr(self._own, "compressor", None)) is None:
            found = self._own.compressor = BlockCompressor()
        compressor: BlockCompressor = found
        return compressor

    def prove_before(self, group: Group, sealed: Mapping[str, int]) -> None:
        """Compares the old bytes of all ranks with their fingerprints. All ranks call it.

        Raises:
            IntegrityError: the version before is not what was sealed.
        """
        told = group.gather(self._old.noted, "gather checksums of the version before")
        found = Fingerprints()
        for noted in told:
            found.absorb(noted)
        joined = found.join()
        for name in found.noted.sizes:
            if name in sealed and sealed[name] != joined.get(name):
                raise wrong_before(name, self._before)


def _crc64(tile: Tile, data: Bytes) -> int:
    """Returns the checksum of a box; 0 if it is not contiguous, and so needs one of each row."""
    return crc64nvme(data.data) if is_flat(tile.box, tile.tensor.shape) else 0


def _sums(data: Bytes, box: Box, entry: TensorEntry) -> tuple[int, int]:
    """Returns the part that a box has in the two sums of a tensor's Adler-32.

    The second sum counts each byte once for every byte from it to the end of the tensor.
    """
    starts = _run_starts(box, entry.shape) * entry.dtype.itemsize
    length, view = len(data) // max(1, len(starts)), data.data
    parts = (view[at : at + length] for at in range(0, len(data), max(1, length)))
    adlers = np.fromiter(map(zlib.adler32, parts), np.int64)
    if not len(adlers):
        return 0, 0
    plain, behind = (adlers & 0xFFFF) - 1, (entry.nbytes - starts - length) % ADLER_BASE
    weighted = (adlers >> 16) - length + plain * behind
    return int(plain.sum() % ADLER_BASE), int((weighted % ADLER_BASE).sum() % ADLER_BASE)


def _run_starts(box: Box, shape: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the first element of each run of a box that is contiguous in a tensor, in order."""
    strides, dim = row_major_strides(shape), len(shape) - 1
    while dim > 0 and box.sizes[dim] == shape[dim]:
        dim -= 1
    starts = np.zeros(1, np.int64)
    for offset, size, stride in zip(box.offsets[:dim], box.sizes[:dim], strides, strict=False):
        starts = (starts[:, None] + (offset + np.arange(size)) * stride).reshape(-1)
    return starts + sum(o * s for o, s in zip(box.offsets[dim:], strides[dim:], strict=True))


class ChangeSink(WriteSink):
    """Gives the tiles of this rank to a `ChangeFinder`. No file of the complete version is written.

    Their checksums come from the fingerprints of the tensors, which lie one after the other.
    """

    def __init__(self, target: Target, store: WritableStore, finder: ChangeFinder) -> None:
        super().__init__(target, store)
        self._finder = finder

    def open(self) -> None:
        """Creates nothing."""

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> SinkState:
        del scratch
        found = Fingerprints()
        for tile, data in zip(batch.tiles, tiles, strict=True):
            found.add(tile, _crc64(tile, data), data)
            self._finder.put(tile, data)
        with self._lock:
            self.fingerprints.absorb(found.noted)
        return SinkState({}, found.noted)

    def finish(self) -> dict[str, int]:
        pieces: dict[str, list[HashedRange]] = {name: [] for name in self.target.file_sizes}
        for literal in self.target.literals:
            crc = crc64nvme(literal.data)
            pieces[literal.file].append(HashedRange(literal.start, len(literal.data), crc, 0))
        for name, crc in self.fingerprints.join().items():
            (slot,) = self.target.slots[name]
            nbytes = self.fingerprints.noted.sizes[name]
            pieces[slot.file].append(HashedRange(slot.start, nbytes, crc, 0))
        return {
            name: join_file(name, mine, self.target.file_sizes[name])
            for name, mine in pieces.items()
        }

    def export_state(self) -> SinkState:
        return SinkState({}, self.fingerprints.noted, {})
