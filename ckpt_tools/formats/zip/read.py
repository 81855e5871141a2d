"""`torch.save` archives of one tensor: finds the payload in an archive.

An archive is a zip of stored (not compressed) records. `data.pkl` has dtype, shape and strides.
`data/0` is the payload, 64-byte aligned. The central directory at the end has the position of each
record. Only the head and tail of an archive are read.

Source: torch 2.13 `caffe2/serialize/inline_container.cc`, `torch/_utils.py`; PKWARE APPNOTE 6.3.9.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ckpt_tools.core.box import row_major_strides
from ckpt_tools.core.catalog import RAW, Extent
from ckpt_tools.core.dtypes import BY_NAME, BY_STORAGE_CLASS, DType
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.pickle.load import load_pickle, short_repr
from ckpt_tools.formats.zip.directory import (
    CRC_AT,
    END,
    LOCAL,
    entries,
    find_directory,
    slice_archive,
)
from ckpt_tools.storage import Store
from ckpt_tools.storage.ranges import Range, Window, coalesce

_HEAD_BYTES = _TAIL_BYTES = 1536
_GAP_BYTES, _WINDOW_BYTES = 4096, 4 << 20
_AHEAD_WINDOWS = 1024
_LEAST_RUN = 8  # shorter ones are parsed one by one


class ArchiveItem(NamedTuple):
    """A chunk to find: the extent of its archive, and the dtype and sizes from the index."""

    extent: Extent
    dtype: DType
    sizes: tuple[int, ...]


class ZipRecord(NamedTuple):
    """One file of a zip: the position of its local header, and its size, in bytes of the archive.

    `crc_at` is the position of its CRC-32 in the directory.
    """

    header: int
    nbytes: int
    crc_at: int


def locate_payloads(store: Store, items: Sequence[ArchiveItem]) -> Iterator[tuple[Extent, Extent]]:
    """Yields, for each archive, the extent of its payload, after a check against the index.

    It reads 1.5 KiB twice per item, joined with the reads of neighbours. Small items are read
    whole, in windows of 4 MiB. Neighbours of one length, dtype and shape are compared all at once.
    """
    halves: dict[int, bytes] = {}
    for window, view in _windows(store, [item.extent for item in items]):
        for run in _runs(window.ranges, items):
            if len(run) >= _LEAST_RUN:
                yield from _locate_run(store, items, run, window, view)
                continue
            for part in run:
                found = _joined(halves, part, window, view, items[part.tag >> 1].extent.nbytes)
                if found is not None:
                    item = items[part.tag >> 1]
                    yield item.extent, _find_payload(store, item, *found)


def heads_and_tails(store: Store, extents: Sequence[Extent]) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields the number of each extent with its first and last 1.5 KiB, in file order."""
    halves: dict[int, bytes] = {}
    for window, view in _windows(store, extents):
        for part in window.ranges:
            number = part.tag >> 1
            found = _joined(halves, part, window, view, extents[number].nbytes)
            if found is not None:
                yield number, *found


def _windows(store: Store, extents: Sequence[Extent]) -> Iterator[tuple[Window, memoryview]]:
    """Yields the reads of heads and tails with their bytes. The tag has twice the number of the
    extent, and 1 more for a tail.
    """
    order = sorted(range(len(extents)), key=lambda number: extents[number][:2])
    # one file at a time: there may be a million chunks
    files = (numbers for _, numbers in groupby(order, lambda number: extents[number].file))
    windows = (
        window
        for numbers in files
        for window in coalesce(_head_and_tail(extents, numbers), _GAP_BYTES, _WINDOW_BYTES)
    )
    for window in _announced(store, windows):
        view = memoryview(bytearray(window.nbytes))
        store.read_into(window.file, window.start, view)
        yield window, view


def _joined(
    halves: dict[int, bytes], part: Range, window: Window, view: memoryview, nbytes: int
) -> tuple[bytes, bytes] | None:
    """Returns head and tail of an archive of `nbytes` bytes; None if only one of them was read.

    `halves` keeps that one until the other comes.
    """
    at, number = part.start - window.start, part.tag >> 1
    data = bytes(view[at : at + part.nbytes])
    if part.nbytes == nbytes:  # a small one, read whole
        return data[:_HEAD_BYTES], data[-_TAIL_BYTES:]
    other = halves.pop(number, None)
    if other is None:
        halves[number] = data
        return None
    return (other, data) if part.tag & 1 else (data, other)


