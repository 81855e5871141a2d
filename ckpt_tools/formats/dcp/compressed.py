"""Shows a compressed checkpoint as the plain one that it stands for.

With torch's `ZStandard` extension, each item of a data file is a zstd stream of its archive. The
length of the archive is stored nowhere, and its checksum lies behind its payload. So the items are
decompressed once, into a temporary file, and all readers see plain archives there.

Source: torch 2.13 `torch/distributed/checkpoint/_extension.py`; confirmed on files that it wrote.
"""

from __future__ import annotations

import io
import os
import re
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from tempfile import TemporaryFile
from typing import IO, NamedTuple, cast

import zstandard

from ckpt_tools.core.dtypes import by_name
from ckpt_tools.core.threads import num_threads
from ckpt_tools.errors import FormatError, IntegrityError, StorageError, printable
from ckpt_tools.formats.dcp.metadata import ItemLocation, Metadata, parse_metadata, render
from ckpt_tools.storage import Capabilities, Store, Writer, read
from ckpt_tools.storage.base import StoreDefaults
from ckpt_tools.storage.memory import MemoryStore

_READ_BYTES, _WRITE_BYTES = 1 << 20, 1 << 20
_MAX_WINDOW_BYTES = 1 << 27
_MAX_MORE_BYTES = 1 << 20  # of a tensor's archive, besides its elements
_MAX_OBJECT_BYTES, _MAX_OBJECTS_BYTES = 256 << 20, 4 << 30  # of one, and of all
_OF_RANK = re.compile(r"__[0-9]+\.metadata")
_ZIP, _END_OF_ZIP, _TAIL_BYTES = b"PK\3\4", b"PK\5\6", 22


class _Item(NamedTuple):
    """An item of a data file, the most bytes that it may decompress to, and whether no tensor says.

    Objects have a limit together, too.
    """

    at: ItemLocation
    most: int
    is_object: bool


class _Compressed(io.RawIOBase):
    """The compressed bytes of an item, as a stream."""

    def __init__(self, store: Store, at: ItemLocation) -> None:
        super().__init__()
        self._store, self._at, self._left = store, at.start, at.nbytes
        self._file = at.file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self._left)
        if count:
            self._store.read_into(self._file, self._at, memoryview(buffer)[:count])
        self._at, self._left = self._at + count, self._left - count
        return count


