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

from ckpt_tools.core.box import row_major_strides
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.checksum import hex64
from ckpt_tools.core.coverage import cover_error
from ckpt_tools.core.grid import Relation, same_elements
from ckpt_tools.core.plan import Plan, TensorPlan
from ckpt_tools.core.relations import PiecesError, SourceIndexes, assemble, is_whole
from ckpt_tools.errors import IntegrityError, PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store
from ckpt_tools.transfer.prove import hash_tensors

_MOST_NOTED = 100_000  # relations in a manifest
_MOST_PIECES = 1 << 16  # of one tensor


class WayBack(NamedTuple):
    """How a stored tensor is made again of a result, which is on the left of the relations."""

    entry: TensorEntry
    relations: Sequence[Relation]
    is_renaming: bool


class Inverse(NamedTuple):
    """How the stored tensors of a source are made again of a result. Empty tensors are left out.

    Attributes:
        ways: a tensor may have several, if the result has it twice.
        written: the tensors of the result as they lie in its files.
        stored_as: the name under which a tensor of the result is written, if it has several.
        changed: tensors of the result with other values than those stored: cast or computed ones.
        in_part: stored tensors of which the result has some elements.
    """

    ways: Sequence[WayBack]
    written: Mapping[str, TensorEntry]
    stored_as: Mapping[str, str]
    changed: Sequence[str]
    in_part: Sequence[str]

    @property
    def stored(self) -> dict[str, TensorEntry]:
        """Returns the stored tensors that come back."""
        return {way.entry.fqn: way.entry for way in self.ways}

    @property
    def reordered(self) -> set[str]:
        """Returns the stored tensors all of whose parts, cut or reordered, are proved together."""
        return {way.entry.fqn for way in self.ways if not way.is_renaming}

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
    changed, renamed = list[str](), set[str]()
    for fqn in (*planned, *aliases):
        entry, tensor = catalog.tensors[fqn], planned[aliases.get(fqn, fqn)]
        if not math.prod(entry.shape):
            continue
        if entry.is_computed or tensor.src_dtype is not tensor.dst_dtype or fqn in altered:
            changed.append(fqn)
            continue
        found = entry.relations or (same_elements(entry.stored_name, fqn, entry.shape),)
        written[fqn] = _written(fqn, tensor)
        for relation in found:
            held = stored.get(relation.left.name)
            if held is None:  # a value that the conversion has made, such as a step
                continue
            back = Relation(relation.sizes, relation.right._replace(name=fqn), relation.left)
            if is_whole(relation, entry.shape, held.shape):
                ways.append(WayBack(held, [back], is_renaming=True))
                renamed.add(held.fqn)
            else:
                parts.setdefault(held.fqn, []).append(back)
    in_part = []
    for name, relations in parts.items():
        if sum(relation.numel for relation in relations) == math.prod(stored[name].shape):
            ways.append(WayBack(stored[name], relations, is_renaming=False))
        elif name not in renamed:
            in_part.append(name)
    return Inverse(ways, written, aliases, changed, in_part)


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
        num_tensors, nbytes: of the source; on rank 0.
        by_reading: stored tensors that consist of too many pieces of the result. Instead, their
            bytes in the source were compared with the seal, if there is one.
        read_nbytes: bytes of the source that were read for the proof; on rank 0, by all ranks.
        about: for the manifest; empty on other ranks than 0.
    """

    num_tensors: int
    nbytes: int
    by_reading: Sequence[str]
    read_nbytes: int
    about: Mapping[str, Any]


class _Found(NamedTuple):
    """Fingerprints that one rank has computed.

    Attributes:
        back: by the number of a way, of the tensor that was made again.
        stored: by name, of tensors of the source that were read again.
        nbytes: bytes of these.
    """

    back: Mapping[int, int]
    stored: Mapping[str, int]
    nbytes: int


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

    Each rank makes some tensors. A tensor of the source that is not sealed is read again, if it was
    cut, joined or reordered. If it only got another name, the files are compared with its bytes as
    the copy has read them.

    Args:
        inverse: from `inverse_of`.
        source: the checkpoint.
        files: the store of the written files, which are whole.
        sealed: the fingerprints in the source's manifest, by name.
        computed: on rank 0, the fingerprints of the results, as the copy has read them.
        group: all ranks. Each calls it.
        jobs: threads.
        tiles: see `tile_bytes`.

    Raises:
        IntegrityError: the written files do not give the source back.
        PlanError: an element of the source was used twice, and another not at all.
    """
    with group.phase("prove the inverse"):
        mine = _found(inverse, source, files, sealed, group, jobs, tiles)
    told = group.gather(mine, "gather fingerprints")
    about: Mapping[str, Any] = {}
    done, by_reading = inverse._replace(ways=[]), list[str]()
    with group.phase("compare with the source"):
        if not group.rank:
            back = {number: crc for found in told for number, crc in found.back.items()}
            read = {name: crc for found in told for name, crc in found.stored.items()}
            for number, way in enumerate(inverse.ways):
                name, made = way.entry.fqn, way.relations[0].left.name
                if number in back:
                    as_read = computed.get(inverse.stored_as.get(made, made), 0)
                    expected = sealed.get(name, read.get(name, as_read))
                    _compare(source, way, expected, back[number])
                else:
                    by_reading.append(name)
                    if name in sealed:
                        _compare(source, way, sealed[name], read[name])
            done = inverse._replace(ways=[w for n, w in enumerate(inverse.ways) if n in back])
            about = _about(done, {**read, **sealed})
    proved = done.stored.values()
    return InverseProof(
        len(proved),
        sum(entry.nbytes for entry in proved),
        by_reading,
        sum(found.nbytes for found in told) if told else mine.nbytes,
        about,
    )


