"""What the property tests draw: shapes, and ways to split them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from hypothesis import strategies as st

from ckpt_tools.core.box import Box, flat_range_boxes, whole

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover `shape` exactly: cut by a grid, or into flat ranges as ZeRO cuts; in any
    order, empty ones among them.
    """
    if draw(st.booleans()) or not shape:
        total = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
        boxes = [
            b
            for low, high in zip([0, *cuts], [*cuts, total], strict=True)
            for b in flat_range_boxes(shape, low, high)
        ]
    else:
        boxes = [whole(shape)]
        for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)):
            cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
            boxes = [piece for box in boxes for piece in cut(box, dim, cuts)]
    boxes = boxes or [whole(shape)]
    return draw(st.permutations(boxes))


def cut(box: Box, dim: int, cuts: list[int]) -> list[Box]:
    low, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    edges = [low, *(min(max(c, low), end) for c in cuts), end]
    return [
        Box(
            (*box.offsets[:dim], a, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], b - a, *box.sizes[dim + 1 :]),
        )
        for a, b in pairwise(edges)
    ]


def flip(path: Path, at: int, bit: int) -> None:
    """Turns one bit of a file round; twice is never."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
