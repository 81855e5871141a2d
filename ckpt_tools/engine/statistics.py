"""Computes statistics of tensors, tile by tile: magnitudes, zeros, NaN and infinity.

Sums are kept in float64, so that the result has the same digits however a tensor is cut.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import typing as npt

from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.statistics import TensorStatistics
from ckpt_tools.engine.fingerprints import Fingerprints
from ckpt_tools.engine.kernels import Bytes, inner, to_float64
from ckpt_tools.engine.schedule import Batch, Tile
from ckpt_tools.ranks.base import Group

_BLOCK_NUMEL = 1 << 17  # a block and its float64 values stay in a processor's cache
_CODES_NUMEL = 1 << 13  # from here on, counting the codes of a short type is faster
_BIAS = 1023  # of float64's exponent
_INFINITE = 0x7F80  # the upper bits of a float32 that is infinite
Counts = npt.NDArray[np.int64]


@dataclass
class Moments:
    """The statistics of a part of a tensor, in a form that adds up.

    The sums are float, or NumPy's long double where squares exceed the range of float.

    `exponents[i]` is the number of finite nonzero values with a magnitude of at least 2**(i - 1023)
    and less than twice that; None if that was not asked for. `lost` then has for each type of
    `SHORT_TYPES` how many of them it makes zero, and how many too large. `num_compared` elements
    are finite now and were so before; `sum_change` is the sum of the squares of their changes.
    """

    numel: int = 0
    sum_squares: Any = 0.0
    max_abs: float = 0.0
    num_zeros: int = 0
    num_nan: int = 0
    num_inf: int = 0
    exponents: Counts | None = None
    lost: Counts | None = None
    num_compared: int = 0
    sum_change: Any = 0.0

    def add(self, other: Moments) -> None:
        """Adds another part."""
        self.numel += other.numel
        self.sum_squares += other.sum_squares
        self.max_abs = max(self.max_abs, other.max_abs)
        self.num_zeros += other.num_zeros
        self.num_nan += other.num_nan
        self.num_inf += other.num_inf
        self.num_compared += other.num_compared
        self.sum_change += other.sum_change
        if other.exponents is not None:
            mine = self.exponents
            self.exponents = other.exponents if mine is None else mine + other.exponents
        if other.lost is not None:
            self.lost = other.lost if self.lost is None else self.lost + other.lost

    def result(self) -> TensorStatistics:
        """Returns the statistics of the parts that were added."""
        finite = self.numel - self.num_nan - self.num_inf
        rms = _root(self.sum_squares, finite, self.max_abs) if finite else 0.0
        change = None
        if self.num_compared:
            change = _root(self.sum_change, self.num_compared, sys.float_info.max)
        return TensorStatistics(
            self.numel, rms, self.max_abs, self.num_zeros, self.num_nan, self.num_inf, change
        )

    def histogram(self) -> dict[int, int]:
        """Returns the number of values by the power of two of their magnitude."""
        counts = self.exponents
        if counts is None:
            return {}
        return {int(i) - _BIAS: int(counts[i]) for i in np.flatnonzero(counts)}


def measure(data: Bytes, dtype: DType, with_exponents: bool = False) -> Moments:
    """Returns the statistics of contiguous values.

    Args:
        data: the values.
        dtype: their type. A type without numeric values counts by the numbers of its bytes.
        with_exponents: also count magnitudes by power of two.
    """
    total = Moments()
    if dtype.bits <= 16 and len(data) >= _CODES_NUMEL * dtype.itemsize:
        return _measure_codes(data, dtype, with_exponents)
    step = _BLOCK_NUMEL * dtype.itemsize
    is_long = dtype.name == "float32" and len(data) >= _CODES_NUMEL * dtype.itemsize
    for start in range(0, len(data), step):
        block = data[start : start + step]
        total.add(_measure_block(block, dtype, with_exponents and not is_long))
    for start in range(0, len(data) if with_exponents and is_long else 0, 8 * step):
        exponents, lost = _count_float32(data[start : start + 8 * step])
        total.add(Moments(exponents=exponents, lost=lost))
    return total


def measure_change(data: Bytes, before: Bytes, dtype: DType) -> Moments:
    """Returns only the change of contiguous values from their values before."""
    total, step = Moments(), _BLOCK_NUMEL * dtype.itemsize
    for start in range(0, len(data), step):
        gap = _gap(data[start : start + step], before[start : start + step], dtype)
        square = inner(gap, gap)
        if not math.isfinite(square) or square == 0.0:  # or the squares are too small for float
            gap = gap[np.isfinite(gap)]
            square = sum_squares(gap)
        total.add(Moments(num_compared=len(gap), sum_change=square))
    return total


def _gap(data: Bytes, before: Bytes, dtype: DType) -> npt.NDArray[np.float64]:
    """Returns the change of each element, in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype.name == "float32":  # one conversion instead of two; the difference of two near
            # values has no rounding error
            gap: npt.NDArray[Any] = data.view(np.float32) - before.view(np.float32)
            return gap.astype(np.float64)
        gap = to_float64(data, dtype) - to_float64(before, dtype)
    return gap.view(np.float64) if gap.dtype.kind == "c" else gap


