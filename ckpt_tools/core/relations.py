"""Relations: which elements two tensors share.

A relation is a grid of elements that lies in both tensors, at strides of its own in each. A rename,
a cut, a stack, a transposition, interleaved rows and rotary heads are all lists of relations. The
inverse of a relation is the same grid with its two sides exchanged.

`assemble` makes a tensor of the elements of others. Only chunks change; no bytes are moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core.box import Box, BoxIndex, row_major_strides
from ckpt_tools.core.catalog import (
    RAW,
    Catalog,
    Chunk,
    ChunkList,
    Extent,
    TensorEntry,
)
from ckpt_tools.core.coverage import cover_error
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.grid import GridPlace, Relation
from ckpt_tools.errors import CatalogError, PlanError, printable

_MAX_PIECES = 1 << 20  # of one tensor


class PiecesError(PlanError):
    """A tensor would consist of too many pieces."""


class Coordinates(NamedTuple):
    """The coordinates of a grid along one dim of a tensor: `start + step · index[axis]`.

    `axis` is None if the coordinate does not move.
    """

    start: int
    step: int = 1
    axis: int | None = None


class SourceIndexes:
    """What `assemble` finds out about the tensors that it takes elements of, by their identity.

    Two optimizers may give a moment the same name. The tensors must live as long as this.
    """

    def __init__(self) -> None:
        self._boxes: dict[int, BoxIndex] = {}
        self._made: dict[int, _Joined] = {}

    def chunks(self, entry: TensorEntry) -> BoxIndex:
        """Returns the index of a tensor's chunks."""
        if id(entry) not in self._boxes:
            self._boxes[id(entry)] = BoxIndex([chunk.box for chunk in entry.chunks])
        return self._boxes[id(entry)]

    def stored(self, entry: TensorEntry) -> _Joined:
        """Returns the parts of stored tensors that a tensor was made of."""
        if id(entry) not in self._made:
            parts = [part for own in entry.relations for part in _boxes(own, entry.shape)]
            self._made[id(entry)] = _Joined(JoinedMemory(entry.shape, parts))
        return self._made[id(entry)]


def assemble(
    fqn: str,
    shape: tuple[int, ...],
    relations: Sequence[Relation],
    entries: Mapping[str, TensorEntry],
    indexes: SourceIndexes | None = None,
    most: int = _MAX_PIECES,
) -> TensorEntry:
    """Returns a tensor that consists of elements of other tensors.

    Args:
        fqn, shape: of the result.
        relations: with the sources on the left and the result on the right. Together they give each
            of its elements once.
        entries: the sources. Their extents must be RAW, unless they are taken whole.
        indexes: pass one for many results of the same sources, and each source is sorted once.
        most: pieces of which the result may consist.

    Raises:
        PlanError: the sources differ in type, have other shapes, or are cut into too many pieces.
    """
    sources = [entries[name] for name in dict.fromkeys(r.left.name for r in relations)]
    first = sources[0]
    of_each = {entry.dtype.name: entry.fqn for entry in reversed(sources)}
    if len(of_each) > 1:
        some = ", ".join(f"{printable(name)} ({dtype})" for dtype, name in of_each.items())
        raise PlanError(f"tensors of different types cannot become one: {some}")
    if len(relations) == 1 and is_whole(relations[0], shape, first.shape):
        return first.named(fqn)
    chunks: list[Chunk] = []
    indexes = SourceIndexes() if indexes is None else indexes
    for relation in relations:
        entry = entries[relation.left.name]
        index = indexes.chunks(entry)
        for sizes, source, target in _aligned(relation, entry.shape, shape):
            chunks += _pieces(entry, index, sizes, source, target)
            if len(chunks) > most:
                raise PiecesError(
                    f"more than {most:,} pieces of {printable(entry.fqn)!r} would become"
                    f" {printable(fqn)!r}"
                )
    made = replace(
        first,
        shape=shape,
        chunks=ChunkList(chunks),
        relations=tuple(_from_stored(relations, entries, indexes)),
        is_computed=any(source.is_computed for source in sources),
    )
    return made.named(fqn)


def _from_stored(
    relations: Iterable[Relation], entries: Mapping[str, TensorEntry], indexes: SourceIndexes
) -> Iterator[Relation]:
    """Returns the relations of the result of `assemble` with stored tensors.

    A tensor that is computed while it is read has none.
    """
    for relation in relations:
        entry = entries[relation.left.name]
        if entry.is_computed or not relation.numel:
            continue
        if entry.relations and not _is_part(entry):
            yield from indexes.stored(entry).through(relation)
            continue
        name, start = entry.stored_name, 0
        if entry.relations:  # a part of a part
            name, start = entry.relations[0].left[:2]
        left = relation.left._replace(name=name, offset=relation.left.offset + start)
        yield relation._replace(left=left)


