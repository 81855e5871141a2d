"""Turns a plan into batches: the order, the sizes, and the bytes to read and write.

Every tensor is cut into tiles: contiguous ranges of its own row-major order. Whatever the sharding,
a tile overlaps a chunk in one contiguous range of that chunk. Each read and each write is therefore
one range, and only copies in memory use strides. Small tiles share a batch. This module does no I/O
and takes no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ckpt_tools.core.box import (
    Box,
    BoxIndex,
    OverlapList,
    bands,
    flat_span,
    flat_start,
    index_of,
    is_flat,
    row_major_strides,
    whole,
)
from ckpt_tools.core.catalog import Chunk, Payloads
from ckpt_tools.core.plan import Plan, Slot, TensorPlan, num_cells

DEFAULT_MEMORY_BYTES = 64 << 20
MIN_TILE_BYTES, MAX_TILE_BYTES = 64 << 10, 4 << 20
_BUFFERS_PER_WORKER = 3


class Read(NamedTuple):
    """Bytes of a source file that hold the elements of `box`.

    They are row-major, or have `strides` (in elements).
    """

    file: str
    start: int
    nbytes: int
    box: Box
    strides: tuple[int, ...] | None


class Write(NamedTuple):
    """Bytes of a target file that receive the elements of `box`, row-major."""

    file: str
    start: int
    nbytes: int
    box: Box


class Tile(NamedTuple):
    """A contiguous range of a tensor, with its reads and its writes."""

    tensor: TensorPlan
    box: Box
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]

    @property
    def src_nbytes(self) -> int:
        """Bytes of the tile in the source's type."""
        return self.box.numel * self.tensor.src_dtype.itemsize

    @property
    def dst_nbytes(self) -> int:
        """Bytes of the tile in the target's type."""
        return self.box.numel * self.tensor.dst_dtype.itemsize

    def flat_range(self, box: Box) -> tuple[int, int] | None:
        """Returns the byte range of `box` in the tile's source values; None if not contiguous."""
        span, itemsize = flat_span(box, self.box), self.tensor.src_dtype.itemsize
        return None if span is None else (span[0] * itemsize, span[1] * itemsize)


class Batch(NamedTuple):
    """Tiles that one worker moves through its buffers together."""

    tiles: tuple[Tile, ...]

    @property
    def read_nbytes(self) -> int:
        """Bytes to read, including the gaps of strided ranges."""
        return sum(r.nbytes for t in self.tiles for r in t.reads)

    @property
    def num_reads(self) -> int:
        """Number of ranges to read."""
        return sum(len(t.reads) for t in self.tiles)


class Share(NamedTuple):
    """A part of a plan's work: of all bytes that its tiles write, in order, those in `low:high`."""

    low: int
    high: int

    def has(self, start: int, nbytes: int) -> bool:
        """Tells whether a tile belongs to this share: the tile must begin in it.

        An empty tile belongs to the first share.
        """
        return self.low <= start < self.high if nbytes else self.low == 0


ALL = Share(0, 1 << 63)


