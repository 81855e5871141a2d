"""Copies within one S3: which runs of a target the store can copy by itself, and what is left for this process.

A part of a multipart upload has at least 5 MiB (but for the last) and a file at most 10,000 of them; so a run that is too short, and
the seam before a long one, go through the engine as ever. Only where the source's manifest has a tensor's fingerprint: bytes that
nobody here sees could not be sealed otherwise. May import levels 0 to 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools.box import flat_start, is_flat, whole
from ckpt_tools.bucket import RemotePlace
from ckpt_tools.catalog import RAW, Extent
from ckpt_tools.engine.regions import cut_slot
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.operations.proof import Print
from ckpt_tools.plan import Plan, Slot, TensorPlan, plan_copies
from ckpt_tools.storage import Capabilities, RemoteStore, Writer
from ckpt_tools.storage.upload import MAX_PARTS, MIN_PART_BYTES, PART_BYTES, Upload

_MAX_COPY_BYTES = 256 << 20
_ELEMENT_BYTES = 16  # of the largest type


class Run(NamedTuple):
    """Bytes of a target file that are one run of a source file."""

    start: int
    nbytes: int
    file: str
    source_start: int


class Part(NamedTuple):
    """A part of an upload: `run` is what it is copied from, None where its bytes are sent."""

    start: int
    nbytes: int
    run: Run | None


@dataclass
class Within:
    """What a store copies by itself, for one plan.

    Attributes:
        place, origin: where to, and where from.
        parts: of every file of which the store copies something.
        rest: the plan of what is left.
        vouched: `(file, start, nbytes, crc64)` of slots whose checksum is known from the source's manifest.
        fingerprints: of the tensors that are vouched for.
        nbytes: bytes that the store copies.
    """

    place: RemotePlace
    origin: RemoteStore
    parts: Mapping[str, Sequence[Part]]
    rest: Plan
    vouched: Sequence[tuple[str, int, int, int]]
    fingerprints: Mapping[str, int]
    nbytes: int

    @property
    def capabilities(self) -> Capabilities:
        """Those of the place."""
        return self.place.capabilities

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts a file, its parts cut so that the store can copy some of them."""
        parts = self.parts.get(path)
        if parts is None:
            return self.place.create(path, nbytes)
        upload = self.place.store.create(path, nbytes, replace(self.place.how(path), starts=tuple(p.start for p in parts)))
        assert isinstance(upload, Upload)
        for part in parts:
            if part.run is not None:
                run = part.run
                at = run.source_start + part.start - run.start
                upload.copy(part.start, part.nbytes, f"{self.origin.root}/{run.file}", at, self.origin.version(run.file))
        return upload

    def vouch(self, sink: WriteSink) -> None:
        """Tells a sink the checksums of what it does not see."""
        for file, start, nbytes, crc64 in self.vouched:
            sink.vouch(file, start, nbytes, crc64)


def plan_within(
    prints: Mapping[str, Print], plan: Plan, located: Mapping[Extent, Extent], place: RemotePlace, origin: RemoteStore
) -> Within | None:
    """Returns what the store can copy by itself, None for nothing.

    Args:
        prints: the fingerprints that the source's manifest has, by the plan's names.
        plan: the whole.
        located: where payloads of packed extents are.
        place: where it goes.
        origin: the source's store, the same S3 as the place's.
    """
    target = plan.target
    framed = {trailer.file for trailer in target.trailers}  # a frame has a CRC-32 of its payload
    runs: dict[str, list[Run]] = {}
    for tensor in plan.tensors:
        if tensor.fqn in prints:
            for slot in tensor.slots:
                if slot.file not in framed and slot.box == whole(tensor.shape):
                    runs.setdefault(slot.file, []).extend(_runs(tensor, slot, located))
    parts = {file: cut_parts(target.file_sizes[file], found) for file, found in runs.items()}
    parts = {file: found for file, found in parts.items() if any(p.run for p in found)}
    if not parts:
        return None
    sent = {file: _sent_ranges(found) for file, found in parts.items()}
    tensors, vouched, trusted = [], [], {}
    for tensor in plan.tensors:
        left = [piece for slot in tensor.slots for piece in (cut_slot(tensor, slot, sent[slot.file]) if slot.file in sent else (slot,))]
        if left == list(tensor.slots):
            tensors.append(tensor)
            continue
        slot = tensor.slots[0]
        trusted[tensor.fqn] = prints[tensor.fqn].crc64
        vouched.append((slot.file, slot.start, _nbytes(tensor), prints[tensor.fqn].crc64))
        if left:
            copies = plan_copies([c.box for c in tensor.chunks], [s.box for s in left])
            tensors.append(replace(tensor, slots=tuple(left), copies=tuple(copies)))
    nbytes = sum(p.nbytes for found in parts.values() for p in found if p.run)
    return Within(place, origin, parts, replace(plan, tensors=tuple(tensors)), vouched, trusted, nbytes)


def _nbytes(tensor: TensorPlan) -> int:
    return whole(tensor.shape).numel * tensor.dst_dtype.itemsize


def _runs(tensor: TensorPlan, slot: Slot, located: Mapping[Extent, Extent]) -> Iterator[Run]:
    """Yields the copies of a slot that are one run at both ends."""
    itemsize = tensor.dst_dtype.itemsize
    for copy in tensor.copies:
        chunk = tensor.chunks[copy.src]
        extent = located.get(chunk.extent, chunk.extent)
        inner = copy.box.within(chunk.box)
        if extent.packing == RAW and extent.strides is None and is_flat(copy.box, tensor.shape) and is_flat(inner, chunk.box.sizes):
            start = slot.start + flat_start(copy.box, tensor.shape) * itemsize
            yield Run(start, copy.box.numel * itemsize, extent.file, extent.start + flat_start(inner, chunk.box.sizes) * itemsize)


def _sent_ranges(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Returns the ranges of a file that are sent, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for part in parts:
        if part.run is None:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == part.start else part.start
            ranges.append((first, part.start + part.nbytes))
    return ranges


def cut_parts(nbytes: int, runs: Sequence[Run]) -> list[Part]:
    """Cuts a file into the parts of an upload: long runs are copied, all else is sent.

    Args:
        nbytes: of the file.
        runs: which bytes are runs of source files; they do not overlap.

    Returns:
        Parts that tile the file; all but the last have at least 5 MiB, and there are at most 10,000.
    """
    least = max(MIN_PART_BYTES, -(-3 * nbytes // MAX_PARTS))
    parts: list[Part] = []
    sent = 0  # where what is to be sent begins
    for run in sorted(runs):
        end = run.start + run.nbytes
        short = 0 if run.start == sent else max(0, least - (run.start - sent))
        stolen = -(-short // _ELEMENT_BYTES) * _ELEMENT_BYTES  # so that no element is cut
        left = run.nbytes - stolen
        if left < least:
            continue
        parts += _pieces(sent, run.start + stolen, least, None)
        parts += _pieces(run.start + stolen, end, least, run)
        sent = end
    return parts + _pieces(sent, nbytes, least, None)


def _pieces(start: int, stop: int, least: int, run: Run | None) -> list[Part]:
    """Cuts a range into equal parts, the last one a little longer or shorter."""
    size = max(least, PART_BYTES if run is None else _MAX_COPY_BYTES)
    cuts = list(range(start, stop, size))
    if len(cuts) > 1 and stop - cuts[-1] < least:
        cuts.pop()
    return [Part(a, b - a, run) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)] if cuts else []
