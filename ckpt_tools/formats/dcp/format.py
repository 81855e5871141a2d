"""PyTorch Distributed Checkpoint: `.metadata` and `.distcp` files.

A `.distcp` is a sequence of items. Each item is a complete `torch.save` archive of one chunk or
object. `.metadata` has the location of each item. A save without collectives leaves one
`__{rank}.metadata` per rank instead, each with that rank's view. This module joins these views,
replicas included.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import (
    TORCH_ZIP,
    BytesEntry,
    Catalog,
    Chunk,
    ChunkList,
    Extent,
    Payloads,
    TensorEntry,
)
from ckpt_tools.core.checksum import LateChecksums
from ckpt_tools.core.dtypes import DType, by_name
from ckpt_tools.core.memory import no_gc, trim
from ckpt_tools.core.plan import Literal, Slot, Target, Trailer
from ckpt_tools.core.tables import is_table
from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    StorageError,
    printable,
)
from ckpt_tools.formats.base import MANIFEST, SHORT_ID, Request, note_of
from ckpt_tools.formats.builder import CatalogBuilder, UnreadValues, name_of
from ckpt_tools.formats.dcp import metadata as dcp_metadata
from ckpt_tools.formats.dcp.metadata import ItemLocation, Metadata, TensorMeta
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.pickle.state import UnreadTensor, plain_path
from ckpt_tools.formats.torch_save import (
    OpenedFile,
    read_leaves,
)
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.formats.zip.write import ArchiveWrapping, wrap
from ckpt_tools.storage import MemoryStore, Store, check_path, read

NAME = "dcp"
STORES_ALIASES = True
LOOKS_FOR = ".metadata"
_PAGE_BYTES = 4096
_ALIGNED_BYTES = 64 << 10  # of a payload: shorter ones would grow too much
_MANY_BYTES = 1 << 20  # a `.metadata` of this size has about 5,000 chunks
COLUMNS_FROM = 16  # chunks of a tensor
_MAX_MORE_BYTES = 512  # torch adds a hash of the contents after the payload
_DATA_FILE = re.compile(rf"__([0-9]+)_([0-9]+)(?:\.{SHORT_ID})?\.distcp$")
_MAX_RESOLVED_BYTES = 64 << 20
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_RANK_METADATA = re.compile(r"__([0-9]+)\.metadata")


class CompressedError(FormatError):
    """The items are compressed: `compressed.DecompressedStore` shows them as plain ones."""


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether `.metadata`, or one `__{rank}.metadata` per rank, is among the files."""
    return ".metadata" in files or any(_RANK_METADATA.fullmatch(name) for name in files)


def read_catalog(store: Store) -> Catalog:
    """Reads `.metadata`, or every `__{rank}.metadata`; see `Format.read_catalog`."""
    files = store.list_files()
    names = (
        [".metadata"]
        if ".metadata" in files
        else sorted((n for n in files if _RANK_METADATA.fullmatch(n)), key=_metadata_rank)
    )
    if not names:
        raise FormatError(f"no .metadata in {printable(store.url)}")
    _check_ranks(files, names)
    is_large = len(names) == 1 and files[names[0]] >= _MANY_BYTES
    crcs = LateChecksums()
    found = _read_many(store, names[0], crcs) if is_large else None
    entries, objects, parsed, aside = found or _read(store, names, crcs)
    if any(metadata.compressed for metadata in parsed):
        raise CompressedError(f"the items are compressed ({printable(store.url)})")
    items = {
        fqn: BytesEntry(fqn, extents[0], tuple(extents[1:])) for fqn, extents in objects.items()
    }
    _set_aside(entries, store, aside)
    memory_file = InMemoryFile()
    _resolve_all(entries, store, aside, memory_file)
    archives = tuple(extent for extents in aside.archives.values() for extent in extents)
    used = {file for t in entries.values() for file in t.chunks.file_names()} | {
        e.file for extents in objects.values() for e in extents
    }
    used |= {extent.file for extent in archives}
    # torch's writer leaves an empty file for a rank that saved nothing
    empty = {file for file, nbytes in files.items() if not nbytes}
    world_size, sealed = _sealed_head(store, files)
    ranks = {
        file: int(match[1]) for file in sorted(used | empty) if (match := _DATA_FILE.search(file))
    }
    catalog = Catalog(
        NAME,
        entries,
        items,
        {fqn: path for metadata in parsed for fqn, path in metadata.paths.items()},
        _sizes(store, files, used),
        max([*ranks.values(), *map(_metadata_rank, names), world_size - 1]) + 1,
        ranks,
        parsed[0].extras,
        archives,
        memory_files=memory_file.files,
        unread=aside.kinds,
        index_crcs=crcs,
    )
    more = [name for name in _BESIDE if name in files]
    # of a sealed checkpoint, only files that were sealed
    foreign = tuple(name for name in more if sealed is not None and name not in sealed)
    for name in more:
        if name not in foreign:
            catalog = _with_values(catalog, store, name, files[name])
    if not foreign:
        return catalog
    extras = {**catalog.extras, "beside": f"{', '.join(foreign)} (not sealed)"}
    return replace(catalog, beside=foreign, extras=extras)


