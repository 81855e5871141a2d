"""The contract of a format: read a store into a catalog, lay a set of tensors out as target files.

One file a format; metadata only, so that a look at 2 TB in a bucket costs a few requests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import BytesEntry, Catalog, Chunk, ChunkTable, Extent, TensorEntry
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.plan import Target
from ckpt_tools.errors import PlanError
from ckpt_tools.storage import Store


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor to be written: `boxes[r]` is what rank (or file) `r` holds of it, None for nothing
    at all.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[Box | None, ...]


class TargetMesh(NamedTuple):
    """The mesh of a job that will load DTensors: a device's type, the name of its one axis ("" for
    none), and which tensors are sharded.
    """

    device: str
    axis: str
    sharded: frozenset[str]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be laid out: tensors, objects by their size in bytes, and the keys on the way to
    each where known.

    `file_name` names the one file of a format that has one; `with_index` asks for numbered shards
    and an index instead. `name` gives the name under which a data file will lie: an object store
    wants the attempt's id in it. Tensors of fewer than `small_first` bytes stand together at the
    beginning of a file, so that what lies behind can be copied by the store in long runs. `values`
    are plain ones, for a format that stores them as such and not as objects. `files` are small ones
    that are to lie beside; `index` names the one of them whose appearance makes the whole visible,
    for a format that has no index of its own. `mesh` is for files of ranks with DTensors inside.
    """

    tensors: Sequence[TargetTensor]
    world_size: int = 1
    objects: Mapping[str, int] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    file_name: str = "model.safetensors"
    with_index: bool = False
    name: Callable[[str], str] = str
    small_first: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    index: str = ""
    mesh: TargetMesh | None = None


class Format(Protocol):
    """What a module under `formats/` offers."""

    @property
    def NAME(self) -> str:
        """As `inspect` prints it."""
        ...

    @property
    def LOOKS_FOR(self) -> str:
        """The file by which the format is recognised, for the message where nothing is."""
        ...

    def recognise(self, files: Mapping[str, int]) -> bool:
        """Tells from the names of the files under a root whether they are of this format."""
        ...

    def read_catalog(self, store: Store) -> Catalog:
        """Reads metadata only.

        Raises:
            FormatError: it is malformed.
            CatalogError: it names tensors without saying where they are.
        """
        ...

    def locate(self, store: Store, tensors: Iterable[TensorEntry]) -> Mapping[Extent, Extent]:
        """Finds the payload within every packed extent of the tensors, in batches; extents that are
        RAW are left out.

        Raises:
            FormatError: an item is not what the catalog says: another dtype, shape or length.
        """
        ...

    def guess(self, tensors: Iterable[TensorEntry]) -> Mapping[Extent, Extent]:
        """Returns where the payloads of packed extents lie if they were written as usual; unusual
        and RAW ones are left out.
        """
        ...

    def lay_out(self, request: Request) -> Target:
        """Returns target files with a slot for every box, all literal bytes, and the index.

        Raises:
            PlanError: the format cannot hold one of the tensors.
        """
        ...


_ATTEMPT = re.compile(r".+\.([0-9a-f]{8})\.(?:distcp|safetensors)")


def attempt_name(file: str, attempt: str) -> str:
    """Returns a data file's name with the id of an attempt: `__0_0.a1b2c3d4.distcp`."""
    stem, _, suffix = file.rpartition(".")
    return f"{stem}.{attempt[:8]}.{suffix}"


def attempt_of(file: str) -> str:
    """Returns the id of the attempt in a data file's name, "" where there is none."""
    match = _ATTEMPT.fullmatch(file)
    return match[1] if match else ""


SHAPES = "shapes.json"  # beside files that lack the shapes of parameters, or their order
PIN = "ckpt.pin"  # a step that holds a file of this name is never removed
LOCK = ".ckpt.lock"  # who writes to a run, or copies to a prefix of a bucket
# before the name of what stands aside for a moment, while another takes its place
ASIDE = ".aside."
# what an attempt notes beside its data: the result's seal, and what it has begun to send
MANIFEST, UPLOADS = "manifest", "uploads"
_MAX_NAME_BYTES = 200
_NOTE = re.compile(r"(?:(.+)\.)?ckpt\.(manifest|uploads)\.[0-9a-f]{8}\.json", re.DOTALL)


