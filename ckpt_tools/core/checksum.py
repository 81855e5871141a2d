"""Checksums of files and tensors (CRC-64/NVME) and of zip records (CRC-32), and how to join them.

Both run at the speed of a memory copy and release the GIL. This module imports nothing of this
package.
"""

from __future__ import annotations

from collections.abc import Iterable

from awscrt.checksums import combine_crc64nvme, crc64nvme
from isal.isal_zlib import crc32, crc32_combine

__all__ = [
    "combine_crc64nvme",
    "crc32",
    "crc32_combine",
    "crc64nvme",
    "hex64",
    "join_crc32",
    "join_crc64",
]


def hex64(crc: int) -> str:
    """Returns a CRC-64 as the manifest spells it: 16 lower-case hex digits."""
    return f"{crc:016x}"


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
