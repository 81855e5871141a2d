"""Decides which rank reads which bytes that several ranks need.

Areas of stored chunks are dealt out in rounds. Every rank knows the needs of all ranks, so all
compute the same plan without more messages. Imports torch indirectly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.core.box import Box, bands, flat_start, is_flat
from ckpt_tools.core.catalog import Catalog, Chunk, TensorEntry
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.plan import Slot, Target, plan_transfer
from ckpt_tools.loop.state.shards import Shard
from ckpt_tools.ranks.gloo import RankSet

_LEAST_PIECE_BYTES, _PIECE_BYTES = 64 << 10, 4 << 20
_ROUND_BYTES = 16 << 20  # bytes of one rank in a round
_WORTH = 1.25  # share a read only if it saves this factor


class WantedBox(NamedTuple):
    """The elements that a rank needs for one of its shards."""

    rank: int
    number: int
    box: Box


class SharedArea(NamedTuple):
    """The needed area of a stored chunk: its smallest box, and the part for each rank.

    `dtype` is the element type in memory.
    """

    entry: TensorEntry
    dtype: DType
    chunk: Chunk
    box: Box
    wanted: tuple[WantedBox, ...]


class RoundRead(NamedTuple):
    """A part of an area that one rank reads in a round, to position `start` of its buffer."""

    area: SharedArea
    box: Box
    start: int

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes in memory."""
        return self.box.numel * self.area.dtype.itemsize


Round = list[list[RoundRead]]  # one list per reading rank


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The division of a load: the shards that a rank reads alone, and the shared areas.

    Attributes:
        alone: numbers of the shards that this rank reads by itself.
        areas: the areas that ranks read for each other.
        size: number of ranks.
    """

    alone: frozenset[int]
    areas: Sequence[SharedArea]
    size: int

    def rounds(self) -> Iterator[Round]:
        """Yields the rounds, the same on every rank.

        In each round every rank reads a run of boxes, and about as many bytes as the others.
        """
        share_nbytes = -(
            -sum(area.box.numel * area.dtype.itemsize for area in self.areas) // self.size
        )
        most_nbytes, piece_nbytes = (
            min(_ROUND_BYTES, share_nbytes),
            min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, share_nbytes // 4)),
        )
        reader, end, found = 0, 0, self._nothing()
        for area in self.areas:
            for box in bands(area.box, piece_nbytes // area.dtype.itemsize):
                found[reader].append(RoundRead(area, box, end))
                end += found[reader][-1].nbytes
                if end >= most_nbytes:
                    reader, end = reader + 1, 0
                if reader == self.size:
                    yield found
                    reader, found = 0, self._nothing()
        if any(found):
            yield found

    def _nothing(self) -> Round:
        return [[] for _ in range(self.size)]


def divide(
    group: RankSet,
    catalog: Catalog,
    shards: Sequence[Shard],
    names: Mapping[str, str],
    gap_nbytes: int,
) -> ReadPlan:
    """Decides which areas ranks read for each other. All ranks of the group call it.

    Args:
        group: the ranks that read together.
        catalog: of the checkpoint.
        shards: the shards of this rank.
        names: stored names of shards that have another name.
        gap_nbytes: a rank that reads alone also reads holes up to this size, because two requests
            cost more.
    """
    mine = [(names.get(s.fqn, s.fqn), s.dtype.name, s.box) for s in shards]
    wanted: dict[str, list[WantedBox]] = {}
    dtypes: dict[str, set[str]] = {}
    for rank, needs in enumerate(group.all_gather(mine, "divide the reading")):
        for number, (name, dtype, box) in enumerate(needs):
            wanted.setdefault(name, []).append(WantedBox(rank, number, box))
            dtypes.setdefault(name, set()).add(dtype)
    areas: list[SharedArea] = []
    together: set[str] = set()
    for name, parts in wanted.items():
        if len({w.rank for w in parts}) == 1 or len(dtypes[name]) > 1:
            continue
        found = _areas(catalog.tensors[name], BY_NAME[min(dtypes[name])], parts)
        alone = sum(_read_nbytes(w.box, a, gap_nbytes) for a in found for w in a.wanted)
        if alone > _WORTH * sum(_read_nbytes(a.box, a, gap_nbytes) for a in found):
            areas += found
            together.add(name)
    return ReadPlan(
        frozenset(i for i, (name, _, _) in enumerate(mine) if name not in together),
        areas,
        group.size,
    )


def _areas(entry: TensorEntry, dtype: DType, wanted: Sequence[WantedBox]) -> list[SharedArea]:
    slots = tuple(Slot(w.box, "", 0) for w in wanted)
    plan = plan_transfer(Catalog("", {entry.fqn: entry}), Target("", {}, {entry.fqn: slots}))
    found: dict[int, list[WantedBox]] = {}
    for src, dst, box in plan.tensors[0].overlaps:
        found.setdefault(src, []).append(wanted[dst]._replace(box=box))
    return [
        SharedArea(entry, dtype, entry.chunks[n], _around([w.box for w in parts]), tuple(parts))
        for n, parts in sorted(found.items())
    ]


def _around(boxes: Sequence[Box]) -> Box:
    low = tuple(map(min, zip(*(b.offsets for b in boxes), strict=True)))
    high = tuple(map(max, zip(*(b.ends for b in boxes), strict=True)))
    return Box(low, tuple(h - o for h, o in zip(high, low, strict=True)))


def _read_nbytes(box: Box, area: SharedArea, gap_nbytes: int) -> int:
    """Returns how many bytes a rank reads for a box of a chunk, small holes included."""
    inner, full, itemsize = (
        box.within(area.chunk.box),
        area.chunk.box.sizes,
        area.entry.dtype.itemsize,
    )
    if is_flat(inner, full):
        return box.numel * itemsize
    dim, run = len(full) - 1, 1
    while inner.sizes[dim] == full[dim]:
        run *= full[dim]
        dim -= 1
    if (full[dim] - inner.sizes[dim]) * run * itemsize > gap_nbytes:
        return box.numel * itemsize
    last = Box(tuple(e - 1 for e in inner.ends), (1,) * len(full))
    return (flat_start(last, full) + 1 - flat_start(inner, full)) * itemsize
