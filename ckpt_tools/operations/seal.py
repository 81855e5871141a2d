"""Adds a manifest to a checkpoint that has none, if all its own checksums are right."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Unpack

from ckpt_tools.core.box import flat_start, is_flat
from ckpt_tools.core.catalog import Chunk, ChunkList, Extent, Payloads, TensorEntry
from ckpt_tools.core.checksum import crc32, crc64nvme, hex64, join_crc32, join_crc64
from ckpt_tools.core.plan import num_cells, plan_values
from ckpt_tools.engine.fingerprints import Fingerprints, HashedRange, HashedRanges
from ckpt_tools.errors import IntegrityError, PlanError, printable, redacted
from ckpt_tools.formats.base import attempt_for, note_of
from ckpt_tools.formats.registry import INDEXES, Source, is_ours
from ckpt_tools.formats.torch_save import pickle_range
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.batches import ReadBatch
from ckpt_tools.operations.verification import RecordCheck, Verification
from ckpt_tools.publish.check_manifest import Problem
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.manifest import (
    Manifest,
    SealedFile,
    SealedPickle,
    file_name,
    seal_file,
    seal_tensors,
)
from ckpt_tools.publish.sealed_source import whole_archives
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.one_file import folder_of
from ckpt_tools.transfer.options import Path_, Reading
from ckpt_tools.transfer.prove import prove_replicas

# shorter payloads are read a second time, because every part costs memory
_MANY, _LEAST_BYTES, _LEAST_OF_MANY = 100_000, 64 << 10, 1 << 20
_TRIES = 2  # a bit may have flipped on the way: read again


@dataclass(frozen=True, slots=True)
class SealResult:
    """The result of `seal`.

    Attributes:
        path: the checkpoint.
        manifest: name of the new file.
        files: bytes of every data file.
        num_tensors: how many have a fingerprint now.
        unknown: files with bytes that have no checksum. They are sealed as they are.
        seconds: wall-clock time.
    """

    path: str
    manifest: str
    files: Mapping[str, int]
    num_tensors: int
    unknown: tuple[str, ...]
    seconds: float


@checked(Reading)
def seal(src: Path_, **options: Unpack[Reading]) -> SealResult:
    """Adds a manifest to a checkpoint that has none. It writes nothing else.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        **options: see `Reading`.

    Raises:
        PlanError: it has a manifest already, or manifests do not support its kind of index.
        IntegrityError: it is damaged; the message names the damage.
        CheckpointError: it cannot be read or written to.
    """
    began = time.monotonic()
    work = Verification(src, options)
    folder, file = folder_of(work.store)
    if work.manifest is not None:
        raise PlanError(
            f"it already has a manifest: {printable(work.store.url)}",
            hint="ckpt verify compares with it",
        )
    if work.is_compressed:
        raise PlanError(
            f"a manifest has checksums of plain items, and these are compressed:"
            f" {printable(work.store.url)}",
            hint="ckpt copy writes it without compression",
        )
    _refuse(work.structure())
    assert work.catalog is not None
    sizes = dict(work.catalog.file_sizes)
    if not file and len(sizes) == 1 and not _index_in(folder):  # as transformers saves small models
        return seal(f"{work.store.url.rstrip('/')}/{next(iter(sizes))}", **options)
    index = "" if file else _index_of(work, folder, sizes)
    tensors = list(work.catalog.tensors.values())
    source = Source(work.store.url, work.store, work.format, work.catalog)
    prove_replicas(source, tensors, work.catalog.objects.values())
    found = _FileChecksums(work, sizes)
    for batch in work.batches(sizes):
        found.add(batch)
    memory_files = work.catalog.memory_files  # values of pickles lie in no file
    objects = {
        fqn: item.extent
        for fqn, item in work.catalog.objects.items()
        if item.extent.file not in memory_files
    }
    (crcs,) = work.hash_ranges(objects, crc64nvme)
    data = read(folder, index) if index else b""
    content = (
        f"{sorted(sizes.items())}"
        f" {crc64nvme(data) if index else found.seal(file, sizes[file]).crc64nvme}"
    )
    # if two processes seal one checkpoint, the second finds the name taken
    attempt = attempt_for(content)
    manifest = Manifest.now(
        attempt,
        "seal",
        work.format.NAME,
        {},
        world_size=work.catalog.world_size,
        files={name: found.seal(name, nbytes) for name, nbytes in sizes.items()},
        index=(index, SealedFile(len(data), hex64(crc64nvme(data)))) if index else None,
        tensors=seal_tensors(plan_values(tensors), found.fingerprints()),
        objects={fqn: seal_file(e.nbytes, crcs[fqn], ()) for fqn, e in objects.items()},
        pickles=_pickles(work, sizes),
    )
    name = file_name(attempt, file)
    place = open_destination(folder.url, options.get("storage_options"))
    place.add_note(name, manifest.render(), attempt)
    return SealResult(
        redacted(work.store.url),
        name,
        sizes,
        len(manifest.tensors),
        tuple(found.unknown),
        time.monotonic() - began,
    )


def _index_in(folder: Store) -> str:
    """Returns the name of the index in a directory; "" if there is none."""
    return next((name for name in INDEXES if name in folder.list_files()), "")


def _index_of(work: Verification, folder: Store, sizes: Mapping[str, int]) -> str:
    """Returns the name of the index of a directory.

    Raises:
        PlanError: there is none, or other files look like parts of the checkpoint.
    """
    index = _index_in(folder)
    if not index:
        raise PlanError(
            f"only a checkpoint of one file, or with one index, can be sealed:"
            f" {printable(work.store.url)}",
            hint="reshard it first",
        )
    strange = [
        name
        for name in folder.list_files()
        if is_ours(name) and name not in (*sizes, index) and note_of(name) is None
    ]
    if strange:
        raise PlanError(
            "files that look like parts of the checkpoint, but are not:"
            f" {printable(', '.join(strange[:8]))}"
            f" ({printable(work.store.url)})",
            hint="an older save into the same directory left them: move them away first",
        )
    return index


def _pickles(work: Verification, sizes: Mapping[str, int]) -> dict[str, SealedPickle]:
    """Returns the checksums of the pickles of `torch.save` files."""
    assert work.catalog is not None
    found: dict[str, SealedPickle] = {}
    for name in whole_archives(work.catalog) & sizes.keys():
        where = pickle_range(work.store, name, sizes[name])
        found[name] = SealedPickle(*where, hex64(crc64nvme(read(work.store, name, *where))))
    return found


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise IntegrityError(
            f"a damaged checkpoint is not sealed: {problems[0]}"
            + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""),
            hint="ckpt verify names everything; ckpt salvage writes what is whole",
        )


class _FileChecksums:
    """The checksums of all files, collected batch by batch.

    Attributes:
        unknown: files with bytes that have no checksum.
    """

    def __init__(self, work: Verification, sizes: Mapping[str, int]) -> None:
        assert work.catalog is not None
        self.unknown = sorted(work.files_without_archives(set(sizes)))
        self._work, self._tensors = work, list(work.catalog.tensors.values())
        self._files: dict[str, list[HashedRange]] = {name: [] for name in sizes}
        self._cells: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in sizes}
        self._fingerprints, self._unjoined = Fingerprints(), set[str]()
        # start, end, number of the tensor
        self._chunks: dict[str, list[tuple[int, int, int, Chunk]]] = {name: [] for name in sizes}
        for number, tensor in enumerate(self._tensors):
            for chunk in tensor.chunks:
                start, nbytes = chunk.extent.start, chunk.extent.nbytes
                self._chunks.setdefault(chunk.extent.file, []).append(
                    (start, start + nbytes, number, chunk)
                )
        for chunks in self._chunks.values():
            chunks.sort(key=lambda item: item[:3])

    def add(self, batch: ReadBatch) -> None:
        """Reads a batch, compares its records, and notes its checksums.

        Raises:
            IntegrityError: it is damaged.
        """
        problems, unknown, records = self._work.look_at_archives(batch)
        _refuse(problems)
        self.unknown = sorted({*self.unknown, *unknown})
        tensors = self._within(batch)
        located = self._work.format.locate(batch.store, tensors)
        least = 0 if batch.is_held else _LEAST_BYTES if len(records) <= _MANY else _LEAST_OF_MANY
        cells, long = _cells(tensors, located), _long_pieces(tensors, located, least)
        parts = [
            _cut(extent, batch)
            for extent in chain(
                chain(*cells.values()), (extent for extent, _ in chain(*long.values()))
            )
        ]
        hashed = _read_once(self._work, batch, records, parts, least)
        for name, pieces in hashed.pieces.items():
            nbytes = sum(piece.nbytes for piece in pieces)
            self._files[name].append(
                HashedRange(
                    pieces[0].start, nbytes, join_crc64((p.crc64, p.nbytes) for p in pieces), 0
                )
            )
        for name, extents in cells.items():
            self._cells[name] += [
                (*cell[1:3], hashed.crc64(cell), hashed.crc32(cell)) for cell in extents
            ]
        self._unjoined |= {
            t.fqn
            for t in tensors
            if t.fqn not in long and any(chunk.box.numel for chunk in t.chunks)
        }
        for tensor in tensors:
            for extent, start in long.get(tensor.fqn, ()):
                piece = _cut(extent, batch)
                noted = HashedRange(
                    start + piece.start - extent.start, piece.nbytes, hashed.crc64(piece), 0
                )
                self._fingerprints.noted.pieces.setdefault(tensor.fqn, HashedRanges()).append(noted)

    def _within(self, batch: ReadBatch) -> list[TensorEntry]:
        """Returns the tensors of a batch, each with its chunks there."""
        found: dict[int, dict[Chunk, None]] = {}
        for name, start, nbytes in batch.spans:
            chunks = self._chunks[name]
            first = bisect_left(chunks, start, key=lambda item: item[1])
            for _, end, number, chunk in islice(
                chunks, first, bisect_left(chunks, start + nbytes, key=lambda item: item[0])
            ):
                if end > start:
                    # a dict: count a chunk in two spans only once
                    found.setdefault(number, {})[chunk] = None
        return [
            replace(self._tensors[number], chunks=ChunkList(chunks))
            for number, chunks in found.items()
        ]

    def fingerprints(self) -> dict[str, int]:
        """Returns the fingerprints of all tensors.

        Tensors whose parts could not be joined so far are read again.
        """
        for tensor in self._tensors:
            self._fingerprints.noted.sizes[tensor.fqn] = tensor.nbytes
        for fqn in self._unjoined:
            self._fingerprints.noted.pieces.pop(fqn, None)
        known = self._fingerprints.join()
        left = [t for t in self._tensors if t.fqn not in known]
        return known | dict(
            self._work.fingerprints(left, self._work.format.locate(self._work.store, left))
        )

    def seal(self, name: str, nbytes: int) -> SealedFile:
        """Returns a file's entry, with its cells."""
        crc = join_crc64((p.crc64, p.nbytes) for p in sorted(self._files[name]))
        return seal_file(nbytes, crc, sorted(self._cells[name]))


