"""Proves the bytes from which tensors were computed while they were read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.plan import plan_values
from ckpt_tools.engine.computed import ComputedStore
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import HashSink
from ckpt_tools.errors import IntegrityError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.ranks.base import Group
from ckpt_tools.transfer.prove import prove_fingerprints, sealed_fingerprints
from ckpt_tools.transfer.stretches import prove_apart, prove_stretches, stretch_proofs


def prove_parts(
    store: ComputedStore, source: Source, catalog: Catalog, names: Iterable[str], group: Group
) -> None:
    """Compares the bytes that all ranks have read with their checksums.

    What no process has read whole is read once more.

    Args:
        store: has computed the tensors.
        source: the checkpoint that it reads.
        catalog: the tensors that it reads: stored ones, or views of them.
        names: of the tensors in `catalog` that were needed.
        group: all ranks. Each calls it.

    Raises:
        IntegrityError: they are not what was written.
    """
    needed = sorted(names)
    if not needed:
        return
    with group.phase("prove quantized weights"):
        reading = store.opened()
        reading.watch.prove({})
        alone = reading.fingerprints.join().keys()
    read = set().union(*group.all_gather(set(alone), "prove quantized weights"))
    reading.fingerprints.share(group)
    joined = reading.fingerprints.join()
    with group.phase("prove quantized weights"):
        _refuse_differing(source, reading.fingerprints.differing())
    stored = [n for n in needed if not catalog.tensors[n].is_computed]  # others prove themselves
    rest = [n for n in stored if n not in joined or n not in read]
    tiles = tile_bytes(DEFAULT_MEMORY_BYTES, 1)
    with group.phase("prove quantized weights"):
        tensors = [catalog.tensors[n] for n in rest[group.rank :: group.size]]
        plan = plan_values(tensors)
        located = source.format.locate(source.store, tensors)
        sink, watch = HashSink(), CrcWatch(read_whole(plan, located), source.store)
        execute_batches(schedule(plan, located, *tiles), source.store, sink, 1, crc_watch=watch)
        watch.prove({})
        again = sink.fingerprints.join()
        _refuse_differing(source, [n for n in again if joined.get(n, again[n]) != again[n]])
        computed = {**joined, **again}
        manifest, every = checked_manifest(source), plan_values(catalog.tensors[n] for n in needed)
        prove_fingerprints(source, sealed_fingerprints(manifest, source, catalog, every), computed)
        proofs = stretch_proofs(manifest, source, catalog, every)
    # those that are views need all results
    for part in group.all_gather(sink.fingerprints.join(), "prove quantized weights"):
        computed |= part
    with group.phase("prove quantized weights"):
        prove_stretches(source, proofs, computed)
        prove_apart(source, proofs, proofs.apart[group.rank :: group.size], 1, tiles)


def _refuse_differing(source: Source, names: Sequence[str]) -> None:
    """Refuses tensors of which two reads differ: results may be of the wrong one."""
    if names:
        raise IntegrityError(
            f"bytes were read twice, and differ: {printable(names[0])!r} in"
            f" {printable(source.path)}",
            hint="if the network did it, another try is right; else look at the disk",
        )
