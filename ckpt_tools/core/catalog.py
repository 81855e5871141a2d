"""The catalog: what a checkpoint holds and where each byte lies.

A catalog is plain data. Any format can fill it, and every operation reads it. It does not know how
files are opened or how a format packs its items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from ckpt_tools.core.box import Box, Overlaps, whole
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.grid import Relation
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


# the payload of each packed extent, as `Format.locate` finds it; other extents are payloads
Payloads = Mapping[Extent, Extent]


class Chunk(NamedTuple):
    """A stored piece of a tensor: which elements, and where they lie."""

    box: Box
    extent: Extent


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, in any order, with replicas.

    The methods answer questions about all of them. The defaults ask chunk by chunk;
    `chunk_table.ChunkTable` has arrays, so it answers for millions without a loop in Python.
    """

    __slots__ = ()
    has_columns = False

    def under(self, renamed: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Chunks:
        """Returns the same chunks with other file names, which a function returns for tuples."""
        return ChunkList(
            Chunk(box, extent._replace(file=renamed((extent.file,))[0])) for box, extent in self
        )

    def kinds(self) -> list[Box]:
        """Returns boxes: at least one per distinct size."""
        return [chunk.box for chunk in self]

    def nbytes_by_file(self, itemsize: int) -> Mapping[str, tuple[int, int]]:
        """Returns the number of chunks in each file, and the bytes of their elements."""
        found: dict[str, tuple[int, int]] = {}
        for box, extent in self:
            count, nbytes = found.get(extent.file, (0, 0))
            found[extent.file] = count + 1, nbytes + box.numel * itemsize
        return found

    def file_names(self) -> set[str]:
        """Returns the files that hold a chunk."""
        return {chunk.extent.file for chunk in self}

    @property
    def has_strides(self) -> bool:
        """Tells whether elements of a chunk lie in another order than row-major."""
        return any(chunk.extent.strides for chunk in self)

    def covers(self, shape: Sequence[int]) -> bool:
        """Tells whether the chunks certainly hold every element of a tensor exactly once.

        If not, the caller has to look at each chunk.
        """
        del shape
        return False

    def fit(self, file_sizes: Mapping[str, int], itemsize: int) -> bool:
        """Tells whether every extent certainly lies in its file, with room for its elements."""
        del file_sizes, itemsize
        return False

    def overlaps(self, targets: Sequence[Box]) -> Overlaps | None:
        """Pairs every target box with the chunks that overlap it; None if that needs a plan."""
        del targets
        return None


class ChunkList(tuple[Chunk, ...], Chunks):
    """Chunks as objects."""

    __slots__ = ()


def one_chunk(box: Box, extent: Extent) -> ChunkList:
    """Returns the chunks of a tensor that is stored in one piece."""
    return ChunkList((Chunk(box, extent),))


class QuantizedWeight(NamedTuple):
    """A weight that is several tensors: codes, and what turns them into numbers.

    Attributes:
        codes: the stored name of the codes.
        scheme: how it is quantized, such as `bitsandbytes 4-bit`.
        bits: per number; None if unknown.
        parts: the stored names of all its tensors.
    """

    codes: str
    scheme: str
    bits: int | None
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor.

    Attributes:
        fqn, shape, dtype: its name, its global shape and its element type.
        chunks: in any order, with replicas.
        stored: its name in the checkpoint, if that differs from `fqn`.
        quantized: the quantized weight that it is a part of.
        is_computed: elements of it are computed when they are read, so no fingerprint is known.
        relations: the elements of stored tensors (left) that it (right) was made of; empty for a
            stored tensor.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks
    stored: str = field(default="", compare=False)
    quantized: QuantizedWeight | None = field(default=None, compare=False)
    is_computed: bool = field(default=False, compare=False)
    relations: tuple[Relation, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, Chunks):  # a format of somebody else gives a plain tuple
            object.__setattr__(self, "chunks", ChunkList(self.chunks))

    def named(self, fqn: str) -> TensorEntry:
        """Returns the tensor under another name. It keeps its stored name."""
        return self if fqn == self.fqn else replace(self, fqn=fqn, stored=self.stored_name)

    @property
    def stored_name(self) -> str:
        """Returns its name in the checkpoint."""
        return self.stored or self.fqn

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, stored once."""
        return whole(self.shape).numel * self.dtype.itemsize


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

    def named(self, fqn: str) -> BytesEntry:
        """Returns the object under another name."""
        return replace(self, fqn=fqn)


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