def _cut(extent: Extent, batch: ReadBatch) -> Extent:
    """Returns the part of an extent that lies in a batch."""
    mine = [(start, start + nbytes) for name, start, nbytes in batch.spans if name == extent.file]
    start, stop = max(extent.start, min(mine)[0]), min(extent.start + extent.nbytes, max(mine)[1])
    return extent._replace(start=start, nbytes=stop - start)


def _cells(tensors: Iterable[TensorEntry], located: Payloads) -> dict[str, set[Extent]]:
    """Returns the cells of long packed payloads, by file."""
    cells: dict[str, set[Extent]] = {}
    for chunk in (
        chunk for tensor in tensors for chunk in tensor.chunks if chunk.extent in located
    ):
        payload = located[chunk.extent]
        count = num_cells(chunk.box, payload.nbytes)
        size = payload.nbytes // max(1, count)
        cells.setdefault(payload.file, set()).update(
            Extent(payload.file, payload.start + n * size, size) for n in range(count)
        )
    return cells


def _long_pieces(
    tensors: Iterable[TensorEntry], located: Payloads, least: int
) -> dict[str, list[tuple[Extent, int]]]:
    """Returns the extents of chunks by file, each with its start byte in the tensor.

    Only for tensors whose chunks are all long, and each a contiguous run of the tensor.

    A long chunk has at least `least` bytes.
    """
    found = {}
    for tensor in tensors:
        pieces = [
            (located.get(chunk.extent, chunk.extent), chunk.box)
            for chunk in tensor.chunks
            if chunk.box.numel
        ]
        if pieces and all(
            e.nbytes >= least and e.strides is None and is_flat(box, tensor.shape)
            for e, box in pieces
        ):
            found[tensor.fqn] = [
                (e, flat_start(box, tensor.shape) * tensor.dtype.itemsize) for e, box in pieces
            ]
    return found


