"""Proves that all ranks saved the same replicas, and that the bytes read are the sealed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, Chunk, Extent
from ckpt_tools.core.checksum import crc32, hex64
from ckpt_tools.core.coverage import replicas
from ckpt_tools.core.plan import Plan, Slot, Target, TensorPlan, plan_copies
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import schedule
from ckpt_tools.engine.sinks import HashSink
from ckpt_tools.errors import IntegrityError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.formats.zip.verify import examine
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.storage import read


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
    stored = {t.chunks[0].extent: fqn for fqn, t in source.catalog.tensors.items() if t.chunks}
    objects = {item.extent: fqn for fqn, item in source.catalog.objects.items()}
    found = {}
    for tensor in plan.tensors:
        if tensor.is_object:
            fqn = objects.get(tensor.chunks[0].extent, "")
            if fqn in manifest.objects:
                crc64 = int(manifest.objects[fqn].crc64nvme, 16)
                found[tensor.fqn] = SealedFingerprint(fqn, crc64)
        elif tensor.src_dtype is tensor.dst_dtype and tensor.chunks:
            fqn = stored.get(catalog.tensors[tensor.fqn].chunks[0].extent, "")
            # a part of it has another
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
                    "nothing was written; try again in case the network did it, else restore the"
                    " files or take another step"
                ),
            )


def prove_copies(
    source: Source,
    catalog: Catalog,
    plan: Plan,
    located: Mapping[Extent, Extent],
    jobs: int,
    tiles: tuple[int, int],
) -> None:
    """Checks replicas and objects before anything is written: no fingerprint proves these.

    Raises:
        IntegrityError: two replicas hold different bytes, or an object is damaged; its name and
            files are told.
    """
    _prove_replicas(source, catalog, plan, located, jobs, tiles)
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


def _prove_replicas(
    source: Source,
    catalog: Catalog,
    plan: Plan,
    located: Mapping[Extent, Extent],
    jobs: int,
    tiles: tuple[int, int],
) -> None:
    """Reads every copy of what several ranks saved, and refuses copies that differ."""
    probes: list[TensorPlan] = []
    groups: list[tuple[str, list[Chunk]]] = []
    for tensor in plan.tensors:
        if tensor.is_object:
            item = catalog.objects[tensor.fqn]
            box = whole((item.extent.nbytes,))
            copies = [Chunk(box, e) for e in (item.extent, *item.replicas)]
            if any(e.nbytes != item.extent.nbytes for e in item.replicas):
                raise _differ(
                    catalog,
                    tensor.fqn,
                    copies[0],
                    next(c for c in copies if c.extent.nbytes != item.extent.nbytes),
                )
            groups += [(tensor.fqn, copies)] if item.replicas else []
        else:
            groups += [(tensor.fqn, group) for group in replicas(catalog.tensors[tensor.fqn])]
    by_fqn = {t.fqn: t for t in plan.tensors}
    for number, (fqn, group) in enumerate(groups):
        dtype = by_fqn[fqn].src_dtype
        for copy, chunk in enumerate(group):
            box = whole(chunk.box.sizes)
            slots = (Slot(box, "", 0),)
            alone = (Chunk(box, chunk.extent),)
            probes.append(
                TensorPlan(
                    f"{number}.{copy}",
                    box.sizes,
                    dtype,
                    dtype,
                    alone,
                    slots,
                    tuple(plan_copies([box], [box])),
                )
            )
    if not probes:
        return
    sink = HashSink()
    execute_batches(
        schedule(Plan(tuple(probes), Target("", {}, {})), located, *tiles), source.store, sink, jobs
    )
    fingerprints = sink.fingerprints.join()
    for number, (fqn, group) in enumerate(groups):
        for copy, chunk in enumerate(group):
            if fingerprints[f"{number}.{copy}"] != fingerprints[f"{number}.0"]:
                raise _differ(catalog, fqn, group[0], chunk)


def _differ(catalog: Catalog, fqn: str, first: Chunk, second: Chunk) -> IntegrityError:
    return IntegrityError(
        f"replicas differ: {printable(fqn)!r} {first.box} is not the same in"
        f" {catalog.where(first.extent.file)} and {catalog.where(second.extent.file)}",
        hint=(
            "one of the ranks had another value, or its file is damaged; leave the tensor out, or"
            " take another checkpoint"
        ),
    )