def _is_part(entry: TensorEntry) -> bool:
    """Tells whether all elements of a tensor follow each other in one stored tensor."""
    return len(entry.relations) == 1 and entry.relations[0].is_stretch


def _boxes(
    relation: Relation, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], StridedView]]:
    """Splits a relation until its right side is a box; returns where that is, and its left side."""
    coords = _coordinates(relation.sizes, relation.right, shape)
    if not isinstance(coords, tuple):
        steps = [coord.axis for coord in coords if coord.axis is not None and coord.step != 1]
        if not steps:
            sizes = tuple(1 if c.axis is None else relation.sizes[c.axis] for c in coords)
            left = relation.left
            strides = tuple(0 if c.axis is None else left.strides[c.axis] for c in coords)
            view = StridedView(left.name, left.offset, sizes, strides)
            yield tuple(coord.start for coord in coords), view
            return
        coords = steps[0], 1
    for part in _split(relation, *coords):
        yield from _boxes(part, shape)


def is_whole(relation: Relation, shape: Sequence[int], other: Sequence[int]) -> bool:
    """Tells whether a relation only gives a tensor another name."""
    if tuple(shape) != tuple(other) or relation.sizes != tuple(shape):
        return False
    strides = row_major_strides(shape)
    return not relation.numel or (
        not relation.left.offset
        and not relation.right.offset
        and relation.left.strides == relation.right.strides == strides
    )


def _pieces(
    entry: TensorEntry,
    index: BoxIndex,
    sizes: Sequence[int],
    source: Sequence[Coordinates],
    target: Sequence[Coordinates],
) -> Iterator[Chunk]:
    """Returns the chunks of the result that take a grid of a source, one per chunk of it."""
    for number in sorted(index.near(_around(sizes, source))):
        chunk = entry.chunks[number]
        found = _within(chunk.box, sizes, source)
        if found is None:
            continue
        lows, highs = found
        yield Chunk(
            Box(
                tuple(r.start + (0 if r.axis is None else lows[r.axis]) for r in target),
                tuple(1 if r.axis is None else highs[r.axis] - lows[r.axis] for r in target),
            ),
            _extent(chunk, entry.dtype.itemsize, source, target, lows, highs),
        )


