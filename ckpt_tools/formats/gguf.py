"""GGUF, the format of llama.cpp: weights that are not quantised. Read only.

A header has typed key-value pairs, and the names, shapes and positions of tensors. The values
follow, row-major, with dims in the opposite order.

Source: github.com/ggml-org/ggml, `docs/gguf.md` and `include/ggml.h`, versions 2 and 3; confirmed
on files that the package gguf wrote.
"""

from __future__ import annotations

import re
import struct
from collections import Counter

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.base import guess_bare, locate_bare, only_read, recognise_none
from ckpt_tools.storage import Store, read

NAME = "gguf"
SUFFIX = ".gguf"
LOOKS_FOR = f"*{SUFFIX}"
_TYPES = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
_QUANTISED = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
_VALUES = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_NEEDED, _SHOWN = ("split.count", "general.alignment"), ("general.architecture", "general.name")
_WINDOW_BYTES = 1 << 20
_MAX_ITEMS = 4_000_000  # strings (mostly of vocabularies) and tensors
_MAX_NAME_BYTES, _MAX_NDIM, _MAX_DEPTH, _MAX_NUMEL = 65_535, 8, 4, 1 << 60
locate, guess, recognise = locate_bare, guess_bare, recognise_none
lay_out = only_read("GGUF", hint="write --to hf, and llama.cpp converts that")


def read_catalog(store: Store) -> Catalog:
    """Reads the header; see `Format.read_catalog`."""
    ((name, size),) = store.list_files().items()
    header = _Header(store, name, size)
    if header.take(4) != b"GGUF":
        raise FormatError(f"not a GGUF file ({printable(name)})")
    version = header.number("<I")
    if version not in (2, 3):
        raise FormatError(
            f"GGUF of version {version} is not read, expected 2 or 3 in little-endian order"
            f" ({printable(name)})"
        )
    num_tensors, num_values = header.count("<Q"), header.count("<Q")
    values: dict[str, str] = {}
    for _ in range(num_values):
        key = header.text()
        value = header.value(header.number("<I"))
        if key not in _SHOWN + _NEEDED:  # a vocabulary may have megabytes
            continue
        if values.setdefault(key, value) != value:
            raise FormatError(
                f"two values of one key: {printable(key)} is {printable(values[key])} and"
                f" {printable(value)} ({printable(name)})"
            )
    if values.get("split.count", "1") not in ("0", "1"):
        hint = "join them with llama-gguf-split --merge"
        raise FormatError(
            f"one of {printable(values['split.count'])} parts of a GGUF model ({printable(name)})",
            hint=hint,
        )
    alignment = values.get("general.alignment", "32")
    if not re.fullmatch(r"[1-9][0-9]{0,6}", alignment):
        raise FormatError(
            f"the alignment of a GGUF file is not a number of bytes: {printable(alignment)}"
            f" ({printable(name)})"
        )
    tensors = _tensors(header, num_tensors, name, size, int(alignment))
    extras = {key.rpartition(".")[2]: values[key] for key in _SHOWN if key in values}
    return Catalog(
        NAME,
        tensors,
        file_sizes={name: size},
        extras={"gguf": f"version {version}, {num_values:,} values"} | extras,
    )


