"""Proves a result by its inverse: the source is made again of what was written.

Each tensor of a result has relations with stored tensors. With their sides exchanged, they make the
stored tensors of the written files. The fingerprints must be those of the source. So no element was
lost, moved or changed. That proves nothing of the meaning of a map: one that exchanges two tensors
has an inverse, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.core.box import BoxIndex
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.checksum import hex64
from ckpt_tools.core.coverage import cover_error
from ckpt_tools.core.grid import Relation, same_elements
from ckpt_tools.core.plan import Plan, TensorPlan, plan_values
from ckpt_tools.core.relations import assemble, is_whole
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import schedule
from ckpt_tools.engine.sinks import HashSink
from ckpt_tools.errors import IntegrityError, PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store

_MOST_NOTED = 100_000  # relations in a manifest


class WayBack(NamedTuple):
    """How a stored tensor is made again of a result, which is on the left of the relations."""

    entry: TensorEntry
    relations: Sequence[Relation]
    is_renaming: bool


class Inverse(NamedTuple):
    """How the stored tensors of a source are made again of a result.

    Attributes:
        ways: a tensor may have several, if the result has it twice.
        written: the tensors of the result as they lie in its files.
        lacking: stored tensors of which the result has some elements, and not all of them as they
            were.
    """

    ways: Sequence[WayBack]
    written: Mapping[str, TensorEntry]
    lacking: Sequence[str]

    @property
    def stored(self) -> dict[str, TensorEntry]:
        """Returns the stored tensors that come back."""
        return {way.entry.fqn: way.entry for way in self.ways}

    def without(self, results: Collection[str]) -> Inverse:
        """Returns the same without results that are one stored tensor each."""
        kept = [
            way
            for way in self.ways
            if not (way.is_renaming and way.relations[0].left.name in results)
        ]
        return self._replace(ways=kept)


def inverse_of(
    source: Source,
    catalog: Catalog,
    plan: Plan,
    aliases: Mapping[str, str],
    altered: Collection[str] = (),
) -> Inverse:
    """Returns how the tensors of a source are made again of a result.

    Args:
        source: the checkpoint.
        catalog: the view of it that the plan was made for.
        plan: of the result.
        aliases: other names in the result, with the names under which they are written.
        altered: results with other values than those read.
    """
    planned = {tensor.fqn: tensor for tensor in plan.tensors if not tensor.is_object}
    stored, written = source.catalog.tensors, dict[str, TensorEntry]()
    ways, parts = list[WayBack](), dict[str, list[Relation]]()
    for fqn in (*planned, *aliases):
        entry, tensor = catalog.tensors[fqn], planned[aliases.get(fqn, fqn)]
        found = entry.relations or (same_elements(entry.stored_name, fqn, entry.shape),)
        found = tuple(r for r in found if r.left.name in stored)
        for name in dict.fromkeys(relation.left.name for relation in found):
            parts.setdefault(name, [])
        is_same = tensor.src_dtype is tensor.dst_dtype and fqn not in altered
        if not found or entry.is_computed or not is_same:
            continue
        written[fqn] = _written(fqn, tensor)
        for relation in found:
            back = Relation(relation.sizes, relation.right._replace(name=fqn), relation.left)
            held = stored[relation.left.name]
            if is_whole(relation, entry.shape, held.shape):
                ways.append(WayBack(held, [back], is_renaming=True))
            else:
                parts[held.fqn].append(back)
    lacking = []
    renamed = {way.entry.fqn for way in ways}
    for name, relations in parts.items():
        held = stored[name]
        if relations and sum(relation.numel for relation in relations) == math.prod(held.shape):
            ways.append(WayBack(held, relations, is_renaming=False))
        elif held.nbytes and (relations or name not in renamed):
            lacking.append(name)
    return Inverse(ways, written, lacking)


def _written(fqn: str, tensor: TensorPlan) -> TensorEntry:
    """Returns a tensor of the result as it lies in the files."""
    dtype = tensor.dst_dtype
    chunks = (
        Chunk(slot.box, Extent(slot.file, slot.start, slot.box.numel * dtype.itemsize))
        for slot in tensor.slots
    )
    return TensorEntry(fqn, dtype, tensor.shape, ChunkList(chunks))


class InverseProof(NamedTuple):
    """What came back.

    Attributes:
        num_tensors, nbytes: of the source.
        lacking: see `Inverse`.
        read_nbytes: bytes of the source that this rank has read for the proof.
        about: for the manifest; empty on other ranks than 0.
    """

    num_tensors: int
    nbytes: int
    lacking: Sequence[str]
    read_nbytes: int
    about: Mapping[str, Any]


def prove_inverse(
    inverse: Inverse,
    source: Source,
    files: Store,
    sealed: Mapping[str, int],
    computed: Mapping[str, int],
    group: Group,
    jobs: int,
    tiles: tuple[int, int],
) -> InverseProof:
    """Makes the source again of the written files, and compares the fingerprints.

    Each rank makes some tensors. A tensor of the source without a known fingerprint is read.

    Args:
        inverse: from `inverse_of`.
        source: the checkpoint.
        files: the store of the written files, which are whole.
        sealed: the fingerprints in the source's manifest, by name.
        computed: on rank 0, the fingerprints of the results, as they were written.
        group: all ranks. Each calls it.
        jobs: threads.
        tiles: see `tile_bytes`.

    Raises:
        IntegrityError: the written files do not give the source back.
        PlanError: an element of the source was used twice, and another not at all.
    """
    numbers = range(group.rank, len(inverse.ways), group.size)
    with group.phase("prove the inverse"):
        indexes: dict[int, BoxIndex] = {}
        back = [_assembled(str(n), inverse.ways[n], inverse.written, indexes) for n in numbers]
        found = _hashed(back, files, {}, jobs, tiles)
        unknown = {
            way.entry.fqn: way.entry
            for way in (inverse.ways[n] for n in numbers)
            if way.entry.fqn not in sealed and not way.is_renaming
        }
        located = source.format.locate(source.store, [*unknown.values()])
        read = _hashed([*unknown.values()], source.store, located, jobs, tiles)
    told = group.gather((found, read), "gather fingerprints")
    stored = inverse.stored
    about: Mapping[str, Any] = {}
    with group.phase("compare with the source"):
        if not group.rank:
            crcs = {number: crc for part, _ in told for number, crc in part.items()}
            known = {name: crc for _, part in told for name, crc in part.items()} | dict(sealed)
            for number, way in enumerate(inverse.ways):
                name = way.entry.fqn
                if name not in known:  # a renaming: it was copied as it was read
                    known[name] = computed.get(way.relations[0].left.name, 0)
                _compare(source, way, known[name], crcs.get(str(number), 0))
            about = _about(inverse, known)
    return InverseProof(
        len(stored),
        sum(entry.nbytes for entry in stored.values()),
        inverse.lacking,
        sum(entry.nbytes for entry in unknown.values()),
        about,
    )


def _assembled(
    name: str, way: WayBack, written: Mapping[str, TensorEntry], indexes: dict[int, BoxIndex]
) -> TensorEntry:
    """Returns a stored tensor, made of those that were written."""
    made = assemble(name, way.entry.shape, way.relations, written, indexes)
    if not way.is_renaming and cover_error(Catalog("", {}), made) is not None:
        raise PlanError(
            f"an element of {printable(way.entry.fqn)!r} is used twice, and another not at all",
            hint="if you wrote no key map, this is a fault of ckpt: please report it",
        )
    return made


def _hashed(
    tensors: Sequence[TensorEntry],
    store: Store,
    located: Mapping[Extent, Extent],
    jobs: int,
    tiles: tuple[int, int],
) -> dict[str, int]:
    """Returns the fingerprints of tensors that are read from a store."""
    sink = HashSink()
    execute_batches(schedule(plan_values(tensors), located, *tiles), store, sink, jobs)
    return sink.fingerprints.join()


def _compare(source: Source, way: WayBack, expected: int, got: int) -> None:
    if got != expected:
        names = ", ".join(dict.fromkeys(relation.left.name for relation in way.relations[:3]))
        raise IntegrityError(
            "the written files do not give the source back: expected CRC-64"
            f" {hex64(expected)}, got {hex64(got)} ({printable(way.entry.fqn)!r} in"
            f" {printable(source.path)}, from {printable(names)})",
            hint="nothing was published; ckpt verify tells whether the source is damaged; else look"
            " at the memory and the disk",
        )


def _about(inverse: Inverse, known: Mapping[str, int]) -> dict[str, Any]:
    """Returns what the manifest says of the proof. Names that stay are not listed."""
    renamed, relations, fingerprints = {}, dict[str, list[Any]](), {}
    for way in inverse.ways:
        name = way.entry.fqn
        if way.is_renaming:
            made = way.relations[0].left.name
            if made != name:
                renamed[made] = name
            continue
        fingerprints[name] = hex64(known[name])
        relations[name] = [
            [left.name, sizes, left.offset, left.strides, right.offset, right.strides]
            for sizes, left, right in way.relations
        ]
    number = sum(map(len, relations.values()))
    return {
        "num_tensors": len(inverse.stored),
        "lacking": list(inverse.lacking),
        "num_relations": number,
        "renamed": renamed,
        "fingerprints": fingerprints,
        **({"relations": relations} if number <= _MOST_NOTED else {}),
    }
