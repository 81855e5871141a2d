"""Plans copies within one store: the ranges of a target that the store copies, and the rest for
this process. The store is an S3, or a file system that clones blocks.

In S3, a part of a multipart upload has at least 5 MiB, except for the last, and a file has at most
10,000 parts. So the engine copies short ranges, and the seam before a long one. A file system
clones whole blocks.

The store copies a range only if the source's manifest has the checksums. This process does not read
those bytes, so it could not seal them otherwise. The checksums of a slot are joined from those of
its cells. If no frame in the file has a slot's CRC-32, the tensor's fingerprint is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ckpt_tools.core.box import Overlap, flat_span, whole
from ckpt_tools.core.catalog import RAW, Payloads
from ckpt_tools.core.dtypes import MAX_ITEMSIZE
from ckpt_tools.core.plan import Plan, Slot, TensorPlan, plan_overlaps
from ckpt_tools.engine.fingerprints import HashedRange
from ckpt_tools.engine.partition import cut_slot
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.publish.base import CopiedRange, CopyTarget
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.storage import Capabilities, Writer
from ckpt_tools.storage.s3.parts import MAX_PARTS, MIN_PART_BYTES, PART_BYTES
from ckpt_tools.transfer.prove import SealedFingerprint

_MAX_COPY_BYTES = 256 << 20
_MIN_CLONE_BYTES = 64 << 10  # shorter ones are copied as fast


class CopyRange(NamedTuple):
    """Bytes of a target file that are one range of a source file."""

    start: int
    nbytes: int
    file: str
    source_start: int


class UploadPart(NamedTuple):
    """A part of an upload, or a stretch of a file on a disk.

    `source` is where it is copied or cloned from; None if this process sends or writes it.
    """

    start: int
    nbytes: int
    source: CopyRange | None


class KnownSlot(NamedTuple):
    """A slot, piece by piece with their checksums, and the bytes of it that are sent."""

    file: str
    slot: Sequence[HashedRange]
    sent_nbytes: int


@dataclass
class ServerCopy:
    """What a store copies by itself, for one plan.

    Attributes:
        copy_target: where the copies go.
        parts: of every file of which the store copies something.
        rest: the plan of what is left.
        known_slots: slots of which it copies something.
        fingerprints: of the tensors that they are of.
        nbytes: bytes that the store copies.
    """

    copy_target: CopyTarget
    parts: Mapping[str, Sequence[UploadPart]]
    rest: Plan
    known_slots: Sequence[KnownSlot]
    fingerprints: Mapping[str, int]
    nbytes: int

    @property
    def capabilities(self) -> Capabilities:
        """Returns the capabilities of the target's store."""
        return self.copy_target.capabilities

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts a file, its parts cut so that the store can copy some of them."""
        parts = self.parts.get(path)
        if parts is None:
            return self.copy_target.create(path, nbytes)
        copied = [
            CopiedRange(
                part.start,
                part.nbytes,
                part.source.file,
                part.source.source_start + part.start - part.source.start,
            )
            for part in parts
            if part.source is not None
        ]
        return self.copy_target.create_copied(path, nbytes, tuple(p.start for p in parts), copied)

    def add_known_slots(self, sink: WriteSink) -> None:
        """Tells an opened sink the checksums of the bytes that it does not see."""
        for known_slot in self.known_slots:
            sink.add_known_slot(*known_slot)


def plan_within(
    manifest: Manifest,
    fingerprints: Mapping[str, SealedFingerprint],
    plan: Plan,
    located: Payloads,
    copy_target: CopyTarget,
) -> ServerCopy | None:
    """Returns what the store can copy by itself, None for nothing.

    Args:
        manifest: the source's.
        fingerprints: the fingerprints that it has, by the plan's names.
        plan: the whole.
        located: where payloads of packed extents are.
        copy_target: where the copies go.
    """
    target = plan.target
    slots = _Slots(manifest, fingerprints, {trailer.file for trailer in target.trailers}, located)
    ranges: dict[str, list[CopyRange]] = {}
    for tensor in plan.tensors:
        for slot, found in slots.ranges(tensor):
            ranges.setdefault(slot.file, []).extend(found)
    block = copy_target.block_nbytes
    parts = {
        file: cut_blocks(target.file_sizes[file], found, block)
        if block
        else cut_parts(target.file_sizes[file], found, file in slots.framed)
        for file, found in ranges.items()
    }
    parts = {file: found for file, found in parts.items() if any(p.source for p in found)}
    if not parts:
        return None
    sent = {file: _sent_ranges(found) for file, found in parts.items()}
    tensors, known_slots, trusted = [], [], {}
    for tensor in plan.tensors:
        left = [
            list(cut_slot(tensor, slot, sent[slot.file])) if slot.file in sent else [slot]
            for slot in tensor.slots
        ]
        cut = [
            number
            for number, slot in enumerate(tensor.slots)
            if left[number] != [slot] and slot.box.numel
        ]
        if not cut:
            tensors.append(tensor)
            continue
        trusted[tensor.fqn] = fingerprints[tensor.fqn].crc64
        itemsize = tensor.dst_dtype.itemsize
        for number in cut:
            sent_nbytes = sum(piece.box.numel for piece in left[number]) * itemsize
            known_slots.append(
                KnownSlot(tensor.slots[number].file, slots.known[tensor.fqn, number], sent_nbytes)
            )
        rest = tuple(chain.from_iterable(left))
        if rest:
            overlaps = plan_overlaps([c.box for c in tensor.chunks], [s.box for s in rest])
            tensors.append(replace(tensor, slots=rest, overlaps=overlaps))
    nbytes = sum(p.nbytes for found in parts.values() for p in found if p.source)
    return ServerCopy(
        copy_target, parts, replace(plan, tensors=tuple(tensors)), known_slots, trusted, nbytes
    )


class _Slots:
    """The slots of a plan that the store could copy in part, with checksums that are known without
    reading.

    Attributes:
        framed: the files in which a slot's CRC-32 stands around it.
        known: the pieces of such slots, by tensor and number.
    """

    def __init__(
        self,
        manifest: Manifest,
        fingerprints: Mapping[str, SealedFingerprint],
        framed: set[str],
        located: Payloads,
    ) -> None:
        self.framed, self.known, self._prints, self._located = (
            framed,
            dict[tuple[str, int], Sequence[HashedRange]](),
            fingerprints,
            located,
        )
        self._cells = {
            file: sorted(sealed.ranges) for file, sealed in manifest.files.items() if sealed.ranges
        }

    def ranges(self, tensor: TensorPlan) -> Iterator[tuple[Slot, list[CopyRange]]]:
        """Yields the slots of a tensor with what of them is one range at both ends."""
        if tensor.fqn not in self._prints or not (self._cells or _is_one(tensor)):
            return
        by_slot: dict[int, list[Overlap]] = {}
        for overlap in tensor.overlaps:
            by_slot.setdefault(overlap.dst, []).append(overlap)
        for number, mine in by_slot.items():
            slot = tensor.slots[number]
            found = sorted(self._found(tensor, slot, mine))
            known = self._know(tensor, slot, found)
            if known:
                self.known[tensor.fqn, number] = known
                yield slot, found

    def _found(
        self, tensor: TensorPlan, slot: Slot, overlaps: Iterable[Overlap]
    ) -> Iterator[CopyRange]:
        """Yields the overlaps with a slot that are one range at both ends."""
        itemsize = tensor.dst_dtype.itemsize
        for overlap in overlaps:
            chunk = tensor.chunks[overlap.src]
            extent = self._located.get(chunk.extent, chunk.extent)
            into, of = flat_span(overlap.box, slot.box), flat_span(overlap.box, chunk.box)
            if (
                into
                and of
                and "%" not in extent.file
                and extent.packing == RAW
                and extent.strides is None
            ):
                start, source_start = (
                    slot.start + into[0] * itemsize,
                    extent.start + of[0] * itemsize,
                )
                yield CopyRange(start, overlap.box.numel * itemsize, extent.file, source_start)

    def _know(
        self, tensor: TensorPlan, slot: Slot, ranges: Iterable[CopyRange]
    ) -> Sequence[HashedRange]:
        """Returns the pieces of a slot with their checksums, as far as anybody needs them; none if
        they are unknown.
        """
        nbytes = slot.box.numel * tensor.dst_dtype.itemsize
        if slot.file not in self.framed and _is_one(tensor):
            return [HashedRange(slot.start, nbytes, self._prints[tensor.fqn].crc64, 0)]
        pieces = [piece for source in ranges for piece in self._pieces(source)]
        return pieces if sum(piece.nbytes for piece in pieces) == nbytes else ()

    def _pieces(self, source: CopyRange) -> Iterator[HashedRange]:
        """Yields the cells that lie in a source range, where they will be."""
        cells, end = self._cells.get(source.file, ()), source.source_start + source.nbytes
        for number in range(bisect_left(cells, (source.source_start,)), len(cells)):
            cell = cells[number]
            if cell.start + cell.nbytes > end:
                return
            yield HashedRange(
                source.start + cell.start - source.source_start,
                cell.nbytes,
                int(cell.crc64nvme, 16),
                int(cell.crc32, 16),
            )


def _is_one(tensor: TensorPlan) -> bool:
    return [slot.box for slot in tensor.slots] == [whole(tensor.shape)]


def _sent_ranges(parts: Sequence[UploadPart]) -> list[tuple[int, int]]:
    """Returns the ranges of a file that are sent, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for part in parts:
        if part.source is None:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == part.start else part.start
            ranges.append((first, part.start + part.nbytes))
    return ranges