def _read_once(
    work: Verification,
    batch: ReadBatch,
    records: Mapping[str, RecordCheck],
    parts: Iterable[Extent],
    least: int,
) -> _Hashed:
    """Reads a batch, compares all records with their archives, and returns checksums of parts.

    One read provides the bytes to compare and to seal. Only records of fewer bytes than `least` are
    read separately.
    """
    short = {key: record for key, record in records.items() if record.extent.nbytes < least}
    crcs: Mapping[str, int] = (
        work.hash_ranges({key: record.extent for key, record in short.items()}, crc32)[0]
        if short
        else {}
    )
    _refuse(work.compare_records(short, crcs))
    long = {key: record for key, record in records.items() if key not in short}
    wanted = [*parts, *(record.extent for record in long.values())]
    for _ in range(_TRIES):
        hashed = _Hashed(work, batch, wanted)
        crcs = {key: hashed.crc32(record.extent) for key, record in long.items()}
        _refuse(work.compare_records(long, crcs))
        if all(crcs[key] == record.extent.crc32 for key, record in long.items()):
            return hashed
        batch = replace(batch, store=work.store)  # the bytes in memory are wrong
    raise IntegrityError(
        f"repeated reads return different bytes: {printable(work.store.url)}",
        hint="check the disk and the network",
    )


