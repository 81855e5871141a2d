"""Renders the places of a tensor's chunks in `.metadata` as rows of an array.

Imports NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.chunk_table import Ints
from ckpt_tools.formats.pickle.write import integer

_Bytes = npt.NDArray[np.uint8]
_MEAN_ROWS = 8  # of a block, from which arrays are faster than joined bytes


class _Block(NamedTuple):
    """Rows that lie behind each other, and whose opcodes have the same lengths."""

    before: _Bytes
    behind: _Bytes


class PlaceRows:
    """The opcodes of a tensor's places, one row for each chunk, without its name and the starts."""

    def __init__(self, before: Sequence[bytes], behind: Sequence[bytes]) -> None:
        """Stores the opcodes between the name and the start of each row, and behind the start."""
        self._before, self._behind = before, behind
        lengths = [[len(part) for part in parts] for parts in (before, behind)]
        self._lengths: Ints = np.array(lengths, np.int64)
        self._blocks: dict[tuple[int, int], _Block] = {}

    def render(self, name: bytes, starts: Ints) -> bytes:
        """Returns the opcodes of all rows.

        Args:
            name: opcodes that push the tensor's name.
            starts: `[rows]`, where each chunk begins in its file, in bytes.
        """
        widths = _widths(starts)
        is_edge = (np.diff(self._lengths) != 0).any(axis=0) | (np.diff(widths) != 0)
        edges = np.flatnonzero(is_edge) + 1
        if len(edges) * _MEAN_ROWS > len(starts):
            pushed = map(integer, starts.tolist())
            rows = zip(self._before, pushed, self._behind, strict=True)
            return b"".join(name + before + start + behind for before, start, behind in rows)
        bounds = [0, *edges.tolist(), len(starts)]
        return b"".join(
            self._rows(low, high, name, starts[low:high], int(widths[low]))
            for low, high in pairwise(bounds)
        )

    def _rows(self, low: int, high: int, name: bytes, starts: Ints, width: int) -> bytes:
        if (low, high) not in self._blocks:
            self._blocks[low, high] = _Block(
                *(
                    np.frombuffer(b"".join(parts[low:high]), np.uint8).reshape(high - low, -1)
                    for parts in (self._before, self._behind)
                )
            )
        block = self._blocks[low, high]
        parts = (np.frombuffer(name, np.uint8), block.before, _pushed(starts, width), block.behind)
        rows = np.empty((high - low, sum(part.shape[-1] for part in parts)), np.uint8)
        at = 0
        for part in parts:
            rows[:, at : at + part.shape[-1]] = part
            at += part.shape[-1]
        return rows.tobytes()


def _widths(values: Ints) -> Ints:
    """Returns the bytes of the opcodes that push each number; see `integer`."""
    ends = np.int64(1) << np.array([8, 16, 31, 39, 47, 55], np.int64)
    return np.array([2, 3, 5, 7, 8, 9, 10], np.int64)[np.searchsorted(ends, values, "right")]


def _pushed(values: Ints, width: int) -> _Bytes:
    """Returns the opcodes that push numbers, `[n, width]`, which all take so many bytes."""
    rows = np.empty((len(values), width), np.uint8)
    head = {2: b"K", 3: b"M", 5: b"J"}.get(width) or b"\x8a" + bytes([width - 2])
    rows[:, : len(head)] = np.frombuffer(head, np.uint8)
    digits = np.ascontiguousarray(values, "<i8").view(np.uint8).reshape(-1, 8)
    rows[:, len(head) :] = digits[:, : width - len(head)]
    return rows
