"""Makes the frames of a delta from the pieces of all ranks of a job.

The pieces of a tensor go to one rank, its owner. Where they follow each other in the tensor, and
the checksum can be joined, the frame consists of the pieces as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from tempfile import SpooledTemporaryFile

import numpy as np
import zstandard

from ckpt_tools.core.box import BoxIndex, bands, flat_start, is_flat, whole
from ckpt_tools.core.catalog import TensorEntry
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.engine.kernels import Bytes, gather, scatter
from ckpt_tools.engine.sinks import empty_bytes
from ckpt_tools.formats.deltas.encoding import Encoder, Hasher, new_hasher
from ckpt_tools.formats.deltas.joined_frames import BlockCompressor, frame_of
from ckpt_tools.formats.deltas.layout import ADLER32, OVERWRITE, DeltaIndex
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.delta_changes import ADLER_BASE, Piece, TensorChange
from ckpt_tools.publish.delta_frames import FrameFile, parts_of, told_if_full, wrong_before
from ckpt_tools.ranks.base import Group

_BLOCK_BYTES = 2 << 20
_ROUND_BYTES = 512 << 20  # of new bytes for each rank, whose changes are exchanged together
_IN_MEMORY_BYTES = 8 << 20  # of a frame in work; longer ones wait on a disk


class ChangeJoiner:
    """Exchanges the changes of all ranks, and makes the frames of this rank's tensors.

    Attributes:
        num_changed, changed_nbytes: tensors and bytes of these frames that have changed.
    """

    def __init__(
        self,
        before: Source,
        sealed: Mapping[str, int],
        index: DeltaIndex,
        folder: str | None,
        jobs: int,
        frames: FrameFile,
    ) -> None:
        self._before, self._index, self._folder, self._jobs = before, index, folder, jobs
        self._sealed = sealed
        self._frames, self._lock = frames, threading.Lock()
        self.num_changed = self.changed_nbytes = 0
        # with these, a frame needs neither the old bytes nor the new ones
        self._needs_old = index.encoding == OVERWRITE or index.checksum != ADLER32

    def join(self, changes: dict[str, TensorChange], group: Group) -> None:
        """Makes the frames. All ranks call it, each with its own changes, which it gives up."""
        sizes = {name: t.nbytes for name, t in self._before.catalog.tensors.items()}
        for owners in _rounds(sizes, group.size):
            parts: list[dict[str, TensorChange]] = [{} for _ in range(group.size)]
            for name, rank in owners.items():
                if name in changes:
                    parts[rank][name] = changes.pop(name)
            dealt = group.deal_objects(parts, "exchange the changes")
            del parts
            with group.phase("encode the changes"):
                mine: dict[str, list[TensorChange]] = {}
                for part in dealt:
                    for name, change in part.items():
                        mine.setdefault(name, []).append(change)
                with ThreadPoolExecutor(self._jobs, "ckpt-delta") as pool:
                    for done in [pool.submit(self._encode, *item) for item in mine.items()]:
                        done.result()

    def _encode(self, name: str, changes: Sequence[TensorChange]) -> None:
        if not any(change.pieces for change in changes):
            return
        entry = self._before.catalog.tensors[name]
        nbytes = entry.nbytes
        pieces = sorted(piece for change in changes for piece in change.pieces)
        hasher: Hasher = _Joined(changes, nbytes)
        follows = all(blocks.can_follow for _, blocks in pieces[1:])
        if follows and not self._needs_old and all(is_flat(box, entry.shape) for box, _ in pieces):
            itemsize = entry.dtype.itemsize
            parts = (
                (flat_start(box, entry.shape) * itemsize, box.numel * itemsize, blocks.data)
                for box, blocks in pieces
            )
            self._frames.add(name, frame_of(nbytes, parts), hasher.hexdigest())
        elif self._needs_old or (blocks := _compressed(entry, pieces)) is None:
            self._encode_anew(name, entry, pieces, hasher)
        else:
            self._frames.add(name, frame_of(nbytes, blocks), hasher.hexdigest())
        with self._lock:
            self.num_changed += 1
            self.changed_nbytes += sum(change.num_changed for change in changes)

    def _encode_anew(
        self, name: str, entry: TensorEntry, pieces: Sequence[Piece], hasher: Hasher
    ) -> None:
        """Makes the frame of a tensor from its decompressed changes."""
        nbytes, extent = entry.nbytes, entry.chunks[0].extent
        if self._index.checksum != ADLER32:
            hasher = new_hasher(self._index.checksum)
        encoder, old_crc = Encoder(self._index.encoding, nbytes, hasher, self._folder), 0
        with (
            told_if_full(),
            closing(encoder),
            SpooledTemporaryFile(_IN_MEMORY_BYTES, prefix="ckpt-", dir=self._folder) as frame,
        ):
            for diff in _difference(entry, pieces):
                start, old = encoder.at, np.zeros(len(diff), np.uint8)
                if self._needs_old:
                    self._before.store.read_into(extent.file, extent.start + start, old.data)
                    old_crc = crc64nvme(old.data, old_crc)
                    np.bitwise_xor(diff, old, out=diff)
                frame.write(encoder.add(diff, old))
            if self._needs_old and self._sealed.get(name, old_crc) != old_crc:
                raise wrong_before(name, self._before)
            for rest in encoder.finish():
                frame.write(rest)
            self._frames.add(name, parts_of(frame), encoder.checksum)


class _Joined:
    """The Adler-32 of a tensor from the sums of its parts. It needs no bytes."""

    def __init__(self, changes: Sequence[TensorChange], nbytes: int) -> None:
        plain = (1 + sum(change.sums[0] for change in changes)) % ADLER_BASE
        weighted = (nbytes + sum(change.sums[1] for change in changes)) % ADLER_BASE
        self._value = weighted << 16 | plain

    def update(self, data: object, /) -> None:
        del data

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _rounds(sizes: Mapping[str, int], num_ranks: int) -> Iterator[dict[str, int]]:
    """Yields the tensors of each round of messages, with the rank that makes the frame of each."""
    owners, total, loads = dict[str, int](), 0, [0] * num_ranks
    for name, nbytes in sizes.items():
        if owners and total + nbytes > num_ranks * _ROUND_BYTES:
            yield owners
            owners, total = {}, 0
        rank = loads.index(min(loads))
        loads[rank] += nbytes
        owners[name] = rank
        total += nbytes
    yield owners


def _compressed(entry: TensorEntry, pieces: Sequence[Piece]) -> list[tuple[int, int, bytes]] | None:
    """Returns the blocks of a whole tensor for `frame_of`; None if some cannot follow others."""
    found: list[tuple[int, int, bytes]] = []
    compressor, at = BlockCompressor(), 0
    for diff in _difference(entry, pieces):
        if diff.any():
            blocks = compressor.compress(diff)
            if found and not blocks.can_follow:
                return None
            found.append((at, len(diff), blocks.data))
        at += len(diff)
    return found


def _difference(entry: TensorEntry, pieces: Sequence[Piece]) -> Iterator[Bytes]:
    """Yields the difference of a whole tensor, block by block. The memory is the caller's."""
    index, itemsize = BoxIndex([piece.box for piece in pieces]), entry.dtype.itemsize
    decompressor, kept = zstandard.ZstdDecompressor(), dict[int, Bytes]()
    for window in bands(whole(entry.shape), max(1, _BLOCK_BYTES // itemsize)):
        block, used = np.zeros(window.numel * itemsize, np.uint8), dict[int, Bytes]()
        for number, shared in index.overlaps(window):
            box, blocks = pieces[number]
            data = kept.get(number)
            if data is None:
                nbytes = box.numel * itemsize
                frame = b"".join(frame_of(nbytes, [(0, nbytes, blocks.data)]))
                data = np.frombuffer(decompressor.decompress(frame), np.uint8)
            used[number] = data
            if shared != box:
                part = empty_bytes(shared.numel * itemsize)
                gather(data, box, part, shared, itemsize)
                data = part
            scatter(data, shared, block, window, itemsize)
        kept = used
        yield block