def cut_parts(nbytes: int, ranges: Sequence[CopyRange], framed: bool = False) -> list[UploadPart]:
    """Cuts a file into the parts of an upload: long ranges are copied, all else is sent.

    Args:
        nbytes: of the file.
        ranges: which bytes are copied from source files; they do not overlap.
        framed: the bytes before a range are written once the slot is full, so part of them is sent
            from here.

    Returns:
        Parts that tile the file; all but the last have at least 5 MiB, and there are at most
        10,000.
    """
    least = max(MIN_PART_BYTES, -(-3 * nbytes // MAX_PARTS))
    parts: list[UploadPart] = []
    sent = 0  # the end of the parts so far
    for source in sorted(ranges):
        end = source.start + source.nbytes
        short = 0 if source.start == sent else max(int(framed), least - (source.start - sent))
        stolen = -(-short // MAX_ITEMSIZE) * MAX_ITEMSIZE  # so that no element is cut
        left = source.nbytes - stolen
        if left < least:
            continue
        parts += _pieces(sent, source.start + stolen, least, None)
        parts += _pieces(source.start + stolen, end, least, source)
        sent = end
    return parts + _pieces(sent, nbytes, least, None)


def cut_blocks(nbytes: int, ranges: Sequence[CopyRange], block: int) -> list[UploadPart]:
    """Cuts a file for a file system that clones blocks: whole blocks are cloned, all else is sent.

    Args:
        nbytes: of the file.
        ranges: which bytes are those of source files; they do not overlap.
        block: bytes of a block.

    Returns:
        Parts that tile the file. No element is cut.
    """
    parts: list[UploadPart] = []
    sent = 0  # the end of the parts so far
    for source in sorted(ranges):
        first = -(-source.start // block) * block
        last = (source.start + source.nbytes) // block * block
        is_apart = (source.start - source.source_start) % block
        if is_apart or (first - source.start) % MAX_ITEMSIZE or last - first < _MIN_CLONE_BYTES:
            continue
        if sent < first:
            parts.append(UploadPart(sent, first - sent, None))
        parts.append(UploadPart(first, last - first, source))
        sent = last
    if sent < nbytes:
        parts.append(UploadPart(sent, nbytes - sent, None))
    return parts


def _pieces(start: int, stop: int, least: int, source: CopyRange | None) -> list[UploadPart]:
    """Cuts a range into equal parts, the last one a little longer or shorter."""
    size = max(least, PART_BYTES if source is None else _MAX_COPY_BYTES)
    cuts = list(range(start, stop, size))
    if len(cuts) > 1 and stop - cuts[-1] < least:
        cuts.pop()
    return (
        [UploadPart(a, b - a, source) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)]
        if cuts
        else []
    )