def _measure_block(data: Bytes, dtype: DType, with_exponents: bool) -> Moments:
    if dtype.name in ("float32", "float64"):
        plain: npt.NDArray[Any] = data.view(dtype.name)
    else:
        plain = to_float64(data, dtype)
        plain = plain.view(np.float64) if plain.dtype.kind == "c" else plain
    high, low = float(plain.max()), float(plain.min())
    with np.errstate(invalid="ignore"):  # a signalling NaN is one, too
        values = plain.astype(np.float64, copy=False)
    nans = infs = 0
    if not math.isfinite(high - low):
        nans, infs = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        values = values[np.isfinite(values)]
        high, low = (float(values.max()), float(values.min())) if len(values) else (0.0, 0.0)
    return Moments(
        len(plain),
        sum_squares(values),
        max(high, -low),
        int(np.count_nonzero((values if len(values) < len(plain) else plain) == 0)),
        nans,
        infs,
        _exponents(values) if with_exponents else None,
        _lost(np.abs(values), None) if with_exponents else None,
    )


def sum_squares(values: npt.NDArray[np.float64]) -> Any:
    """Returns the sum of squares, as a long double if float has no room for it."""
    with np.errstate(over="ignore", under="ignore"):
        found = inner(values, values)
        if (found == 0.0 or not math.isfinite(found)) and np.any(values):
            long = values.astype(np.longdouble)
            return (long * long).sum()
    return found


def _root(total: Any, count: int, most: float) -> float:
    """Returns the root of a mean, as far as float can hold it."""
    found = float(np.sqrt(np.longdouble(total) / count))
    return found if math.isfinite(found) else most


def _exponents(values: npt.NDArray[np.float64]) -> Counts:
    words = np.ascontiguousarray(values[values != 0]).view(np.uint64)
    return np.bincount((words >> np.uint64(52)).astype(np.int64) & 0x7FF, minlength=2048)


class ShortType(NamedTuple):
    """A short type: magnitudes up to `zero` become 0, those from `large` on infinite or NaN.

    Half of the smallest subnormal number is rounded to the even zero. Half a step above the largest
    number is rounded up, except that e4m3fn has no number there; torch clips to its largest.
    """

    name: str
    zero: float
    large: float


SHORT_TYPES = (
    ShortType("bf16", 2.0**-134, (2 - 2.0**-8) * 2.0**127),
    ShortType("fp16", 2.0**-25, 65520.0),
    ShortType("fp8 e4m3", 2.0**-10, math.nextafter(464.0, math.inf)),
    ShortType("fp8 e5m2", 2.0**-17, 61440.0),
)


def _lost(magnitudes: npt.NDArray[np.float64], counts: Any) -> Counts:
    """Returns how many magnitudes each short type makes zero, and how many too large: `[types, 2]`.

    Args:
        magnitudes: finite ones; zeros are not lost.
        counts: how often each occurs; once if None.
    """
    found = np.zeros((len(SHORT_TYPES), 2), np.int64)
    for number, kind in enumerate(SHORT_TYPES):
        for column, is_lost in enumerate(
            ((magnitudes > 0) & (magnitudes <= kind.zero), magnitudes >= kind.large)
        ):
            found[number, column] = (is_lost if counts is None else counts * is_lost).sum()
    return found


