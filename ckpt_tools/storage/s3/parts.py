"""What S3 allows of the parts of a file, and where they begin by default."""

from __future__ import annotations

from collections.abc import Sequence

PART_BYTES, MIN_PART_BYTES, MAX_PARTS = 8 << 20, 5 << 20, 10_000


def part_starts(nbytes: int) -> Sequence[int]:
    """Returns the starts of a file's parts: equal sizes in whole MiB, and at most 10,000 parts."""
    mebibytes = -(-nbytes // (MAX_PARTS << 20))
    return range(0, nbytes, max(PART_BYTES, mebibytes << 20))