def _runs(parts: Sequence[Range], items: Sequence[ArchiveItem]) -> Iterator[list[Range]]:
    """Yields runs of whole archives of one length, dtype and shape, at equal distances.

    Every part is in one run. Most runs have one part.
    """
    run: list[Range] = []
    kind: Any = None
    for part in parts:
        item = items[part.tag >> 1]
        is_whole = part.nbytes == item.extent.nbytes
        own = (part.nbytes, item.dtype, item.sizes) if is_whole else None
        step = part.start - run[-1].start if run else 0
        fits = own is not None and own == kind and step >= part.nbytes
        if run and not (fits and (len(run) < 2 or step == run[1].start - run[0].start)):
            yield run
            run = []
        run.append(part)
        kind = own
    if run:
        yield run


def _locate_run(
    store: Store,
    items: Sequence[ArchiveItem],
    run: Sequence[Range],
    window: Window,
    view: memoryview,
) -> Iterator[tuple[Extent, Extent]]:
    """Yields the payloads of a run. What equals the first archive needs no parsing.

    The payload and the checksums may differ.
    """
    first = items[run[0].tag >> 1]
    data = bytes(view[run[0].start - window.start :][: run[0].nbytes])
    head, tail = data[:_HEAD_BYTES], data[-_TAIL_BYTES:]
    found = _find_payload(store, first, head, tail)
    yield first.extent, found
    records, directory = read_directory(store, first.extent, tail)
    record = records["data/0"]
    alike = _equal_rows(data, records, len(directory), run[1:], window, view)
    is_all, shift = found.nbytes == record.nbytes, found.start - first.extent.start
    for part, (is_alike, crc) in zip(run[1:], alike, strict=True):
        item = items[part.tag >> 1]
        if not is_alike:
            own = bytes(view[part.start - window.start :][: part.nbytes])
            yield (
                item.extent,
                _find_payload(store, item, own[:_HEAD_BYTES], own[-_TAIL_BYTES:]),
            )
            continue
        known = crc if is_all and (crc or not found.nbytes) else None
        start = item.extent.start + shift
        yield (
            item.extent,
            Extent(item.extent.file, start, found.nbytes, RAW, found.strides, known),
        )


def _equal_rows(
    data: bytes,
    records: dict[str, ZipRecord],
    directory_nbytes: int,
    parts: Sequence[Range],
    window: Window,
    view: memoryview,
) -> Iterator[tuple[bool, int]]:
    """Yields for each archive whether it equals `data`, and the CRC-32 of its payload.

    Only the bytes that locate a payload are compared: those up to the payload, and the directory
    without its checksums.
    """
    import numpy as np  # `ckpt inspect` does not need it

    nbytes, front = len(data), records["data/0"].header + LOCAL.size
    start = int(END.unpack(data[-END.size :])[6])
    step = parts[1].start - parts[0].start
    rows = np.ndarray(
        (len(parts), nbytes), np.uint8, view, parts[0].start - window.start, (step, 1)
    )
    if start + directory_nbytes > nbytes or front > min(start, _HEAD_BYTES):
        yield from ((False, 0) for _ in parts)  # a zip64 directory, or a long pickle
        return
    template = np.frombuffer(data, np.uint8)
    is_equal = (rows[:, :front] == template[:front]).all(axis=1)
    at = start
    for crc_at in sorted(record.crc_at for record in records.values()):
        stop = start + crc_at
        is_equal &= (rows[:, at:stop] == template[at:stop]).all(axis=1)
        at = stop + 4
    is_equal &= (rows[:, at:] == template[at:]).all(axis=1)
    own = start + records["data/0"].crc_at
    crcs = np.ascontiguousarray(rows[:, own : own + 4]).view("<u4")[:, 0]
    yield from zip(is_equal.tolist(), crcs.tolist(), strict=True)


def _announced(store: Store, windows: Iterator[Window]) -> Iterator[Window]:
    """Yields windows some time after announcing them to the store, if the store prefetches.

    They are not announced to a disk, which would only read small separate pieces.
    """
    if not store.capabilities.fetches_ahead:
        yield from windows
        return
    waiting: deque[Window] = deque()
    for window in windows:
        store.will_read([(window.file, window.start, window.nbytes)])
        waiting.append(window)
        if len(waiting) > _AHEAD_WINDOWS:
            yield waiting.popleft()
    store.will_read((), is_all=True)
    yield from waiting


