"""The manifest: a sealed record of files and tensors, as JSON beside the data. `docs/manifest.md`
describes every field.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import TORCH_ZIP, BytesEntry, Catalog
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.plan import Literal, Plan
from ckpt_tools.core.statistics import TensorStatistics, unpack_statistics
from ckpt_tools.errors import FormatError, IntegrityError, StorageError, printable
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import MANIFEST, note_name, note_of, short_name
from ckpt_tools.formats.dcp.format import is_data_file
from ckpt_tools.formats.registry import INDEXES, Source, folder_of, open_source
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.retries import read_again_if_wrong
from ckpt_tools.version import __version__

VERSION = 2  # version 1 has no checksum of its own and is not read
CHECKSUM = "crc64nvme"


class SealedRange(NamedTuple):
    """A range of a file, a payload or a cell of one, with its checksums as 16 and 8 hex digits."""

    start: int
    nbytes: int
    crc64nvme: str
    crc32: str


class SealedFile(NamedTuple):
    """A file with its checksum as 16 hex digits, and those of the cells of its long payloads."""

    nbytes: int
    crc64nvme: str
    ranges: tuple[SealedRange, ...] = ()


class SealedPickle(NamedTuple):
    """The range of a `torch.save` file that has its pickle, and the checksum as 16 hex digits."""

    start: int
    nbytes: int
    crc64nvme: str


class SealedTensor(NamedTuple):
    """A tensor with the checksum of its row-major little-endian bytes, however it is sharded.

    `statistics` is None if the writer did not compute them.
    """

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    statistics: TensorStatistics | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """See `docs/manifest.md`. `index` is None if a single file is its own index."""

    attempt: str
    created: str
    tool: str
    operation: str
    format: str
    source: Mapping[str, Any]
    world_size: int | None
    files: Mapping[str, SealedFile] = field(repr=False)
    index: tuple[str, SealedFile] | None
    tensors: Mapping[str, SealedTensor] = field(repr=False)
    objects: Mapping[str, SealedFile] = field(default_factory=dict, repr=False)
    pickles: Mapping[str, SealedPickle] = field(default_factory=dict, repr=False)
    step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    timing: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def not_finite(self) -> list[str]:
        """Returns the names of the tensors with NaN or infinity, as far as the save measured it."""
        return [
            fqn for fqn, t in self.tensors.items() if t.statistics and not t.statistics.is_finite
        ]

    @property
    def has_statistics(self) -> bool:
        """Tells whether the save measured its tensors."""
        return any(t.statistics is not None for t in self.tensors.values())

    @classmethod
    def now(
        cls, attempt: str, operation: str, form: str, source: Mapping[str, Any], **fields: Any
    ) -> Manifest:
        """Returns a manifest with the current time and the version of this tool."""
        created, tool = (
            dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            f"ckpt-tools {__version__}",
        )
        return cls(
            attempt=attempt,
            created=created,
            tool=tool,
            operation=operation,
            format=form,
            source=source,
            **fields,
        )

    def render(self) -> bytes:
        """Returns the JSON text: ASCII, a line for every file and tensor, keys in a fixed order."""
        body: dict[str, Any] = {"ckpt_manifest": VERSION, "checksum": CHECKSUM}
        body |= {f.name: getattr(self, f.name) for f in fields(self)}
        body["index"] = {"name": self.index[0], **_fields(self.index[1])} if self.index else None
        for key in _OMITTED:
            if not body[key]:
                del body[key]
        lines = [
            f" {json.dumps(key)}: {_table(value) if key in _TABLES else json.dumps(value)}"
            for key, value in body.items()
        ]
        text = ("{\n" + ",\n".join(lines)).encode("ascii")
        return text + f',\n "crc64nvme": "{hex64(crc64nvme(text))}"\n}}\n'.encode("ascii")


def _table(entries: Mapping[str, SealedFile | SealedTensor | SealedPickle]) -> str:
    lines = [
        f"  {json.dumps(name)}: {json.dumps(_fields(entry))}" for name, entry in entries.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"


def _fields(entry: SealedFile | SealedTensor | SealedPickle) -> dict[str, Any]:
    values = {
        _KEYS.get(key, key): value
        for key, value in entry._asdict().items()
        if value or key not in _OPTIONAL
    }
    if "statistics" in values:
        values["statistics"] = values["statistics"].packed()
    return values


def file_name(attempt: str, beside: str = "") -> str:
    """Returns the manifest's name; see `note_name`."""
    return note_name(MANIFEST, attempt, beside)


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("attempt", "created", "tool", "operation", "format"), (str,)),
    "source": (dict,),
    "world_size": (int, type(None)),
    "step": (int, type(None)),
}
_OPTIONAL = ("ranges", "statistics")  # absent rather than empty
_KEYS = {"ranges": "runs"}  # in the text, if it differs from the field
_TABLES = ("files", "tensors", "objects", "pickles")  # a line for each entry
_OMITTED = ("metrics", "timing", "objects", "pickles")  # absent rather than empty
_HEX = re.compile(r"[0-9a-f]+")
_ATTEMPT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_OWN = re.compile(rb',\n "crc64nvme": "([0-9a-f]{16})"\n}\n\Z')


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Returns a manifest from its text.

    Raises:
        FormatError: it is malformed, or of a version that this tool does not know.
    """
    try:
        body = json.loads(data)
        if body["ckpt_manifest"] != VERSION or body["checksum"] != CHECKSUM:
            raise FormatError(
                f"a manifest of another version: expected {VERSION} with {CHECKSUM}, got"
                f" {printable(str(body['ckpt_manifest']))} with {printable(str(body['checksum']))}"
                f" ({printable(where)})"
            )
        own = _OWN.search(data)
        if own is None or hex64(crc64nvme(data[: own.start()])) != own[1].decode():
            raise FormatError(
                f"a manifest is damaged: its checksum is not that of its text ({printable(where)})"
            )
        index = body["index"]
        for key, kinds in _KINDS.items():
            if type(body[key]) not in kinds:
                raise ValueError(f"{key} is a {type(body[key]).__name__}")
        if not _ATTEMPT.fullmatch(body["attempt"]):
            raise ValueError(f"attempt is {body['attempt']!r}, not a UUID")
        return Manifest(
            **{
                f.name: body[f.name]
                for f in fields(Manifest)
                if f.name not in ("index", *_TABLES, *_OMITTED)
            },
            metrics=_numbers("metrics", body.get("metrics", {})),
            timing=_numbers("timing", body.get("timing", {})),
            files={str(name): _sealed(entry) for name, entry in body["files"].items()},
            index=None if index is None else (str(index["name"]), _sealed(index)),
            tensors={str(fqn): _sealed_tensor(entry) for fqn, entry in body["tensors"].items()},
            objects={str(fqn): _sealed(entry) for fqn, entry in body.get("objects", {}).items()},
            pickles={str(name): _pickle(entry) for name, entry in body.get("pickles", {}).items()},
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise FormatError(
            f"a manifest is malformed: {printable(repr(error))} ({printable(where)})"
        ) from error


_DAMAGED_INDEX = (
    "if another tool has written here since the seal, remove ckpt.manifest.*.json and run ckpt"
    " seal. Else a bit has flipped: try again, take another copy, or save the rest: ckpt salvage"
)
_READ_BYTES, _JSON_BYTES = 16 << 20, 1 << 20
_MAX_PICKLE_BYTES = 512 << 20  # a reader refuses longer pickles
_MAX_BYTES = 128 << 20  # JSON takes up to twenty times its length in memory


def names_in(store: Store, beside: str = "") -> list[str]:
    """Returns the names of the manifests in a directory, or of those of one file in it."""
    return [name for name in store.list_files() if note_of(name) == (MANIFEST, short_name(beside))]


def find_manifest(store: Store, beside: str = "") -> Manifest | None:
    """Returns the manifest in a directory, or that of one file in it; None if there is none.

    A crash may leave several, and so may an object store in which one attempt has just taken the
    place of another. Then it is the one that knows the index, or whose checksum fits the file.

    Args:
        store: the directory.
        beside: the file.

    Raises:
        FormatError: it is malformed, or of several none fits or more than one.
    """
    files, names = store.list_files(), names_in(store, beside)
    found = [read_manifest(store, name) for name in names]
    if len(found) > 1:
        if beside:
            crc = _crc_of(store, beside)
            found = [m for m in found if beside in m.files and m.files[beside].crc64nvme == crc][:1]
        else:
            found = [
                m
                for m in found
                if m.index
                and m.index[0] in files
                and hex64(crc64nvme(read(store, m.index[0]))) == m.index[1].crc64nvme
            ]
        if len(found) != 1:
            raise FormatError(
                f"{len(names)} manifests, of which {len(found)} fit: {printable(', '.join(names))}"
                f" ({printable(store.url)})",
                hint="remove all but one that fits; or all of them, and then ckpt seal",
            )
    return found[0] if found else None


def _crc_of(store: Store, name: str) -> str:
    """Reads a whole file, and returns its CRC-64 as 16 hex digits."""
    crc, nbytes = 0, store.size(name)
    for start in range(0, nbytes, _READ_BYTES):
        piece = read(store, name, start, min(_READ_BYTES, nbytes - start))
        crc = crc64nvme(piece, crc)
    return hex64(crc)


def read_manifest(store: Store, name: str) -> Manifest:
    """Reads one manifest of a directory.

    Raises:
        FormatError: it is malformed, or too long to be a manifest.
    """
    if (nbytes := store.size(name)) > _MAX_BYTES:
        raise FormatError(
            f"a manifest is too long: expected at most {_MAX_BYTES} bytes, got {nbytes}"
            f" ({printable(name)})"
        )
    return parse_manifest(read(store, name), name)


def of_source(source: Source) -> Manifest | None:
    """Returns the manifest of an opened checkpoint; None if there is none.

    Raises:
        IntegrityError: the checkpoint's names are not those that were sealed. No other checksum
            finds a flipped bit in a name.
    """
    manifest = of_store(source.store)
    if manifest is not None:
        check_files(manifest, source)
        _check_indexes(manifest, source.catalog)
        check_pickles(manifest, source.store, source.catalog)
        _check_headers(manifest, source.catalog)
        _check_names(manifest, source.catalog)
    return manifest


def open_sealed(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> tuple[Source, Manifest | None]:
    """Opens a checkpoint whose names are the sealed ones; returns its manifest, too.

    If names from a remote store differ from the sealed ones, they are read once more. The arguments
    and errors are those of `open_source` and `of_source`.
    """
    opened = [open_source(path, options, beside)]

    def checked() -> tuple[Source, Manifest | None]:
        source = opened.pop() if opened else open_source(path, options, beside)
        try:
            manifest = of_source(source)
            return replace(source, catalog=with_sealed_objects(source.catalog, manifest)), manifest
        except BaseException:
            source.store.close()
            raise

    return read_again_if_wrong(opened[0].store, checked)


def with_sealed_objects(catalog: Catalog, manifest: Manifest | None) -> Catalog:
    """Returns the catalog, with the sealed checksums of its objects."""
    sealed = manifest.objects if manifest is not None else {}
    if not sealed:
        return catalog
    objects = {
        fqn: replace(item, crc64=int(sealed[fqn].crc64nvme, 16)) if fqn in sealed else item
        for fqn, item in catalog.objects.items()
    }
    return replace(catalog, objects=objects)


def read_object(store: Store, item: BytesEntry) -> bytes:
    """Reads an object, and compares it with its sealed checksum.

    Raises:
        IntegrityError: it is not what was sealed.
    """
    extent = item.extent
    data = read(store, extent.file, extent.start, extent.nbytes)
    if item.crc64 is not None and crc64nvme(data) != item.crc64:
        raise IntegrityError(
            f"an object is not what was sealed: expected CRC-64 {hex64(item.crc64)}, got"
            f" {hex64(crc64nvme(data))} ({printable(item.fqn)!r} in {printable(extent.file)})",
            hint="ckpt verify names what is damaged; restore the file, or take another step",
        )
    return data


def seal_objects(plan: Plan, fingerprints: Mapping[str, int]) -> dict[str, SealedFile]:
    """Returns the objects of a finished plan with their checksums."""
    return {
        t.fqn: seal_file(whole(t.shape).numel, fingerprints[t.fqn], ())
        for t in plan.tensors
        if t.is_object and t.fqn in fingerprints
    }


def strays_of(manifest: Manifest, catalog: Catalog) -> list[str]:
    """Returns the files that a catalog takes values from and that were not sealed."""
    sealed = {*manifest.files, *(manifest.index or ())[:1]}
    used = set(catalog.file_sizes)
    # a sealed model may be a part of a larger checkpoint, but no other model may take its place
    data = {name for name in manifest.files if name.endswith(safetensors.SUFFIX)}
    is_part = catalog.format != manifest.format and bool(data) and data <= used
    return [] if is_part else sorted(used - sealed - catalog.made.keys())


def check_files(manifest: Manifest, source: Source) -> None:
    """Refuses a sealed checkpoint that takes values from other files.

    Raises:
        IntegrityError: somebody has put such a file there.
    """
    if strays := strays_of(manifest, source.catalog):
        raise IntegrityError(
            f"a file that was not sealed would give values: {printable(', '.join(strays[:3]))}"
            f" ({printable(source.path)})",
            hint="move it away; or remove the manifest, to read everything without a seal",
        )


def _check_indexes(manifest: Manifest, catalog: Catalog) -> None:
    """Compares the index files, as they were read, with their checksums in the manifest."""
    sealed = {**manifest.files, **dict([manifest.index] if manifest.index else ())}
    for name, crc in catalog.index_crcs.items():
        if name in sealed and hex64(crc) != sealed[name].crc64nvme:
            raise IntegrityError(
                f"an index is not the sealed one: expected CRC-64 {sealed[name].crc64nvme}, got"
                f" {hex64(crc)} ({printable(name)})",
                hint=_DAMAGED_INDEX,
            )


def check_pickles(manifest: Manifest, store: Store, catalog: Catalog) -> None:
    """Compares the pickles of `torch.save` files with their checksums in the manifest.

    A pickle has every name and plain value. Short files that have them, too, are compared as a
    whole: the index, the progress of transformers' Trainer, and `torch.save` files whose pickles
    were not sealed.

    Raises:
        IntegrityError: one is not what was sealed.
    """
    used, ranges = whole_archives(catalog), dict(manifest.pickles)
    for name, file in [*manifest.files.items(), *([manifest.index] if manifest.index else [])]:
        is_short = file.nbytes <= (_READ_BYTES if name in used else _JSON_BYTES)
        is_index = manifest.index is not None and name == manifest.index[0]
        is_read = name in used or is_index or name.endswith("trainer_state.json")
        if is_read and is_short and name not in ranges and name not in catalog.index_crcs:
            ranges[name] = SealedPickle(0, file.nbytes, file.crc64nvme)
    folder = folder_of(store)[0]
    folder.will_read((name, found.start, found.nbytes) for name, found in ranges.items())
    for name, (start, nbytes, expected) in ranges.items():
        try:
            is_short = folder.size(name) < start + nbytes
            data = b"" if is_short else read(folder, name, start, nbytes)
            got = "a shorter file" if is_short else hex64(crc64nvme(data))
        except StorageError as error:
            if not error.is_missing:
                raise
            raise IntegrityError(
                f"a sealed file is missing: {printable(name)} ({printable(folder.url)})",
                hint="restore it; ckpt salvage writes what is there",
            ) from error
        if got != expected:
            raise IntegrityError(
                f"the pickle of a file is not the sealed one: expected CRC-64 {expected}, got {got}"
                f" ({printable(name)})",
                hint=_DAMAGED_INDEX,
            )


def whole_archives(catalog: Catalog) -> set[str]:
    """Returns the files that are one archive of `torch.save` each."""
    return {
        file
        for file, start, nbytes, packing, *_ in catalog.archives
        if start == 0 and packing == TORCH_ZIP and nbytes == catalog.file_sizes.get(file)
    }


def check_file(manifest: Manifest | None, name: str, data: bytes) -> None:
    """Compares a small file that was read with its checksum in the manifest, if it has one.

    Raises:
        IntegrityError: it is not what was sealed.
    """
    if manifest is None:
        return
    sealed = {**manifest.files, **dict([manifest.index] if manifest.index else ())}.get(name)
    if sealed is not None and hex64(crc64nvme(data)) != sealed.crc64nvme:
        raise IntegrityError(
            f"a file is not the sealed one: expected CRC-64 {sealed.crc64nvme}, got"
            f" {hex64(crc64nvme(data))} ({printable(name)})",
            hint="restore it; or remove the manifest, if the file was changed on purpose",
        )


def seal_pickles(literals: Iterable[Literal]) -> dict[str, SealedPickle]:
    """Returns the checksums of the pickles at the beginning of files that are laid out."""
    return {
        file: SealedPickle(0, len(data), hex64(crc64nvme(data)))
        for file, start, data in literals
        if start == 0 and data.startswith(b"PK") and not is_data_file(file)
    }


def _check_names(manifest: Manifest, catalog: Catalog) -> None:
    """Refuses a checkpoint that lacks sealed tensors: names come from those of files, too.

    It may have more tensors. Also, a sealed model may be a part of a larger checkpoint.
    """
    if catalog.lacks_shapes or catalog.format != manifest.format:
        return
    there = catalog.tensors.keys() | catalog.unread.keys()
    if missing := [fqn for fqn in manifest.tensors if fqn not in there]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        names = printable(", ".join(missing[:3]))
        raise IntegrityError(
            f"{len(missing)} sealed tensors are not there: {names}{more}",
            hint=(
                "a file is missing, has another name, or is damaged: ckpt verify names it. If"
                " another tool has written here since the seal, remove the manifest"
            ),
        )


def _check_headers(manifest: Manifest, catalog: Catalog) -> None:
    """Compares names, types and shapes that come from headers, which have no checksum.

    Indexes have one in the manifest, and torch's pickles have one in their zip.
    """
    if manifest.operation == "copy" and not manifest.tensors:
        return  # a copy of a file without a manifest reads no header
    has_pickle = any(archive.packing == TORCH_ZIP for archive in catalog.archives)
    if catalog.index_crcs or has_pickle or catalog.lacks_shapes:
        return
    sealed = {fqn: (t.dtype, tuple(t.shape)) for fqn, t in manifest.tensors.items()}
    found = {fqn: (t.dtype.name, tuple(t.shape)) for fqn, t in catalog.tensors.items()}
    for fqn in {**found, **sealed} if found != sealed else ():
        if found.get(fqn) != sealed.get(fqn):
            raise IntegrityError(
                f"a header is not the sealed one: expected {sealed.get(fqn, 'no such tensor')}, got"
                f" {found.get(fqn, 'none')} ({printable(fqn)!r})",
                hint=_DAMAGED_INDEX,
            )


def of_store(store: Store) -> Manifest | None:
    """Returns the manifest of a detected checkpoint; None if there is none.

    Raises:
        IntegrityError: the manifest beside a file is of another file.
    """
    folder, given = folder_of(store)
    name = given or only_file(folder)
    manifest = find_manifest(folder, name)
    if manifest is not None and name and name not in manifest.files:
        raise IntegrityError(
            f"the manifest beside a file is of another file: expected {printable(name)!r}, got"
            f" {printable(', '.join(list(manifest.files)[:3]))!r} ({printable(folder.url)})",
            hint="give the file its name back, or remove the manifest to read it without",
        )
    return manifest


def only_file(folder: Store) -> str:
    """Returns the name of a file that is the whole checkpoint of a directory and has a manifest.

    Returns "" if there is none.
    """
    files = folder.list_files()
    found = [name for name in files if name.endswith(safetensors.SUFFIX)]
    is_single = len(found) == 1 and not any(name in INDEXES for name in files)
    return found[0] if is_single and names_in(folder, found[0]) else ""


def _sealed(entry: Mapping[str, Any]) -> SealedFile:
    if type(entry["nbytes"]) is not int or entry["nbytes"] < 0:
        raise ValueError(f"nbytes is {entry['nbytes']!r}")
    # ranges without a CRC-32 are not used
    ranges = [found for found in entry.get("runs", ()) if len(found) != 3]
    return SealedFile(
        entry["nbytes"],
        _hex(entry["crc64nvme"]),
        tuple(_sealed_range(found, entry["nbytes"]) for found in ranges),
    )


def _sealed_range(found: Sequence[Any], file_nbytes: int) -> SealedRange:
    start, nbytes, crc64, crc32 = found
    if (
        type(start) is not int
        or type(nbytes) is not int
        or not 0 <= start < start + nbytes <= file_nbytes
    ):
        raise ValueError(f"a range is {found!r} of a file of {file_nbytes} bytes")
    return SealedRange(start, nbytes, _hex(crc64), _hex(crc32, 8))


def _pickle(entry: Mapping[str, Any]) -> SealedPickle:
    start, nbytes = entry["start"], entry["nbytes"]
    is_range = type(start) is int and type(nbytes) is int and start >= 0
    if not is_range or not 0 <= nbytes <= _MAX_PICKLE_BYTES:
        raise ValueError(f"a pickle is at {start!r}, {nbytes!r} bytes")
    return SealedPickle(start, nbytes, _hex(entry["crc64nvme"]))


def _numbers(key: str, entry: Mapping[str, Any]) -> dict[str, float | None]:
    for name, value in entry.items():
        if type(value) not in (int, float, type(None)) or not math.isfinite(value or 0.0):
            raise ValueError(f"{key}[{name!r}] is {value!r}")
    return {str(name): value if value is None else float(value) for name, value in entry.items()}


def _sealed_tensor(entry: Mapping[str, Any]) -> SealedTensor:
    shape, found = tuple(map(int, entry["shape"])), entry.get("statistics")
    return SealedTensor(
        str(entry["dtype"]),
        shape,
        _hex(entry["fingerprint"]),
        None if found is None else unpack_statistics(str(entry["dtype"]), shape, found),
    )


def _hex(value: object, digits: int = 16) -> str:
    if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
        raise ValueError(f"not a checksum: {value!r}")
    return value


def seal_file(nbytes: int, crc64: int, ranges: Iterable[tuple[int, int, int, int]]) -> SealedFile:
    """Returns the entry of a file.

    Args:
        nbytes, crc64: of the file.
        ranges: (start, bytes, CRC-64, CRC-32) of the cells of its long payloads.
    """
    return SealedFile(
        nbytes,
        hex64(crc64),
        tuple(
            SealedRange(start, length, hex64(crc), f"{crc32:08x}")
            for start, length, crc, crc32 in ranges
        ),
    )


def seal_tensors(plan: Plan, fingerprints: Mapping[str, int]) -> dict[str, SealedTensor]:
    """Returns the tensors of a finished plan with their fingerprints; an empty tensor's is that of
    no bytes, 0.
    """
    return {
        t.fqn: SealedTensor(t.dst_dtype.name, t.shape, hex64(fingerprints.get(t.fqn, 0)))
        for t in plan.tensors
        if not t.is_object and (t.fqn in fingerprints or not whole(t.shape).numel)
    }
