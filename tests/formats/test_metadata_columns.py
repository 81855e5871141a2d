"""A `.metadata` of many chunks is read as arrays: whatever comes out must be what the reader of
single objects says.
"""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools.core import coverage as soundness
from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.checksum import LateChecksums
from ckpt_tools.core.chunk_table import ChunkTable
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import plan_overlaps
from ckpt_tools.formats.base import below
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import ItemLocation, TensorMeta, parse_metadata, render
from ckpt_tools.formats.dcp.metadata_columns import read_bulk
from ckpt_tools.storage import LocalStore
from tests.benchmarks.giants import Llama, build
from tests.many_chunks import as_torch_gathers, written


def same(data: bytes) -> bool:
    """Compares both readers; tells whether the quick one took it."""
    plain, found = parse_metadata(data, "test"), read_bulk(data, "test")
    if found is None:
        return False
    metadata, chunks = found
    assert (metadata.objects, metadata.paths, metadata.extras) == (
        plain.objects,
        plain.paths,
        plain.extras,
    )
    assert metadata.places == {key: place for key, place in plain.places.items() if key[1] is None}
    assert list(metadata.tensors) == list(plain.tensors) == list(chunks)
    for fqn, meta in plain.tensors.items():
        assert metadata.tensors[fqn][:2] == meta[:2]
        assert [c.box for c in chunks[fqn]] == list(meta.boxes) and {
            b.sizes for b in chunks[fqn].kinds()
        } == {b.sizes for b in meta.boxes}
        places = [ItemLocation(*plain.places[fqn, box.offsets]) for box in meta.boxes]
        assert [ItemLocation(*c.extent[:3]) for c in chunks[fqn]] == places
    return True


SHAPES = {
    "a.w": (40, 3),
    "b": (70,),
    "scalar": (),
    "c" * 250: (300_000, 70_000, 2),
    "conv": (9, 3, 2, 2),
    "none": (0, 4),
}


@pytest.mark.parametrize("ranks", [5, 40, 1300])
@pytest.mark.parametrize("is_torchs", [False, True])
def test_many_chunks_are_read_as_the_single_ones(ranks: int, is_torchs: bool) -> None:
    data = render(written(SHAPES, ranks), "id")
    assert same(as_torch_gathers(data) if is_torchs else data)


@pytest.mark.parametrize("is_torchs", [False, True])
def test_many_values_may_come_before_the_first_stretch(is_torchs: bool) -> None:
    """Opcodes refer to the first 256 remembered values by one byte, and to later ones by four."""
    scalars: dict[str, tuple[int, ...]] = {f"a{n:03}": () for n in range(300)}
    last: dict[str, tuple[int, ...]] = {f"z{n:03}": (40, n + 1) for n in range(30)}
    data = render(written(scalars | SHAPES | last, 40), "id")
    assert same(as_torch_gathers(data) if is_torchs else data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
        st.lists(st.integers(0, 2**20), max_size=3).map(tuple),
        max_size=6,
    ),
    st.integers(4, 300),
    st.integers(0, 400),
    st.booleans(),
)
def test_whatever_the_shapes_are(
    shapes: dict[str, tuple[int, ...]], ranks: int, num_objects: int, is_torchs: bool
) -> None:
    data = render(
        written({f: s for f, s in shapes.items() if not f.startswith("o.")}, ranks, num_objects),
        "id",
    )
    same(as_torch_gathers(data) if is_torchs else data)


@pytest.mark.slow
def test_the_metadata_of_a_large_job_is_read_so_too(tmp_path: Path) -> None:
    shapes = Llama(6, 64, 128, 4, 2, 512).shapes()
    build(shapes, 128, tmp_path / "run", with_adamw=True)
    data = as_torch_gathers((tmp_path / "run" / ".metadata").read_bytes())
    assert len(data) > dcp._MANY_BYTES and same(data)
    for text in (data, (tmp_path / "run" / ".metadata").read_bytes()):
        (tmp_path / "run" / ".metadata").write_bytes(text)
        found = dcp.read_catalog(LocalStore(tmp_path / "run"))
        assert all(
            isinstance(t.chunks, ChunkTable) == (len(t.chunks) >= dcp.COLUMNS_FROM)
            for t in found.tensors.values()
        )
        assert any(isinstance(t.chunks, ChunkTable) for t in found.tensors.values())
        soundness.check(found)
        plain = {
            f: TensorEntry(f, t.dtype, t.shape, ChunkList(t.chunks))
            for f, t in found.tensors.items()
        }
        entries, objects, _, _ = dcp._read(
            LocalStore(tmp_path / "run"), [".metadata"], LateChecksums()
        )
        assert entries == plain and {f: e[0] for f, e in objects.items()} == {
            f: o.extent for f, o in found.objects.items()
        }
    result = ckpt_tools.merge(tmp_path / "run", tmp_path / "m.safetensors", dry_run=True)
    assert result.num_copies == sum(
        c.box.numel > 0
        for f, t in found.tensors.items()
        if f.startswith("model.")
        for c in t.chunks
    )
    assert (
        result.read_nbytes
        == result.needed_nbytes
        == sum(t.nbytes for f, t in found.tensors.items() if f.startswith("model."))
    )


