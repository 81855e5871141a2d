"""Plan, schedule and run against numpy: any split to any split, in a budget, every byte once."""

import numpy as np
import pytest
import torch
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.box import Box, row_major_strides, whole
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Literal, Slot, Target, plan_overlaps, plan_transfer
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.kernels import cast
from ckpt_tools.engine.schedule import schedule
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import StorageError
from ckpt_tools.storage import MemoryStore
from tests.core.painting import painted
from tests.strategies import full_shapes, shapes, tilings

DTYPES = {"uint8": "u1", "float16": "f2", "float32": "f4", "int64": "i8", "complex128": "c16"}


@given(full_shapes, st.data())
def test_copies_tile_every_target_exactly(shape: tuple[int, ...], data: st.DataObject) -> None:
    src, dst = data.draw(tilings(shape)), data.draw(tilings(shape))
    copies = plan_overlaps(src, dst)
    for number, box in enumerate(dst):
        assert (
            painted(shape, [c.box for c in copies if c.dst == number]) == painted(shape, [box])
        ).all()
    assert all(c.box.intersect(src[c.src]) == c.box for c in copies)


def source(
    values: np.ndarray, boxes: list[Box], dtype: str, order: list[int]
) -> tuple[MemoryStore, Catalog]:
    """A store with the chunks of an array, dims of each chunk laid out in `order`: strided where
    that is not row-major.
    """
    data, chunks = bytearray(b"junk"), []
    for box in boxes:
        part = np.ascontiguousarray(values[box.slices()].transpose(order))
        strides = np.empty(len(order), int)
        strides[order] = row_major_strides(part.shape)
        is_plain = order == sorted(order)
        extent = Extent(
            "f",
            len(data),
            part.nbytes,
            strides=None if is_plain else tuple(int(s) for s in strides),
        )
        chunks.append(Chunk(box, extent))
        data += part.tobytes()
    entry = TensorEntry("w", BY_NAME[dtype], values.shape, ChunkList(chunks))
    return MemoryStore({"f": data}), Catalog("test", {"w": entry}, file_sizes={"f": len(data)})


@settings(max_examples=300)
@given(shapes, st.sampled_from(sorted(DTYPES)), st.integers(16, 400), st.integers(1, 3), st.data())
def test_any_split_becomes_any_other_bit_for_bit(
    shape: tuple[int, ...], dtype: str, tile: int, jobs: int, data: st.DataObject
) -> None:
    values = (
        np.random.default_rng(0)
        .integers(0, 255, (*shape, np.dtype(DTYPES[dtype]).itemsize), np.uint8)
        .view(DTYPES[dtype])[..., 0]
    )
    order = data.draw(st.permutations(range(len(shape))))
    store, catalog = source(values, data.draw(tilings(shape)), dtype, list(order))
    check(catalog)
    slots, at = [], 3
    for box in data.draw(tilings(shape)):
        slots.append(Slot(box, "out", at))
        at += box.numel * values.itemsize
    target = Target("test", {"out": at}, {"w": tuple(slots)}, (Literal("out", 0, b"abc"),))
    steps = list(schedule(plan_transfer(catalog, target), {}, tile, tile))
    assert all(sum(t.dst_nbytes for t in s.tiles) <= tile or len(s.tiles) == 1 for s in steps)
    assert all(t.dst_nbytes <= max(tile, values.itemsize) for s in steps for t in s.tiles)
    assert all(
        r.nbytes <= 2 * r.box.numel * values.itemsize
        for s in steps
        for t in s.tiles
        for r in t.reads
    )
    out = MemoryStore()
    sink = WriteSink(target, out)
    sink.open()
    totals = execute_batches(steps, store, sink, jobs)
    checksums = sink.finish()
    written = bytes(out.files["out"])
    assert written[:3] == b"abc"
    for slot in slots:
        want = np.ascontiguousarray(values[slot.box.slices()]).tobytes()
        assert written[slot.start : slot.start + len(want)] == want
    assert checksums["out"] == crc64nvme(written)
    assert totals.written_nbytes == values.nbytes
    if values.size:
        assert sink.fingerprints.join()["w"] == crc64nvme(np.ascontiguousarray(values).tobytes())


