"""Lets a rank read what other ranks of its job hold in memory.

Before each round of batches, every rank asks the holders for the ranges that its batches read. So
all ranks go through the rounds together, and each needs the memory of one round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.schedule import Batch
from ckpt_tools.engine.sinks import empty_bytes
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store
from ckpt_tools.storage.overlay import Overlay
from ckpt_tools.storage.ranges import Range, coalesce

_MIN_ROUND_BYTES = 1 << 20
_ALL_ROUNDS_BYTES = 1 << 30  # of all ranks in one round: one of them may hold all that is read
_GAP_BYTES, _WINDOW_BYTES = 4 << 10, 8 << 20
_WORD = 8
_Place = tuple[str, int, int]  # a file, the first byte, and the number of bytes


def in_rounds(
    batches: Iterable[Batch], store: Store, held: Mapping[str, int], group: Group, memory_bytes: int
) -> Iterator[tuple[list[Batch], Store]]:
    """Yields this rank's batches, a round at a time, with a store that has all that they read.

    All ranks iterate together, and get the same number of rounds. Some may have no batches.

    Args:
        batches: what this rank moves.
        store: has the files that this rank holds.
        held: the rank that holds each file. `store` has the others.
        group: the ranks.
        memory_bytes: what a rank reads in a round, or less if there are many ranks.

    Raises:
        PeerError: another rank failed.
    """
    limit = max(_MIN_ROUND_BYTES, min(memory_bytes, _ALL_ROUNDS_BYTES // group.size))
    left = iter(batches)
    while True:
        with group.phase("look at what is read"):
            round_ = list(_next_round(left, limit))
            wanted = _wanted(round_, held, group)
        asked = group.deal_objects([(bool(round_), places) for places in wanted], "ask for shards")
        if not any(has_more for has_more, _ in asked):
            return
        with group.phase("look for shards"):
            answers = [_answer(store, places) for _, places in asked]
        dealt = group.deal(answers, "send shards")
        del answers
        fetched: dict[str, list[tuple[int, Bytes]]] = {}
        for places, words in zip(wanted, dealt, strict=True):
            data, at = words.reshape(-1).view(np.uint8), 0
            for file, start, nbytes in places:
                fetched.setdefault(file, []).append((start, data[at : at + nbytes]))
                at += _padded(nbytes)
        yield round_, _FetchedStore(store, fetched)
        del fetched, dealt


def _next_round(batches: Iterator[Batch], limit: int) -> Iterator[Batch]:
    nbytes = 0
    for batch in batches:
        yield batch
        nbytes += batch.read_nbytes
        if nbytes >= limit:
            return


def _wanted(
    batches: Sequence[Batch], held: Mapping[str, int], group: Group
) -> list[Sequence[_Place]]:
    """Returns what batches read of each rank; nothing of this one."""
    ranges: list[list[Range]] = [[] for _ in range(group.size)]
    for read in (read for batch in batches for tile in batch.tiles for read in tile.reads):
        holder = held.get(read.file, group.rank)
        if holder != group.rank:
            ranges[holder].append(Range(read.file, read.start, read.nbytes, 0))
    return [[w[:3] for w in coalesce(r, _GAP_BYTES, _WINDOW_BYTES)] for r in ranges]


def _answer(store: Store, places: Sequence[_Place]) -> npt.NDArray[np.uint64]:
    """Returns the bytes of some ranges, each padded to whole words."""
    total = sum(_padded(nbytes) for _, _, nbytes in places)
    data, at = empty_bytes(total), 0
    for file, start, nbytes in places:
        store.read_into(file, start, data[at : at + nbytes].data)
        data[at + nbytes : at + _padded(nbytes)] = 0
        at += _padded(nbytes)
    return data.view(np.uint64).reshape(-1, 1)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _WORD) * _WORD


class _FetchedStore(Overlay):
    """A store with some ranges of files over it that other ranks hold."""

    def __init__(self, inner: Store, fetched: Mapping[str, list[tuple[int, Bytes]]]) -> None:
        super().__init__(inner, {})
        self._fetched = fetched

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        pieces = self._fetched.get(path)
        if pieces is None:
            self.inner.read_into(path, start, buffer)
            return
        # a window may have gaps, of which nobody asks; its first and its last byte were asked for
        into, stop = np.frombuffer(buffer, np.uint8), start + len(buffer)
        first = max(0, bisect_right(pieces, start, key=lambda piece: piece[0]) - 1)
        end = start
        for at, data in pieces[first:]:
            low, high = max(start, at), min(stop, at + len(data))
            if low >= stop:
                break
            if low < high:
                into[low - start : high - start] = data[low - at : high - at]
                end = high
        if pieces[first][0] > start or end < stop:
            raise StorageError(
                f"bytes {start}:{stop} were not fetched from the rank that has them"
                f" ({printable(path)})"
            )

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        return None if path in self._fetched else self.inner.view(path, start, nbytes)
