"""Writes `torch.save` archives: the bytes around payloads, and whole archives of plain values.

Payloads are copied in later. The order of records, their alignment and the zip64 end are torch's
own. `.data/serialization_id` is left out: it is a hash of the contents that only torch's usage
logging reads.

Source: torch 2.13 `caffe2/serialize/inline_container.cc`; PKWARE APPNOTE 6.3.9.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ckpt_tools.core.checksum import crc32
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.plan import Literal, Trailer
from ckpt_tools.formats.pickle.write import TensorRecord, pickled
from ckpt_tools.formats.zip.directory import CENTRAL, END, END64, HUGE, LOCAL

_ALIGNMENT = 64
_FIRST = ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little"))


class CrcTail(NamedTuple):
    """Bytes of an archive that contain the CRC-32 of the payload at `payload`."""

    start: int
    nbytes: int
    payload: int
    render: Callable[[int], bytes]


class TorchArchive:
    """An archive under construction.

    `parts` are the known bytes. `tails` are the bytes that need a payload's CRC-32.
    """

    def __init__(self, state: Any) -> None:
        """Begins the archive with `data.pkl`, a pickle of `state`."""
        self.nbytes = 0
        self.parts: list[tuple[int, bytes]] = []
        self.tails: list[CrcTail] = []
        self._records: list[tuple[str, int, int, int | None]] = []
        for name, data in (("data.pkl", pickled(state)), *_FIRST):
            self.add(name, data)

    def _put(self, data: bytes) -> None:
        self.parts.append((self.nbytes, data))
        self.nbytes += len(data)

    def add(self, name: str, data: bytes) -> None:
        """Appends a record whose bytes are known."""
        crc = crc32(data)
        self._records.append((name, self.nbytes, len(data), crc))
        self._put(_local_header(name, self.nbytes, len(data)) + data + _descriptor(crc, len(data)))

    def room(self, key: str, nbytes: int) -> int:
        """Appends a record for a payload of `nbytes` bytes, and returns the payload's start."""
        self._records.append((f"data/{key}", self.nbytes, nbytes, None))
        self._put(_local_header(f"data/{key}", self.nbytes, nbytes))
        start = self.nbytes
        self.nbytes += nbytes
        self._wait(start, functools.partial(_descriptor, nbytes=nbytes))
        return start

    def _wait(self, payload: int, render: Callable[[int], bytes]) -> None:
        nbytes = len(render(0))
        self.tails.append(CrcTail(self.nbytes, nbytes, payload, render))
        self.nbytes += nbytes

    def finish(self) -> None:
        """Appends the last record and the directory."""
        payloads = iter([tail.payload for tail in self.tails])
        self.add("version", b"3\n")
        start = self.nbytes
        for name, at, nbytes, crc in self._records:
            if crc is None:
                self._wait(next(payloads), functools.partial(_entry, name, at, nbytes))
            else:
                self._put(_entry(name, at, nbytes, crc))
        self._put(_end_of_directory(len(self._records), self.nbytes - start, start))

    def around(self, name: str) -> tuple[list[Literal], list[Trailer]]:
        """Returns the bytes around the payloads of a finished archive, for a file called `name`."""
        trailers = [
            Trailer(name, tail.start, tail.nbytes, tail.payload, tail.render) for tail in self.tails
        ]
        return [Literal(name, start, data) for start, data in self.parts], trailers


class ArchiveWrapping(NamedTuple):
    """The bytes around a payload: `prefix`, the payload of `nbytes`, and a suffix.

    `render_suffix` returns the suffix for the payload's CRC-32.
    """

    prefix: bytes
    nbytes: int
    suffix_nbytes: int
    render_suffix: Callable[[int], bytes]


@functools.lru_cache(maxsize=4096)
def wrap(dtype: DType, sizes: tuple[int, ...]) -> ArchiveWrapping:
    """Returns the archive that `torch.save` makes of a contiguous CPU tensor.

    The payload is left out.
    """
    nbytes = math.prod(sizes) * dtype.itemsize
    archive = TorchArchive(TensorRecord(dtype, sizes, "0"))
    start = archive.room("0", nbytes)
    archive.finish()
    prefix = b"".join(data for at, data in archive.parts if at < start)
    behind = [(at, data) for at, data in archive.parts if at >= start]

    def render(crc: int) -> bytes:
        return b"".join(
            data
            for _, data in sorted(
                [*behind, *((tail.start, tail.render(crc)) for tail in archive.tails)]
            )
        )

    return ArchiveWrapping(prefix, nbytes, archive.nbytes - start - nbytes, render)


def render_archive(value: Any) -> bytes:
    """Returns the archive that `torch.save` makes of a plain value, as DCP stores objects.

    Raises:
        PlanError: the value is not plain; see `pickled`.
    """
    archive = TorchArchive(value)
    archive.finish()
    return b"".join(data for _, data in archive.parts)


def _entry(name: str, at: int, nbytes: int, crc: int) -> bytes:
    """Returns a record's entry in the central directory."""
    full = f"archive/{name}".encode()
    big = ([nbytes, nbytes] if nbytes >= HUGE else []) + ([at] if at >= HUGE else [])
    extra = struct.pack(f"<2H{len(big)}Q", 1, 8 * len(big), *big) if big else b""
    size, header = min(nbytes, HUGE), min(at, HUGE)
    return (
        CENTRAL.pack(
            b"PK\x01\x02",
            0,
            0,
            0x0808,
            0,
            0,
            0,
            crc,
            size,
            size,
            len(full),
            len(extra),
            0,
            0,
            0,
            0,
            header,
        )
        + full
        + extra
    )


def _local_header(name: str, at: int, nbytes: int) -> bytes:
    full = f"archive/{name}".encode()
    zip64 = struct.pack("<2H2Q", 1, 16, 0, 0) if nbytes >= HUGE else b""
    unpadded = at + LOCAL.size + len(full) + len(zip64) + 4
    fill = -unpadded % _ALIGNMENT
    extra = zip64 + b"FB" + struct.pack("<H", fill) + b"Z" * fill
    return (
        LOCAL.pack(b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(full), len(extra)) + full + extra
    )


def _descriptor(crc: int, nbytes: int) -> bytes:
    return struct.pack("<4sIQQ" if nbytes >= HUGE else "<4sIII", b"PK\x07\x08", crc, nbytes, nbytes)


def _end_of_directory(count: int, nbytes: int, start: int) -> bytes:
    end64 = END64.pack(
        b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, nbytes, start
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + nbytes, 1)
    return (
        end64
        + locator
        + END.pack(
            b"PK\x05\x06",
            0,
            0,
            min(count, 0xFFFF),
            min(count, 0xFFFF),
            min(nbytes, HUGE),
            min(start, HUGE),
            0,
        )
    )