@given(full_shapes, st.integers(1, 5), st.data())
def test_a_plan_of_one_rank_reads_no_more_than_it_needs_along_the_same_dim(
    shape: tuple[int, ...], ranks: int, data: st.DataObject
) -> None:
    if not shape:
        return
    rows = [Box((i, *(0,) * (len(shape) - 1)), (1, *shape[1:])) for i in range(shape[0])]
    _, catalog = source(np.zeros(shape, "f4"), rows, "float32", list(range(len(shape))))
    mine = Box((0,) * len(shape), (-(-shape[0] // ranks), *shape[1:]))
    target = Target("test", {"out": mine.numel * 4}, {"w": (Slot(mine, "out", 0),)})
    plan = plan_transfer(catalog, target)
    assert (
        sum(s.read_nbytes for s in schedule(plan, {}, 64, 64))
        == plan.payload_bytes
        == mine.numel * 4
    )


def test_a_hole_in_the_source_never_becomes_uninitialised_memory() -> None:
    from ckpt_tools.errors import CatalogError

    store, catalog = source(np.zeros((4,), "f4"), [Box((0,), (2,))], "float32", [0])
    target = Target("test", {"out": 16}, {"w": (Slot(whole((4,)), "out", 0),)})
    sink = WriteSink(target, MemoryStore())
    sink.open()
    with pytest.raises(CatalogError, match="no source"):
        execute_batches(schedule(plan_transfer(catalog, target), {}, 64, 64), store, sink, 1)


def test_a_file_that_is_not_written_in_full_is_not_finished() -> None:
    target = Target("test", {"out": 16}, {})
    sink = WriteSink(target, MemoryStore())
    sink.open()
    with pytest.raises(StorageError, match="not written in full"):
        sink.finish()


class Breaking(MemoryStore):
    """A store whose third read fails, as a disk's might."""

    reads = 0

    def view(self, path: str, start: int, nbytes: int) -> None:  # type: ignore[override]
        """A disk's files do not lie in memory."""

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.reads += 1
        if self.reads == 3:
            raise StorageError("cannot read: I/O error (f)")
        buffer[:] = super().view(path, start, len(buffer))


@pytest.mark.parametrize("jobs", [1, 4])
def test_the_first_error_of_any_thread_is_the_one_that_is_raised(jobs: int) -> None:
    store, catalog = source(np.zeros((64, 64), "f4"), [whole((64, 64))], "float32", [0, 1])
    target = Target("test", {"out": 64 * 64 * 4}, {"w": (Slot(whole((64, 64)), "out", 0),)})
    sink = WriteSink(target, MemoryStore())
    sink.open()
    with pytest.raises(StorageError, match="I/O error"):
        execute_batches(
            schedule(plan_transfer(catalog, target), {}, 256, 256),
            Breaking(store.files),
            sink,
            jobs,
        )


FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of a 16-bit type; a million random ones, and the edges, of a wider one."""
    if name in ("float16", "bfloat16"):
        return (
            torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(FLOATS[name])
        )
    bits = torch.int32 if name == "float32" else torch.int64
    random = (
        torch.randint(-(1 << 31), 1 << 31, (1 << 20,))
        if bits is torch.int32
        else torch.randint(-(1 << 62), 1 << 62, (1 << 20,))
    )
    edges = torch.tensor(
        [
            0.0,
            -0.0,
            float("inf"),
            -float("inf"),
            float("nan"),
            65504.0,
            65519.9,
            65520.0,
            3.3895e38,
            3.4e38,
            1e-45,
            6e-8,
        ]
    )
    return torch.cat([random.to(bits).view(FLOATS[name]), edges.to(FLOATS[name])])


@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("dst", FLOATS)
def test_casts_round_as_torch_does_and_count_overflow(src: str, dst: str) -> None:
    if src == dst:
        return
    values = patterns(src)
    want = (
        values.to(torch.float32).to(FLOATS[dst]) if dst != "float64" else values.to(torch.float64)
    )
    raw = np.frombuffer(values.view(torch.uint8).numpy().tobytes(), np.uint8)
    into = np.empty(values.numel() * BY_NAME[dst].itemsize, np.uint8)
    overflowed = cast(raw, BY_NAME[src], into, BY_NAME[dst])
    got = torch.frombuffer(bytearray(into.tobytes()), dtype=FLOATS[dst])
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan)
    words = torch.int16 if got.itemsize == 2 else torch.int32 if got.itemsize == 4 else torch.int64
    assert torch.equal(got.view(words)[~nan], want.view(words)[~nan])
    assert overflowed == int((torch.isinf(want) & torch.isfinite(values)).sum())


def test_a_tile_is_never_larger_than_one_element_or_the_budget() -> None:
    _, catalog = source(np.zeros((3, 1000), "c16"), [whole((3, 1000))], "complex128", [0, 1])
    target = Target("test", {"out": 48000}, {"w": (Slot(whole((3, 1000)), "out", 0),)})
    for tile in (1, 16, 100, 16000):
        assert max(
            t.dst_nbytes
            for s in schedule(plan_transfer(catalog, target), {}, tile, tile)
            for t in s.tiles
        ) <= max(16, tile)
