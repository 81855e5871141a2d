"""Boxes: axis-aligned pieces of an N-d tensor in element coordinates.

This module knows integers only: no bytes, no files, no dtypes. It imports nothing of this package.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple

_FEW = 64  # boxes of a tensor whose index is kept
_MOST_KEPT = 64  # answers of such an index


class Box(NamedTuple):
    """The elements `offsets[d] <= i[d] < offsets[d] + sizes[d]` of a tensor.

    A 0-d box holds one element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The coordinate after the last one, per dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Returns the shared box, or None if no element is shared.

        Two 0-d boxes share their one element.
        """
        if self == other:
            return None if 0 in self.sizes else self
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low = a if a > b else b
            size = min(a + n, b + m) - low
            if size <= 0:
                return None
            offsets.append(low)
            sizes.append(size)
        shared = tuple(sizes)
        if shared == other.sizes:
            return other
        return self if shared == self.sizes else Box(tuple(offsets), shared)

    def within(self, outer: Box) -> Box:
        """Returns this box in the coordinates of `outer`, i.e. shifted by minus `outer.offsets`."""
        return Box(
            tuple(o - p for o, p in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    def slices(self) -> tuple[slice, ...]:
        """Returns the index that selects this box in an array."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        if len(self.offsets) != len(self.sizes):  # of a hostile file, in the error that says so
            return f"[offsets {list(self.offsets)}, sizes {list(self.sizes)}]"
        pairs = zip(self.offsets, self.sizes, strict=True)
        return f"[{', '.join(f'{o}:{o + s}' for o, s in pairs)}]"


class Overlap(NamedTuple):
    """Elements that a source chunk and a target slot share: `box`, in the tensor's coordinates.

    `src` and `dst` are the numbers of the chunk and of the slot.
    """

    src: int
    dst: int
    box: Box


class Overlaps(Sequence[Overlap]):
    """The overlaps of one tensor. `chunk_table.OverlapTable` has them as arrays."""

    __slots__ = ()

    @property
    def numel(self) -> int:
        """The number of elements in all boxes together."""
        return sum(overlap.box.numel for overlap in self)

    def taken(self) -> dict[int, int]:
        """Returns the number of elements that are read of each chunk, by chunk number."""
        taken: dict[int, int] = {}
        for overlap in self:
            taken[overlap.src] = taken.get(overlap.src, 0) + overlap.box.numel
        return taken

    def sources(self) -> list[int]:
        """Returns the numbers of the chunks that are read, in order."""
        return sorted(self.taken())


class OverlapList(tuple[Overlap, ...], Overlaps):
    """Overlaps as objects."""

    __slots__ = ()


class BoxIndex:
    """An index that finds the boxes that overlap a given box.

    The boxes are sorted along the dim that cuts them most finely.
    """

    def __init__(self, boxes: Sequence[Box], keeps: bool = False) -> None:
        """Sorts the boxes; `keeps` tells whether to keep answers for the next question."""
        self._boxes = boxes
        self._kept = dict[Box, tuple[tuple[int, Box], ...]]() if keeps else None
        offsets = list(zip(*[b.offsets for b in boxes], strict=True))  # by dim
        sizes = list(zip(*[b.sizes for b in boxes], strict=True))
        self._low = tuple(map(min, offsets))
        self._high = tuple(max(map(add, o, s)) for o, s in zip(offsets, sizes, strict=True))
        self._dim = dim = max(range(len(offsets)), key=lambda d: len(set(offsets[d])), default=0)
        self._order = (
            sorted(range(len(boxes)), key=offsets[dim].__getitem__)
            if offsets
            else list(range(len(boxes)))
        )
        self._starts = sorted(offsets[dim]) if offsets else []
        self._reach = max(sizes[dim]) if offsets else 0

    def overlaps(self, box: Box) -> Iterable[tuple[int, Box]]:
        """Returns the number of every box that shares elements with `box`, and the shared box."""
        if self._kept is None:
            return self._overlaps(box)
        if (found := self._kept.get(box)) is None:
            found = tuple(self._overlaps(box))
            if len(self._kept) < _MOST_KEPT:
                self._kept[box] = found
        return found

    def _overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        boxes, dim = self._boxes, self._dim
        if self._starts and len(boxes) > 1:
            low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
            if low <= self._low[dim] and high >= self._high[dim] and self._are_all_in(box):
                yield from (
                    (number, boxes[number]) for number in self._order if boxes[number].numel
                )
                return
        for number in self.near(box):
            shared = boxes[number].intersect(box)
            if shared is not None:
                yield number, shared

    def near(self, box: Box) -> Sequence[int]:
        """Returns the numbers of all boxes that may share elements with `box`, and of some others.

        Only the dim that cuts the boxes most finely is compared.
        """
        if not self._starts or len(self._boxes) < 2:
            return self._order
        low, high = box.offsets[self._dim], box.offsets[self._dim] + box.sizes[self._dim]
        return self._order[
            bisect_left(self._starts, low - self._reach + 1) : bisect_left(self._starts, high)
        ]

    def _are_all_in(self, box: Box) -> bool:
        return all(
            o <= low and o + s >= high
            for o, s, low, high in zip(box.offsets, box.sizes, self._low, self._high, strict=True)
        )


