"""The catalog: what a checkpoint holds and where each byte lies.

A catalog is plain data. Any format can fill it, and every operation reads it. It does not know how
files are opened or how a format packs its items.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ckpt_tools.core.box import Box, CopyTable, whole
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import FormatError, printable

RAW, TORCH_ZIP, ZIP = "raw", "torch_zip", "zip"


class Extent(NamedTuple):
    """Bytes `start <= i < start + nbytes` of a file.

    `strides` are in elements, and None for row-major order. `crc32` is the CRC-32 of the bytes,
    where the format keeps one. `packing` is one of:

    - RAW: the range is the payload itself.
    - TORCH_ZIP: the range is a `torch.save` archive. `Format.locate` finds the payload in it.
    - ZIP: the range is any other zip that holds several entries.
    """

    file: str
    start: int
    nbytes: int
    packing: str = RAW
    strides: tuple[int, ...] | None = None
    crc32: int | None = None


class Chunk(NamedTuple):
    """A stored piece of a tensor: which elements, and where they lie."""

    box: Box
    extent: Extent


class ChunkTable(Sequence[Chunk]):
    """Chunks stored as arrays, so that questions about all of them need no loop in Python.

    `chunk_table` implements it. `names` lists the files of the whole catalog, or of a part of it.
    Several tensors share one such tuple.
    """

    names: tuple[str, ...]

    @abstractmethod
    def under(self, names: tuple[str, ...]) -> ChunkTable:
        """Returns the same chunks with other file names, in the same order."""

    @abstractmethod
    def kinds(self) -> list[Box]:
        """Returns one example box per distinct size."""

    @abstractmethod
    def nbytes_by_file(self, itemsize: int) -> Mapping[str, tuple[int, int]]:
        """Returns the number of chunks in each file, and the bytes of their elements."""

    @abstractmethod
    def file_names(self) -> set[str]:
        """Returns the files that hold a chunk."""

    @abstractmethod
    def covers(self, shape: Sequence[int]) -> bool:
        """Tells whether the chunks certainly hold every element of a tensor exactly once."""

    @abstractmethod
    def copies(self, targets: Sequence[Box]) -> CopyTable | None:
        """Pairs every target box with the chunks that overlap it.

        Returns None if the chunks are cut along several dims, or overlap.
        """

    @abstractmethod
    def fit(self, file_sizes: Mapping[str, int], itemsize: int) -> bool:
        """Tells whether every extent lies in its file and is long enough for its elements."""

    @abstractmethod
    def are_apart(self, others: Sequence[ChunkTable], ranges: Iterable[Extent]) -> bool:
        """Tells whether no two extents overlap, among `ranges` and `others`.

        `others` includes this table.
        """


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: global shape, element type, and its chunks (in any order, replicas included)."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, stored once."""
        return whole(self.shape).numel * self.dtype.itemsize


def kinds_of(entry: TensorEntry) -> list[Box]:
    """Returns boxes of a tensor's chunks: at least one for each distinct size."""
    return (
        entry.chunks.kinds()
        if isinstance(entry.chunks, ChunkTable)
        else [c.box for c in entry.chunks]
    )


def nbytes_by_file(entry: TensorEntry) -> Mapping[str, tuple[int, int]]:
    """Returns the number of a tensor's chunks in each file, and the bytes of their elements."""
    if isinstance(entry.chunks, ChunkTable):
        return entry.chunks.nbytes_by_file(entry.dtype.itemsize)
    found: dict[str, tuple[int, int]] = {}
    for box, extent in entry.chunks:
        count, nbytes = found.get(extent.file, (0, 0))
        found[extent.file] = count + 1, nbytes + box.numel * entry.dtype.itemsize
    return found


