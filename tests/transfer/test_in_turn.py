"""On a disk, threads take turns between the files of a target: the same tiles in another order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Plan, Slot, Target, plan_transfer
from ckpt_tools.engine.schedule import Batch, shares
from ckpt_tools.storage.local import LocalStore
from ckpt_tools.transfer.order import batches_for

FLOAT = BY_NAME["float32"]
TILES = (1 << 20, 4 << 20)


def plan_of(shapes: list[tuple[int, ...]], cut: int, files: int, rng: random.Random) -> Plan:
    """Returns the plan of a reshard: each tensor is cut along a dim, into some of the files."""
    entries, slots, sizes = {}, {}, dict.fromkeys((f"f{n}" for n in range(files)), 0)
    for number, shape in enumerate(shapes):
        name, nbytes = f"t{number}", whole(shape).numel * FLOAT.itemsize
        chunks = one_chunk(whole(shape), Extent(f"s{number}", 0, nbytes))
        entries[name] = TensorEntry(name, FLOAT, shape, chunks)
        edges = sorted(rng.sample(range(1, shape[cut]), rng.randrange(min(files, shape[cut]))))
        found = []
        for n, (low, high) in enumerate(zip([0, *edges], [*edges, shape[cut]], strict=True)):
            offsets, dims = [0] * len(shape), list(shape)
            offsets[cut], dims[cut] = low, high - low
            box, file = Box(tuple(offsets), tuple(dims)), f"f{n}"
            found.append(Slot(box, file, sizes[file]))
            sizes[file] += box.numel * FLOAT.itemsize
        slots[name] = tuple(found)
    sizes = {file: nbytes for file, nbytes in sizes.items() if nbytes}
    return plan_transfer(Catalog("test", entries), Target("test", sizes, slots))


def writes(batches: list[Batch]) -> list[tuple[str, int, int]]:
    return [
        (write.file, write.start, write.nbytes)
        for batch in batches
        for tile in batch.tiles
        for write in tile.writes
    ]


@pytest.mark.parametrize("cut", [0, 1])
def test_any_number_of_threads_has_the_same_tiles(cut: int, tmp_path: Path) -> None:
    """So an attempt can be continued with another number of threads, or by several processes."""
    store = LocalStore(tmp_path)
    has_turned = False
    for seed in range(60):
        rng = random.Random(seed)
        shapes = [
            tuple(rng.choice([(700, 900), (1, 2111, 1031), (40, 50, 601)]))
            for _ in range(rng.randrange(1, 6))
        ]
        shapes = [shape for shape in shapes if shape[cut] > 1] or [(700, 900)]
        plan = plan_of(shapes, cut, rng.randrange(1, 7), rng)
        expected = writes(list(batches_for(plan, {}, TILES, store)))
        for jobs in (2, 3, 8):
            found = writes(list(batches_for(plan, {}, TILES, store, jobs=jobs)))
            assert sorted(found) == sorted(expected), (seed, jobs)
            has_turned |= found != expected
        together = [
            write
            for share in shares(plan, 3)
            for write in writes(list(batches_for(plan, {}, TILES, store, share, jobs=4)))
        ]
        assert sorted(together) == sorted(expected), seed
    assert has_turned == (cut == 0)


def test_files_take_turns(tmp_path: Path) -> None:
    plan = plan_of([(4096, 1024)] * 4, 0, 1, random.Random(0))
    slots = {
        fqn: (slot._replace(file=f"f{n}"),)
        for n, (fqn, (slot,)) in enumerate(plan.target.slots.items())
    }
    entries = {t.fqn: TensorEntry(t.fqn, FLOAT, t.shape, t.chunks) for t in plan.tensors}
    target = Target("test", {f"f{n}": 1 << 24 for n in range(4)}, slots)
    plan = plan_transfer(Catalog("test", entries), target)
    found = writes(list(batches_for(plan, {}, TILES, LocalStore(tmp_path), jobs=2)))
    assert [file for file, _, _ in found[:6]] == ["f0", "f2"] * 3
    found = writes(list(batches_for(plan, {}, TILES, LocalStore(tmp_path), jobs=8)))
    assert [file for file, _, _ in found[:8]] == ["f0", "f1", "f2", "f3"] * 2


def test_a_plan_without_files_has_no_batches(tmp_path: Path) -> None:
    plan = plan_transfer(Catalog("test", {}), Target("test", {}, {}))
    assert list(batches_for(plan, {}, TILES, LocalStore(tmp_path), jobs=4)) == []