def _check_ranks(files: Mapping[str, int], names: Sequence[str]) -> None:
    """Refuses the metadata of some ranks without those of others.

    Raises:
        CatalogError: a rank's metadata is missing, and there is no `.metadata` for all.
    """
    if ".metadata" in names:
        return
    there = {_metadata_rank(name) for name in names}
    ranks = {int(match[1]) for name in files if (match := _DATA_FILE.search(name))}
    missing = sorted((ranks | set(range(max(there) + 1))) - there)
    if missing:
        raise CatalogError(
            f"metadata of ranks is missing: expected __{missing[0]}.metadata, got"
            f" {printable(', '.join(names[:4]))}",
            hint="copy the files of all ranks into one directory",
        )


class _UnreadTensors:
    """Tensors that ckpt does not read: their kinds, and the archives of their chunks."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.archives: dict[str, list[Extent]] = {}

    def add(self, fqn: str, kind: str, chunks: Iterable[Chunk]) -> None:
        self.kinds[fqn], self.archives[fqn] = kind, [chunk.extent for chunk in chunks]


def _set_aside(entries: dict[str, TensorEntry], store: Store, aside: _UnreadTensors) -> None:
    """Removes tensors that store something other than the elements of their shape, like torchao's.

    Only archives that are too short for their elements are opened.
    """
    for fqn, entry in list(entries.items()):
        if is_table(entry.chunks):
            continue
        short = next(
            (
                c.extent
                for c in entry.chunks
                if c.extent.nbytes < c.box.numel * entry.dtype.itemsize
            ),
            None,
        )
        kind = _kind_in(short, store) if short else ""
        if kind:
            aside.add(fqn, kind, entries.pop(fqn).chunks)


class _Item(MemoryStore):
    """One item of a data file, presented as a separate file. Only requested bytes are read."""

    def __init__(self, store: Store, extent: Extent) -> None:
        super().__init__()
        self._store, self._extent = store, extent

    def size(self, path: str) -> int:
        del path
        return self._extent.nbytes

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        if start < 0 or start + len(buffer) > self._extent.nbytes:
            raise FormatError(
                f"an item ends early: byte {start + len(buffer)} of {self._extent.nbytes}"
                f" ({printable(path)})"
            )
        self._store.read_into(self._extent.file, self._extent.start + start, buffer)


def _kind_in(extent: Extent, store: Store) -> str:
    """Returns the kind of a tensor that ckpt does not read.

    Returns "" for any other tensor, and for a damaged archive.
    """
    others = UnreadValues()
    try:
        if not 0 <= extent.start < extent.start + extent.nbytes <= store.size(extent.file):
            return ""
        list(read_leaves(_Item(store, extent), extent.file, extent.nbytes, others))
    except (CheckpointError, OSError):
        return ""
    return next(iter(others.tensors.values()), "")


def _resolve_all(
    entries: dict[str, TensorEntry], store: Store, aside: _UnreadTensors, memory_file: InMemoryFile
) -> None:
    """Reads conjugated views, and puts their real elements into memory.

    Torch stores the elements of the base with a flag. Such views are rare and small: a larger one
    is set aside.
    """
    for fqn, entry in list(entries.items()):
        is_complex = entry.dtype.name in ("complex64", "complex128")
        if not is_complex or is_table(entry.chunks):
            continue
        items = [_pending_item(chunk.extent, store) for chunk in entry.chunks]
        if not any(items):
            continue
        kind = next(item[1].kind for item in items if item)
        if entry.nbytes > _MAX_RESOLVED_BYTES:
            aside.add(fqn, kind, entries.pop(fqn).chunks)
            continue
        try:
            chunks = [
                chunk._replace(extent=memory_file.add(_resolved(*item))) if item else chunk
                for chunk, item in zip(entry.chunks, items, strict=True)
            ]
        except IntegrityError:
            continue  # verify names the damage, and every reader refuses the item
        aside.archives[fqn] = [chunk.extent for chunk in entry.chunks]
        entries[fqn] = replace(entry, chunks=ChunkList(chunks))


def _pending_item(extent: Extent, store: Store) -> tuple[OpenedFile, UnreadTensor] | None:
    """Returns the opened item of a tensor with pending operations; None for any other item."""
    try:
        opened = OpenedFile(_Item(store, extent), extent.file, extent.nbytes, UnreadValues())
    except (CheckpointError, OSError):
        return None  # a damaged item is reported when it is read
    root = opened.root
    return (opened, root) if isinstance(root, UnreadTensor) and root.pending else None


def _resolved(opened: OpenedFile, tensor: UnreadTensor) -> bytes:
    """Returns the elements of a tensor in row-major order, with its pending operations done."""
    import numpy as np

    view = tensor.view
    assert view is not None
    data = opened.payload(view)
    if not data:
        return b""
    values = np.lib.stride_tricks.as_strided(
        np.frombuffer(data, view.dtype.name),
        view.sizes,
        [step * view.dtype.itemsize for step in view.strides],
    )
    values = values.conj() if "conj" in tensor.pending else values
    return np.ascontiguousarray(-values if "neg" in tensor.pending else values).tobytes()


_Read = tuple[dict[str, TensorEntry], dict[str, list[Extent]], list[Metadata], _UnreadTensors]


def _read_index(store: Store, name: str, crcs: LateChecksums) -> bytes:
    """Reads a metadata file, and notes its CRC-64."""
    data = read(store, name)
    crcs.note(name, data)
    return data


def _read(store: Store, names: Iterable[str], crcs: LateChecksums) -> _Read:
    """Reads metadata files one by one, and notes their CRC-64.

    Returns tensors, objects with their replicas, the contents of each file, and the tensors of
    types that ckpt does not read.
    """
    parsed = []
    tensors: dict[str, list[Chunk]] = {}
    metas: dict[str, TensorMeta] = {}
    objects: dict[str, list[Extent]] = {}
    with no_gc():
        for name in names:
            parsed.append(dcp_metadata.parse_metadata(_read_index(store, name, crcs), name))
            _collect(parsed[-1], name, tensors, metas, objects)
        aside, entries = _UnreadTensors(), {}
        for fqn, meta in metas.items():
            if meta.dtype in _QUANTIZED:
                aside.add(fqn, f"a quantized tensor, {meta.dtype}", tensors[fqn])
            else:
                entries[fqn] = TensorEntry(
                    fqn,
                    by_name(meta.dtype, repr(printable(fqn))),
                    meta.shape,
                    ChunkList(tensors[fqn]),
                )
    return entries, objects, parsed, aside


def _read_many(store: Store, name: str, crcs: LateChecksums) -> _Read | None:
    """Reads a file with very many chunks as arrays; None if the file is not regular enough.

    Returns the same as `_read`.
    """
    # importing NumPy takes longer than reading most checkpoints
    from ckpt_tools.formats.dcp.metadata_columns import read_bulk

    found = read_bulk(_read_index(store, name, crcs), name)
    if found is None:
        return None
    metadata, chunks = found
    objects = {
        fqn: [Extent(*metadata.places[fqn, None])]
        for fqn in metadata.objects
        if (fqn, None) in metadata.places
    }
    if len(objects) < len(metadata.objects):
        return None  # some objects have no location
    aside, entries = _UnreadTensors(), {}
    for fqn, meta in metadata.tensors.items():
        if meta.dtype in _QUANTIZED:
            aside.add(fqn, f"a quantized tensor, {meta.dtype}", chunks[fqn])
            continue
        columns = chunks[fqn]  # for few chunks, arrays are slower than objects
        kept = columns if len(columns) >= COLUMNS_FROM else ChunkList(columns)
        entries[fqn] = TensorEntry(fqn, by_name(meta.dtype, repr(printable(fqn))), meta.shape, kept)
    del chunks
    trim()
    return entries, objects, [metadata], aside


# `torch.save` files that other programs put beside DCP
_BESIDE = {"meta.pt": "Lightning", "common.pt": "Megatron-Core"}


def _with_values(catalog: Catalog, store: Store, name: str, size: int) -> Catalog:
    """Returns the catalog with the plain values of a file beside DCP.

    Examples are counters, schedulers and arguments.
    """
    found = CatalogBuilder(memory_file=InMemoryFile(catalog.memory_files))
    for path, value, extents in read_leaves(store, name, size, found.others):
        fqn = name_of(path)
        if extents or fqn in catalog.tensors or fqn in catalog.objects or fqn in found.objects:
            kind = "a tensor beside DCP" if extents else "its name is taken"
            found.others.skip((name, *path), kind)
        else:
            found.value(path, value)
    found.sizes = {name: size}
    beside = found.finish(NAME)
    return replace(
        catalog,
        objects={**catalog.objects, **beside.objects},
        paths={**catalog.paths, **beside.paths} if catalog.paths else {},
        file_sizes={**catalog.file_sizes, **beside.file_sizes},
        memory_files=beside.memory_files,
        extras={**catalog.extras, "written by": _BESIDE[name], **beside.extras},
        archives=(*catalog.archives, *beside.archives),
        unread={**catalog.unread, **beside.unread},
        unknown={**catalog.unknown, **beside.unknown},
    )


def _metadata_rank(name: str) -> int:
    match = _RANK_METADATA.fullmatch(name)
    return int(match[1]) if match else 0


def _sizes(store: Store, files: Mapping[str, int], used: Iterable[str]) -> dict[str, int]:
    """Returns the sizes of the data files that exist; files in folders are looked up one by one."""
    sizes = {}
    for file in used:
        try:
            sizes[file] = files[check_path(file, store.url)] if file in files else store.size(file)
        except StorageError as error:
            if not error.is_missing:
                raise
    return sizes


def _sealed_head(store: Store, files: Mapping[str, int]) -> tuple[int, set[str] | None]:
    """Returns the number of ranks, and the names of files, from our manifests.

    Without a manifest, these are 0 and None. The data files may show fewer ranks, because some may
    have saved nothing. If there are several manifests, only one fits, and it is not known here.
    """
    names = [name for name in files if note_of(name) == (MANIFEST, "")]
    world_size, sealed = 0, set[str]()
    for name in names:
        try:
            manifest = json.loads(read(store, name))
            world_size = manifest["world_size"]
            sealed |= set(manifest["files"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FormatError(
                f"a manifest is malformed: {printable(str(error))} ({name})",
                hint="remove it to read the checkpoint without",
            ) from error
    is_known = len(names) == 1 and type(world_size) is int
    return world_size if is_known else 0, sealed if names else None


def _collect(
    metadata: Metadata,
    where: str,
    tensors: dict[str, list[Chunk]],
    metas: dict[str, TensorMeta],
    objects: dict[str, list[Extent]],
) -> None:
    """Adds one metadata file's entries to those of earlier files."""
    lost: list[str] = []
    for fqn, meta in metadata.tensors.items():
        known = metas.setdefault(fqn, meta)
        if (known.dtype, known.shape) != (meta.dtype, meta.shape):
            raise FormatError(
                f"ranks disagree about a tensor: {known.dtype} {list(known.shape)} and {meta.dtype}"
                f" {list(meta.shape)} ({where}, {printable(fqn)!r})"
            )
        chunks = tensors.setdefault(fqn, [])
        for box in meta.boxes:
            place = metadata.places.get((fqn, box.offsets))
            if place is None:
                lost.append(fqn)
            else:
                chunks.append(Chunk(box, Extent(place.file, place.start, place.nbytes, TORCH_ZIP)))
    for fqn in metadata.objects:
        place = metadata.places.get((fqn, None))
        if place is None:
            lost.append(fqn)
        else:
            objects.setdefault(fqn, []).append(Extent(*place))
    if lost:
        raise CatalogError(
            f"{where} lists {len(lost)} chunks without a location: "
            + ", ".join(repr(printable(f)) for f in lost[:8]),
            hint=(
                "torch's writer lost them when one of its threads failed (pytorch issue 191391);"
                " take an older checkpoint"
            ),
        )


