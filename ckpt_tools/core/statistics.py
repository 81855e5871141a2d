"""The statistics of one tensor: its size in the mean and at most, and its special values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_DIGITS = 6  # of numbers that people and manifests get: the same ones for every way to cut a tensor


class TensorStatistics(NamedTuple):
    """The statistics of one tensor.

    Attributes:
        numel: its elements. The two parts of a complex number count separately.
        rms: root of the mean square of the finite values; 0 if there are none.
        max_abs: the largest finite magnitude.
        num_zeros, num_nan, num_inf: how many elements are zero, NaN and infinite.
        change_rms: root of the mean square of the change since the step before, over elements that
            are finite in both; None if it was not measured.
    """

    numel: int
    rms: float
    max_abs: float
    num_zeros: int
    num_nan: int
    num_inf: int
    change_rms: float | None = None

    @property
    def is_finite(self) -> bool:
        """Tells whether no element is NaN or infinite."""
        return not (self.num_nan or self.num_inf)

    def packed(self) -> list[Any]:
        """Returns the values as a manifest stores them: rounded, without the number of elements."""
        change = [] if self.change_rms is None else [_rounded(self.change_rms)]
        counts = (self.num_zeros, self.num_nan, self.num_inf)
        return [_rounded(self.rms), _rounded(self.max_abs), *counts, *change]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def unpack_statistics(dtype: str, shape: Sequence[int], values: Sequence[Any]) -> TensorStatistics:
    """Returns the statistics of a tensor from `TensorStatistics.packed`.

    Raises:
        ValueError: the values are not such a list.
    """
    rms, max_abs, *counts = values[:5]
    change = list(values[5:])
    numel = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
    if (
        len(counts) != 3
        or any(type(c) is not int or not 0 <= c <= numel for c in counts)
        or len(change) > 1
        or any(
            type(v) not in (int, float) or not 0 <= v < math.inf for v in (rms, max_abs, *change)
        )
    ):
        raise ValueError(f"statistics are {list(values)!r}")
    zeros, nans, infs = counts
    change_rms = float(change[0]) if change else None
    return TensorStatistics(numel, float(rms), float(max_abs), zeros, nans, infs, change_rms)