def _found(
    inverse: Inverse,
    source: Source,
    files: Store,
    sealed: Mapping[str, int],
    group: Group,
    jobs: int,
    tiles: tuple[int, int],
) -> _Found:
    """Returns the fingerprints of this rank's share."""
    numbers = range(group.rank, len(inverse.ways), group.size)
    indexes = SourceIndexes()
    made, again = list[TensorEntry](), dict[str, TensorEntry]()
    for number in numbers:
        way = inverse.ways[number]
        back = _assembled(str(number), way, inverse.written, indexes)
        if back is not None:
            made.append(back)
        # nobody knows its fingerprint; or it is sealed, and nothing else proves its bytes
        if (back is None) == (way.entry.fqn in sealed) and not way.is_renaming:
            again[way.entry.fqn] = way.entry
    located = source.format.locate(source.store, [*again.values()])
    back_crcs = hash_tensors(made, files, {}, jobs, tiles)
    return _Found(
        {int(name): crc for name, crc in back_crcs.items()},
        hash_tensors([*again.values()], source.store, located, jobs, tiles),
        sum(entry.nbytes for entry in again.values()),
    )


def _assembled(
    name: str, way: WayBack, written: Mapping[str, TensorEntry], indexes: SourceIndexes
) -> TensorEntry | None:
    """Returns a stored tensor, made of those that were written; None if it has too many pieces.

    Its dims are cut further, so that each relation is a box of it, if that can be. The order of the
    elements stays, and with it the fingerprint.

    Raises:
        PlanError: an element of it is used twice.
    """
    shape = way.entry.shape if way.is_renaming else _cut_further(way.entry.shape, way.relations)
    try:
        made = assemble(name, shape, way.relations, written, indexes, _MOST_PIECES)
    except PiecesError:
        return None
    if not way.is_renaming and cover_error(Catalog("", {}), made) is not None:
        raise PlanError(
            f"an element of {printable(way.entry.fqn)!r} is used twice, and another not at all",
            hint="if you wrote no key map, this is a fault of ckpt: please report it",
        )
    return made


def _cut_further(shape: tuple[int, ...], relations: Sequence[Relation]) -> tuple[int, ...]:
    """Returns a shape of the same elements, with a dim for each stride of the right sides.

    Returns the shape itself if a stride is no multiple of the next smaller one.
    """
    steps = {
        stride
        for relation in relations
        for size, stride in zip(relation.sizes, relation.right.strides, strict=True)
        if size > 1
    }
    strides = sorted({1, *row_major_strides(shape), *steps}, reverse=True)
    numel = math.prod(shape)
    above = [numel, *strides[:-1]]
    if not all(strides) or any(a % s for a, s in zip(above, strides, strict=True)):
        return shape
    return tuple(a // s for a, s in zip(above, strides, strict=True) if a != s) or shape


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
        "num_relations": number,
        "num_changed": len(inverse.changed),
        "in_part": list(inverse.in_part),
        "renamed": renamed,
        "fingerprints": fingerprints,
        **({"relations": relations} if number <= _MOST_NOTED else {}),
    }
