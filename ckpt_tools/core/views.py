"""Tensors made of pieces of others: rows reordered, cut out or stacked.

Only chunks change; no bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core.box import Box, row_major_strides
from ckpt_tools.core.catalog import RAW, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.errors import PlanError, printable


class RowRange(NamedTuple):
    """A map of `number` rows: `source, source + step, …` become `target, target + 1, …`."""

    target: int
    source: int
    number: int
    step: int = 1


def cut_chunk(chunk: Chunk, box: Box, itemsize: int) -> Chunk:
    """Returns the part of a chunk in `box`, which must lie in it. The chunk must be RAW."""
    return Chunk(
        box, _view(chunk, box, itemsize, chunk.extent.strides or row_major_strides(chunk.box.sizes))
    )


def _view(chunk: Chunk, box: Box, itemsize: int, strides: Sequence[int]) -> Extent:
    """Returns the extent of a strided view that begins at `box`'s first element.

    The view has the sizes of `box`, and its elements are `strides` apart.
    """
    own = chunk.extent.strides or row_major_strides(chunk.box.sizes)
    skip = sum((o - p) * s for o, p, s in zip(box.offsets, chunk.box.offsets, own, strict=True))
    span = 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True)) if box.numel else 0
    is_flat = all(
        n == 1 or s == r
        for n, s, r in zip(box.sizes, strides, row_major_strides(box.sizes), strict=True)
    )
    extent = chunk.extent
    is_all = not skip and span * itemsize == extent.nbytes
    crc32 = extent.crc32 if is_all else None
    return Extent(
        extent.file,
        extent.start + skip * itemsize,
        span * itemsize,
        RAW,
        None if is_flat else tuple(strides),
        crc32,
    )


def take_rows(entry: TensorEntry, rows: Sequence[RowRange], num_rows: int) -> TensorEntry:
    """Returns the tensor of `num_rows` rows (indices of dim 0), taken from another tensor.

    Args:
        entry: the source; its extents must be RAW.
        rows: which rows become which; together they give every target row once.
        num_rows: rows of the target.

    Raises:
        PlanError: the source has no dims.
    """
    if not entry.shape:
        raise PlanError(f"a tensor without dims has no rows: {printable(entry.fqn)!r}")
    chunks = ChunkList(
        piece
        for part in rows
        for chunk in entry.chunks
        for piece in _rows_of(chunk, part, entry.dtype.itemsize)
    )
    return replace(entry, shape=(num_rows, *entry.shape[1:]), chunks=chunks)


def _rows_of(chunk: Chunk, part: RowRange, itemsize: int) -> Iterator[Chunk]:
    low, high = chunk.box.offsets[0], chunk.box.offsets[0] + chunk.box.sizes[0]
    first = max(0, -(-(low - part.source) // part.step))
    last = min(part.number, -(-(high - part.source) // part.step))
    if first >= last or not chunk.box.numel:
        return
    strides = chunk.extent.strides or row_major_strides(chunk.box.sizes)
    at = Box(
        (part.source + first * part.step, *chunk.box.offsets[1:]),
        (last - first, *chunk.box.sizes[1:]),
    )
    extent = _view(chunk, at, itemsize, (strides[0] * part.step, *strides[1:]))
    yield Chunk(Box((part.target + first, *at.offsets[1:]), at.sizes), extent)


def stack_rows(fqn: str, entries: Sequence[TensorEntry]) -> TensorEntry:
    """Returns the tensor that stacks the rows of several tensors.

    Raises:
        PlanError: they differ in type or in another dim.
    """
    first = entries[0]
    if any(
        e.dtype != first.dtype or not e.shape or e.shape[1:] != first.shape[1:] for e in entries
    ):
        raise PlanError(
            "tensors of different types or widths cannot become one:"
            f" {', '.join(printable(e.fqn) for e in entries)}"
        )
    chunks: list[Chunk] = []
    start = 0
    for entry in entries:
        chunks += [
            Chunk(Box((b.offsets[0] + start, *b.offsets[1:]), b.sizes), extent)
            for b, extent in entry.chunks
        ]
        start += entry.shape[0]
    return TensorEntry(
        fqn,
        first.dtype,
        (start, *first.shape[1:]),
        ChunkList(chunks),
        first.stored_name,
        next((e.quantized for e in entries if e.quantized is not None), None),
    )


def take_layer(entry: TensorEntry, index: int) -> TensorEntry:
    """Returns index `index` of dim 0, without that dim: one layer of a stack.

    The tensor's extents must be RAW.
    """
    chunks = []
    for chunk in entry.chunks:
        box = Box((index, *chunk.box.offsets[1:]), (1, *chunk.box.sizes[1:]))
        if chunk.box.offsets[0] <= index < chunk.box.offsets[0] + chunk.box.sizes[0]:
            extent = cut_chunk(chunk, box, entry.dtype.itemsize).extent
            strides = extent.strides[1:] if extent.strides else None
            chunks.append(
                Chunk(Box(box.offsets[1:], box.sizes[1:]), extent._replace(strides=strides))
            )
    return replace(entry, shape=entry.shape[1:], chunks=ChunkList(chunks))