def short_name(name: str) -> str:
    """Returns a name that leaves room for a prefix or suffix: of more than 200 bytes, the beginning
    and a hash of the whole.

    A file system takes 255 bytes; the longest addition is that of a note.
    """
    if len(name.encode()) <= _MAX_NAME_BYTES:
        return name
    kept = name.encode()[: _MAX_NAME_BYTES - 17].decode(errors="ignore")
    return f"{kept}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def note_name(kind: str, attempt: str, file: str = "") -> str:
    """Returns the name of a note: unique per attempt, with the data file's `short_name` in front
    where it stands beside one.
    """
    return (
        f"{short_name(file)}.ckpt.{kind}.{attempt[:8]}.json"
        if file
        else f"ckpt.{kind}.{attempt[:8]}.json"
    )


def note_of(name: str) -> tuple[str, str] | None:
    """Returns the kind of a note and the `short_name` of the file beside which it stands, "" for a
    directory; None for any other name.
    """
    match = _NOTE.fullmatch(name)
    return (match[2], match[1] or "") if match else None


def is_note(name: str, file: str = "") -> bool:
    """Tells whether a name is that of a note that stands beside a file, or of one in a directory
    for all of it.
    """
    note = note_of(name)
    return note is not None and note[1] == short_name(file)


def locate_bare(store: Store, tensors: Iterable[TensorEntry]) -> Mapping[Extent, Extent]:
    """`Format.locate` of a format that packs nothing."""
    del store, tensors
    return {}


def guess_bare(tensors: Iterable[TensorEntry]) -> Mapping[Extent, Extent]:
    """`Format.guess` of a format that packs nothing."""
    del tensors
    return {}


def recognise_none(files: Mapping[str, int]) -> bool:
    """`Format.recognise` of files that are read where their own path is given: such lie about
    beside checkpoints for many reasons.
    """
    del files
    return False


def only_read(what: str, hint: str) -> Callable[[Request], Target]:
    """Returns the `Format.lay_out` of a format that is only read; it raises PlanError."""

    def lay_out(request: Request) -> Target:
        raise PlanError(f"{what} is only read ({len(request.tensors)} tensors)", hint=hint)

    return lay_out


def whole_tensor(entry: TensorEntry, dtype: DType | None = None) -> TargetTensor:
    """Returns the target of a tensor that stays in one piece."""
    return TargetTensor(entry.fqn, dtype or entry.dtype, entry.shape, (whole(entry.shape),))


def below(catalog: Catalog, folder: str, prefix: str = "") -> Catalog:
    """Returns a catalog as a part of another one: files in `folder`, if it is not empty; names
    behind `prefix`, which ends in a dot.
    """
    folder = f"{folder}/" if folder else ""
    tables: dict[tuple[str, ...], tuple[str, ...]] = {}

    def at(extent: Extent) -> Extent:
        return (
            extent
            if extent.file in catalog.made
            else extent._replace(file=f"{folder}{extent.file}")
        )

    def moved(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        if not isinstance(chunks, ChunkTable):
            return tuple(Chunk(c.box, at(c.extent)) for c in chunks)
        if chunks.names not in tables:
            tables[chunks.names] = tuple(f"{folder}{name}" for name in chunks.names)
        return chunks.under(tables[chunks.names])

    return replace(
        catalog,
        tensors={
            prefix + n: replace(t, fqn=prefix + n, chunks=moved(t.chunks))
            for n, t in catalog.tensors.items()
        },
        objects={
            prefix + n: BytesEntry(prefix + n, at(o.extent), tuple(map(at, o.replicas)))
            for n, o in catalog.objects.items()
        },
        paths={
            prefix + n: (prefix.rstrip("."), *path) if prefix else path
            for n, path in catalog.paths.items()
        },
        file_sizes={f"{folder}{f}": size for f, size in catalog.file_sizes.items()},
        ranks={f"{folder}{f}": rank for f, rank in catalog.ranks.items()},
        archives=tuple(map(at, catalog.archives)),
        unread={prefix + n: kind for n, kind in catalog.unread.items()},
        unknown={prefix + n: kind for n, kind in catalog.unknown.items()},
    )