def _tensors(
    header: _Header, count: int, name: str, size: int, alignment: int
) -> dict[str, TensorEntry]:
    """Reads the tensors' part of the header. The values begin where it ends."""
    found = [
        (header.text(_MAX_NAME_BYTES), header.shape(), header.number("<I"), header.number("<Q"))
        for _ in range(count)
    ]
    begin, others = (
        -(-header.at // alignment) * alignment,
        Counter(kind for _, _, kind, _ in found if kind not in _TYPES),
    )
    if others:
        kinds = ", ".join(
            f"{_QUANTISED.get(kind, f'type {kind}')} ({n:,})" for kind, n in others.most_common(8)
        )
        raise FormatError(
            f"quantised tensors are not read: {kinds} of {count:,} ({printable(name)})",
            hint="take the F32, F16 or BF16 file of the model",
        )
    tensors: dict[str, TensorEntry] = {}
    stop = 0
    for fqn, shape, kind, start in sorted(found, key=lambda item: item[3]):
        if fqn in tensors:
            raise FormatError(f"two tensors have one name: {printable(fqn)!r} ({printable(name)})")
        if start % alignment or start < stop:
            raise FormatError(
                f"a tensor begins at byte {start} of the values: expected a multiple of"
                f" {alignment}, after the tensor before it, which ends at {stop}"
                f" ({printable(fqn)!r} in {printable(name)})"
            )
        dtype, box = BY_NAME[_TYPES[kind]], whole(shape)
        extent = Extent(name, begin + start, box.numel * dtype.itemsize)
        if extent.start + extent.nbytes > size:
            where = f"{printable(fqn)!r} in {printable(name)}"
            raise FormatError(
                f"a tensor runs past its file: {extent.start + extent.nbytes} of {size} bytes"
                f" ({where})"
            )
        stop = start + extent.nbytes
        tensors[fqn] = TensorEntry(fqn, dtype, shape, one_chunk(box, extent))
    return {fqn: tensors[fqn] for fqn, *_ in found}


class _Header:
    """A reader of a file's header, value by value."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self._size = store, name, size
        self._window, self._start, self._items = b"", 0, 0
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        """Returns the next bytes."""
        if nbytes > self._size - self.at:
            raise FormatError(
                f"a GGUF header is truncated at byte {self.at} ({printable(self._name)})"
            )
        low = self.at - self._start
        if low < 0 or low + nbytes > len(self._window):
            self._start, low = self.at, 0
            self._window = read(
                self._store,
                self._name,
                self.at,
                min(self._size - self.at, max(nbytes, _WINDOW_BYTES)),
            )
        self.at += nbytes
        return self._window[low : low + nbytes]

    def number(self, code: str) -> int:
        """Returns the next number."""
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def count(self, code: str) -> int:
        """Returns the next number as a count of items; a hostile file may not have too many."""
        found = self.number(code)
        self._items += found
        if self._items > _MAX_ITEMS:
            raise FormatError(
                f"a GGUF header has more than {_MAX_ITEMS:,} items ({printable(self._name)})"
            )
        return found

    def text(self, most: int = 1 << 20) -> str:
        """Returns the next string."""
        nbytes = self.number("<Q")
        if nbytes > most:
            raise FormatError(
                f"a string in a GGUF header is too long: {nbytes} bytes ({printable(self._name)})"
            )
        return self.take(nbytes).decode("utf-8", "replace")

    def shape(self) -> tuple[int, ...]:
        """Returns the next shape, in torch's order of dims."""
        ndim = self.number("<I")
        if ndim > _MAX_NDIM:
            raise FormatError(f"a tensor has {ndim} dims ({printable(self._name)})")
        shape = tuple(self.number("<Q") for _ in range(ndim))[::-1]
        if whole(shape).numel > _MAX_NUMEL:
            raise FormatError(
                f"a tensor has {whole(shape).numel} elements ({printable(self._name)})"
            )
        return shape

    def value(self, kind: int, depth: int = 0) -> str:
        """Reads a value and returns it as a string; "" for an array."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < _MAX_DEPTH:
            inner = self.number("<I")
            if inner in _VALUES:
                self.skip(self.number("<Q") * struct.calcsize(_VALUES[inner]))
                return ""
            for _ in range(self.count("<Q")):
                self.value(inner, depth + 1)
            return ""
        if kind not in _VALUES:
            raise FormatError(
                f"a value of a GGUF header is of an unknown type: {kind} ({printable(self._name)})"
            )
        return str(struct.unpack(_VALUES[kind], self.take(struct.calcsize(_VALUES[kind])))[0])

    def skip(self, nbytes: int) -> None:
        """Skips bytes without reading them."""
        if nbytes > self._size - self.at:
            raise FormatError(
                f"a GGUF header is truncated at byte {self.at} ({printable(self._name)})"
            )
        self.at += nbytes