def index_of(boxes: Sequence[Box]) -> BoxIndex:
    """Returns the index of boxes; one of few boxes is kept, as a model's tensors are cut alike."""
    return _kept_index(tuple(boxes)) if len(boxes) <= _FEW else BoxIndex(boxes)


@functools.lru_cache(maxsize=256)
def _kept_index(boxes: tuple[Box, ...]) -> BoxIndex:
    return BoxIndex(boxes, keeps=True)


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of all elements of a tensor of `shape`."""
    return _whole(tuple(shape))


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    """Returns one box for all tensors of a shape, of which a model has few."""
    return Box((0,) * len(shape), shape)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a contiguous row-major array of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_flat(box: Box, shape: Sequence[int]) -> bool:
    """Tells whether the elements of `box` are contiguous in a row-major array of `shape`."""
    outer_is_single = True
    for size, full in zip(box.sizes, shape, strict=True):
        if not outer_is_single and size != full:
            return False
        if size != 1:
            outer_is_single = False
    return True


def flat_start(box: Box, shape: Sequence[int]) -> int:
    """Returns the row-major index, in elements, of the first element of `box`."""
    index = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        index = index * size + offset
    return index


@functools.lru_cache(maxsize=4096)
def flat_span(box: Box, frame: Box) -> tuple[int, int] | None:
    """Returns the element range of `box` in `frame`, a row-major buffer; None if not contiguous."""
    if box == frame:
        return 0, frame.numel
    inner = box.within(frame)
    if not is_flat(inner, frame.sizes):
        return None
    start = flat_start(inner, frame.sizes)
    return start, start + box.numel


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns the elements `start <= i < stop` of a row-major tensor of `shape` as boxes, in order.

    A tensor of N dims needs at most 2N-1 boxes.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range {start}:{stop} does not lie in shape {tuple(shape)}")
    if start >= stop:
        return []
    wide = [dim for dim, size in enumerate(shape) if size > 1]  # at most 63, so the recursion ends
    found = []
    for offsets, sizes in _flat_boxes(tuple(shape[dim] for dim in wide), start, stop):
        at, n = [0] * len(shape), [1] * len(shape)
        for dim, offset, size in zip(wide, offsets, sizes, strict=True):
            at[dim], n[dim] = offset, size
        found.append(Box(tuple(at), tuple(n)))
    return found


def _flat_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from (((first, *o), (1, *s)) for o, s in _flat_boxes(shape[1:], head, tail))
        return
    if head:
        yield from (((first, *o), (1, *s)) for o, s in _flat_boxes(shape[1:], head, row))
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if tail:
        yield from (((last, *o), (1, *s)) for o, s in _flat_boxes(shape[1:], 0, tail))


def flat_parts(box: Box, frame: Box) -> Iterator[Box]:
    """Yields the parts of `box` that are each contiguous in `frame`, a row-major buffer, in order.

    There are as few as possible. `box` lies in `frame`.
    """
    dim = len(box.sizes) - 1
    while dim > 0 and box.sizes[dim] == frame.sizes[dim]:
        dim -= 1
    lead = [range(o, o + n) for o, n in zip(box.offsets[:dim], box.sizes[:dim], strict=True)]
    for index in itertools.product(*lead):
        yield Box((*index, *box.offsets[dim:]), (*(1,) * dim, *box.sizes[dim:]))


def bands(box: Box, max_numel: int, cuts: Sequence[int] = ()) -> Iterator[Box]:
    """Cuts `box` into pieces of at most `max_numel` elements, in row-major order.

    The elements of each piece are contiguous in the row-major order of `box`.

    Args:
        box: the box to cut. An empty box yields nothing.
        max_numel: the largest size of a piece, in elements; at least 1.
        cuts: coordinates along the first dim that no piece may straddle.

    Yields:
        Boxes in row-major order that tile `box` exactly. A piece has single indices in its leading
        dims, then one range, then the full extent of `box`. Its overlap with a chunk that is itself
        a box is therefore contiguous in that chunk.
    """
    if box.numel == 0:
        return
    lead = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(box.sizes))
    if lead and box.numel > max_numel:  # dims of one element need no recursion
        inner = Box(box.offsets[lead:], box.sizes[lead:])
        for band in bands(inner, max_numel, cuts):
            yield Box((*box.offsets[:lead], *band.offsets), (*box.sizes[:lead], *band.sizes))
        return
    if not box.sizes:
        yield box
        return
    row = math.prod(box.sizes[1:])
    low, end = box.offsets[0], box.offsets[0] + box.sizes[0]
    rest = Box(box.offsets[1:], box.sizes[1:])
    if row > max_numel:
        for index in range(low, end):
            yield from (
                Box((index, *b.offsets), (1, *b.sizes))
                for b in bands(rest, max_numel, cuts if box.sizes[0] == 1 else ())
            )
        return
    step = max(1, max_numel // row)
    edges = [low, *(c for c in sorted(set(cuts)) if low < c < end), end]
    for left, right in pairwise(edges):
        for at in range(left, right, step):
            yield Box((at, *rest.offsets), (min(step, right - at), *rest.sizes))
