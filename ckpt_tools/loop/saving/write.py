"""Writes a rank's shards into its `.distcp` files, and commits the files of all ranks on one rank.

A rank has one file, and others for the shards that are expected to stay the same: see `FileKind`.

Imports nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.laps import Laps
from ckpt_tools.core.plan import Literal, Slot, Target, plan_transfer
from ckpt_tools.engine.execute import Progress, execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, Batch, schedule, tile_bytes
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.engine.statistics import Moments
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import ItemLocation
from ckpt_tools.loop.state.shard_info import FileKind, ShardInfo
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.manifest import (
    ROOM_BYTES,
    Manifest,
    SealedFile,
    SealedTensor,
    file_name,
    seal_file,
)
from ckpt_tools.storage import LocalStore, MemoryStore, NoStore, write_file

_WRITE_BYTES = 4 << 20


class FilePlan(NamedTuple):
    """The plan of a file of a rank. It stays valid while the rank's shards stay the same.

    Attributes:
        target, batches: the file, and the copies into it. Objects come after the shards.
        places: the position of each shard's archive.
        numbers: its shards, among those that the rank writes.
        kind: which file it is.
    """

    target: Target
    batches: tuple[Batch, ...]
    places: tuple[ItemLocation, ...]
    numbers: tuple[int, ...]
    kind: FileKind = FileKind.CHANGING


class SavedObject(NamedTuple):
    """An object in a rank's file: its start, its bytes, and its CRC-64."""

    start: int
    nbytes: int
    crc64: int


class RankFile(NamedTuple):
    """The description of a rank's written file.

    Attributes:
        name: of the file, before it gets the id of an attempt.
        nbytes, crc64: of the file.
        ranges: (start, bytes, CRC-64, CRC-32) of the cells of long shards.
        objects: the place and the checksum of each object.
        shares: the rank's share of each tensor's fingerprint. The commit does not need it.
        moments: the statistics of the rank's part of each tensor; empty if they are not wanted.
        seconds: of writing, and of making the bytes durable.
        identity: of the file, to link it.
        linked: the step that had the file already; "" if it was written.
        how: the file came from there: "linked", "cloned" or "copied".
        remark: for the report, such as why it was written although nothing seems to have changed.
    """

    name: str
    nbytes: int
    crc64: int
    ranges: tuple[tuple[int, int, int, int], ...]
    objects: tuple[SavedObject, ...]
    shares: Mapping[str, int]
    moments: Mapping[str, Moments] = {}
    seconds: Mapping[str, float] = {}
    identity: tuple[int | str, ...] = ()
    linked: str = ""
    how: str = ""
    remark: str = ""


def shards_by_file(kinds: npt.NDArray[np.int64]) -> dict[FileKind, npt.NDArray[np.int64]]:
    """Returns the numbers of the shards in each file of a rank. The first file is always there."""
    found = {kind: np.flatnonzero(kinds == kind) for kind in FileKind}
    return {kind: mine for kind, mine in found.items() if len(mine) or kind == FileKind.CHANGING}


def plan_rank_files(rank: int, pieces: Sequence[ShardInfo]) -> tuple[FilePlan, ...]:
    """Plans a rank's files, for the shards that it writes."""
    files = shards_by_file(np.array([piece.file for piece in pieces], np.int64))
    return tuple(
        _plan_file(rank, kind, tuple(numbers.tolist()), [pieces[n] for n in numbers])
        for kind, numbers in files.items()
    )