def tile_bytes(memory_bytes: int, jobs: int) -> tuple[int, int]:
    """Returns the usual and the largest size of a tile.

    With these sizes, the buffers of all workers together stay within `memory_bytes`.
    """
    largest = max(MIN_TILE_BYTES, memory_bytes // (jobs * _BUFFERS_PER_WORKER))
    return min(MAX_TILE_BYTES, largest), largest


def schedule(
    plan: Plan,
    located: Payloads,
    tile_nbytes: int,
    max_tile_nbytes: int,
    share: Share = ALL,
) -> Iterator[Batch]:
    """Yields the batches that carry out a plan, in the order of the target.

    Args:
        plan: what to copy.
        located: the locations of the payloads of packed extents, from `Format.locate`.
        tile_nbytes: the usual limit for the bytes of a tile, and of a batch.
        max_tile_nbytes: the limit for a tile of a tensor that is stored transposed. Larger tiles
            give such a tensor longer contiguous reads. A single element larger than that is a tile
            by itself.
        share: which tiles are wanted, see `shares`.

    Yields:
        Batches whose tiles write every byte of every slot exactly once, over all shares.
    """
    tiles: list[Tile] = []
    filled = 0
    is_framed = bool(plan.target.trailers)
    for tensor, start in _starts(plan, share):
        for tile in _tiles(
            tensor, located, tile_nbytes, max(tile_nbytes, max_tile_nbytes), is_framed
        ):
            start += tile.dst_nbytes
            if not share.has(start - tile.dst_nbytes, tile.dst_nbytes):
                continue
            nbytes = max(tile.src_nbytes, tile.dst_nbytes)
            if tiles and filled + nbytes > tile_nbytes:
                yield Batch(tuple(tiles))
                tiles, filled = [], 0
            tiles.append(tile)
            filled += nbytes
    if tiles:
        yield Batch(tuple(tiles))


def shares(plan: Plan, count: int) -> list[Share]:
    """Cuts the work of a plan into `count` shares of equal bytes, also within large tensors."""
    if count == 1:
        return [ALL]
    total = sum(map(_tiled_nbytes, plan.tensors))
    edges = [total * number // count for number in range(count)]
    return [Share(low, high) for low, high in pairwise([*edges, ALL.high])]


def in_share(plan: Plan, share: Share) -> list[TensorPlan]:
    """Returns the tensors that have a part in a share."""
    return [tensor for tensor, _ in _starts(plan, share)]


def _tiled_nbytes(tensor: TensorPlan) -> int:
    numel = (
        whole(tensor.shape).numel if tensor.is_complete else sum(s.box.numel for s in tensor.slots)
    )
    return numel * tensor.dst_dtype.itemsize


def _starts(plan: Plan, share: Share) -> Iterator[tuple[TensorPlan, int]]:
    """Yields the tensors that have a part in a share, and the number of bytes before each."""
    if share == ALL:  # for which this number does not matter
        yield from ((tensor, 0) for tensor in plan.tensors)
        return
    start = 0
    for tensor in plan.tensors:
        nbytes = _tiled_nbytes(tensor)
        if share.has(start, nbytes) or (start < share.low < start + nbytes):
            yield tensor, start
        start += nbytes


def read_nbytes(plan: Plan, tile_nbytes: int, max_tile_nbytes: int) -> int:
    """Returns the bytes that the batches of a plan read; it does not locate packed payloads."""
    return sum(_tensor_reads(tensor, tile_nbytes, max_tile_nbytes) for tensor in plan.tensors)


def _tensor_reads(tensor: TensorPlan, tile_nbytes: int, max_tile_nbytes: int) -> int:
    if tensor.is_complete and not tensor.chunks.has_strides:
        return tensor.payload_bytes  # a tile of a whole tensor reads one range of each chunk
    return sum(
        read.nbytes
        for tile in _tiles(tensor, {}, tile_nbytes, max_tile_nbytes)
        for read in tile.reads
    )


def by_files(plan: Plan, num_files: int) -> Iterator[Plan]:
    """Cuts a plan into plans of `num_files` target files each.

    A store that takes streams keeps a part of each open file in memory.
    """
    names = list(plan.target.file_sizes)
    for at in range(0, max(1, len(names)), num_files):
        mine = set(names[at : at + num_files])
        if len(mine) == len(names):
            yield plan
            return
        tensors = []
        for tensor in plan.tensors:
            kept = [i for i, slot in enumerate(tensor.slots) if slot.file in mine]
            renumbered = {old: new for new, old in enumerate(kept)}
            overlaps = OverlapList(
                o._replace(dst=renumbered[o.dst]) for o in tensor.overlaps if o.dst in renumbered
            )
            if kept:
                tensors.append(
                    replace(tensor, slots=tuple(tensor.slots[i] for i in kept), overlaps=overlaps)
                )
        yield replace(plan, tensors=tuple(tensors))


class Sources:
    """The source chunks of a tensor, indexed by their boxes."""

    def __init__(self, tensor: TensorPlan, located: Payloads) -> None:
        used, all_chunks = tensor.overlaps.sources(), tensor.chunks
        every = list(all_chunks) if len(used) > 1 else {i: all_chunks[i] for i in used}
        chunks = [every[i] for i in used]
        self._boxes = tuple([box for box, _ in chunks])
        self._extents = [located.get(stored, stored) for _, stored in chunks]
        self._index, self._itemsize = index_of(self._boxes), tensor.src_dtype.itemsize
        self.is_strided = any(extent.strides for extent in self._extents)

    def reads(self, box: Box) -> tuple[Read, ...]:
        """Returns the reads for a contiguous range of the tensor."""
        found: list[Read] = []
        for i, shared in self._index.overlaps(box):
            stored, extent = self._boxes[i], self._extents[i]
            if extent.strides is None and shared == stored:
                nbytes = shared.numel * self._itemsize
                found.append(Read(extent.file, extent.start, nbytes, shared, None))
            else:
                found += _reads(Chunk(stored, extent), shared, self._itemsize)
        return tuple(found)


def _tiles(
    tensor: TensorPlan,
    located: Payloads,
    tile_nbytes: int,
    max_tile_nbytes: int,
    is_framed: bool = False,
) -> Iterator[Tile]:
    sources = Sources(tensor, located)
    itemsize = max(tensor.src_dtype.itemsize, tensor.dst_dtype.itemsize)
    limit = max_tile_nbytes if sources.is_strided else tile_nbytes
    max_numel = max(1, limit // itemsize)
    slots = [s for s in tensor.slots if s.box.numel]
    regions = [whole(tensor.shape)] if tensor.is_complete else [s.box for s in slots]
    cuts = [cut for s in slots for cut in _cuts(s, tensor.dst_dtype.itemsize, is_framed)]
    targets = index_of([s.box for s in slots])
    for region in regions:
        for box in bands(region, max_numel, cuts):
            yield Tile(
                tensor,
                box,
                sources.reads(box),
                tuple(_writes(slots, targets, box, tensor.dst_dtype.itemsize)),
            )


def _cuts(slot: Slot, itemsize: int, is_framed: bool) -> Iterator[int]:
    """Yields the coordinates along the first dim that no tile may straddle.

    They are the start of a slot and of its cells, because each cell needs its own checksum.
    """
    if slot.box.sizes:
        low, rows = slot.box.offsets[0], slot.box.sizes[0]
        count = num_cells(slot.box, slot.box.numel * itemsize) if is_framed else 0
        yield from range(low, low + rows, rows // max(1, count))


def _reads(chunk: Chunk, shared: Box, itemsize: int) -> Iterator[Read]:
    """Yields the reads for the elements that a tile and a part of a chunk share.

    They are one contiguous range, or a few strided ranges whose bytes are mostly needed.
    """
    extent = chunk.extent
    inner = shared.within(chunk.box)
    if extent.strides is None and is_flat(inner, chunk.box.sizes):
        start = extent.start + flat_start(inner, chunk.box.sizes) * itemsize
        yield Read(extent.file, start, shared.numel * itemsize, shared, None)
        return
    strides = extent.strides or row_major_strides(chunk.box.sizes)
    for part in _dense_parts(inner, strides):
        first = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
        box = Box(
            tuple(o + p for o, p in zip(part.offsets, chunk.box.offsets, strict=True)), part.sizes
        )
        yield Read(
            extent.file,
            extent.start + first * itemsize,
            _span(part, strides) * itemsize,
            box,
            strides,
        )


def _span(box: Box, strides: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last one of a strided box."""
    return 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))


def _dense_parts(box: Box, strides: Sequence[int]) -> Iterator[Box]:
    """Cuts a strided box along its widest strides, until each part fills half of its span."""
    if _span(box, strides) <= 2 * box.numel:
        yield box
        return
    dim = max((d for d, n in enumerate(box.sizes) if n > 1), key=lambda d: strides[d])
    for index in range(box.offsets[dim], box.offsets[dim] + box.sizes[dim]):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = index, 1
        yield from _dense_parts(Box(tuple(offsets), tuple(sizes)), strides)


def _writes(slots: Sequence[Slot], targets: BoxIndex, box: Box, itemsize: int) -> Iterator[Write]:
    for number, shared in targets.overlaps(box):
        slot = slots[number]
        at = 0 if shared == slot.box else flat_start(shared.within(slot.box), slot.box.sizes)
        yield Write(slot.file, slot.start + at * itemsize, shared.numel * itemsize, shared)
