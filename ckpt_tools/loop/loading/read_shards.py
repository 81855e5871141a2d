"""Reads tensors of a checkpoint straight into the memory of shards.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from ckpt_tools.core.catalog import Catalog, ChunkList, Payloads, TensorEntry
from ckpt_tools.core.plan import Plan, Slot, Target, plan_transfer
from ckpt_tools.engine.crc_watch import CrcWatch, compare_positions, read_whole
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import schedule, tile_bytes
from ckpt_tools.engine.sinks import FillSink, HashSink, Sink
from ckpt_tools.errors import IntegrityError
from ckpt_tools.formats.registry import Source
from ckpt_tools.loop.loading.load_request import LoadReport
from ckpt_tools.loop.loading.proof import LoadProof, ShareProof
from ckpt_tools.loop.state.shards import Shard, has_bytes
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.storage import MemoryStore
from ckpt_tools.storage.retries import read_again_if_wrong

_BATCH_BYTES = 64 << 20


def empty_tensor(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name), device="cpu")


def read_shards(
    source: Source,
    shards: Sequence[Shard],
    names: Mapping[str, str],
    jobs: int,
    memory_bytes: int,
    report: LoadReport,
    proof: LoadProof | None = None,
) -> None:
    """Fills shards. `names` maps shard names to stored names that differ; see `fill`."""
    entries = {
        n: replace(source.catalog.tensors[names.get(n, n)], fqn=n) for n in {s.fqn for s in shards}
    }
    fill(
        replace(source, catalog=replace(source.catalog, tensors=entries)),
        shards,
        jobs,
        memory_bytes,
        report,
        proof,
        names,
    )


def fill(
    source: Source,
    shards: Sequence[Shard],
    jobs: int,
    memory_bytes: int,
    report: LoadReport,
    proof: LoadProof | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Reads the bytes of shards straight into the shards' memory.

    Shards on a device go through host memory, `_BATCH_BYTES` at a time. One batch is read while the
    previous one is copied.

    Args:
        source: its catalog has all of the shards' names. Values are cast where a shard's type
            differs.
        shards: their memory must not overlap.
        jobs, memory_bytes: threads, and the budget of their buffers.
        report: receives the counts.
        proof: the sealed fingerprints. Tensors that are read in full are compared with them.
        names: stored names of shards that have another name, for `proof`.

    Raises:
        IntegrityError: a range or a tensor that was read in full is not what was written.
        CheckpointError: it cannot be read.
    """
    reader = ShardReader(source, jobs, memory_bytes, report, proof, names)
    stages = Stager(), Stager()
    try:
        for number, batch in enumerate(_batches(source.catalog, shards)):
            with stages[number % 2].fill([shard.tensor for shard in batch]) as views:
                reader.fill(batch, views)
    finally:
        for stage in stages:
            stage.settle()


def _batches(catalog: Catalog, shards: Sequence[Shard]) -> list[list[Shard]]:
    """Divides shards that need a buffer into batches, tensor by tensor in stored order."""
    nbytes: dict[str, int] = {}
    by_tensor: dict[str, list[Shard]] = {}
    for shard in shards:
        nbytes[shard.fqn] = nbytes.get(shard.fqn, 0) + (
            0 if has_bytes(shard.tensor) else shard.nbytes
        )
        by_tensor.setdefault(shard.fqn, []).append(shard)
    batches: list[list[Shard]] = [[]]
    room = _BATCH_BYTES
    for fqn in sorted(
        by_tensor,
        key=lambda n: min((c.extent[:2] for c in catalog.tensors[n].chunks), default=("", 0)),
    ):
        if nbytes[fqn] > max(room, 0) and room < _BATCH_BYTES:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1] += by_tensor[fqn]
        room -= nbytes[fqn]
    return batches


