"""Proves that all ranks saved the same replicas, and that the bytes read are the sealed ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import (
    BytesEntry,
    Catalog,
    Chunk,
    Payloads,
    TensorEntry,
    one_chunk,
)
from ckpt_tools.core.checksum import crc32, hex64
from ckpt_tools.core.coverage import replicas
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.plan import Plan, Slot, Target, TensorPlan, plan_overlaps, plan_values
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import HashSink
from ckpt_tools.errors import IntegrityError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.formats.zip.verify import examine
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.storage import Store, read


class SealedFingerprint(NamedTuple):
    """A tensor or object in the source's manifest: its name there, and its fingerprint."""

    fqn: str
    crc64: int


def sealed_fingerprints(
    manifest: Manifest | None, source: Source, catalog: Catalog, plan: Plan
) -> dict[str, SealedFingerprint]:
    """Returns the sealed fingerprints of the tensors and objects that a plan leaves as they are.

    They are by the plan's names.

    Args:
        manifest: the source's.
        source: the checkpoint.
        catalog: the view of it that the plan was made for, in which names may be other ones.
        plan: tensors that are cast are left out.
    """
    if manifest is None:
        return {}
    objects = {item.extent: fqn for fqn, item in source.catalog.objects.items()}
    found = {}
    for tensor in plan.tensors:
        if tensor.is_object:
            fqn = objects.get(tensor.chunks[0].extent, "")
            if fqn in manifest.objects:
                crc64 = int(manifest.objects[fqn].crc64nvme, 16)
                found[tensor.fqn] = SealedFingerprint(fqn, crc64)
        elif tensor.src_dtype is tensor.dst_dtype and tensor.chunks:
            fqn = catalog.tensors[tensor.fqn].stored_name
            # a part of it has another fingerprint
            if fqn in manifest.tensors and source.catalog.tensors[fqn].chunks == tensor.chunks:
                found[tensor.fqn] = SealedFingerprint(
                    fqn, int(manifest.tensors[fqn].fingerprint, 16)
                )
    return found


def prove_fingerprints(
    source: Source, expected: Mapping[str, SealedFingerprint], computed: Mapping[str, int]
) -> None:
    """Compares the fingerprints of the bytes read with the sealed ones.

    A tensor's fingerprint is the same for every sharding.

    Args:
        source: the checkpoint, for messages.
        expected: from `sealed_fingerprints`.
        computed: of the bytes that were read, by the plan's names.

    Raises:
        IntegrityError: a tensor is not what was written, on the disk, or on the way.
    """
    for name, sealed in expected.items():
        if computed.get(name, sealed.crc64) != sealed.crc64:
            raise IntegrityError(
                "bytes were damaged since they were written: expected CRC-64"
                f" {hex64(sealed.crc64)}, got {hex64(computed[name])}"
                f" ({printable(sealed.fqn)!r} in {printable(source.path)})",
                hint=(
                    "if the network did it, another try is right; else restore the files or take"
                    " another step"
                ),
            )


def prove_planned_replicas(
    source: Source,
    catalog: Catalog,
    plan: Plan,
    located: Payloads,
    jobs: int,
    tiles: tuple[int, int],
) -> None:
    """Checks replicas and objects before anything is written: no fingerprint proves these.

    Raises:
        IntegrityError: two replicas hold different bytes, or an object is damaged; its name and
            files are told.
    """
    tensors = [catalog.tensors[t.fqn] for t in plan.tensors if not t.is_object]
    objects = [catalog.objects[t.fqn] for t in plan.tensors if t.is_object]
    found = [*_copies_of_tensors(tensors), *_copies_of_objects(catalog, objects)]
    _compare_replicas(source, found, located, jobs, tiles)
    _prove_objects(source, catalog, plan)


def _prove_objects(source: Source, catalog: Catalog, plan: Plan) -> None:
    """Compares the CRC-32 in objects that are zips, as torch saves them.

    Objects are copied unchanged, so a damaged one would stay damaged.
    """
    extents = {
        catalog.objects[t.fqn].extent: t.fqn
        for t in plan.tensors
        if t.is_object and t.chunks[0].extent.nbytes
    }
    for found in examine(source.store, list(extents)):
        wrong = next(
            (
                e
                for e in found.left
                if crc32(read(source.store, e.file, e.start, e.nbytes)) != e.crc32
            ),
            None,
        )
        if found.problem or wrong:
            what = found.problem or "is damaged: its CRC-32 is wrong"
            raise IntegrityError(
                f"{printable(extents[found.extent])!r} {what} ({catalog.where(found.extent.file)})",
                hint="ckpt verify names everything; ckpt salvage writes what is whole",
            )