def files_of(entry: TensorEntry) -> set[str]:
    """Returns the files that hold a chunk of a tensor."""
    return (
        entry.chunks.file_names()
        if isinstance(entry.chunks, ChunkTable)
        else {c.extent.file for c in entry.chunks}
    )


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """One object that is not a tensor: copied whole and never unpickled.

    Attributes:
        fqn, extent: its name, and its bytes.
        replicas: must hold the same bytes.
        crc64: the sealed CRC-64 of its bytes; None if there is none.
    """

    fqn: str
    extent: Extent
    replicas: tuple[Extent, ...] = ()
    crc64: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All entries of a checkpoint.

    Attributes:
        format: name of the format that read the checkpoint.
        tensors: by FQN, in the order of the checkpoint.
        objects: by FQN, in the order of the checkpoint.
        paths: for an FQN that was flattened from a nested dict, the keys on the way (DCP's
            `planner_data`).
        file_sizes: bytes of every data file that the entries use.
        world_size: number of ranks that wrote the checkpoint; None if the format does not record
            it.
        ranks: for each data file, the rank that wrote it, if the format records it.
        extras: other facts that the format keeps, as strings for people.
        archives: zips that hold several entries each. Entries are views of their records, so some
            may share bytes.
        memory_files: files that exist in memory only. They hold objects and small tensors that the
            reader made from values in metadata.
        beside: names of files and folders next to the checkpoint's own. Nothing is read from them.
        unread: tensors of kinds that ckpt does not read, such as quantized ones. Each has its kind,
            for people.
        unknown: values of unknown types, each with its type.
        lacks_shapes: the files lack the shapes of parameters; a separate file of shapes must give
            them.
        index_crcs: CRC-64 of the index files, as they were read.
    """

    format: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, BytesEntry] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    world_size: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    extras: Mapping[str, str] = field(default_factory=dict)
    archives: tuple[Extent, ...] = ()
    memory_files: Mapping[str, bytes] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    lacks_shapes: bool = False
    index_crcs: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each stored once."""
        return sum(t.nbytes for t in self.tensors.values())

    def where(self, file: str) -> str:
        """Returns a file's name for a message, with the rank that wrote it if known."""
        return (
            f"{printable(file)} of rank {self.ranks[file]}"
            if file in self.ranks
            else printable(file)
        )


_MAX_NAME = 1 << 16


def is_valid_name(fqn: str) -> bool:
    """Tells whether every format can store a name: no lone surrogate, and not too long."""
    return len(fqn) <= _MAX_NAME and (
        fqn.isascii() or not any("\ud800" <= c <= "\udfff" for c in fqn)
    )


def check_names(catalog: Catalog) -> None:
    """Refuses names that no file could store again.

    Raises:
        FormatError: a name contains a lone surrogate, or is too long for a parameter name.
    """
    for fqn in chain(catalog.tensors, catalog.objects, catalog.unread, catalog.unknown):
        if not is_valid_name(fqn):
            raise FormatError(f"an entry's name is not valid, or too long: {printable(fqn)!r}")
    for entries in (catalog.tensors, catalog.objects):
        for fqn, entry in entries.items():
            if entry.fqn != fqn:
                raise FormatError(
                    f"the reader of {catalog.format} gives an entry two names: {printable(fqn)!r},"
                    f" and {printable(entry.fqn)!r} in the entry"
                )


def other_names(catalog: Catalog) -> dict[str, str]:
    """Returns the tensors that are stored under an earlier name already, with that name.

    Such tied tensors have the same chunks, type and shape.
    """
    first: dict[Extent, TensorEntry] = {}
    found = {}
    for fqn, entry in catalog.tensors.items():
        if not entry.nbytes or not entry.chunks:
            continue
        other = first.setdefault(entry.chunks[0].extent, entry)
        if other is not entry and (
            (other.dtype, other.shape, len(other.chunks))
            == (entry.dtype, entry.shape, len(entry.chunks))
            and all(a == b for a, b in zip(other.chunks, entry.chunks, strict=True))
        ):
            found[fqn] = other.fqn
    return found
