"""NumPy's `.npz`, written by `numpy.savez`: a zip with one `.npy` per array. Read only.

A `.npy` is a short header followed by the values, in C or Fortran order. An array is therefore a
range of bytes here too.

Source: numpy 2 `numpy/lib/format.py` (NEP 1), versions 1.0 to 3.0 of the header; confirmed on files
that it wrote.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from operator import mul

from ckpt_tools.core.box import row_major_strides, whole
from ckpt_tools.core.catalog import RAW, ZIP, Catalog, Extent, TensorEntry, one_chunk
from ckpt_tools.core.checksum import crc32, crc32_combine
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.base import guess_bare, locate_bare, only_read, recognise_none
from ckpt_tools.formats.zip.directory import DirectoryEntry, entries, find_directory
from ckpt_tools.formats.zip.read import ZipRecord, data_start
from ckpt_tools.storage import Store, read

NAME = "npz"
SUFFIX = ".npz"
LOOKS_FOR = f"*{SUFFIX}"
_TAIL_BYTES, _FRONT_BYTES = 64 << 10, 1 << 10
_MAX_HEADER_BYTES = 64 << 10
_MAX_DIGITS = 18
_MAX_NDIM = 64
_STORED, _ENCRYPTED = 0, 1
_KINDS = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
}
_HEADER = re.compile(
    r"\{'descr': (?P<descr>'[^']*'|\[.*\]), 'fortran_order': (?P<order>True|False), 'shape':"
    r" \((?P<shape>[0-9, ]*)\), \} *\n?"
)
locate, guess, recognise = locate_bare, guess_bare, recognise_none
lay_out = only_read(".npz", hint="write safetensors, and numpy reads it by safetensors.numpy")


def read_catalog(store: Store) -> Catalog:
    """Reads the zip directory and the header of every array; see `Format.read_catalog`."""
    ((name, size),) = store.list_files().items()
    tensors: dict[str, TensorEntry] = {}
    records = list(_records(store, name, size))
    store.will_read((name, entry.header, _front_nbytes(entry, size)) for entry in records)
    for entry in records:
        fqn = entry.name.decode("utf-8", "replace").removesuffix(".npy")
        if fqn in tensors:
            raise FormatError(f"two arrays have one name: {printable(fqn)!r} ({printable(name)})")
        tensors[fqn] = _read_array(store, Extent(name, 0, size), entry, fqn)
    _check_apart(tensors.values(), name)
    return Catalog(NAME, tensors, file_sizes={name: size}, archives=(Extent(name, 0, size, ZIP),))


def _check_apart(tensors: Iterable[TensorEntry], name: str) -> None:
    """Refuses arrays that share bytes: a small file could stand for terabytes.

    Raises:
        FormatError: two arrays overlap.
    """
    extents = sorted((t.chunks[0].extent[1], t.chunks[0].extent[2], t.fqn) for t in tensors)
    for (start, nbytes, one), (begin, more, other) in pairwise(extents):
        if nbytes and more and start + nbytes > begin:
            raise FormatError(
                f"two arrays share bytes: {printable(one)!r} and {printable(other)!r}"
                f" ({printable(name)})"
            )


def _records(store: Store, name: str, size: int) -> Iterator[DirectoryEntry]:
    tail = read(store, name, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    try:
        count, directory = find_directory(store, Extent(name, 0, size), tail)
        yield from entries(directory, count)
    except (FormatError, struct.error) as error:
        raise FormatError(f"not a .npz, or a damaged one: {error} ({printable(name)})") from error


def _front_nbytes(entry: DirectoryEntry, size: int) -> int:
    """Returns how many bytes to read from the start of a record: usually both headers."""
    return max(0, min(size - entry.header, _FRONT_BYTES))


def _read_array(store: Store, archive: Extent, entry: DirectoryEntry, fqn: str) -> TensorEntry:
    """Reads the two headers of an array's record, and returns the array."""
    where = f"{printable(fqn)!r} in {printable(archive.file)}"
    if entry.method != _STORED or entry.flags & _ENCRYPTED:
        hint = (
            "load it with numpy.load and write it again with numpy.savez: ckpt cannot read a part"
            " of compressed data"
        )
        raise FormatError(
            f"a compressed array, as numpy.savez_compressed writes it ({where})", hint=hint
        )
    front = read(store, archive.file, entry.header, _front_nbytes(entry, archive.nbytes))
    begin = data_start(front, ZipRecord(0, entry.nbytes, 0))
    at = entry.header + begin
    if at + entry.nbytes > archive.nbytes:
        raise FormatError(
            f"an array runs past its file: {at + entry.nbytes} of {archive.nbytes} bytes ({where})"
        )

    def cut(nbytes: int) -> bytes:
        return (
            front[begin : begin + nbytes]
            if begin + nbytes <= len(front)
            else read(store, archive.file, at, nbytes)
        )

    header = _header(cut, entry.nbytes, where)
    dtype, is_fortran, shape = _parse(header, where)
    nbytes = entry.nbytes - len(header)
    if whole(shape).numel * dtype.itemsize != nbytes:
        raise FormatError(
            f"an array has the wrong length: {dtype.name} {list(shape)} in {nbytes} bytes ({where})"
        )
    columns = tuple(accumulate(shape[:-1], mul, initial=1)) if shape else ()
    strides = columns if is_fortran and nbytes and columns != row_major_strides(shape) else None
    # CRCs are linear: without the header's share, the record's CRC is that of the values
    crc = entry.crc ^ crc32_combine(crc32(header), 0, nbytes)
    extent = Extent(archive.file, at + len(header), nbytes, RAW, strides, crc)
    return TensorEntry(fqn, dtype, shape, one_chunk(whole(shape), extent))


def _header(cut: Callable[[int], bytes], nbytes: int, where: str) -> bytes:
    """Returns numpy's header.

    `cut` returns bytes from the start of the header; `nbytes` is the length of the record.
    """
    front = cut(min(nbytes, 12))
    if front[:6] != b"\x93NUMPY" or len(front) < 12 or front[6] not in (1, 2, 3):
        raise FormatError(f"not an array of numpy, or of a later version than 3.0 ({where})")
    begin = 10 if front[6] == 1 else 12
    total = begin + int.from_bytes(front[8:begin], "little")
    if total > min(nbytes, _MAX_HEADER_BYTES):
        raise FormatError(f"the header of an array is too long: {total} bytes ({where})")
    return cut(total)


def _parse(header: bytes, where: str) -> tuple[DType, bool, tuple[int, ...]]:
    """Returns element type, whether the order is Fortran's, and shape."""
    found = _HEADER.fullmatch(header[10 if header[6] == 1 else 12 :].decode("utf-8", "replace"))
    if found is None:
        raise FormatError(f"the header of an array is not as numpy writes it ({where})")
    descr = found["descr"].strip("'")
    kind = _KINDS.get(descr[1:]) if descr[:1] in "<|=" else None
    if kind is None:
        raise FormatError(
            f"arrays of this type are not read: {printable(descr)[:60]}, expected little-endian"
            f" numbers ({where})"
        )
    sizes = [n for n in found["shape"].replace(" ", "").split(",") if n]
    if len(sizes) > _MAX_NDIM or any(len(n) > _MAX_DIGITS for n in sizes):
        raise FormatError(
            f"an array has an impossible shape: ({printable(found['shape'][:60])}) ({where})"
        )
    shape = tuple(map(int, sizes))
    return BY_NAME[kind], found["order"] == "True", shape
