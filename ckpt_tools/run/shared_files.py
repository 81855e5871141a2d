"""Counts the bytes that steps of a run share, since a save links files that have not changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ckpt_tools.run.step import Step


class Links:
    """Counts steps one after the other, as if they were removed. A shared file goes with its last
    link.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], int] = {}  # links by device and inode

    def freed_nbytes(self, step: Step) -> int:
        """Returns the bytes that the removal of one more step frees."""
        shared = 0
        for found in _files_of(step):
            if found.st_nlink > 1:
                key = found.st_dev, found.st_ino
                left = self._left[key] = self._left.get(key, found.st_nlink) - 1
                shared += found.st_size * (left > 0)
        return max(0, step.nbytes - shared)


def shared_nbytes(step: Step) -> int:
    """Returns the bytes of a step's files that have further links; 0 in an object store."""
    return sum(found.st_size for found in _files_of(step) if found.st_nlink > 1)


def stored_nbytes(steps: Iterable[Step]) -> int:
    """Returns the bytes of steps on a disk, each file once."""
    total, seen = 0, set[tuple[int, int]]()
    for step in steps:
        total += step.nbytes
        for found in _files_of(step):
            key = found.st_dev, found.st_ino
            total -= found.st_size * (key in seen)
            seen.add(key)
    return total


def _files_of(step: Step) -> Iterable[os.stat_result]:
    """Yields the data files of a step on a disk, as far as they are there."""
    if step.manifest is not None and isinstance(step.path, Path):
        for name in step.manifest.files:
            with suppress(OSError):
                yield os.lstat(step.path / name)