def _plan_file(
    rank: int, kind: FileKind, numbers: tuple[int, ...], pieces: Sequence[ShardInfo]
) -> FilePlan:
    """Plans a file and the copies into it. In memory, shard number `i` is the file `i`."""
    file, laid_out = dcp.lay_out_rank(rank, ((p.box, BY_NAME[p.dtype]) for p in pieces), kind)
    slots: dict[str, list[Slot]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for position, (piece, (slot, _)) in enumerate(zip(pieces, laid_out, strict=True)):
        dtype = BY_NAME[piece.dtype]
        slots.setdefault(piece.fqn, []).append(slot)
        chunks.setdefault(piece.fqn, []).append(
            Chunk(piece.box, Extent(str(position), 0, piece.box.numel * dtype.itemsize))
        )
    entries = {
        p.fqn: TensorEntry(p.fqn, BY_NAME[p.dtype], p.shape, ChunkList(chunks[p.fqn]))
        for p in pieces
    }
    target = Target(
        dcp.NAME,
        {file.name: file.nbytes},
        {f: tuple(s) for f, s in slots.items()},
        tuple(file.literals),
        tuple(file.trailers),
    )
    batches = schedule(
        plan_transfer(Catalog("memory", entries), target), {}, *tile_bytes(DEFAULT_MEMORY_BYTES, 2)
    )
    places = tuple(location for _, location in laid_out)
    return FilePlan(target, tuple(batches), places, numbers, kind)


def write_part(
    plan: FilePlan,
    target: Destination,
    staged: Attempt,
    memory: Sequence[memoryview],
    objects: Sequence[bytes],
    jobs: int,
    measures: bool = False,
    before: Path | None = None,
    measured: Mapping[str, Moments] | None = None,
    progress: Progress | None = None,
) -> RankFile:
    """Writes a file of a rank and makes it durable.

    Args:
        plan: from `plan_file`.
        target: the checkpoint to be.
        staged: the attempt.
        memory: the bytes of every shard, in the plan's order.
        objects: archives that come after the shards.
        jobs: threads.
        measures: also compute statistics.
        before: the step before, with the same layout, from which the changes are measured.
        measured: tensors whose values were measured before.
        progress: called with the bytes of each batch that is written, by any thread.

    Raises:
        StorageError: there is no room, or a write failed.
    """
    (name, nbytes), *_ = plan.target.file_sizes.items()
    literals, places = list(plan.target.literals), []
    file = dcp.DataFile(name, nbytes)
    for data in objects:
        _, place = file.add_object(len(data))
        places.append(SavedObject(place.start, place.nbytes, crc64nvme(data)))
        literals.append(Literal(name, place.start, data))
    nbytes = file.nbytes
    if not nbytes:
        return RankFile(name, 0, 0, (), (), {})
    target.check_room(nbytes + ROOM_BYTES)
    whole_file = replace(plan.target, file_sizes={name: nbytes}, literals=tuple(literals))
    sink = WriteSink(
        whole_file,
        staged.writable,
        lambda file: target.name(file, staged.attempt),
        measures=measures,
        before=LocalStore(before) if measures and before is not None else None,
        measured=measured,
    )
    laps = Laps()
    part = _fill(plan, sink, memory, jobs, progress, laps)
    staged.sync()
    laps.lap("fsync")
    identity = staged.identity(target.name(name, staged.attempt)) if plan.kind else ()
    return part._replace(objects=tuple(places), seconds=laps.seconds, identity=identity)


def rehearsed_part(
    plan: FilePlan, memory: Sequence[memoryview], jobs: int, measures: bool
) -> RankFile:
    """Returns what `write_part` would return for a file without objects. It writes nothing."""
    sink = WriteSink(plan.target, NoStore(), measures=measures)
    return _fill(plan, sink, memory, jobs, None, Laps())


def _fill(
    plan: FilePlan,
    sink: WriteSink,
    memory: Sequence[memoryview],
    jobs: int,
    progress: Progress | None,
    laps: Laps,
) -> RankFile:
    try:
        sink.open()
        execute_batches(
            plan.batches,
            MemoryStore({str(number): view for number, view in enumerate(memory)}),
            sink,
            jobs,
            progress,
        )
        laps.lap("write")
        checksums = sink.finish()
    finally:
        sink.abort()
    (name, nbytes), *_ = sink.target.file_sizes.items()
    shares = {fqn: sink.fingerprints.share_of(fqn) for fqn in plan.target.slots}
    ranges = tuple(sink.ranges_of(name))
    return RankFile(name, nbytes, checksums[name], ranges, (), shares, sink.moments)


def write_files(staged: Attempt, files: Mapping[str, bytes]) -> dict[str, SealedFile]:
    """Writes small files beside the data; returns them as the manifest names them."""
    for name, data in files.items():
        write_file(staged.writable, name, data)
    return {name: seal_file(len(data), crc64nvme(data), ()) for name, data in files.items()}


class WrittenIndex(NamedTuple):
    """The `.metadata` of a save: its bytes and its CRC-64.

    `data` has its contents in an object store, where it is written last. On a disk it is empty: the
    index lies beside the data files already, and was never held in full.
    """

    nbytes: int
    crc64: int
    data: bytes = b""


def write_index(staged: Attempt, pieces: Iterable[bytes]) -> WrittenIndex:
    """Writes the index into the directory of an attempt; in an object store, only joins it."""
    if staged.folder is None:
        data = b"".join(pieces)
        return WrittenIndex(len(data), crc64nvme(data), data)
    nbytes = crc = 0
    writer = staged.writable.create(dcp.LOOKS_FOR, 0)
    try:
        for data in _gathered(pieces):
            writer.write_at(nbytes, data)
            nbytes, crc = nbytes + len(data), crc64nvme(data, crc)
        writer.finish()
    finally:
        writer.abort()
    return WrittenIndex(nbytes, crc)


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Joins short pieces, so that each write is long."""
    waiting, nbytes = list[bytes](), 0
    for piece in pieces:
        waiting.append(piece)
        nbytes += len(piece)
        if nbytes >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, nbytes = [], 0
    yield b"".join(waiting)


def describe(
    target: Destination,
    staged: Attempt,
    index: WrittenIndex,
    parts: Sequence[Sequence[RankFile]],
    tensors: Mapping[str, SealedTensor],
    objects: Mapping[str, SavedObject],
) -> Manifest:
    """Returns the manifest of a checkpoint from every rank's files.

    Args:
        target: the checkpoint to be.
        staged: the attempt. Its files are complete, except for manifest and index.
        index: `.metadata`.
        parts: the files of every rank.
        tensors: the sealed tensors, with known fingerprints.
        objects: the objects of all ranks, by name.
    """
    files = {
        target.name(part.name, staged.attempt): seal_file(
            part.nbytes, part.crc64, part.ranges
        )._replace(linked=part.linked if part.how != "copied" else "")
        for mine in parts
        for part in mine
        if part.nbytes
    }
    return Manifest.now(
        staged.attempt,
        "save",
        dcp.NAME,
        {},
        world_size=len(parts),
        files=files,
        index=(dcp.LOOKS_FOR, SealedFile(index.nbytes, hex64(index.crc64))),
        tensors=tensors,
        objects={fqn: seal_file(o.nbytes, o.crc64, ()) for fqn, o in objects.items()},
    )


def commit(staged: Attempt, manifest: Manifest, index: WrittenIndex) -> list[str]:
    """Publishes a checkpoint; returns notes.

    Raises:
        StorageError: it failed, or a file is not what its rank wrote. Then nothing is visible.
    """
    files = {name: file.nbytes for name, file in manifest.files.items()}
    literal = Literal(dcp.LOOKS_FOR, 0, index.data) if index.data else None
    if literal is None:
        files[dcp.LOOKS_FOR] = index.nbytes
    sealed = Literal(file_name(staged.attempt), 0, manifest.render())
    return staged.publish(sealed, literal, files)