class DecompressedStore(StoreDefaults):
    """The files of a checkpoint, as they would be without compression."""

    compression = "zstd, decompressed into a temporary file"

    def __init__(self, base: Store) -> None:
        """Decompresses all items.

        Raises:
            FormatError: an item is longer than its tensor allows.
            IntegrityError: an item is damaged, or cut.
            StorageError: the items cannot be read, or there is no room for the temporary file.
        """
        self._base, self.url, self.traffic = base, base.url, base.traffic
        kind = base.capabilities
        self.capabilities = Capabilities(can_write_anywhere=False, is_remote=kind.is_remote)
        files = base.list_files()
        names = [".metadata"] if ".metadata" in files else filter(_OF_RANK.fullmatch, files)
        indexes = {name: parse_metadata(read(base, name), name) for name in names}
        items: dict[ItemLocation, _Item] = {}
        for metadata in indexes.values():
            for item in _items(metadata):
                at = item.at
                if at.start < 0 or at.nbytes <= 0:
                    raise FormatError(
                        f"an item has no place: {at.nbytes} bytes at {at.start}"
                        f" ({printable(at.file)})"
                    )
                items[at] = max(item, items.get(at, item))
        self._file = TemporaryFile(prefix="ckpt-")  # noqa: SIM115  # closed with this object
        weakref.finalize(self, self._file.close)
        self._lock, self._end, self._object_nbytes = threading.Lock(), 0, 0
        self._files: dict[str, list[tuple[int, int, int]]] = {}
        self._sizes: dict[str, int] = {}
        places: dict[ItemLocation, ItemLocation] = {}
        ordered = sorted(items.values())
        with ThreadPoolExecutor(num_threads(None), "ckpt-zstd") as pool:
            for item, parts in zip(ordered, pool.map(self._one, ordered), strict=True):
                first = end = self._sizes.get(item.at.file, 0)
                for where, nbytes in parts:
                    self._files.setdefault(item.at.file, []).append((end, nbytes, where))
                    end += nbytes
                self._sizes[item.at.file] = end
                places[item.at] = ItemLocation(item.at.file, first, end - first)
        self._memory = MemoryStore(
            {
                name: render(_moved(metadata, places), metadata.extras.get("save_id", ""))
                for name, metadata in indexes.items()
            },
            base.url,
        )

    def _one(self, item: _Item) -> list[tuple[int, int]]:
        """Decompresses an item, and returns its parts in the temporary file: first byte, bytes."""
        nbytes, buffer, parts = 0, bytearray(_WRITE_BYTES), list[tuple[int, int]]()
        first = last = b""
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        with decompressor.stream_reader(
            cast(IO[bytes], _Compressed(self._base, item.at)),
            read_size=_READ_BYTES,
            read_across_frames=True,
        ) as reader:
            while count := _read_into(reader, buffer, item.at):
                first = first or bytes(buffer[: min(4, count)])
                last = (last + bytes(buffer[:count]))[-_TAIL_BYTES:]
                if nbytes + count > item.most:
                    raise FormatError(
                        f"a compressed item is longer than its tensor: over {item.most:,} bytes"
                        f" ({printable(item.at.file)}, byte {item.at.start})"
                    )
                parts.append((self._write(memoryview(buffer)[:count], item), count))
                nbytes += count
        if not nbytes or (first == _ZIP and _END_OF_ZIP not in last):
            raise _damaged(item.at, "it ends early")  # nothing else tells that a stream is cut
        return parts

    def _write(self, data: memoryview, item: _Item) -> int:
        """Adds bytes to the temporary file, and returns where they begin."""
        with self._lock:
            start, self._end = self._end, self._end + len(data)
            self._object_nbytes += len(data) * item.is_object
            if self._object_nbytes > _MAX_OBJECTS_BYTES:
                raise FormatError(
                    f"the objects decompress to more than {_MAX_OBJECTS_BYTES:,} bytes"
                    f" ({printable(self.url)})"
                )
        at = start
        try:
            while len(data):
                count = os.pwrite(self._file.fileno(), data, at)
                at, data = at + count, data[count:]
        except OSError as error:
            raise StorageError(
                f"cannot decompress into a temporary file: {error.strerror}",
                hint="make room in TMPDIR, for as many bytes as the checkpoint has tensors",
            ) from error
        return start

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        memory = {name: self._memory.size(name) for name in self._memory.files}
        return {**self._base.list_files(below), **self._sizes, **memory}

    def folders(self) -> list[str]:
        return self._base.folders()

    def enter(self, name: str) -> Store:
        return self._base.enter(name)

    def strays(self) -> Mapping[str, str]:
        return self._base.strays()

    def size(self, path: str) -> int:
        if path in self._memory.files:
            return self._memory.size(path)
        return self._sizes[path] if path in self._sizes else self._base.size(path)

    def version(self, path: str) -> str:
        return self._base.version(path)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        if path in self._memory.files:
            self._memory.read_into(path, start, buffer)
        elif path not in self._files:
            self._base.read_into(path, start, buffer)
        else:
            self._read(path, start, buffer)

    def _read(self, path: str, start: int, buffer: memoryview) -> None:
        items, end = self._files[path], start + len(buffer)
        if not 0 <= start <= end <= self._sizes[path]:
            raise StorageError(
                f"a file ended early: expected bytes {start}:{end}, got {self._sizes[path]}"
                f" ({printable(path)})"
            )
        first = bisect_right(items, start, key=lambda item: item[0]) - 1
        for at, nbytes, where in items[max(0, first) :]:
            low, high = max(start, at), min(end, at + nbytes)
            if at >= end:
                break
            while low < high:
                part = buffer[low - start : high - start]
                if not (count := os.preadv(self._file.fileno(), [part], where + low - at)):
                    raise StorageError("the temporary file of decompressed items was cut")
                low += count

    def create(self, path: str, nbytes: int) -> Writer:
        raise StorageError(f"a checkpoint is not written to: {printable(path)} ({nbytes} bytes)")

    def close(self) -> None:
        self._base.close()  # the temporary file stays with this object: it may be read again


def _read_into(
    reader: zstandard.ZstdDecompressionReader, buffer: bytearray, at: ItemLocation
) -> int:
    try:
        return int(reader.readinto(buffer))
    except zstandard.ZstdError as error:
        raise _damaged(at, str(error)) from error


def _damaged(at: ItemLocation, why: str) -> IntegrityError:
    return IntegrityError(
        f"a compressed item is damaged: {printable(why)} ({printable(at.file)}, byte {at.start})",
        hint="restore the file from a copy",
    )


def _items(metadata: Metadata) -> Iterator[_Item]:
    boxes = {
        (fqn, box.offsets): box.numel * by_name(meta.dtype, repr(printable(fqn))).itemsize
        for fqn, meta in metadata.tensors.items()
        for box in meta.boxes
    }
    for key, at in metadata.places.items():
        if key[1] is None:
            yield _Item(at, _MAX_OBJECT_BYTES, True)
        else:
            yield _Item(at, boxes.get((key[0], key[1]), 0) + _MAX_MORE_BYTES, False)


def _moved(metadata: Metadata, places: Mapping[ItemLocation, ItemLocation]) -> Metadata:
    moved = {key: places[at] for key, at in metadata.places.items()}
    return replace(metadata, places=moved, compressed=False)
