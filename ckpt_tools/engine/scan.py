"""Scans values for NaN, infinity, tensors of zeros only, and tensors of one value only.

It looks at bit patterns, so it knows every float type without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.catalog import TensorEntry
from ckpt_tools.core.dtypes import DType
from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.schedule import Batch, Tile
from ckpt_tools.ranks.base import Group


class Pattern(NamedTuple):
    """The bit pattern of a float type's special values.

    NaN and infinity have all bits of `exponent` set. Infinity has no bit of `mantissa` set.
    """

    word: str
    exponent: int
    mantissa: int


_IEEE = {
    "float64": Pattern("u8", 0x7FF << 52, (1 << 52) - 1),
    "float32": Pattern("u4", 0xFF << 23, (1 << 23) - 1),
    "float16": Pattern("u2", 0x1F << 10, (1 << 10) - 1),
    "bfloat16": Pattern("u2", 0xFF << 7, (1 << 7) - 1),
    "float8_e5m2": Pattern("u1", 0x1F << 2, 3),
    "complex128": Pattern("u8", 0x7FF << 52, (1 << 52) - 1),
    "complex64": Pattern("u4", 0xFF << 23, (1 << 23) - 1),
    "complex32": Pattern("u2", 0x1F << 10, (1 << 10) - 1),
}
_NAN_ONLY = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}


class Finding(NamedTuple):
    """A finding about a tensor: the numbers of NaN and infinite values.

    It also tells whether all values are the same, and whether all are zero.
    """

    fqn: str
    nans: int
    infs: int
    is_constant: bool
    is_zero: bool


@dataclass
class _ValueCounts:
    nans: int = 0
    infs: int = 0
    first: bytes | None = None
    is_constant: bool = True

    def add(self, other: _ValueCounts) -> None:
        """Adds the result of another part of the tensor."""
        self.nans, self.infs = self.nans + other.nans, self.infs + other.infs
        self.is_constant = self.is_constant and other.is_constant and other.first == self.first


class ScanSink:
    """A sink that examines values and keeps none of them."""

    def __init__(self) -> None:
        self._seen: dict[str, _ValueCounts] = {}
        self._lock = threading.Lock()

    def room(self, tile: Tile) -> Bytes | None:
        del tile
        return None

    def take(self, batch: Batch, tiles: list[Bytes], scratch: Bytes) -> None:
        del scratch
        for tile, data in zip(batch.tiles, tiles, strict=True):
            nans, infs = count_special(data, tile.tensor.dst_dtype)
            first = data[: tile.tensor.dst_dtype.itemsize].tobytes()
            found = _ValueCounts(nans, infs, first, _is_constant(data, len(first)))
            with self._lock:
                self._seen.setdefault(tile.tensor.fqn, _ValueCounts(first=first)).add(found)

    def share(self, group: Group) -> None:
        """Merges the results of all ranks of a group."""
        found = group.all_gather(self._seen, "gather findings")
        self._seen = {}
        for fqn, seen in (item for one in found for item in one.items()):
            self._seen.setdefault(fqn, _ValueCounts(first=seen.first)).add(seen)

    def findings(self, tensors: Iterable[TensorEntry]) -> list[Finding]:
        """Returns the findings for these tensors, in their order.

        A tensor of one element does not count as constant.
        """
        found = []
        for tensor in tensors:
            seen = self._seen.get(tensor.fqn)
            if seen is None:
                continue
            is_constant = seen.is_constant and tensor.nbytes > tensor.dtype.itemsize
            if seen.nans or seen.infs or is_constant:
                found.append(
                    Finding(
                        tensor.fqn,
                        seen.nans,
                        seen.infs,
                        is_constant,
                        is_constant and not any(seen.first or b""),
                    )
                )
        return found


def count_special(data: Bytes, dtype: DType) -> tuple[int, int]:
    """Returns the number of NaN and of infinite values.

    The two parts of a complex number count separately.

    Args:
        data: contiguous values.
        dtype: their type.
    """
    if dtype.name in _NAN_ONLY:
        return sum(int(np.count_nonzero(data == code)) for code in _NAN_ONLY[dtype.name]), 0
    pattern = _IEEE.get(dtype.name)
    if pattern is None:
        return 0, 0
    words = data.view(pattern.word)
    special = words[(words & words.dtype.type(pattern.exponent)) == pattern.exponent]
    nans = int(np.count_nonzero(special & special.dtype.type(pattern.mantissa)))
    return nans, len(special) - nans


def _is_constant(data: Bytes, itemsize: int) -> bool:
    """Tells whether every element equals the one before it."""
    return len(data) == itemsize or not np.any(data[itemsize:] != data[:-itemsize])
