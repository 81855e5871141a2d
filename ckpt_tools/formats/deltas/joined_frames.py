"""Joins compressed pieces of one tensor to one zstd frame, without decompressing them.

A frame is a header and blocks. The blocks of frames that were compressed apart may follow each
other in one frame, but for one thing: a block may refer to the last three offsets that were used,
and a compressor assumes 1, 4 and 8 when it begins. So each piece begins with three blocks that use
these offsets. They hold 17 zero bytes, which the difference of two versions has almost everywhere.

Receivers read the first frame of a tensor alone (see `layout`), so the pieces of several ranks
cannot be frames of their own.

Source of the format: RFC 8878, 3.1.1. (The offsets are in 3.1.1.5.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import zstandard

from ckpt_tools.engine.kernels import Bytes

_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL, _WINDOW_LOG = 1, 19  # the window of that level
_DESCRIPTOR = bytes([3 << 6, (_WINDOW_LOG - 10) << 3])  # the size has 8 bytes; no checksum
_SIZE_BYTES = (0, 2, 4, 8)
_RAW, _RLE, _COMPRESSED = range(3)
_MAX_BLOCK_BYTES = 128 << 10
_LAST = b"\x01\x00\x00"  # an empty block
_FEW_BYTES = 64  # stored as they are
_WORD, _ZERO_WORDS = 8, 3  # the run of zeros that is looked for


def _block(kind: int, nbytes: int, content: bytes) -> bytes:
    return (kind << 1 | nbytes << 3).to_bytes(3, "little") + content


def _one_match(num_zeros: int, offset: int) -> bytes:
    """Returns a block with one sequence: some zero bytes, and three that repeat those before.

    Its three tables have one code each. The last byte has the extra bits of the offset, below a 1.
    """
    code = (offset + 3).bit_length() - 1
    literals = bytes([num_zeros << 3 | 1, 0]) if num_zeros else b"\x00"
    extra = (1 << code) | (offset + 3 - (1 << code))
    content = literals + bytes([1, 0b01010100, num_zeros, code, 0, extra])
    return _block(_COMPRESSED, len(content), content)


_RESET = _one_match(8, 8) + _one_match(0, 4) + _one_match(0, 1)
_RESET_BYTES = 8 + 3 * 3


class Blocks(NamedTuple):
    """Compressed bytes, as the blocks of a frame without its last one.

    Attributes:
        data: the blocks.
        can_follow: they may follow other blocks. If not, they are the first ones of a frame.
    """

    data: bytes
    can_follow: bool


class BlockCompressor:
    """Compresses pieces. Each thread has its own."""

    def __init__(self) -> None:
        params = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG)
        self._compressor = zstandard.ZstdCompressor(compression_params=params)

    def compress(self, data: Bytes) -> Blocks:
        """Returns the blocks of a piece."""
        if len(data) < _FEW_BYTES:
            return Blocks(_stored(data), True)
        start = _zeros_in(data)
        if start is None:
            return Blocks(self._blocks(data), False)
        rest = data[start + _RESET_BYTES :]
        return Blocks(_stored(data[:start]) + _RESET + self._blocks(rest), True)

    def _blocks(self, data: Bytes) -> bytes:
        """Returns the blocks of the frame of some bytes; none is marked as the last one."""
        frame = bytearray(self._compressor.compress(data.data))
        is_single, size = frame[4] >> 5 & 1, _SIZE_BYTES[frame[4] >> 6]
        at = first = 5 + (1 - is_single) + (size or is_single)
        while True:
            header = int.from_bytes(frame[at : at + 3], "little")
            nbytes = header >> 3
            if header & 1:
                break
            at += 3 + (1 if header >> 1 & 3 == _RLE else nbytes)
        if not nbytes:
            return bytes(frame[first:at])
        frame[at] &= 0xFE
        return bytes(frame[first:])


def frame_of(nbytes: int, pieces: Iterable[tuple[int, int, bytes]]) -> Iterator[bytes]:
    """Yields one frame of pieces; between them are zeros.

    Args:
        nbytes: bytes of the tensor.
        pieces: first byte, bytes and blocks of each, in order. All but the first one
            `can_follow`.
    """
    yield _MAGIC + _DESCRIPTOR + nbytes.to_bytes(8, "little")
    at = 0
    for start, length, blocks in pieces:
        yield _zeros(start - at)
        yield blocks
        at = start + length
    yield _zeros(nbytes - at) + _LAST


def _zeros(nbytes: int) -> bytes:
    whole, rest = divmod(nbytes, _MAX_BLOCK_BYTES)
    blocks = _block(_RLE, _MAX_BLOCK_BYTES, b"\0") * whole
    return blocks + _block(_RLE, rest, b"\0") if rest else blocks


def _stored(data: Bytes) -> bytes:
    """Returns the blocks of bytes that are stored as they are."""
    return b"".join(
        _block(_RAW, len(part), part.tobytes())
        for start in range(0, len(data), _MAX_BLOCK_BYTES)
        for part in (data[start : start + _MAX_BLOCK_BYTES],)
    )


def _zeros_in(data: Bytes) -> int | None:
    """Returns where enough zero bytes begin; None if that is nowhere."""
    is_zero = data[: len(data) // _WORD * _WORD].view(np.uint64) == 0
    is_run = is_zero[: len(is_zero) - _ZERO_WORDS + 1].copy()
    for number in range(1, _ZERO_WORDS):
        is_run &= is_zero[number : len(is_zero) - _ZERO_WORDS + 1 + number]
    first = int(is_run.argmax())
    return first * _WORD if is_run[first] else None
