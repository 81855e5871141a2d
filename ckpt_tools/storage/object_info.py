"""What a look at an object tells. Imports nothing of this package."""

from __future__ import annotations

from typing import NamedTuple


class ObjectInfo(NamedTuple):
    """What is known of an object.

    Attributes:
        crc64: CRC-64/NVME as the store knows it, or as it was noted when it was written; None where
            nobody knows.
        is_marked: this tool wrote it, as far as a store keeps marks.
        owner: id of the attempt that wrote it.
    """

    crc64: int | None
    is_marked: bool
    owner: str


class SmallObject(NamedTuple):
    """A small object as it was at one moment: contents, version, and its age by the store's clock,
    None where that is unknown.
    """

    data: bytes
    version: str
    age_s: float | None
