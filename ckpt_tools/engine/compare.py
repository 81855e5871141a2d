"""Compares two checkpoints: pairs every tile of one with the same elements of the other.

The two may store these elements differently.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import typing as npt

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import Payloads
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.plan import Plan, TensorPlan
from ckpt_tools.engine.execute import Reader, check_filled, split_buffer
from ckpt_tools.engine.kernels import Bytes, inner, to_float64
from ckpt_tools.engine.schedule import Batch, Sources, Tile
from ckpt_tools.storage import Store

_BLOCK_NUMEL = 1 << 16
_LONG = {"int64": np.int64, "uint64": np.uint64}


@dataclass
class Tally:
    """The differences between the values of one tensor in checkpoints a and b.

    Attributes:
        num_different: elements whose bits differ, or that lie outside the tolerance.
        first: row-major index of the first of them; -1 for none.
        max_abs: the largest |a - b|; NaN if only one of both is NaN.
        max_rel: the largest |a - b| / max(|a|, |b|).
        dot, aa, bb: sums of a*b, a*a and b*b over the elements that were decoded as numbers.
        gaps: the sum of |a - b|^2.
        is_partial: some elements were not decoded, because their bits are equal.
    """

    num_different: int = 0
    first: int = -1
    max_abs: float = 0.0
    max_rel: float = 0.0
    dot: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    gaps: float = 0.0
    is_partial: bool = False

    def add(self, other: Tally) -> None:
        """Adds the differences of another part of the tensor."""
        self.num_different += other.num_different
        if other.first >= 0:
            self.first = other.first if self.first < 0 else min(self.first, other.first)
        self.max_abs, self.max_rel = (
            _larger(self.max_abs, other.max_abs),
            _larger(self.max_rel, other.max_rel),
        )
        self.dot, self.aa, self.bb = self.dot + other.dot, self.aa + other.aa, self.bb + other.bb
        self.gaps += other.gaps
        self.is_partial |= other.is_partial

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both; None if one is zero or a sum is not finite."""
        norm = math.sqrt(self.aa) * math.sqrt(self.bb)
        return (
            max(-1.0, min(1.0, self.dot / norm))
            if norm and math.isfinite(norm) and math.isfinite(self.dot)
            else None
        )

    @property
    def rel_norm(self) -> float | None:
        """The norm of a - b, by the norm of a; None if a is zero or a sum is not finite."""
        if not (math.isfinite(self.aa) and math.isfinite(self.gaps)):
            return None
        if not self.aa:
            return None if self.max_abs else 0.0  # 0.0 and -0.0 differ in their bits only
        return math.sqrt(self.gaps) / math.sqrt(self.aa)


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


