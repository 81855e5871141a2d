"""The protocol of a format: it reads a catalog from a store, and lays out target files.

Each format has its own module. It reads metadata only, so inspecting 2 TB in a bucket takes a few
requests.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple, Protocol

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import BytesEntry, Catalog, Extent, Payloads, TensorEntry
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.plan import Target
from ckpt_tools.errors import CheckpointError, PlanError
from ckpt_tools.storage import Store


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor to write: rank (or file) `r` holds `boxes[r]` of it; None for no part."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[Box | None, ...]


class TargetMesh(NamedTuple):
    """The mesh of a job that will load DTensors.

    It has the device type, the name of its one axis ("" for none), and the names of the sharded
    tensors.
    """

    device: str
    axis: str
    sharded: frozenset[str]


@dataclass(frozen=True, slots=True)
class Request:
    """The contents that a format lays out.

    Attributes:
        tensors: the tensors to write.
        world_size: number of ranks, or of shards.
        objects: size of each object in bytes.
        paths: the keys that lead to an entry, where known.
        file_name: name of the file, for a format with a single file.
        with_index: write numbered shards and an index instead of a single file.
        name: returns the name under which a data file will lie. An object store needs the attempt's
            id in it.
        small_first: tensors of fewer bytes come first in a file. The store can then copy the rest
            in long ranges.
        values: plain values, for a format that stores them as such and not as objects.
        files: small files to put beside the data.
        index: name of the file among `files` that makes the result visible, for a format without an
            index of its own.
        mesh: for files of ranks that contain DTensors.
        aliases: other names of tensors, for a format that stores such a tensor once.
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
    aliases: Mapping[str, str] = field(default_factory=dict)


class Format(Protocol):
    """The protocol that every module under `formats/` offers.

    A module may also have `SUFFIX`, for a format of single files; `INDEX`, for an index that is
    not `LOOKS_FOR`; `STORES_ALIASES`, if `lay_out` takes `Request.aliases`; and `read_readable`,
    which reads the undamaged files of a damaged checkpoint.
    """

    @property
    def NAME(self) -> str:
        """The name of the format, as `inspect` prints it."""
        ...

    @property
    def LOOKS_FOR(self) -> str:
        """The file that identifies the format, for the message that nothing was recognised."""
        ...

    def recognise(self, files: Mapping[str, int]) -> bool:
        """Tells from the file names under a root whether they are of this format."""
        ...

    def read_catalog(self, store: Store) -> Catalog:
        """Reads the catalog, from metadata only.

        Raises:
            FormatError: the metadata is malformed.
            CatalogError: it names tensors without their location.
        """
        ...

    def locate(self, store: Store, tensors: Iterable[TensorEntry]) -> Payloads:
        """Finds the payload in every packed extent of the tensors, in batches.

        RAW extents are left out.

        Raises:
            FormatError: an item has another dtype, shape or length than the catalog says.
        """
        ...

    def guess(self, tensors: Iterable[TensorEntry]) -> Payloads:
        """Returns where the payloads of packed extents lie if they were written in the usual way.

        Unusual extents and RAW extents are left out.
        """
        ...

    def lay_out(self, request: Request) -> Target:
        """Returns target files with a slot for every box, all literal bytes, and the index.

        Raises:
            PlanError: the format cannot hold one of the tensors.
        """
        ...


# It returns the catalog, the error of each unreadable file, and the file of each lost tensor.
ReadReadable = Callable[[Store], tuple[Catalog, dict[str, CheckpointError], dict[str, str]]]


def suffix_of_format(form: Format) -> str:
    """Returns the suffix of a format of single files; "" for a format of directories."""
    return str(getattr(form, "SUFFIX", ""))


def index_of_format(form: Format) -> str:
    """Returns the name of a format's index, or of the file that identifies it."""
    return str(getattr(form, "INDEX", form.LOOKS_FOR))


def stores_aliases(form: Format) -> bool:
    """Tells whether a format stores a tensor with several names once."""
    return bool(getattr(form, "STORES_ALIASES", False))


def reader_of_damaged(form: Format) -> ReadReadable | None:
    """Returns the function of a format that reads the undamaged files; None if it has none."""
    return getattr(form, "read_readable", None)


# The id of an attempt is a UUID. Names have its first eight digits. One is a letter, because eight
# decimal digits are more often a date.
SHORT_ID = "[0-9a-f]{8}"
SHORT_ID_GLOB = "[0-9a-f]" * 8
_ID = re.compile(rf"{SHORT_ID}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{12}}")
_ATTEMPT = re.compile(rf".+\.(?=[0-9]*[a-f])({SHORT_ID})\.(?:distcp|safetensors)")


def new_attempt() -> str:
    """Returns the id of a new attempt."""
    while is_date_like(attempt := str(uuid.uuid4())):
        pass
    return attempt


def attempt_for(content: str) -> str:
    """Returns the id of attempts at the same content: it is always the same."""
    for number in count():
        attempt = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{content} {number}" if number else content))
        if not is_date_like(attempt):
            break
    return attempt


