"""Joins neighbouring byte ranges into fewer, larger reads. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes `start <= i < start + nbytes` of a file; `tag` is the caller's."""

    file: str
    start: int
    nbytes: int
    tag: int


class Window(NamedTuple):
    """One read that serves several ranges."""

    file: str
    start: int
    nbytes: int
    ranges: tuple[Range, ...]


def coalesce(ranges: Iterable[Range], max_gap: int, max_nbytes: int) -> Iterator[Window]:
    """Joins ranges of one file into windows of at most `max_nbytes` bytes.

    Ranges in a window have gaps of at most `max_gap` bytes.

    A longer range gets its own window. Windows are in order of file and start. Every range is in
    exactly one window.
    """
    group: list[Range] = []
    start = end = 0
    for item in sorted(ranges):
        stop = item.start + item.nbytes
        if group and (
            item.file != group[0].file
            or item.start > end + max_gap
            or max(stop, end) - start > max_nbytes
        ):
            yield Window(group[0].file, start, end - start, tuple(group))
            group = []
        if not group:
            start = end = item.start
        group.append(item)
        end = max(end, stop)
    if group:
        yield Window(group[0].file, start, end - start, tuple(group))