def locate(store: Store, tensors: Iterable[TensorEntry]) -> Payloads:
    """Finds the payloads; see `Format.locate`."""
    tensors = list(tensors)
    try:
        return _locate(store, tensors)
    except FormatError as error:
        for tensor in tensors if len(tensors) > 1 else ():
            locate(store, [tensor])  # raises with the tensor's name
        if len(tensors) == 1:
            hint = "; ".join(
                filter(
                    None, (error.hint, "merge, convert and diff leave it out with --exclude GLOB")
                )
            )
            raise type(error)(
                f"{printable(tensors[0].fqn)!r}: {error.args[0]}", hint=hint
            ) from error
        raise


def _locate(store: Store, tensors: Iterable[TensorEntry]) -> Payloads:
    same: dict[tuple[int, ...], tuple[int, ...]] = {}  # a million chunks have few sizes
    with no_gc():
        packed = (
            (box.sizes, extent, t.dtype)
            for t in tensors
            for box, extent in t.chunks
            if extent.packing == TORCH_ZIP
        )
        items = [
            torch_zip.ArchiveItem(extent, dtype, same.setdefault(sizes, sizes))
            for sizes, extent, dtype in packed
        ]
        return dict(torch_zip.locate_payloads(store, items))


def guess(tensors: Iterable[TensorEntry]) -> Payloads:
    """Assumes that an archive of about torch's length has its payload where torch puts it.

    See `Format.guess`.
    """
    found = {}
    for tensor in tensors:
        for box, extent in tensor.chunks:
            wrapping = wrap(tensor.dtype, box.sizes)
            more = extent.nbytes - len(wrapping.prefix) - wrapping.nbytes - wrapping.suffix_nbytes
            if extent.packing == TORCH_ZIP and 0 <= more < _MAX_MORE_BYTES:
                found[extent] = Extent(
                    extent.file, extent.start + len(wrapping.prefix), wrapping.nbytes
                )
    return found