def _within(
    box: Box, sizes: Sequence[int], coords: Sequence[Coordinates]
) -> tuple[list[int], list[int]] | None:
    """Returns which indices of each axis of a grid lie in a box, as `low <= index < high`.

    Returns None if the box has nothing of the grid.
    """
    if not box.numel:
        return None
    lows, highs = [0] * len(sizes), list(sizes)
    for coord, low, size in zip(coords, box.offsets, box.sizes, strict=True):
        if coord.axis is None:
            if not low <= coord.start < low + size:
                return None
            continue
        lows[coord.axis] = max(0, -(-(low - coord.start) // coord.step))
        highs[coord.axis] = min(highs[coord.axis], -(-(low + size - coord.start) // coord.step))
        if lows[coord.axis] >= highs[coord.axis]:
            return None
    return lows, highs


def _extent(
    chunk: Chunk,
    itemsize: int,
    source: Sequence[Coordinates],
    target: Sequence[Coordinates],
    lows: Sequence[int],
    highs: Sequence[int],
) -> Extent:
    """Returns where the part of a grid between `lows` and `highs` lies in a chunk."""
    own = chunk.extent.strides or row_major_strides(chunk.box.sizes)
    skip, moved = _moved(source, lows, chunk.box.offsets, own)
    strides = [0 if coord.axis is None else moved[coord.axis] for coord in target]
    sizes = [1 if coord.axis is None else highs[coord.axis] - lows[coord.axis] for coord in target]
    span = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    plain = row_major_strides(sizes)
    is_flat = all(n == 1 or s == p for n, s, p in zip(sizes, strides, plain, strict=True))
    # an axis of one element does not move, so any stride fits
    given = tuple(p if n == 1 else s for n, s, p in zip(sizes, strides, plain, strict=True))
    extent = chunk.extent
    is_all = not skip and span * itemsize == extent.nbytes
    return Extent(
        extent.file,
        extent.start + skip * itemsize,
        span * itemsize,
        RAW,
        None if is_flat else given,
        extent.crc32 if is_all else None,
    )


def _moved(
    coords: Sequence[Coordinates],
    lows: Sequence[int],
    offsets: Sequence[int],
    strides: Sequence[int],
) -> tuple[int, list[int]]:
    """Returns where a grid begins in memory that has other strides, and its strides there.

    Args:
        coords: of the grid, in the tensor that lies in the memory.
        lows: the first index of each axis.
        offsets: the coordinates of the memory's first element.
        strides: of the memory, per dim of the tensor.
    """
    skip, moved = 0, [0] * len(lows)
    for coord, low, stride in zip(coords, offsets, strides, strict=True):
        at = coord.start if coord.axis is None else coord.start + lows[coord.axis] * coord.step
        skip += (at - low) * stride
        if coord.axis is not None:
            moved[coord.axis] = coord.step * stride
    return skip, moved


# ---- from strides to dims ------------------------------------------------------------------------

_Aligned = tuple[tuple[int, ...], list[Coordinates], list[Coordinates]]


def _aligned(relation: Relation, left: Sequence[int], right: Sequence[int]) -> Iterator[_Aligned]:
    """Splits a relation until each axis moves along one dim of either tensor.

    On the right, an axis also moves by single coordinates, so that its elements form a box.

    Args:
        relation: its grid lies in both tensors.
        left, right: the shapes of the tensors.
    """
    if not relation.numel:
        return
    found = []
    # the right first: it needs boxes, and what they take from the left may have steps
    for place, shape in ((relation.right, right), (relation.left, left)):
        coords = _coordinates(relation.sizes, place, shape)
        if isinstance(coords, tuple):
            for part in _split(relation, *coords):
                yield from _aligned(part, left, right)
            return
        found.append(coords)
    steps = [coord for coord in found[0] if coord.axis is not None and coord.step != 1]
    if steps:
        assert steps[0].axis is not None
        for part in _split(relation, steps[0].axis, 1):
            yield from _aligned(part, left, right)
        return
    yield relation.sizes, found[1], found[0]


def _coordinates(
    sizes: Sequence[int], place: GridPlace, shape: Sequence[int]
) -> list[Coordinates] | tuple[int, int]:
    """Returns the coordinates of a grid along each dim of a tensor.

    An axis may not move along a single dim, and two axes may move along the same one. Then it
    returns an axis, and how many of its indices stay together: 1 to take each by itself.
    """
    strides, rest = row_major_strides(shape), place.offset
    coords = []
    for stride in strides:
        start, rest = divmod(rest, stride)
        coords.append(Coordinates(start))
    for axis, (size, stride) in enumerate(zip(sizes, place.strides, strict=True)):
        if size == 1:
            continue
        dims = [d for d, s in enumerate(strides) if shape[d] > 1 and stride and stride % s == 0]
        if not dims:
            return axis, 1
        dim = max(dims, key=strides.__getitem__)
        step = stride // strides[dim]
        room = -(-(shape[dim] - coords[dim].start) // step)  # indices that stay in the dim
        if size > room:
            return axis, room if size % room == 0 and not coords[dim].start else 1
        other = coords[dim].axis
        if other is not None:
            return (axis, 1) if stride > place.strides[other] else (other, 1)
        coords[dim] = Coordinates(coords[dim].start, step, axis)
    return coords


def _split(relation: Relation, axis: int, together: int) -> Iterator[Relation]:
    """Splits a grid along an axis: into one part per index, or into two axes of one grid."""
    sizes, left, right = relation
    number = sizes[axis]
    if together > 1:
        outer, inner = number // together, together
        yield Relation(
            (*sizes[:axis], outer, inner, *sizes[axis + 1 :]),
            *(
                GridPlace(
                    name,
                    offset,
                    (*strides[:axis], strides[axis] * inner, strides[axis], *strides[axis + 1 :]),
                )
                for name, offset, strides in (left, right)
            ),
        )
        return
    if number > _MAX_PIECES:
        raise PiecesError(
            f"more than {_MAX_PIECES:,} pieces of {printable(left.name)!r} would become"
            f" {printable(right.name)!r}"
        )
    for index in range(number):
        yield Relation(
            (*sizes[:axis], *sizes[axis + 1 :]),
            *(
                GridPlace(
                    name,
                    offset + index * strides[axis],
                    (*strides[:axis], *strides[axis + 1 :]),
                )
                for name, offset, strides in (left, right)
            ),
        )


# ---- through copies in memory --------------------------------------------------------------------


class StridedView(NamedTuple):
    """A strided view of some memory: `memory` names it; the rest counts elements."""

    memory: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class JoinedMemory(NamedTuple):
    """Memory that was filled with views of other memory, each at a box of its shape."""

    shape: tuple[int, ...]
    parts: Sequence[tuple[tuple[int, ...], StridedView]]


def relations_of(
    name: str, view: StridedView, joined: Mapping[str, JoinedMemory]
) -> list[Relation]:
    """Returns which elements of which tensors a view consists of.

    Args:
        name: of the tensor that the view is.
        view: of the memory of a tensor, or of memory that was filled with views.
        joined: the memory that was filled, by its name; all other memory is that of a tensor.
    """
    place = GridPlace(name, 0, row_major_strides(view.sizes))
    first = Relation(view.sizes, GridPlace(view.memory, view.offset, view.strides), place)
    pending, found, indexed = [first], list[Relation](), dict[str, _Joined]()
    while pending:
        relation = pending.pop()
        memory = joined.get(relation.left.name)
        if memory is None:
            found.append(relation)
            continue
        if relation.left.name not in indexed:
            indexed[relation.left.name] = _Joined(memory)
        for part in indexed[relation.left.name].through(relation):
            pending.append(part)
            if len(pending) > _MAX_PIECES:
                raise PiecesError(
                    f"{printable(name)!r} would consist of more than {_MAX_PIECES:,} pieces"
                )
    return found[::-1]


class _Joined:
    """Memory that was filled with views of other memory, with an index of their boxes."""

    def __init__(self, memory: JoinedMemory) -> None:
        self._shape, self._parts = memory.shape, [part for _, part in memory.parts]
        self._boxes = [Box(offsets, part.sizes) for offsets, part in memory.parts]
        self._index = BoxIndex(self._boxes)

    def through(self, relation: Relation) -> Iterator[Relation]:
        """Returns the parts of a relation, each in the memory that filled its box here.

        Args:
            relation: its left side lies in this memory.
        """
        if not relation.numel:
            return
        coords = _coordinates(relation.sizes, relation.left, self._shape)
        if isinstance(coords, tuple):
            for one in _split(relation, *coords):
                yield from self.through(one)
            return
        sizes, right = relation.sizes, relation.right
        for number in sorted(self._index.near(_around(sizes, coords))):
            box, part = self._boxes[number], self._parts[number]
            found = _within(box, sizes, coords)
            if found is None:
                continue
            lows, highs = found
            skip, strides = _moved(coords, lows, box.offsets, part.strides)
            above = sum(low * s for low, s in zip(lows, right.strides, strict=True))
            yield Relation(
                tuple(h - low for low, h in zip(lows, highs, strict=True)),
                GridPlace(part.memory, part.offset + skip, tuple(strides)),
                GridPlace(right.name, right.offset + above, right.strides),
            )


def _around(sizes: Sequence[int], coords: Sequence[Coordinates]) -> Box:
    """Returns the smallest box that has a grid."""
    spans = [1 if c.axis is None else (sizes[c.axis] - 1) * c.step + 1 for c in coords]
    return Box(tuple(coord.start for coord in coords), tuple(spans))


def check_used_once(relations: Iterable[Relation], shapes: Mapping[str, Sequence[int]]) -> None:
    """Makes sure that relations use each element of the tensors on the left exactly once.

    Args:
        relations: of all tensors.
        shapes: of those on the left that must be used up.

    Raises:
        PlanError: an element is used twice, or not at all.
    """
    used: dict[str, list[Relation]] = {name: [] for name in shapes}
    for relation in relations:
        if relation.left.name in used:
            used[relation.left.name].append(relation)
    for name, found in used.items():
        shape = tuple(shapes[name])
        number, numel = sum(relation.numel for relation in found), math.prod(shape)
        # as many as there are, and each of them: none twice
        error = None if number != numel or not numel else _cover_error(name, shape, found)
        if number != numel or error is not None:
            raise PlanError(
                f"{printable(name)!r} has {numel:,} elements, and {number:,} would be used"
                if number != numel
                else f"an element of {printable(name)!r} would be used twice"
            )


def _cover_error(
    name: str, shape: tuple[int, ...], relations: Sequence[Relation]
) -> CatalogError | None:
    """Returns the error of a tensor in which grids leave a hole."""
    boxes = (
        Box(
            tuple(coord.start for coord in coords),
            tuple(1 if coord.axis is None else sizes[coord.axis] for coord in coords),
        )
        for r in relations
        for sizes, _, coords in _aligned(Relation(r.sizes, r.left, r.left), shape, shape)
    )
    chunks = ChunkList(Chunk(box, Extent("", 0, 0)) for box in boxes)
    return cover_error(Catalog("", {}), TensorEntry(name, BY_NAME["uint8"], shape, chunks))
