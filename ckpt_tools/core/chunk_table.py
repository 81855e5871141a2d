"""Chunks of a tensor as arrays, for checkpoints with millions of chunks; and proofs about them.

An `ChunkTable` is a sequence of `Chunk` like any other. It builds a `Chunk` when one is
requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import cast, overload

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, Overlap, Overlaps
from ckpt_tools.core.catalog import RAW, Chunk, Chunks, Extent

Ints = npt.NDArray[np.int64]
_MAX_NUMEL = 1 << 62
_FEW = 256  # chunks of a table whose boxes are shared


@lru_cache(maxsize=1024)
def _shared_boxes(offsets: bytes, sizes: bytes, rows: int, dims: int) -> tuple[Box, ...]:
    """Returns the boxes of a small table, which many tensors of a model share."""
    both = (np.frombuffer(part, np.int64).reshape(rows, dims).tolist() for part in (offsets, sizes))
    return tuple(_make_boxes(*both))


@lru_cache(maxsize=1024)
def _shared_lengths(nbytes: bytes) -> list[int]:
    """Returns the lengths of a small table, which many tensors of a model share."""
    return cast(list[int], np.frombuffer(nbytes, np.int64).tolist())


def _make_boxes(offsets: Iterable[list[int]], sizes: Iterable[list[int]]) -> Iterator[Box]:
    return map(Box, map(tuple, offsets), map(tuple, sizes))


class ChunkTable(Chunks):
    """`[n]` chunks of one tensor of `d` dims.

    Attributes:
        offsets, sizes: `[n, d]`, in elements.
        names: the files of any tensor in the catalog.
        files: `[n]`, indices into `names`.
        starts, nbytes: `[n]`, start and length of each extent in bytes.
        packing: of all extents.
    """

    has_columns = True
    __slots__ = ("files", "names", "nbytes", "offsets", "packing", "sizes", "starts")

    def __init__(
        self,
        offsets: Ints,
        sizes: Ints,
        names: tuple[str, ...],
        files: npt.NDArray[np.int32],
        starts: Ints,
        nbytes: Ints,
        packing: str = RAW,
    ) -> None:
        self.offsets, self.sizes, self.names, self.files, self.starts, self.nbytes = (
            offsets,
            sizes,
            names,
            files,
            starts,
            nbytes,
        )
        self.packing = packing

    def under(self, renamed: Callable[[tuple[str, ...]], tuple[str, ...]]) -> ChunkTable:
        names = renamed(self.names)
        return ChunkTable(
            self.offsets, self.sizes, names, self.files, self.starts, self.nbytes, self.packing
        )

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, key: int) -> Chunk: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, key: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(key, slice):
            return tuple(map(self.__getitem__, range(*key.indices(len(self)))))
        box = Box(tuple(self.offsets[key].tolist()), tuple(self.sizes[key].tolist()))
        return Chunk(
            box,
            Extent(
                self.names[self.files[key]],
                int(self.starts[key]),
                int(self.nbytes[key]),
                self.packing,
            ),
        )

    def __iter__(self) -> Iterator[Chunk]:
        names, packing, boxes = self.names, self.packing, self._boxes()
        nbytes = (
            self.nbytes.tolist() if len(self) > _FEW else _shared_lengths(self.nbytes.tobytes())
        )
        places = zip(self.files.tolist(), self.starts.tolist(), nbytes, strict=True)
        return (
            Chunk(box, Extent(names[f], at, n, packing))
            for box, (f, at, n) in zip(boxes, places, strict=True)
        )

    def _boxes(self) -> Iterable[Box]:
        if len(self) > _FEW:
            return _make_boxes(self.offsets.tolist(), self.sizes.tolist())
        rows, dims = self.offsets.shape
        return _shared_boxes(self.offsets.tobytes(), self.sizes.tobytes(), rows, dims)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkTable):
            return (
                isinstance(other, Sequence)
                and len(other) == len(self)
                and all(a == b for a, b in zip(self, other, strict=True))
            )
        if self.names is not other.names or self.packing != other.packing:
            return len(self) == len(other) and tuple(self) == tuple(other)
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("files", "starts", "nbytes", "offsets", "sizes")
        )

    def __hash__(self) -> int:
        return hash(tuple(self))  # a table equals the tuple of its chunks, so the hashes agree

    has_strides = False

    def kinds(self) -> list[Box]:
        return [
            self[int(number)].box for number in np.unique(self.sizes, axis=0, return_index=True)[1]
        ]

    def file_names(self) -> set[str]:
        return {self.names[i] for i in np.unique(self.files)}

    def nbytes_by_file(self, itemsize: int) -> dict[str, tuple[int, int]]:
        numel = self.sizes.prod(axis=1) * itemsize
        counts, totals = np.bincount(self.files), np.bincount(self.files, numel)
        return {self.names[i]: (int(counts[i]), int(totals[i])) for i in np.flatnonzero(counts)}

    def covers(self, shape: Sequence[int]) -> bool:
        """Tells whether the chunks certainly hold every element of a tensor exactly once.

        Returns False for replicas and irregular layouts, even where they do cover the tensor.
        """
        offsets, sizes, full = self.offsets, self.sizes, np.array(shape, np.int64)
        if (
            offsets.shape[1] != len(shape)
            or math.prod(shape) >= _MAX_NUMEL
            or ((offsets < 0) | (sizes < 0) | (offsets > full)).any()
        ):
            return False
        if ((sizes > full) | (offsets + sizes > full)).any():
            return False
        held = (sizes > 0).all(axis=1)
        if not held.any():
            return math.prod(shape) == 0
        offsets, sizes, cell, count = (
            offsets[held],
            sizes[held],
            np.zeros(int(held.sum()), np.int64),
            1,
        )
        # the chunks form a grid: along each dim, every chunk ends where another begins
        for dim in np.flatnonzero((sizes != full).any(axis=0)):
            starts, number = np.unique(offsets[:, dim], return_inverse=True)
            ends = np.append(starts[1:], full[dim])
            if starts[0] or (offsets[:, dim] + sizes[:, dim] != ends[number]).any():
                return False
            cell, count = cell * len(starts) + number, count * len(starts)
        return len(cell) == count == len(np.unique(cell))

    def overlaps(self, targets: Sequence[Box]) -> OverlapTable | None:
        """Pairs every target box with the chunks that overlap it.

        Returns None if chunks are replicas, overlap along the dim of the search, or differ in
        number of dims from a target.
        """
        held = np.flatnonzero((self.sizes > 0).all(axis=1))
        width = self.offsets.shape[1]
        if not width or not len(held) or any(len(box.sizes) != width for box in targets):
            return None
        dim = int(np.argmax([len(np.unique(self.offsets[held, d])) for d in range(width)]))
        held = held[np.argsort(self.offsets[held, dim], kind="stable")]
        lows, highs = self.offsets[held], self.offsets[held] + self.sizes[held]
        if (highs[1:, dim] < highs[:-1, dim]).any() or not self._are_distinct(held):
            return None
        offsets: Ints = np.array([box.offsets for box in targets], np.int64).reshape(-1, width)
        edges = offsets + np.array([box.sizes for box in targets], np.int64).reshape(-1, width)
        first, last = (
            np.searchsorted(highs[:, dim], offsets[:, dim], "right"),
            np.searchsorted(lows[:, dim], edges[:, dim], "left"),
        )
        counts = np.maximum(last - first, 0)
        dst = np.repeat(np.arange(len(targets)), counts)
        at = np.arange(len(dst)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        low = np.maximum(offsets[dst], lows[at])
        size = np.minimum(edges[dst], highs[at]) - low
        shared = (size > 0).all(axis=1)
        return OverlapTable(held[at[shared]], dst[shared], low[shared], size[shared])

    def _are_distinct(self, held: Ints) -> bool:
        """Tells whether no two boxes begin at the same element, as replicas do."""
        return len(np.unique(self.offsets[held], axis=0)) == len(held)

    def fit(self, file_sizes: Mapping[str, int], itemsize: int) -> bool:
        ends = np.array([file_sizes.get(name, -1) for name in self.names], np.int64)[self.files]
        numel = self.sizes.astype(np.float64).prod(axis=1) * itemsize  # float64 cannot wrap around
        return bool(
            (
                (self.starts >= 0)
                & (self.nbytes >= numel)
                & (self.starts <= ends)
                & (self.nbytes <= ends - self.starts)
            ).all()
        )

    def are_apart(self, others: Sequence[ChunkTable], ranges: Iterable[Extent]) -> bool:
        """Tells whether no two extents overlap, among `ranges` and `others`.

        `others` includes this table. Two identical ranges do not count as an overlap.
        """
        many = [c for c in others if isinstance(c, ChunkTable) and c.names is self.names]
        if len(many) < len(others):
            return False  # `files` can be compared only between tables with the same `names`
        number = {name: i for i, name in enumerate(self.names)}
        more = [(number.setdefault(e.file, len(number)), e.start, e.nbytes) for e in ranges]
        extra: Ints = np.array(more, np.int64).reshape(-1, 3)
        files = np.concatenate([extra[:, 0], *(c.files for c in many)])
        starts = np.concatenate([extra[:, 1], *(c.starts for c in many)])
        nbytes = np.concatenate([extra[:, 2], *(c.nbytes for c in many)])
        used = nbytes > 0
        files, starts, nbytes = files[used], starts[used], nbytes[used]
        order = np.lexsort((nbytes, starts, files))
        files, starts, nbytes = files[order], starts[order], nbytes[order]
        is_same = (starts[1:] == starts[:-1]) & (nbytes[1:] == nbytes[:-1])
        return bool(
            ((files[1:] != files[:-1]) | (starts[1:] >= (starts + nbytes)[:-1]) | is_same).all()
        )


class OverlapTable(Overlaps):
    """`[m]` overlaps as arrays: source and target numbers `[m]`, box offsets and sizes `[m, d]`."""

    __slots__ = ("dst", "offsets", "sizes", "src")

    def __init__(self, src: Ints, dst: Ints, offsets: Ints, sizes: Ints) -> None:
        self.src, self.dst, self.offsets, self.sizes = src, dst, offsets, sizes

    def __len__(self) -> int:
        return len(self.src)

    @overload
    def __getitem__(self, key: int) -> Overlap: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Overlap]: ...
    def __getitem__(self, key: int | slice) -> Overlap | Sequence[Overlap]:
        if isinstance(key, slice):
            return tuple(map(self.__getitem__, range(*key.indices(len(self)))))
        box = Box(tuple(self.offsets[key].tolist()), tuple(self.sizes[key].tolist()))
        return Overlap(int(self.src[key]), int(self.dst[key]), box)

    def __iter__(self) -> Iterator[Overlap]:
        boxes = map(Box, map(tuple, self.offsets.tolist()), map(tuple, self.sizes.tolist()))
        return map(Overlap, self.src.tolist(), self.dst.tolist(), boxes)

    @property
    def numel(self) -> int:
        return int(self.sizes.prod(axis=1).sum())

    def taken(self) -> dict[int, int]:
        numbers, at = np.unique(self.src, return_inverse=True)
        taken = np.zeros(len(numbers), np.int64)
        np.add.at(taken, at, self.sizes.prod(axis=1))
        return dict(zip(numbers.tolist(), taken.tolist(), strict=True))
