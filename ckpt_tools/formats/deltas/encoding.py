"""Encodes the change of one tensor, and applies it.

A change is one zstd frame. With `xor`, it holds the exclusive-or of the new and the old bytes. With
`overwrite`, it holds a count, the positions of the changed bytes (both as u4), and the new bytes.

Source of the layout: slime at 624b824, `docs/en/advanced/delta-weight-sync.md`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from tempfile import SpooledTemporaryFile
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.errors import IntegrityError, PlanError, printable
from ckpt_tools.formats.deltas.layout import ADLER32, BLAKE3, OVERWRITE, XOR, XXH3

_LEVEL = 1  # the receivers' own: more takes longer than it saves
_BLOCK_BYTES = 2 << 20
_MAX_WINDOW_BYTES = 1 << 27
_MAX_OVERWRITE_BYTES = (1 << 32) - 1  # positions and the count have 32 bits
_IN_MEMORY_BYTES = 8 << 20  # of positions and of values; more wait on a disk
_DENSE = 3  # a block of which a third of the words changed is kept as it is
_WORD = 8

Array = npt.NDArray[Any]
# a block of an exclusive-or: all bytes; the numbers and values of words that are not zero; nothing
_Packed = Bytes | tuple[Array, Array] | None


class Hasher(Protocol):
    """A checksum of bytes that come in order."""

    def update(self, data: Any, /) -> None:
        """Adds bytes."""
        ...

    def hexdigest(self) -> str:
        """Returns the checksum in hexadecimal digits."""
        ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_hasher(checksum: str) -> Hasher:
    """Returns a new checksum of a kind in `CHECKSUMS`.

    Raises:
        PlanError: it needs a package that is not installed.
    """
    found: Any = {ADLER32: _Adler32, XXH3: xxhash.xxh3_128}.get(checksum)
    if found is None:
        try:
            import blake3
        except ImportError as error:
            raise PlanError(
                f"the checksum {BLAKE3} needs a package that is not installed",
                hint=f"pip install blake3; or --checksum {XXH3}",
            ) from error
        found = blake3.blake3
    hasher: Hasher = found()
    return hasher


class Encoder:
    """Encodes the new bytes of one tensor against its old ones. Both come in order.

    Attributes:
        num_changed: changed bytes so far.
        at: bytes so far.
    """

    def __init__(
        self, encoding: str, nbytes: int, hasher: Hasher, folder: str | None = None
    ) -> None:
        """Begins a tensor.

        Args:
            encoding: one of `ENCODINGS`.
            nbytes: its bytes.
            hasher: takes the new bytes.
            folder: where what does not fit into memory waits.
        """
        self._encoding, self._nbytes, self._hasher = encoding, nbytes, hasher
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._stream = self._compressor.compressobj(size=nbytes)
        self._positions, self._values = (
            SpooledTemporaryFile(_IN_MEMORY_BYTES, prefix="ckpt-", dir=folder)  # noqa: SIM115  # see `close`
            for _ in range(2)
        )
        self.num_changed = self.at = 0

    def add(self, new: Bytes, old: Bytes) -> bytes:
        """Takes the next bytes, and returns the bytes of the frame that are complete.

        `old` is overwritten: fresh memory for each piece would take longer than the rest.
        """
        self._hasher.update(new.data)
        diff = np.bitwise_xor(new, old, out=old)
        where = None if self._encoding == XOR else np.flatnonzero(diff != 0)
        self.num_changed += int(np.count_nonzero(diff)) if where is None else len(where)
        start, self.at = self.at, self.at + len(new)
        if where is None:
            return self._stream.compress(diff.data)
        if len(where):
            self._positions.write((where + start).astype("<u4").data)
            self._values.write(new[where].data)
        return b""

    def finish(self) -> Iterator[bytes]:
        """Yields the rest of the frame."""
        if self._encoding == OVERWRITE:
            self._stream = self._compressor.compressobj(size=4 + 5 * self.num_changed)
            yield self._stream.compress(np.array([self.num_changed], "<u4").data)
            for file in (self._positions, self._values):
                file.seek(0)
                while piece := file.read(_BLOCK_BYTES):
                    yield self._stream.compress(piece)
        yield self._stream.flush()

    @property
    def checksum(self) -> str:
        """Returns the checksum of the new bytes so far."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        """Gives up the room."""
        self._positions.close()
        self._values.close()


def check_size(encoding: str, name: str, nbytes: int) -> None:
    """Refuses a tensor that an encoding cannot address.

    Raises:
        PlanError: it is too long for `overwrite`.
    """
    if encoding == OVERWRITE and nbytes > _MAX_OVERWRITE_BYTES:
        raise PlanError(
            f"a tensor is too long for the encoding {OVERWRITE}, whose positions have 32 bits:"
            f" {printable(name)!r} has {nbytes:,} bytes",
            hint=f"--encoding {XOR}",
        )


class Patch(Protocol):
    """A decoded change, which can be applied to any range of the tensor's bytes."""

    nbytes: int  # of memory

    def apply(self, data: Bytes, start: int) -> None:
        """Changes the tensor's bytes from `start` on, in place."""
        ...