# ---- writing -------------------------------------------------------------------------------------


class DataFile:
    """A `.distcp` under construction."""

    def __init__(self, name: str, nbytes: int = 0) -> None:
        """Begins a file, or continues one that has `nbytes` bytes already."""
        self.name, self.nbytes = name, nbytes
        self.literals: list[Literal] = []
        self.trailers: list[Trailer] = []

    def add_object(self, nbytes: int) -> tuple[Slot, ItemLocation]:
        """Appends an object of `nbytes` bytes."""
        place = ItemLocation(self.name, self.nbytes, nbytes)
        self.nbytes += nbytes
        return Slot(Box((0,), (nbytes,)), self.name, place.start), place

    def add_chunk(self, box: Box, wrapping: ArchiveWrapping) -> tuple[Slot, ItemLocation]:
        """Appends the archive of a chunk. The payload of a long one begins on a page.

        So a file system can clone it. Readers do not see the zeros before the archive: the index
        says where an archive lies.
        """
        start = self.nbytes
        gap = -(start + len(wrapping.prefix)) % _PAGE_BYTES
        if gap and wrapping.nbytes >= _ALIGNED_BYTES:
            self.literals.append(Literal(self.name, start, bytes(gap)))
            start += gap
        data = start + len(wrapping.prefix)
        after = data + wrapping.nbytes
        self.literals.append(Literal(self.name, start, wrapping.prefix))
        self.trailers.append(
            Trailer(self.name, after, wrapping.suffix_nbytes, data, wrapping.render_suffix)
        )
        self.nbytes = after + wrapping.suffix_nbytes
        return Slot(box, self.name, data), ItemLocation(self.name, start, self.nbytes - start)


