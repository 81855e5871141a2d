"""Relations between tensors, compared with NumPy: views, copies, joins, and their inverses."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from ckpt_tools.core.box import Box, row_major_strides
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.grid import GridPlace, Relation, same_elements
from ckpt_tools.core.relations import (
    JoinedMemory,
    StridedView,
    assemble,
    check_used_once,
    relations_of,
)
from ckpt_tools.errors import PlanError

INT64 = BY_NAME["int64"]


class Numpy:
    """Arrays, and what memory they are views of."""

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}
        self.joined: dict[str, JoinedMemory] = {}
        self.views: list[np.ndarray] = []

    def source(self, name: str, shape: Sequence[int], first: int) -> np.ndarray:
        self.memory[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
        return self.memory[name]

    def view(self, array: np.ndarray) -> StridedView:
        """Returns which memory an array is a view of."""
        at = array.__array_interface__["data"][0]
        for name, memory in self.memory.items():
            start = memory.__array_interface__["data"][0]
            if start <= at < start + memory.nbytes:
                strides = tuple(stride // 8 for stride in array.strides)
                return StridedView(name, (at - start) // 8, array.shape, strides)
        raise AssertionError("a copy that nobody noted")

    def join(self, arrays: Sequence[np.ndarray], dim: int) -> np.ndarray:
        made = np.ascontiguousarray(np.concatenate(arrays, axis=dim))
        starts = np.cumsum([0, *[a.shape[dim] for a in arrays]])
        parts = [
            (tuple(int(start) if d == dim else 0 for d in range(made.ndim)), self.view(array))
            for start, array in zip(starts, arrays, strict=False)
        ]
        name = f"made {len(self.memory)}"
        self.memory[name], self.joined[name] = made, JoinedMemory(made.shape, parts)
        return made


def stored(name: str, array: np.ndarray, rng: random.Random, file: bytearray) -> TensorEntry:
    """Returns an entry with the array in chunks, some of them transposed, behind others in a file."""
    boxes = [Box((0,) * array.ndim, array.shape)]
    for _ in range(rng.randrange(4)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, box.sizes[dim])
        low, high = list(box.sizes), list(box.sizes)
        low[dim], high[dim] = at, box.sizes[dim] - at
        offsets = list(box.offsets)
        offsets[dim] += at
        boxes += [Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))]
    chunks = []
    for box in boxes:
        order = list(range(array.ndim))
        if rng.random() < 0.3:
            rng.shuffle(order)
        piece = np.ascontiguousarray(array[box.slices()].transpose(order))
        strides = [0] * array.ndim
        for dim, stride in zip(order, row_major_strides(piece.shape), strict=True):
            strides[dim] = stride
        flat = tuple(strides) == row_major_strides(box.sizes)
        extent = Extent("f", len(file), piece.nbytes, strides=None if flat else tuple(strides))
        chunks.append(Chunk(box, extent))
        file += piece.tobytes()
    return TensorEntry(name, INT64, array.shape, ChunkList(chunks))


def values(entry: TensorEntry, file: bytes) -> np.ndarray:
    """Returns what an entry says, read with NumPy alone."""
    result = np.full(entry.shape, -1)
    for box, extent in entry.chunks:
        flat = np.frombuffer(file, np.int64, extent.nbytes // 8, extent.start)
        strides = extent.strides or row_major_strides(box.sizes)
        result[box.slices()] = np.lib.stride_tricks.as_strided(
            flat, box.sizes, [8 * s for s in strides]
        )
    return result


def random_targets(numpy: Numpy, arrays: list[np.ndarray], rng: random.Random) -> list[np.ndarray]:
    """Cuts, joins, transposes and reorders arrays; each element stays in exactly one of them."""
    for _ in range(rng.randrange(1, 6)):
        array = arrays.pop(rng.randrange(len(arrays)))
        dim = rng.randrange(array.ndim)
        size = array.shape[dim]
        kind = rng.choice(["chunk", "unbind", "transpose", "interleave", "join", "copy", "heads"])
        if kind == "chunk" and size > 1:
            arrays += np.array_split(array, rng.randrange(1, size + 1), axis=dim)
        elif kind == "unbind" and array.ndim > 1:
            arrays += [array[(slice(None),) * dim + (n,)] for n in range(size)]
        elif kind == "transpose":
            arrays.append(array.swapaxes(dim, rng.randrange(array.ndim)))
        elif kind == "interleave" and size % 2 == 0:
            index = (slice(None),) * dim
            arrays += [array[(*index, slice(k, None, 2))] for k in range(2)]
        elif kind == "join":
            fit = [
                a
                for a in arrays
                if a.ndim == array.ndim
                and all(a.shape[d] == array.shape[d] for d in range(a.ndim) if d != dim)
            ]
            arrays = [a for a in arrays if not any(a is f for f in fit)]
            arrays.append(numpy.join([array, *fit], dim))
        elif kind == "heads" and array.ndim == 2 and array.shape[0] % 4 == 0:
            # rotary heads: pairs become halves, by way of a copy
            rows, width = array.shape
            plain = numpy.join([array], 0)
            arrays.append(
                numpy.join([plain.reshape(2, rows // 4, 2, width).swapaxes(1, 2)], 0).reshape(
                    rows, width
                )
            )
        else:
            arrays.append(numpy.join([array], dim))
        numpy.views += arrays
    return arrays


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_compositions_and_their_inverses(first: int) -> None:
    for seed in range(first, first + 100):
        rng, numpy, file = random.Random(seed), Numpy(), bytearray()
        shapes = [
            tuple(rng.choice([1, 2, 3, 4, 8]) for _ in range(rng.randrange(1, 4)))
            for _ in range(rng.randrange(1, 4))
        ]
        sources = {f"s{n}": numpy.source(f"s{n}", s, 10_000 * n) for n, s in enumerate(shapes)}
        entries = {name: stored(name, a, rng, file) for name, a in sources.items()}
        targets = random_targets(numpy, list(sources.values()), rng)
        related: dict[str, list[Relation]] = {}
        for number, array in enumerate(targets):
            related[f"t{number}"] = relations_of(f"t{number}", numpy.view(array), numpy.joined)
        every = [r for found in related.values() for r in found]
        check_used_once(every, {name: a.shape for name, a in sources.items()})
        made = {
            name: assemble(name, targets[n].shape, found, entries)
            for n, (name, found) in enumerate(related.items())
        }
        catalog = Catalog("test", made, file_sizes={"f": len(file)})
        check(catalog, shares=True)
        for number, entry in enumerate(made.values()):
            assert np.array_equal(values(entry, bytes(file)), targets[number]), seed
        # the same relations from the other side
        other, back = bytearray(), [r.inverse() for r in every]
        written = {name: stored(name, targets[n], rng, other) for n, name in enumerate(related)}
        check_used_once(back, {name: targets[n].shape for n, name in enumerate(related)})
        for name, array in sources.items():
            mine = [r for r in back if r.right.name == name]
            entry = assemble(name, array.shape, mine, written)
            check(Catalog("test", {name: entry}, file_sizes={"f": len(other)}), shares=True)
            assert np.array_equal(values(entry, bytes(other)), array), seed


def places(sizes: Sequence[int], place: GridPlace) -> np.ndarray:
    """Returns the elements of a grid, by their numbers in row-major order of the tensor."""
    found = np.full(tuple(sizes), place.offset)
    for axis, (size, stride) in enumerate(zip(sizes, place.strides, strict=True)):
        shape = [1] * len(sizes)
        shape[axis] = size
        found = found + (np.arange(size) * stride).reshape(shape)
    return found.ravel()


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_relations_with_stored_tensors_follow_from_several_steps(first: int) -> None:
    """Each step takes the tensors that the step before has made, under names of stored ones."""
    for seed in range(first, first + 100):
        rng, file = random.Random(seed), bytearray()
        shapes = [
            tuple(rng.choice([1, 2, 3, 4, 8]) for _ in range(rng.randrange(1, 4)))
            for _ in range(rng.randrange(1, 4))
        ]
        sources = {f"s{n}": Numpy().source("", s, 10_000 * n) for n, s in enumerate(shapes)}
        entries = {name: stored(name, a, rng, file) for name, a in sources.items()}
        arrays = dict(sources)
        for step in range(rng.randrange(1, 4)):
            numpy = Numpy()
            for name, array in arrays.items():
                numpy.memory[name] = np.ascontiguousarray(array)
            targets = random_targets(numpy, [numpy.memory[name] for name in arrays], rng)
            related = {
                f"s{n}": relations_of(f"s{n}", numpy.view(array), numpy.joined)
                for n, array in enumerate(reversed(targets) if step else targets)
            }
            arrays = dict(zip(related, reversed(targets) if step else targets, strict=True))
            entries = {
                name: assemble(name, arrays[name].shape, found, entries)
                for name, found in related.items()
            }
        used = dict.fromkeys(sources, 0)
        for name, entry in entries.items():
            assert np.array_equal(values(entry, bytes(file)), arrays[name]), seed
            got = np.full(arrays[name].size, -1)
            whole = same_elements(entry.stored_name, name, entry.shape)
            for relation in entry.relations or (whole,):
                origin = sources[relation.left.name].ravel()
                used[relation.left.name] += relation.numel
                right = places(relation.sizes, relation.right)
                assert (got[right] == -1).all(), seed  # no element has two origins
                got[right] = origin[places(relation.sizes, relation.left)]
            assert np.array_equal(got, arrays[name].ravel()), seed
        assert used == {name: array.size for name, array in sources.items()}, seed


def grid(sizes: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> Relation:
    return Relation(sizes, GridPlace("a", 0, left), GridPlace("b", 0, right))


@pytest.mark.parametrize(
    ("relations", "told"),
    [
        ([grid((3, 4), (4, 1), (4, 1))], "has 16 elements, and 12 would be used"),
        ([grid((4, 4), (4, 1), (4, 1)), grid((1,), (1,), (1,))], "and 17 would be used"),
        ([grid((4, 4), (0, 1), (4, 1))], "used twice"),
        ([grid((2, 8), (8, 1), (8, 1)), grid((0,), (1,), (1,))], ""),
        ([grid((2, 4), (4, 1), (4, 1)), grid((2, 4), (4, 1), (4, 1))], "used twice"),
        ([], "and 0 would be used"),
    ],
)
def test_each_element_is_used_once(relations: list[Relation], told: str) -> None:
    shapes: Mapping[str, Sequence[int]] = {"a": (4, 4)}
    if not told:
        check_used_once(relations, shapes)
        return
    with pytest.raises(PlanError, match=told):
        check_used_once(relations, shapes)


def test_too_many_pieces_are_refused() -> None:
    number = 1 << 21
    entry = TensorEntry(
        "a",
        INT64,
        (number * 2,),
        ChunkList([Chunk(Box((0,), (number * 2,)), Extent("f", 0, number * 16))]),
    )
    with pytest.raises(PlanError, match="more than 1,048,576 pieces"):
        assemble(
            "b",
            (number * 2,),
            [Relation((number, 2), GridPlace("a", 0, (1, number)), GridPlace("b", 0, (2, 1)))],
            {"a": entry},
        )


def test_types_that_differ_are_refused() -> None:
    entries = {
        name: TensorEntry(
            name, BY_NAME[dtype], (2,), ChunkList([Chunk(Box((0,), (2,)), Extent("f", 0, 4))])
        )
        for name, dtype in (("a", "float16"), ("c", "bfloat16"))
    }
    relations = [
        Relation((2,), GridPlace("a", 0, (1,)), GridPlace("b", 0, (1,))),
        Relation((2,), GridPlace("c", 0, (1,)), GridPlace("b", 2, (1,))),
    ]
    with pytest.raises(PlanError, match=r"c \(bfloat16\), a \(float16\)"):
        assemble("b", (4,), relations, entries)