def _count_float32(data: Bytes) -> tuple[Counts, Counts]:
    """Returns what `_exponents` and `_lost` return of the finite float32 values in `data`.

    It takes about twice the memory of the data.
    It counts by the upper 15 bits of a magnitude: exponent and 7 bits of mantissa. Only values that
    share them with a limit of a short type, or that are subnormal, are looked at again.
    """
    upper = data.view(np.uint16)[1::2]
    counts = np.bincount(upper & 0x7FFF, minlength=1 << 15)[:_INFINITE]
    below = np.concatenate(([0], np.cumsum(counts)))  # below[i]: values with less than i

    words: npt.NDArray[np.uint32] = data.view(np.uint32)
    exponents = np.zeros(2048, np.int64)
    exponents[_BIAS - 126 : _BIAS + 128] = counts[128:].reshape(-1, 128).sum(axis=1)
    num_zeros = 0
    if below[128]:  # zeros and subnormal values
        magnitudes = words & 0x7FFFFFFF
        num_zeros = len(magnitudes) - int(np.count_nonzero(magnitudes))
        if num_zeros < below[128]:
            found = magnitudes[(magnitudes > 0) & (magnitudes < 1 << 23)]
            exponents += _exponents(found.view(np.float32).astype(np.float64))

    def at_most(limit: float) -> int:
        """Returns the number of finite values with a magnitude of at most `limit`."""
        nearest = np.float32(limit)
        last = int(nearest.view(np.uint32)) - (float(nearest) > limit)
        first = last >> 16
        if not counts[first]:
            return int(below[first])
        inside = words & 0x7FFFFFFF
        return int(below[first]) + int(np.count_nonzero((inside >= first << 16) & (inside <= last)))

    finite = int(below[-1])
    lost = [
        (at_most(kind.zero) - num_zeros, finite - at_most(math.nextafter(kind.large, 0.0)))
        for kind in SHORT_TYPES
    ]
    return exponents, np.array(lost, np.int64)


def _measure_codes(data: Bytes, dtype: DType, with_exponents: bool) -> Moments:
    """Measures a type of 8 or 16 bits: counts each bit pattern, and looks at each pattern once."""
    words = data.view(np.uint8 if dtype.itemsize == 1 else np.uint16)
    counts = np.zeros(1 << dtype.bits, np.int64)
    for start in range(0, len(words), 2 * _BLOCK_NUMEL):
        counts += np.bincount(words[start : start + 2 * _BLOCK_NUMEL], minlength=len(counts))
    table = _codes(dtype.name)
    used = counts * table.is_finite
    high = np.flatnonzero(used)
    return Moments(
        len(words),
        inner(used, table.squares),
        float(table.magnitudes[high].max()) if len(high) else 0.0,
        int(counts[table.is_zero].sum()),
        int(counts[table.is_nan].sum()),
        int(counts[~table.is_finite & ~table.is_nan].sum()),
        np.bincount(table.exponents, used * ~table.is_zero, 2048).astype(np.int64)
        if with_exponents
        else None,
        _lost(table.magnitudes, used) if with_exponents else None,
    )


@dataclass(frozen=True)
class _Codes:
    """The value of each bit pattern of a short type; magnitudes that are not finite are 0."""

    magnitudes: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    exponents: npt.NDArray[np.int64]
    is_finite: npt.NDArray[np.bool_]
    is_nan: npt.NDArray[np.bool_]
    is_zero: npt.NDArray[np.bool_]


@functools.cache
def _codes(name: str) -> _Codes:
    dtype = BY_NAME[name]
    patterns = np.arange(1 << dtype.bits, dtype=np.uint8 if dtype.itemsize == 1 else np.uint16)
    values = to_float64(patterns.view(np.uint8), dtype)
    is_finite = np.isfinite(values)
    magnitudes = np.where(is_finite, np.abs(values), 0.0)
    exponents = (magnitudes.view(np.uint64) >> np.uint64(52)).astype(np.int64)
    return _Codes(magnitudes, magnitudes**2, exponents, is_finite, np.isnan(values), values == 0.0)


def add_moments(total: dict[str, Moments], found: Iterable[tuple[str, Moments]]) -> None:
    """Adds the statistics of parts of tensors, by name."""
    for fqn, moments in found:
        total.setdefault(fqn, Moments()).add(moments)


class StatisticsSink:
    """A sink that measures values, and keeps none of them.

    Attributes:
        moments: the statistics by tensor, as far as its tiles have passed.
        fingerprints: the checksums of the same tiles, to prove that the bytes were right.
    """

    def __init__(self, with_exponents: bool = False) -> None:
        self.moments: dict[str, Moments] = {}
        self.fingerprints = Fingerprints()
        self._with_exponents = with_exponents
        self._lock = threading.Lock()

    def room(self, tile: Tile) -> Bytes | None:
        del tile
        return None

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> None:
        del scratch
        fingerprints = Fingerprints()
        found = []
        for tile, data in zip(batch.tiles, tiles, strict=True):
            fingerprints.add(tile, crc64nvme(data.data), data)
            if len(data):
                found.append(
                    (tile.tensor.fqn, measure(data, tile.tensor.dst_dtype, self._with_exponents))
                )
        with self._lock:
            self.fingerprints.absorb(fingerprints.noted)
            add_moments(self.moments, found)

    def share(self, group: Group) -> None:
        """Merges the results of all ranks of a group."""
        found: list[Mapping[str, Moments]] = group.all_gather(self.moments, "gather statistics")
        self.fingerprints.share(group)
        self.moments = {}
        for one in found:
            add_moments(self.moments, one.items())