def lay_out_rank(
    rank: int, chunks: Iterable[tuple[Box, DType]], number: int = 0
) -> tuple[DataFile, list[tuple[Slot, ItemLocation]]]:
    """Lays out a data file of one rank: one archive per chunk, in the given order.

    The layout follows from boxes and types alone. So in a save, rank 0 knows the positions in the
    files of all ranks without asking.

    Returns:
        The file, and for each chunk the slot of its bytes and the location of its archive.
    """
    file = DataFile(data_file_name(rank, number))
    return file, [file.add_chunk(box, wrap(dtype, box.sizes)) for box, dtype in chunks]


def is_data_file(name: str) -> bool:
    """Tells whether a name belongs to a data file, or to the metadata of one rank.

    Both torch and this tool use these names.
    """
    return _DATA_FILE.fullmatch(name) is not None or _RANK_METADATA.fullmatch(name) is not None


def data_file_number(name: str) -> int | None:
    """Returns which of its rank's data files a file is; None for no data file."""
    match = _DATA_FILE.fullmatch(name)
    return int(match[2]) if match else None


def is_rank_metadata(name: str) -> bool:
    """Tells whether a file is the metadata of one rank, which a save without collectives writes."""
    return _RANK_METADATA.fullmatch(name) is not None


def data_file_name(rank: int, number: int = 0) -> str:
    """Returns the name that torch gives to a rank's data file; a rank may have several."""
    return f"__{rank}_{number}.distcp"