def is_attempt_id(text: str) -> bool:
    """Tells whether a string has the form of an attempt's id.

    Raises:
        TypeError: it is no string.
    """
    return _ID.fullmatch(text) is not None


def is_date_like(attempt: str) -> bool:
    """Tells whether an id could be a date: names with such an id may be those of a person."""
    return attempt[:8].isdigit()


def attempt_name(file: str, attempt: str) -> str:
    """Returns a data file's name with the id of an attempt: `__0_0.a1b2c3d4.distcp`."""
    stem, _, suffix = file.rpartition(".")
    return f"{stem}.{attempt[:8]}.{suffix}"


def attempt_of(file: str) -> str:
    """Returns the id of the attempt in a data file's name; "" for none."""
    match = _ATTEMPT.fullmatch(file)
    return match[1] if match else ""


SHAPES = "shapes.json"  # For files that lack the shapes of parameters, or their order.
PIN = "ckpt.pin"  # A step that contains this file is never removed.
LOCK = ".ckpt.lock"  # Names the process that writes to a run or to a prefix of a bucket.
# Prefix for a file or folder that is moved aside while another one takes its place.
ASIDE = ".aside."
# The notes of an attempt beside its data: the result's manifest, the uploads it has begun, its
# empty mark (which a power cut may leave in a result), and the files that the host of the job has
# added. In a pulled model: what was pulled; that the hook ran.
MANIFEST, UPLOADS, ATTEMPT, HOST = "manifest", "uploads", "attempt", "host"
PULLED, TOLD = "pulled", "told"
_MAX_NAME_BYTES = 200
_NOTE = re.compile(
    rf"(?:(.+)\.)?ckpt\.(manifest|uploads|attempt|host|pulled|told)\.{SHORT_ID}\.json", re.DOTALL
)


def short_name(name: str) -> str:
    """Returns a name of at most 200 bytes, which leaves room for a prefix or suffix.

    A longer name becomes its beginning and a hash of the whole. File systems allow 255 bytes; the
    longest addition is that of a note.
    """
    data = name.encode(errors="surrogateescape")  # file names are bytes
    if len(data) <= _MAX_NAME_BYTES:
        return name
    from hashlib import sha256  # with OpenSSL, and few names are that long

    kept = data[: _MAX_NAME_BYTES - 17].decode(errors="ignore")
    return f"{kept}~{sha256(data).hexdigest()[:16]}"


def note_name(kind: str, attempt: str, file: str = "") -> str:
    """Returns the name of a note, unique per attempt.

    If the note belongs to a data file, the name begins with that file's `short_name`.
    """
    return (
        f"{short_name(file)}.ckpt.{kind}.{attempt[:8]}.json"
        if file
        else f"ckpt.{kind}.{attempt[:8]}.json"
    )


def note_of(name: str) -> tuple[str, str] | None:
    """Returns the kind of a note and the `short_name` of its file; None for any other name.

    The file is "" if the note belongs to a directory.
    """
    match = _NOTE.fullmatch(name)
    return (match[2], match[1] or "") if match else None


def is_note(name: str, file: str = "") -> bool:
    """Tells whether a name is that of a note for `file`, or for the whole directory if it is ""."""
    note = note_of(name)
    return note is not None and note[1] == short_name(file)


def locate_bare(store: Store, tensors: Iterable[TensorEntry]) -> Payloads:
    """Implements `Format.locate` for a format that packs nothing."""
    del store, tensors
    return {}


def guess_bare(tensors: Iterable[TensorEntry]) -> Payloads:
    """Implements `Format.guess` for a format that packs nothing."""
    del tensors
    return {}


def recognise_none(files: Mapping[str, int]) -> bool:
    """Implements `Format.recognise` for files that are read only if their own path is given.

    Such files lie beside checkpoints for many other reasons.
    """
    del files
    return False


def only_read(what: str, hint: str) -> Callable[[Request], Target]:
    """Returns a `Format.lay_out` that raises PlanError, for a format that ckpt only reads."""

    def lay_out(request: Request) -> Target:
        raise PlanError(f"{what} is only read ({len(request.tensors)} tensors)", hint=hint)

    return lay_out


def whole_tensor(entry: TensorEntry, dtype: DType | None = None) -> TargetTensor:
    """Returns the target of a tensor that stays in one piece."""
    return TargetTensor(entry.fqn, dtype or entry.dtype, entry.shape, (whole(entry.shape),))


def below(catalog: Catalog, folder: str, prefix: str = "") -> Catalog:
    """Returns a catalog as a part of another one.

    Its files lie in `folder`, unless that is empty. Its names begin with `prefix`, which ends in a
    dot.
    """
    folder = f"{folder}/" if folder else ""

    @cache  # tables of one catalog share their names
    def moved(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n if n in catalog.memory_files else f"{folder}{n}" for n in names)

    def at(extent: Extent) -> Extent:
        return extent._replace(file=moved((extent.file,))[0])

    return replace(
        catalog,
        tensors={
            prefix + n: replace(t, fqn=prefix + n, chunks=t.chunks.under(moved))
            for n, t in catalog.tensors.items()
        },
        index_crcs={f"{folder}{name}": crc for name, crc in catalog.index_crcs.items()},
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