def test_what_real_jobs_have_written_is_read_so_too(saved: Callable[[int], Path]) -> None:
    taken = {path.parent.name: same(path.read_bytes()) for path in saved(4).glob("*/.metadata")}
    assert taken["adamw"], taken


def test_what_is_odd_is_left_to_the_usual_reader() -> None:
    data = render(written(SHAPES, 40), "id")
    assert read_bulk(pickle.dumps(pickle.loads(data), 2), "test") is None  # other opcodes
    framed = as_torch_gathers(data)
    # a frame in the middle of an object
    assert read_bulk(framed[:3] + struct.pack("<Q", 5) + framed[11:], "test") is None
    for change in ("place", "offset", "dims"):
        odd = written(SHAPES, 40)
        (fqn, offsets), place = next(
            (k, p) for k, p in odd.places.items() if k[0] == "b" and k[1] != (0,)
        )
        if change == "place":
            del odd.places[fqn, offsets]
        elif change == "dims":
            odd.tensors[fqn] = TensorMeta("float32", (70, 1), odd.tensors[fqn].boxes)
        else:
            odd.tensors["b"] = TensorMeta(
                "float32", (70,), [Box((71,), (1,)), *odd.tensors["b"].boxes]
            )
            odd.places["b", (71,)] = place
        assert read_bulk(render(odd, "id"), "test") is None


def many(boxes: list[Box], starts: list[int], nbytes: list[int], files: list[str]) -> ChunkTable:
    """The same chunks as arrays."""
    import numpy as np

    names = tuple(dict.fromkeys([*files, "other"]))
    dims = len(boxes[0].offsets)
    table = np.array([[*b.offsets, *b.sizes] for b in boxes], np.int64).reshape(
        len(boxes), 2 * dims
    )
    numbers = np.array([names.index(f) for f in files], np.int32)
    return ChunkTable(
        table[:, :dims],
        table[:, dims:],
        names,
        numbers,
        np.array(starts, np.int64),
        np.array(nbytes, np.int64),
    )


cuts = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.tuples(st.integers(0, 12), st.integers(1, 3)),
    st.integers(0, 1),
    cuts,
    cuts,
    st.randoms(use_true_random=False),
)
def test_arrays_answer_as_single_chunks_do(
    shape: tuple[int, int], dim: int, sources: list[int], targets: list[int], rng: random.Random
) -> None:
    def boxes(edges: list[int], *along: int) -> list[Box]:
        found = [whole(shape)]
        for dim in along:
            cuts = [0, *sorted(min(e, shape[dim]) for e in edges), shape[dim]]
            found = [
                Box(
                    (*b.offsets[:dim], low, *b.offsets[dim + 1 :]),
                    (*b.sizes[:dim], high - low, *b.sizes[dim + 1 :]),
                )
                for b in found
                for low, high in pairwise(cuts)
            ]
        rng.shuffle(found)
        return found[: rng.choice((len(found), len(found), max(1, len(found) - 1)))]

    chunks = [
        Chunk(
            box,
            Extent(
                rng.choice("fg"), at * rng.choice((9, 40)), box.numel * rng.choice((4, 4, 4, 2))
            ),
        )
        for at, box in enumerate(boxes(sources, *rng.choice(((dim,), (0, 1)))))
    ]
    array = many(
        [c.box for c in chunks],
        [c.extent.start for c in chunks],
        [c.extent.nbytes for c in chunks],
        [c.extent.file for c in chunks],
    )
    assert (
        list(array) == chunks == list(array[:])
        and [array[i] for i in range(len(array))] == chunks
        and array == tuple(chunks)
    )
    aims = boxes(targets, rng.choice((dim, 1 - dim)))
    copies = array.overlaps(aims)
    if copies is not None:
        assert sorted(copies) == sorted(plan_overlaps([c.box for c in chunks], aims))
        assert copies.numel == sum(c.box.numel for c in copies) and copies.sources() == sorted(
            {c.src for c in copies}
        )
    single, arrays = (
        [
            str(f.error)
            for f in soundness.flaws(
                Catalog(
                    "x",
                    {"t": TensorEntry("t", BY_NAME["float32"], shape, c)},
                    file_sizes={"f": 300, "g": 300},
                )
            )
        ]
        for c in (ChunkList(chunks), array)
    )
    assert single == arrays
    assert not array.covers(shape) or not [e for e in single if "hole" in e or "overlap" in e]