class _Hashed:
    """A batch that is read once: both checksums of each range between two edges.

    Attributes:
        pieces: the hashed ranges of each file, in order.
    """

    def __init__(self, work: Verification, batch: ReadBatch, parts: Iterable[Extent]) -> None:
        """Reads the batch; `parts` are the extents whose checksums are needed later."""
        edges: dict[str, set[int]] = {}
        for name, start, nbytes in batch.spans:
            edges.setdefault(name, set()).update((start, start + nbytes))
        for part in parts:
            edges[part.file].update((part.start, part.start + part.nbytes))
        self._edges = {name: sorted(found) for name, found in edges.items()}
        ranges = {
            f"{name}:{a}": Extent(name, a, b - a)
            for name, found in self._edges.items()
            for a, b in pairwise(found)
        }
        crc64s, crc32s = work.hash_ranges(ranges, crc64nvme, crc32, store=batch.store)
        self.pieces = {
            name: [
                HashedRange(a, b - a, crc64s[f"{name}:{a}"], crc32s[f"{name}:{a}"])
                for a, b in pairwise(found)
            ]
            for name, found in self._edges.items()
            if len(found) > 1
        }

    def _of(self, part: Extent) -> Sequence[HashedRange]:
        edges = self._edges[part.file]
        return self.pieces.get(part.file, [])[
            bisect_left(edges, part.start) : bisect_left(edges, part.start + part.nbytes)
        ]

    def crc64(self, part: Extent) -> int:
        """Returns the CRC-64/NVME of a part."""
        return join_crc64((p.crc64, p.nbytes) for p in self._of(part))

    def crc32(self, part: Extent) -> int:
        """Returns the CRC-32 of a part."""
        return join_crc32((p.crc32, p.nbytes) for p in self._of(part))
