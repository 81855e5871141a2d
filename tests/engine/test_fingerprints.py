"""Fingerprints come together from any boxes that tile a tensor: the exclusive-or of their shares is
the CRC-64 of the whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.box import Box, flat_start, is_flat
from ckpt_tools.engine.fingerprints import (
    Fingerprints,
    HashedRange,
    HashedRanges,
    TensorHashes,
    deal_rows,
    join_rows,
    share_of,
    share_rows,
)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """A shape, the bytes of an element, and along each dim where it is cut."""
    shape = draw(
        st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda s: np.prod(s) < 100_000)
    )
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    return shape, draw(st.sampled_from([1, 2, 4, 8, 16])), cuts


@given(tilings(), st.integers(0, 2**32))
def test_shares_of_boxes_make_the_fingerprint_of_the_whole(
    tiling: tuple[list[int], int, list[list[int]]], seed: int
) -> None:
    shape, itemsize, cuts = tiling
    full = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), np.uint8)
    found = 0
    for corner in itertools.product(*(range(len(c) - 1) for c in cuts)):
        low = tuple(c[i] for c, i in zip(cuts, corner, strict=True))
        box = Box(low, tuple(c[i + 1] - o for c, i, o in zip(cuts, corner, low, strict=True)))
        found ^= share_of(
            np.ascontiguousarray(full[box.slices()]).reshape(-1), box, tuple(shape), itemsize
        )
    assert found == crc64nvme(full.tobytes())


@given(
    st.lists(tilings(), min_size=1, max_size=4),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.integers(0, 2**32),
    st.sampled_from(["", "", "missing", "wrong", "overlap"]),
)
def test_the_notes_of_many_ranks_make_the_fingerprints(
    tensors: list[tuple[list[int], int, list[list[int]]]],
    mesh: tuple[int, int],
    seed: int,
    fault: str,
) -> None:
    """Each part belongs to one rank of each replica. A fault is in the first tensor only."""
    rng, (num_replicas, num_owners) = np.random.default_rng(seed), mesh
    ranks = [[TensorHashes({}, {}, {}) for _ in range(num_owners)] for _ in range(num_replicas)]
    expected, is_faulty, sizes = {}, False, []
    for number, (shape, itemsize, cuts) in enumerate(tensors):
        full = rng.integers(0, 256, (*shape, itemsize), np.uint8)
        expected[number], name = crc64nvme(full.tobytes()), f"t{number}"
        sizes.append(full.size)
        for corner in itertools.product(*(range(len(c) - 1) for c in cuts)):
            low = tuple(c[i] for c, i in zip(cuts, corner, strict=True))
            box = Box(low, tuple(c[i + 1] - o for c, i, o in zip(cuts, corner, low, strict=True)))
            data = np.ascontiguousarray(full[box.slices()]).reshape(-1)
            is_first = number == 0 and not any(corner)
            start, at = flat_start(box, tuple(shape)) * itemsize, is_flat(box, tuple(shape))
            if is_first and fault == "missing":
                is_faulty = True
                continue
            owner = rng.integers(num_owners)
            for replica in ranks:
                hashes = replica[owner]
                table = hashes.pieces if at else hashes.shares
                crc = crc64nvme(data) if at else share_of(data, box, tuple(shape), itemsize)
                found = table.setdefault(name, HashedRanges())
                found.append(HashedRange(start, len(data), crc, 0))
                hashes.sizes[name] = full.size
                if is_first and fault == "wrong" and replica is ranks[0]:
                    found.append(HashedRange(start, len(data), crc ^ 1, 0))
                    is_faulty = True
                if is_first and fault == "overlap" and at and len(data) > 1:
                    found.append(HashedRange(start + 1, len(data) - 1, crc, 0))
                    is_faulty = True
    numbers = {f"t{number}": number for number in expected}
    rows = np.concatenate([share_rows(hashes, numbers) for hashes in itertools.chain(*ranks)])
    joined, differing = join_rows(rows, np.array(sizes, np.uint64))
    for size in (1, 2, 3, 7):  # each rank joins a share of the tensors
        dealt = [deal_rows(part, size) for part in np.array_split(rows, 3)]
        found = [
            join_rows(
                np.concatenate([parts[rank] for parts in dealt]),
                np.array(sizes[rank::size], np.uint64),
            )
            for rank in range(size)
        ]
        assert joined == {
            number * size + rank: crc
            for rank, mine in enumerate(found)
            for number, crc in mine.fingerprints.items()
        }
        assert differing == {
            number * size + rank for rank, mine in enumerate(found) for number in mine.differing
        }
    assert differing <= ({0} if is_faulty else set())
    if is_faulty:  # nothing is known of it, or nothing was noted
        assert joined.pop(0, None) is None
        del expected[0]
    assert joined == expected


@pytest.mark.parametrize("columns", [1, 7, 64, 255, 256, 300, 4096])
def test_short_and_long_runs(columns: int) -> None:
    """Runs of few bytes take another way than those of many."""
    full: Any = np.random.default_rng(columns).integers(0, 256, (77, columns * 3), np.uint8)
    boxes = [Box((0, part * columns), (77, columns)) for part in range(3)]
    shares = [
        share_of(np.ascontiguousarray(full[b.slices()]).reshape(-1), b, full.shape, 1)
        for b in boxes
    ]
    assert shares[0] ^ shares[1] ^ shares[2] == crc64nvme(full.tobytes())


def test_parts_with_a_hole_and_an_overlap_prove_nothing() -> None:
    parts = [HashedRange(0, 4, 1, 0), HashedRange(2, 4, 2, 0)]  # eight bytes, as the tensor has
    rows = share_rows(TensorHashes({"t": HashedRanges(parts)}, {}, {"t": 8}), {"t": 0})
    assert join_rows(rows, np.array([8], np.uint64)) == ({0: None}, set())


@pytest.mark.parametrize("sizes", [(0, 0), (7, 7), (7, 9)])
def test_two_ranks_that_read_other_bytes_of_one_part(sizes: tuple[int, int]) -> None:
    """A part that is not contiguous has the checksum of its sizes: others may begin where it does."""
    whole = {"t": HashedRanges([HashedRange(4, 4, 9, 0)])}
    rows = [share_rows(TensorHashes(whole, {}, {"t": 8}), {"t": 0})]
    for crc, kind in zip((1, 2), sizes, strict=True):
        part = {"t": HashedRanges([HashedRange(0, 4, crc, kind)])}
        pieces, shares = ({}, part) if kind else (part, {})
        rows.append(share_rows(TensorHashes(pieces, shares, {"t": 8}), {"t": 0}))
    found = join_rows(np.concatenate(rows), np.array([8], np.uint64))
    assert found == ({0: None}, {0} if sizes[0] == sizes[1] else set())


def test_a_part_that_was_read_twice_with_other_bytes_is_named() -> None:
    notes = Fingerprints()
    for name, pieces, shares in (
        ("same", [(0, 8, 1, 0), (8, 8, 2, 0), (0, 8, 1, 0)], [(0, 4, 5, 7), (0, 4, 5, 7)]),
        ("piece", [(0, 8, 1, 0), (8, 8, 2, 0), (0, 8, 3, 0)], []),
        ("share", [], [(0, 4, 5, 7), (0, 4, 6, 7)]),
        ("boxes", [], [(0, 4, 5, 7), (0, 4, 6, 8)]),  # other elements, so other bytes
    ):
        notes.noted.pieces[name] = HashedRanges(HashedRange(*piece) for piece in pieces)
        notes.noted.shares[name] = HashedRanges(HashedRange(*share) for share in shares)
        notes.noted.sizes[name] = 16
    assert notes.differing() == ["piece", "share"]