def test_arrays_are_compared_and_counted() -> None:
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    array = many(boxes, [0, 24], [24, 24], ["f", "g"])
    assert (
        array
        == many(boxes, [0, 24], [24, 24], ["f", "g"])
        != many(boxes, [0, 25], [24, 24], ["f", "g"])
    )
    assert hash(array) == hash(
        many(boxes, [0, 24], [24, 24], ["f", "g"])
    ) and array.file_names() == {"f", "g"}
    assert array.covers((4, 3)) and not array.covers((5, 3)) and not array.covers((4, 3, 1))
    assert array.are_apart([array, array], []) and not array.are_apart(
        [array], [Extent("g", 47, 2)]
    )
    assert whole((4, 3)).numel == sum(c.box.numel for c in array)


def test_chunks_of_a_folder_stay_arrays() -> None:
    boxes = [Box((i,), (1,)) for i in range(20)]
    catalog = Catalog(
        "x",
        {"w": TensorEntry("w", BY_NAME["float32"], (20,), Untouched.of(boxes))},
        file_sizes={"f": 80, "other": 0},
    )
    one, two = below(catalog, "model", "model."), below(catalog, "optimizer", "optimizer.")
    both = Catalog(
        "x", {**one.tensors, **two.tensors}, file_sizes={**one.file_sizes, **two.file_sizes}
    )
    assert both.tensors["optimizer.w"].chunks[3] == Chunk(boxes[3], Extent("optimizer/f", 12, 4))
    assert list(soundness.flaws(both)) == []
    clash = Catalog(
        "x",
        {
            **one.tensors,
            "b": replace(one.tensors["model.w"], fqn="b", chunks=Untouched.of(boxes, 2)),
        },
        file_sizes=both.file_sizes,
    )
    # one file under two tables is not proved by arrays
    assert clash.tensors["b"].chunks.names != one.tensors["model.w"].chunks.names
    clash.tensors["b"].chunks.names = (*one.tensors["model.w"].chunks.names,)
    with pytest.raises(AssertionError, match="an object was made"):
        list(soundness.flaws(clash))


class Untouched(ChunkTable):
    """Chunks of which nobody makes an object each."""

    @staticmethod
    def of(boxes: list[Box], first: int = 0) -> Untouched:
        found = many(
            boxes, [first + 4 * i for i in range(len(boxes))], [4] * len(boxes), ["f"] * len(boxes)
        )
        return Untouched(
            *(
                getattr(found, name)
                for name in ("offsets", "sizes", "names", "files", "starts", "nbytes")
            )
        )

    def under(self, renamed: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Untouched:
        names = renamed(self.names)
        return Untouched(self.offsets, self.sizes, names, self.files, self.starts, self.nbytes)

    def __iter__(self) -> Iterator[Chunk]:
        raise AssertionError("an object was made of every chunk")


def test_few_chunks_beside_many_do_not_make_the_proof_of_many_slow() -> None:
    arrays = Untouched.of([Box((i,), (1,)) for i in range(64)])
    step = Chunk(Box((), ()), Extent("f", 256, 4))
    entries = {
        "w": TensorEntry("w", BY_NAME["float32"], (64,), arrays),
        "step": TensorEntry("step", BY_NAME["float32"], (), ChunkList((step,))),
    }
    assert list(soundness.flaws(Catalog("x", entries, file_sizes={"f": 260}))) == []
    clash = TensorEntry(
        "step", BY_NAME["float32"], (), ChunkList((step._replace(extent=Extent("f", 254, 4)),))
    )
    # what is wrong is looked into chunk by chunk
    with pytest.raises(AssertionError, match="an object was made"):
        list(soundness.flaws(Catalog("x", entries | {"step": clash}, file_sizes={"f": 260})))