@no_gc()
def lay_out(request: Request) -> Target:
    """Lays out one `.distcp` per rank, and `.metadata` as the index; see `Format.lay_out`.

    Rank 0 gets all objects. The request's small files lie beside the data.
    """
    files = [DataFile(request.name(data_file_name(rank))) for rank in range(request.world_size)]
    names = {*request.objects, *(tensor.fqn for tensor in request.tensors), *request.aliases}
    metadata = Metadata(
        paths={fqn: plain_path(path) for fqn, path in request.paths.items() if fqn in names}
    )  # stock torch loads only entries that have a path
    slots: dict[str, tuple[Slot, ...]] = {}
    for fqn, nbytes in request.objects.items():
        slot, metadata.places[fqn, None] = files[0].add_object(nbytes)
        slots[fqn] = (slot,)
        metadata.objects.append(fqn)
    for tensor in request.tensors:
        placed = []
        for rank, box in enumerate(tensor.boxes):
            if box is not None:
                slot, metadata.places[tensor.fqn, box.offsets] = files[rank].add_chunk(
                    box, wrap(tensor.dtype, box.sizes)
                )
                placed.append(slot)
        slots[tensor.fqn] = tuple(placed)
        metadata.tensors[tensor.fqn] = TensorMeta(
            tensor.dtype.name, tensor.shape, [b for b in tensor.boxes if b is not None]
        )
    for fqn, other in request.aliases.items():
        metadata.tensors[fqn] = metadata.tensors[other]
        for box in metadata.tensors[other].boxes:
            metadata.places[fqn, box.offsets] = metadata.places[other, box.offsets]
    used = [f for f in files if f.nbytes]
    # derived from the layout, so that a second attempt gives the same bytes
    save_id = str(uuid.uuid5(uuid.NAMESPACE_OID, repr([(f.name, f.nbytes) for f in used])))
    return Target(
        NAME,
        {f.name: f.nbytes for f in used} | {n: len(data) for n, data in request.files.items()},
        slots,
        (
            *(literal for f in used for literal in f.literals),
            *(Literal(name, 0, data) for name, data in request.files.items()),
        ),
        tuple(trailer for f in used for trailer in f.trailers),
        Literal(".metadata", 0, dcp_metadata.render(metadata, save_id)),
        request.world_size,
    )
