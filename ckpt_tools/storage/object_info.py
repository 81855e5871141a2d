"""Information on objects in a store. Imports nothing of this package."""

from __future__ import annotations

from typing import NamedTuple


class ObjectInfo(NamedTuple):
    """The known properties of an object.

    Attributes:
        crc64: CRC-64/NVME from the store, or from the object's metadata; None if unknown.
        is_marked: this tool wrote it. False if the store keeps no metadata.
        owner: id of the attempt that wrote it.
        is_claimed: the CRC-64 is from the object's metadata, where its writer has put it.
    """

    crc64: int | None
    is_marked: bool
    owner: str
    is_claimed: bool = False


class SmallObject(NamedTuple):
    """A small object at one moment: contents, version, and age.

    The age is by the store's clock; None if unknown.
    """

    data: bytes
    version: str
    age_s: float | None