def _head_and_tail(extents: Sequence[Extent], numbers: Iterable[int]) -> Iterator[Range]:
    for number in numbers:
        file, start, nbytes = extents[number][:3]
        if nbytes <= _HEAD_BYTES + _TAIL_BYTES:
            yield Range(file, start, nbytes, 2 * number)
            continue
        yield Range(file, start, _HEAD_BYTES, 2 * number)
        yield Range(file, start + nbytes - _TAIL_BYTES, _TAIL_BYTES, 2 * number + 1)


def _find_payload(store: Store, item: ArchiveItem, head: bytes, tail: bytes) -> Extent:
    try:
        return _find(store, item, head, tail)
    except FormatError as error:
        raise type(error)(
            f"{error} ({printable(item.extent.file)} at byte {item.extent.start})", hint=error.hint
        ) from error
    except struct.error as error:
        raise FormatError(
            f"a zip is truncated ({printable(item.extent.file)} at byte {item.extent.start})"
        ) from error


def _find(store: Store, item: ArchiveItem, head: bytes, tail: bytes) -> Extent:
    records, directory = read_directory(store, item.extent, tail)
    data_record = _record(records, "data/0")
    front = data_record.header + LOCAL.size
    if front > len(head):  # a pickle so long that it pushes the payload out of the first 1.5 KiB
        head = slice_archive(store, item.extent, head, 0, front)
    start, tensor = _parse_front(
        head[:front], _record(records, "data.pkl"), data_record, item.dtype, item.sizes
    )
    if start + data_record.nbytes > item.extent.nbytes:
        raise FormatError(
            f"a record runs past its archive: {start + data_record.nbytes} of {item.extent.nbytes}"
            " bytes"
        )
    skip = tensor.offset * item.dtype.itemsize
    nbytes = data_record.nbytes - skip if tensor.strides else tensor.nbytes
    (crc,) = struct.unpack_from("<I", directory, data_record.crc_at)
    # the CRC is 0 if the writer computed none
    is_all = nbytes == data_record.nbytes and (crc or not nbytes)
    return Extent(
        item.extent.file,
        item.extent.start + start + skip,
        nbytes,
        RAW,
        tensor.strides,
        crc if is_all else None,
    )


@functools.lru_cache(maxsize=4096)
def _parse_front(
    front: bytes,
    pickle_record: ZipRecord,
    data_record: ZipRecord,
    dtype: DType,
    sizes: tuple[int, ...],
) -> tuple[int, _Tensor]:
    """Returns the payload's start and the tensor's layout, from the bytes before the payload.

    `front` ends with the payload's local header. Items of one dtype and shape have the same front,
    byte for byte, so a million chunks need only a few parses.
    """
    start, tensor_bytes = data_start(front, pickle_record), pickle_record.nbytes
    tensor = _parse_tensor(front[start : start + tensor_bytes], dtype, sizes)
    if tensor.storage_nbytes != data_record.nbytes:
        raise FormatError(
            f"a tensor's storage has the wrong length: expected {tensor.storage_nbytes} bytes, got"
            f" {data_record.nbytes}"
        )
    return data_start(front, data_record), tensor


def data_start(front: bytes, record: ZipRecord) -> int:
    """Returns the start of a record's data within the archive, from its local header."""
    if record.header + LOCAL.size > len(front):
        raise FormatError(f"a zip record has an impossible position: byte {record.header}")
    magic, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = LOCAL.unpack_from(
        front, record.header
    )
    if magic != b"PK\x03\x04" or method != 0 or flags & 1:
        raise FormatError(
            f"not a stored zip record: magic {magic!r}, method {method}, flags {flags:#x}"
        )
    return int(record.header + LOCAL.size + name_bytes + extra_bytes)


def _record(records: dict[str, ZipRecord], name: str) -> ZipRecord:
    try:
        return records[name]
    except KeyError:
        raise FormatError(
            f"not a saved tensor: the archive has no {name}, only {printable(', '.join(records))}"
        ) from None


def read_directory(store: Store, extent: Extent, tail: bytes) -> tuple[dict[str, ZipRecord], bytes]:
    """Returns the records of an archive by name, and the raw directory.

    The names lack the folder that torch puts in front.
    """
    count, data = find_directory(store, extent, tail)
    cuts, known = _directories.get((len(data), count), ((), {}))
    records = known.get(b"".join([data[a:b] for a, b in cuts]))
    return records if records is not None else _parse_directory(data, count), data