class ShardReader(NamedTuple):
    """How shards are read; see `fill`."""

    source: Source
    jobs: int
    memory_bytes: int
    report: LoadReport
    proof: LoadProof | None
    names: Mapping[str, str]

    def fill(self, shards: Sequence[Shard], views: Sequence[memoryview]) -> None:
        """Fills the memory of shards."""
        catalog = self.source.catalog
        slots: dict[str, list[Slot]] = {}
        for number, shard in enumerate(shards):
            slots.setdefault(shard.fqn, []).append(Slot(shard.box, str(number), 0))
        memory = MemoryStore({str(number): view for number, view in enumerate(views)})
        target = Target("memory", memory.list_files(), {n: tuple(s) for n, s in slots.items()})
        plan = plan_transfer(
            replace(catalog, tensors={n: catalog.tensors[n] for n in slots}),
            target,
            {s.fqn: s.dtype for s in shards},
        )
        read_again_if_wrong(self.source.store, lambda: self._read(plan, memory))
        self.report.needed_nbytes += plan.payload_bytes

    def _read(self, plan: Plan, memory: MemoryStore) -> None:
        """Reads once from the usual positions of payloads, then checks that they lie there.

        A look at each position first would leave scattered pages in the page cache. These cost a
        cold file half of its read-ahead. If an assumed position was wrong, the tensor is read
        again.
        """
        source = self.source
        used = {
            t.fqn: _used(source.catalog.tensors[t.fqn], t.overlaps.sources()) for t in plan.tensors
        }
        assumed = source.assume(used.values())
        is_remote = source.store.capabilities.is_remote
        if not is_remote:  # announced sequential reads are fastest on a disk
            files = {
                c.extent.file
                for t in used.values()
                for c in t.chunks
                if c.extent.file in source.catalog.file_sizes
            }
            source.store.will_read((file, 0, source.catalog.file_sizes[file]) for file in files)
        part = self.proof.named(self.names) if self.proof is not None else None
        proved, later = self._proved_by_fingerprints(plan, part)
        sink = FillSink(memory, part.note if part is not None else None)
        crc_watch = CrcWatch(read_whole(plan, assumed, proved | later), self.source.store)
        totals = execute_batches(
            schedule(plan, assumed, *tile_bytes(self.memory_bytes, self.jobs)),
            source.store,
            sink,
            self.jobs,
            looks_ahead=is_remote,
            crc_watch=crc_watch,
        )
        real = source.compare(used.values(), assumed)
        num_proved = crc_watch.prove(dict(real.crcs))
        wrong = {t.fqn for t in used.values() if any(c.extent in real.moved for c in t.chunks)}
        if wrong:
            if part is not None:
                part.forget(wrong)
            num_proved += self._read_found(_only(plan, wrong), real.found, sink, proved)
        if part is not None and self.proof is not None:
            try:
                part.prove(proved, str(source.path))
            except IntegrityError:
                self._read_found(plan, real.found, sink, set())  # a CRC-32 also names the file
                raise
            self.proof.absorb(part)
            if later - wrong:
                parts = _only(plan, later - wrong)
                num_chunks = {
                    self.names.get(t.fqn, t.fqn): len(t.overlaps.sources()) for t in parts.tensors
                }
                self.proof.check_later(num_chunks, partial(self._check_chunks, parts, real.found))
        self.report.read_nbytes += totals.read_nbytes
        self.report.num_proved += num_proved + sum(
            len(t.overlaps.sources()) for t in plan.tensors if t.fqn in proved
        )

    def _proved_by_fingerprints(
        self, plan: Plan, part: ShareProof | None
    ) -> tuple[set[str], set[str]]:
        """Returns the tensors that fingerprints prove: after this reading, and after all ranks'.

        Bytes from an object store may be wrong on the way, and are read again at once.
        """
        if part is None or self.proof is None:
            return set(), set()
        waits = self.proof.is_joint and not self.source.store.capabilities.is_remote
        return part.whole(plan), part.parts(plan) if waits else set()

    def _check_chunks(self, plan: Plan, found: Payloads, names: Collection[str]) -> int:
        """Reads tensors again, by stored name, and compares their chunks with their CRC-32.

        Returns the number of proved chunks.
        """
        chosen = {t.fqn for t in plan.tensors if self.names.get(t.fqn, t.fqn) in names}
        return self._read_found(_only(plan, chosen), found, HashSink(), set()) if chosen else 0

    def _read_found(self, plan: Plan, found: Payloads, sink: Sink, proved: set[str]) -> int:
        """Reads from the positions that the files name; returns the number of proved chunks."""
        late = CrcWatch(read_whole(plan, found, proved), self.source.store)
        execute_batches(
            schedule(plan, found, *tile_bytes(self.memory_bytes, self.jobs)),
            self.source.store,
            sink,
            self.jobs,
            crc_watch=late,
        )
        return late.prove(dict(compare_positions(found, found).crcs))


def _only(plan: Plan, names: Collection[str]) -> Plan:
    return replace(plan, tensors=tuple(t for t in plan.tensors if t.fqn in names))


def _used(entry: TensorEntry, numbers: Sequence[int]) -> TensorEntry:
    return replace(entry, chunks=ChunkList(entry.chunks[i] for i in numbers))