class CompareSink:
    """A sink that reads the same elements from another checkpoint and tallies the differences."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        located: Payloads,
        atol: float = 0.0,
        rtol: float = 0.0,
        is_full: bool = False,
    ) -> None:
        """Takes the other checkpoint.

        Args:
            store: its files.
            plan: its tensors, under the same names and shapes.
            located: the locations of its payloads.
            atol, rtol: values count as equal if |a - b| <= atol + rtol * |b|. If both are 0, only
                equal bits count.
            is_full: decode all elements as numbers, not only those whose bits differ.
        """
        self._store, self._atol, self._rtol, self._is_full = store, atol, rtol, is_full
        self._others: dict[str, TensorPlan] = {t.fqn: t for t in plan.tensors}
        self._located = located
        self._sources: tuple[str, Sources] | None = None
        # by the id() of the batch, which stays alive until `take`
        self._waiting: dict[int, list[Tile]] = {}
        self._readers = threading.local()
        self._lock = threading.Lock()
        self.tallies: dict[str, Tally] = {}

    def pair(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches unchanged, and plans the matching reads of the other checkpoint."""
        for batch in batches:
            tiles = [self._other(tile) for tile in batch.tiles]
            self._store.will_read((r.file, r.start, r.nbytes) for t in tiles for r in t.reads)
            with self._lock:
                self._waiting[id(batch)] = tiles
            yield batch
        self._store.will_read((), is_all=True)

    def _other(self, tile: Tile) -> Tile:
        tensor = self._others[tile.tensor.fqn]
        if self._sources is None or self._sources[0] != tensor.fqn:
            self._sources = (tensor.fqn, Sources(tensor, self._located))
        return Tile(tensor, tile.box, self._sources[1].reads(tile.box), ())

    def room(self, tile: Tile) -> Bytes | None:
        del tile
        return None

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> None:
        del scratch
        with self._lock:
            others = self._waiting.pop(id(batch))
        reader = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._readers.reader = Reader(self._store)
        for tile in others:
            check_filled(tile)
        sizes = [t.src_nbytes for t in others]
        buffers = split_buffer(reader.room("tiles", sum(sizes)), sizes)
        reader.fill(list(zip(others, buffers, strict=True)))
        for tile, mine, other, data in zip(batch.tiles, tiles, others, buffers, strict=True):
            found = self._compare(tile, mine, other.tensor.src_dtype, data)
            with self._lock:
                self.tallies.setdefault(tile.tensor.fqn, Tally()).add(found)

    def _compare(self, tile: Tile, mine: Bytes, dtype: DType, data: Bytes) -> Tally:
        own = tile.tensor.dst_dtype
        if own is dtype and not self._is_full and np.array_equal(mine, data):
            return Tally(is_partial=True)
        tally = Tally()
        for at in range(0, tile.box.numel, _BLOCK_NUMEL):
            block, other = (
                d[at * t.itemsize : (at + _BLOCK_NUMEL) * t.itemsize]
                for d, t in ((mine, own), (data, dtype))
            )
            found = self._compare_block(block, own, other, dtype)
            if found.first >= 0:
                found.first = _flat_at(tile.box, tile.tensor.shape, at + found.first)
            tally.add(found)
        return tally

    def _compare_block(self, a: Bytes, a_dtype: DType, b: Bytes, b_dtype: DType) -> Tally:
        x, y = to_float64(a, a_dtype), to_float64(b, b_dtype)
        with np.errstate(all="ignore"):
            gap = (
                _integer_gap(a, a_dtype, b, b_dtype)
                if a_dtype.name in _LONG and b_dtype.name in _LONG
                else np.abs(x - y)
            )
            size = np.maximum(np.abs(x), np.abs(y))
            is_same = (x == y) & (gap == 0) | (np.isnan(x) & np.isnan(y)) | (np.isinf(x) & (x == y))
            gap = np.where(is_same, 0.0, gap)
            if self._atol or self._rtol:
                # the rule of torch.isclose
                different = ~is_same & ~(
                    np.isfinite(gap) & (gap <= self._atol + self._rtol * np.abs(y))
                )
            elif a_dtype is b_dtype:
                different = _bits_differ(a, b, a_dtype.itemsize)
            else:
                different = ~is_same
            ratio = np.where(gap == 0, 0.0, gap / size)
            where = np.flatnonzero(different)
            return Tally(
                len(where),
                int(where[0]) if len(where) else -1,
                float(np.max(gap)),
                float(np.max(ratio)),
                inner(y, x),
                inner(x, x),
                inner(y, y),
                inner(gap, gap),
            )


def _integer_gap(a: Bytes, a_dtype: DType, b: Bytes, b_dtype: DType) -> npt.NDArray[np.float64]:
    """Returns |a - b| of integers that float64 would round."""
    x, y = a.view(_LONG[a_dtype.name]), b.view(_LONG[b_dtype.name])
    if x.dtype == y.dtype:
        # uint64 is exact even where a - b would wrap around
        gap: npt.NDArray[Any] = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(
            np.uint64
        )
    else:
        gap = np.abs(x.astype(object) - y.astype(object))
    return gap.astype(np.float64)


def _bits_differ(a: Bytes, b: Bytes, itemsize: int) -> npt.NDArray[np.bool_]:
    different: npt.NDArray[Any] = (a != b).reshape(-1, itemsize)
    found: npt.NDArray[np.bool_] = np.any(different, axis=1)
    return found


def _flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the row-major position of an index."""
    at = 0
    for i, n in zip(index, shape, strict=True):
        at = at * n + i
    return at


def _flat_at(box: Box, shape: tuple[int, ...], number: int) -> int:
    """Returns the row-major index in the tensor of element `number` of a box."""
    index = []
    for offset, size in zip(reversed(box.offsets), reversed(box.sizes), strict=True):
        index.append(offset + number % size)
        number //= size
    return _flat(tuple(reversed(index)), shape)