# Directories that differ only in their CRCs are parsed once. By length and count, the cache has the
# ranges between the CRCs, and the records by the bytes in these ranges. It is bounded, so that a
# file with a million different directories costs time and not memory.
_Directories = dict[
    tuple[int, int], tuple[tuple[tuple[int, int], ...], dict[bytes, dict[str, ZipRecord]]]
]
_directories: _Directories = {}
_MAX_DIRECTORIES = 4096


def _parse_directory(data: bytes, count: int) -> dict[str, ZipRecord]:
    records: dict[str, ZipRecord] = {}
    cuts = [0]
    for entry in entries(data, count, is_exact=False):
        name = entry.name.decode("utf-8", "replace").partition("/")[2]
        if entry.method or name in records:
            raise FormatError(
                f"a zip record is not stored as torch does it: {printable(name)!r}, method"
                f" {entry.method}"
            )
        records[name] = ZipRecord(entry.header, entry.nbytes, entry.at + CRC_AT)
        cuts += [entry.at + CRC_AT, entry.at + CRC_AT + 4]
    order = records.get("byteorder")
    if order is not None and order.nbytes != len(b"little"):
        raise FormatError(
            "values in big-endian order are not read",
            hint="load the file with torch and save it again on a little-endian machine",
        )
    pairs = tuple(zip(cuts[::2], [*cuts[1::2], len(data)], strict=True))
    if len(_directories) > _MAX_DIRECTORIES:
        _directories.clear()
    old_pairs, known = _directories.get((len(data), count), (pairs, {}))
    if old_pairs != pairs or len(known) > _MAX_DIRECTORIES:
        known = {}
    _directories[len(data), count] = (pairs, known)
    known[b"".join([data[a:b] for a, b in pairs])] = records
    return records


class _Tensor(NamedTuple):
    offset: int
    strides: tuple[int, ...] | None
    storage_nbytes: int
    nbytes: int


def _parse_tensor(data: bytes, dtype: DType, sizes: tuple[int, ...]) -> _Tensor:
    """Returns a tensor's layout in its storage, from its pickle. The index must agree."""
    allowed: dict[tuple[str, str], Any] = {
        ("torch", name): d for name, d in BY_STORAGE_CLASS.items()
    }
    allowed.update({("torch", name): d for name, d in BY_NAME.items()})
    for module in ("torch", "torch.storage"):
        allowed[module, "UntypedStorage"] = allowed[module, "TypedStorage"] = None
    allowed["collections", "OrderedDict"] = lambda *_: None
    allowed["torch._utils", "_rebuild_tensor_v2"] = lambda *args: args
    allowed["torch._utils", "_rebuild_tensor_v3"] = lambda *args: args
    allowed["torch._utils", "_rebuild_parameter"] = lambda tensor, *_: tensor
    value = load_pickle(data, allowed, "data.pkl", persistent_load=lambda pid: pid)
    try:
        (_, storage_type, key, _, numel), offset, shape, strides = value[:4]
        found = storage_type if storage_type is not None else value[6]
        if not isinstance(found, DType) or not all(
            type(n) is int and n >= 0 for n in (numel, offset, *shape, *strides)
        ):
            raise TypeError("its fields are of the wrong type")
    except (TypeError, ValueError, IndexError) as error:
        raise FormatError(f"not a saved tensor: {printable(str(error))}") from error
    if found != dtype or tuple(shape) != sizes or key != "0" or len(strides) != len(sizes):
        raise FormatError(
            f"an item is not what the index says: expected {dtype.name} {list(sizes)}, got"
            f" {found.name} {list(shape)}"
        )
    if storage_type is not None and len(value) > 6 and isinstance(value[6], dict) and value[6]:
        pending = ", ".join(map(short_repr, value[6]))
        raise FormatError(f"a tensor with pending operations is not supported: {pending}")
    return _as_tensor(
        found,
        offset,
        sizes,
        tuple(strides),
        numel if storage_type is None else numel * found.itemsize,
    )


def _as_tensor(
    dtype: DType, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], storage_nbytes: int
) -> _Tensor:
    numel = math.prod(sizes)
    last = (
        offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if numel
        else offset - 1
    )
    if (last + 1) * dtype.itemsize > storage_nbytes:
        raise FormatError(
            f"a tensor exceeds its storage: element {last} of {storage_nbytes // dtype.itemsize}"
        )
    is_row_major = all(
        n == 1 or s == r for n, s, r in zip(sizes, strides, row_major_strides(sizes), strict=True)
    )
    return _Tensor(
        offset,
        None if is_row_major or not numel else strides,
        storage_nbytes,
        numel * dtype.itemsize,
    )
