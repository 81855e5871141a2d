"""Checksums of files and tensors (CRC-64/NVME) and of zip records (CRC-32), and how to join them.

Both run at the speed of a memory copy and release the GIL. This module imports nothing of this
package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from isal.isal_zlib import crc32, crc32_combine

_MAX_WAITING_BYTES = 4 << 20

__all__ = [
    "LateChecksums",
    "combine_crc64nvme",
    "crc32",
    "crc32_combine",
    "crc64nvme",
    "hex64",
    "join_crc32",
    "join_crc64",
]


@cache
def _awscrt() -> Any:
    """Imports awscrt at the first checksum: that takes a fifth of the time of a short command."""
    from awscrt import checksums

    return checksums


def crc64nvme(data: Any, previous: int = 0) -> int:
    """Returns the CRC-64/NVME of bytes, or of bytes behind others whose CRC is `previous`."""
    found: int = _awscrt().crc64nvme(data, previous)
    return found


def combine_crc64nvme(first: int, second: int, second_nbytes: int) -> int:
    """Returns the CRC-64/NVME of two concatenated pieces from their CRCs."""
    found: int = _awscrt().combine_crc64nvme(first, second, second_nbytes)
    return found


def hex64(crc: int) -> str:
    """Returns a CRC-64 as the manifest spells it: 16 lower-case hex digits."""
    return f"{crc:016x}"


class LateChecksums(Mapping[str, int]):
    """The CRC-64/NVME of files by name. That of a short file is computed when it is asked for.

    `ckpt inspect` never asks, and so saves the import of the package that computes it.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._waiting: dict[str, bytes] = {}

    def note(self, name: str, data: bytes) -> None:
        """Adds a file."""
        if len(data) <= _MAX_WAITING_BYTES:
            self._waiting[name] = data
        else:
            self._known[name] = crc64nvme(data)

    def __getitem__(self, name: str) -> int:
        if name in self._waiting:
            self._known[name] = crc64nvme(self._waiting.pop(name))
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._known, **self._waiting})

    def __len__(self) -> int:
        return len(self._known) + len(self._waiting)


def join_crc64(pieces: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-64/NVME of concatenated pieces from their `(crc, nbytes)`, in order."""
    crc = 0
    for piece, nbytes in pieces:
        crc = combine_crc64nvme(crc, piece, nbytes)
    return crc


def join_crc32(pieces: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32 of concatenated pieces from their `(crc, nbytes)`, in order."""
    crc = 0
    for piece, nbytes in pieces:
        crc = crc32_combine(crc, piece, nbytes)
    return crc