def hash_tensors(
    tensors: Sequence[TensorEntry],
    store: Store,
    located: Payloads,
    jobs: int,
    tiles: tuple[int, int],
) -> dict[str, int]:
    """Reads tensors, and returns their fingerprints by name.

    Args:
        tensors: to read.
        store: that has them.
        located: the positions of packed payloads.
        jobs: threads.
        tiles: see `tile_bytes`.
    """
    sink = HashSink()
    execute_batches(schedule(plan_values(tensors), located, *tiles), store, sink, jobs)
    return sink.fingerprints.join()


def prove_replicas(
    source: Source,
    tensors: Iterable[TensorEntry],
    objects: Iterable[BytesEntry] = (),
    jobs: int | None = None,
    memory_bytes: int | None = None,
    group: Group = ALONE,
) -> None:
    """Reads every copy of the tensors and objects that several ranks saved.

    Args:
        source: the checkpoint.
        tensors, objects: its entries. Those with one copy are not read.
        jobs: threads.
        memory_bytes: of their buffers.
        group: reads a share each.

    Raises:
        IntegrityError: two replicas differ; the message names them.
    """
    found = [*_copies_of_tensors(tensors), *_copies_of_objects(source.catalog, objects)]
    mine = found[group.rank :: group.size]
    entries = [group.entry for group in mine if group.entry is not None]
    located = source.format.locate(source.store, entries) if entries else {}
    jobs = num_threads(jobs)
    tiles = tile_bytes(memory_bytes or DEFAULT_MEMORY_BYTES, jobs)
    _compare_replicas(source, mine, located, jobs, tiles)


class _Replicas(NamedTuple):
    """The chunks that hold the same elements of a tensor, or the same object."""

    fqn: str
    dtype: DType
    chunks: list[Chunk]
    entry: TensorEntry | None


def _copies_of_tensors(tensors: Iterable[TensorEntry]) -> Iterator[_Replicas]:
    for entry in tensors:
        for chunks in replicas(entry):
            yield _Replicas(entry.fqn, entry.dtype, chunks, entry)


def _copies_of_objects(catalog: Catalog, objects: Iterable[BytesEntry]) -> Iterator[_Replicas]:
    """Yields the replicas of objects.

    Raises:
        IntegrityError: two replicas have different lengths.
    """
    for item in objects:
        box = whole((item.extent.nbytes,))
        chunks = [Chunk(box, extent) for extent in (item.extent, *item.replicas)]
        for chunk in chunks:
            if chunk.extent.nbytes != item.extent.nbytes:
                raise _differ(catalog, item.fqn, chunks[0], chunk)
        if item.replicas:
            yield _Replicas(item.fqn, BY_NAME["uint8"], chunks, None)


def _compare_replicas(
    source: Source,
    found: Sequence[_Replicas],
    located: Payloads,
    jobs: int,
    tiles: tuple[int, int],
) -> None:
    probes: list[TensorPlan] = []
    for number, group in enumerate(found):
        for place, chunk in enumerate(group.chunks):
            box = whole(chunk.box.sizes)
            slots, alone = (Slot(box, "", 0),), one_chunk(box, chunk.extent)
            name, overlaps = f"{number}.{place}", plan_overlaps([box], [box])
            probes.append(
                TensorPlan(name, box.sizes, group.dtype, group.dtype, alone, slots, overlaps)
            )
    if not probes:
        return
    sink = HashSink()
    execute_batches(
        schedule(Plan(tuple(probes), Target("", {}, {})), located, *tiles), source.store, sink, jobs
    )
    fingerprints = sink.fingerprints.join()
    for number, group in enumerate(found):
        for place, chunk in enumerate(group.chunks):
            if fingerprints[f"{number}.{place}"] != fingerprints[f"{number}.0"]:
                raise _differ(source.catalog, group.fqn, group.chunks[0], chunk)


def _differ(catalog: Catalog, fqn: str, first: Chunk, second: Chunk) -> IntegrityError:
    return IntegrityError(
        f"replicas differ: {printable(fqn)!r} {first.box} is not the same in"
        f" {catalog.where(first.extent.file)} and {catalog.where(second.extent.file)}",
        hint=(
            "one of the ranks had another value, or its file is damaged; leave the tensor out, or"
            " take another checkpoint"
        ),
    )