def decode(frame: bytes, encoding: str, nbytes: int, what: str) -> Patch:
    """Returns the change of a tensor of `nbytes` bytes; `what` names it in messages.

    Raises:
        IntegrityError: the frame is damaged, or not of a tensor of this length.
    """
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
            frame
        ) as reader:
            if encoding == XOR:
                return _Xor(map(_packed, _blocks(reader, nbytes, what)))
            return _read_overwrite(reader, nbytes, what)
    except zstandard.ZstdError as error:
        raise _damaged(what, printable(str(error))) from error


def check_frame(frame: bytes) -> str:
    """Returns why a frame cannot be decompressed, by its own checksum; "" if it can."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
            frame
        ) as reader:
            total = sum(map(len, iter(lambda: reader.read(_BLOCK_BYTES), b"")))
        expected = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as error:
        return f"is damaged: {error}"
    is_known = expected != zstandard.CONTENTSIZE_UNKNOWN
    return f"is cut: {total:,} of {expected:,} bytes" if is_known and total != expected else ""


def _damaged(what: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"the change of a tensor is damaged: {why} ({what})",
        hint=(
            "restore the version, or publish a complete one: ckpt publish --full. If the version is"
            " whole, it changes a different model than the one here"
        ),
    )


def _blocks(reader: Any, nbytes: int, what: str) -> Iterator[Bytes]:
    """Yields the blocks, all in the same memory."""
    memory = np.empty(min(_BLOCK_BYTES, nbytes), np.uint8)
    for start in range(0, nbytes, _BLOCK_BYTES):
        yield _fill(reader, memory[: nbytes - start], what)
    if reader.read(1):
        raise _damaged(what, f"more than the {nbytes:,} bytes of the tensor")


def _fill(reader: Any, memory: Bytes, what: str) -> Bytes:
    at = 0
    while at < len(memory):
        count = reader.readinto(memory[at:].data)
        if not count:
            raise _damaged(what, f"it ends {len(memory) - at:,} bytes early")
        at += count
    return memory


def _exactly(reader: Any, nbytes: int, what: str) -> Bytes:
    return _fill(reader, np.empty(nbytes, np.uint8), what)


def fold(first: Patch, second: Patch) -> Patch | None:
    """Returns one patch that does what two do, one after the other; None for two encodings.

    It may use the memory of both.
    """
    if isinstance(first, _Xor) and isinstance(second, _Xor):
        return _Xor(map(_joined_blocks, first.blocks, second.blocks))
    if isinstance(first, _Overwrite) and isinstance(second, _Overwrite):
        positions = np.concatenate((first.positions, second.positions))
        values = np.concatenate((first.values, second.values))
        order = np.argsort(positions, kind="stable")  # of equal ones, the later change is last
        positions, values = positions[order], values[order]
        is_last = np.ones(len(positions), bool)
        is_last[:-1] = positions[1:] != positions[:-1]
        return _Overwrite(positions[is_last], values[is_last])
    return None


class _Xor:
    """The exclusive-or of a tensor's new and old bytes, by block."""

    def __init__(self, blocks: Iterable[_Packed]) -> None:
        self.blocks = list(blocks)
        self.nbytes = sum(
            0 if b is None else b.nbytes if isinstance(b, np.ndarray) else b[0].nbytes + b[1].nbytes
            for b in self.blocks
        )

    def apply(self, data: Bytes, start: int) -> None:
        end = start + len(data)
        for number in range(start // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
            block, base = self.blocks[number], number * _BLOCK_BYTES
            low, high = max(start, base), min(end, base + _BLOCK_BYTES)
            part = data[low - start : high - start]
            if isinstance(block, np.ndarray):
                np.bitwise_xor(part, block[low - base : high - base], part)
            elif block is not None:
                _xor_words(part, low - base, *block)


def _packed(block: Bytes) -> _Packed:
    """Returns the words of a block that are not zero, with their numbers; None for none."""
    padded = block
    if len(block) % _WORD:
        padded = np.zeros(-(-len(block) // _WORD) * _WORD, np.uint8)
        padded[: len(block)] = block
    words = padded.view(np.uint64)
    where = np.flatnonzero(words != 0)  # of numbers it takes three times as long
    if not len(where):
        return None
    if len(where) * _DENSE > len(words):
        return block.copy()
    return where.astype(np.uint32), words[where]


def _joined_blocks(a: _Packed, b: _Packed) -> _Packed:
    """Returns the exclusive-or of two blocks. It may use their memory."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, np.ndarray):
        if isinstance(b, np.ndarray):
            return np.bitwise_xor(a, b, out=a)
        _xor_words(a, 0, *b)
        return a
    if isinstance(b, np.ndarray):
        _xor_words(b, 0, *a)
        return b
    last = int(max(a[0][-1], b[0][-1]))
    words = np.zeros(last + 1, np.uint64)
    for where, values in (a, b):
        words[where] ^= values
    where = np.flatnonzero(words != 0)
    return (where.astype(np.uint32), words[where]) if len(where) else None


def _span(numbers: Array, low: int, high: int) -> tuple[int, int]:
    """Returns where the numbers of `low:high` lie among ascending ones.

    The keys have the type of the numbers: else NumPy converts all of these at each call.
    """
    most = np.iinfo(numbers.dtype).max

    def at(key: int) -> int:
        found = np.searchsorted(numbers, numbers.dtype.type(key)) if key <= most else len(numbers)
        return int(found)

    return at(low), at(high)


def _xor_words(part: Bytes, start: int, where: Array, words: Array) -> None:
    """Applies words to a part of a block that begins at byte `start` of it."""
    first, last = -(-start // _WORD), (start + len(part)) // _WORD  # whole words
    low, high = _span(where, start // _WORD, -(-(start + len(part)) // _WORD))
    for at in {low, high - 1} if low < high else ():
        word = int(where[at])
        if first <= word < last:
            continue
        values = words[at : at + 1].view(np.uint8)  # at an edge
        begin, end = max(word * _WORD, start), min(word * _WORD + _WORD, start + len(part))
        own = part[begin - start : end - start]
        np.bitwise_xor(own, values[begin - word * _WORD : end - word * _WORD], own)
    if first < last:
        low, high = _span(where, first, last)
        whole = part[first * _WORD - start : last * _WORD - start].view(np.uint64)
        whole[where[low:high].astype(np.int64) - first] ^= words[low:high]


class _Overwrite:
    """The positions of a tensor's changed bytes, which ascend, and their new values."""

    def __init__(self, positions: Array, values: Bytes) -> None:
        self.positions, self.values = positions, values
        self.nbytes = positions.nbytes + values.nbytes

    def apply(self, data: Bytes, start: int) -> None:
        low, high = _span(self.positions, start, start + len(data))
        data[self.positions[low:high].astype(np.int64) - start] = self.values[low:high]


def _read_overwrite(reader: Any, nbytes: int, what: str) -> _Overwrite:
    (count,) = _exactly(reader, 4, what).view("<u4").tolist()
    if count > nbytes:
        raise _damaged(what, f"{count:,} bytes changed of {nbytes:,}")
    positions = _exactly(reader, 4 * count, what).view("<u4")
    values = _exactly(reader, count, what)
    if reader.read(1):
        raise _damaged(what, "there are bytes behind its end")
    if count and (int(positions[-1]) >= nbytes or not (positions[1:] > positions[:-1]).all()):
        raise _damaged(what, "its positions do not ascend within the tensor")
    return _Overwrite(positions, values)
