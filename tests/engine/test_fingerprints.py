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

from ckpt_tools.core.box import Box
from ckpt_tools.engine.fingerprints import share_of


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
