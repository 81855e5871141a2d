import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.box import BoxIndex, bands, flat_range_boxes, flat_start, is_flat, whole
from tests.core.painting import painted
from tests.strategies import full_shapes, shapes, tilings


@given(shapes, st.data())
def test_a_flat_range_is_at_most_2n_minus_1_boxes_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_range_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    numbers = np.arange(total).reshape(shape)
    assert [n for b in boxes for n in numbers[b.slices()].flatten()] == list(range(start, stop))


def test_a_flat_range_outside_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie in shape"):
        flat_range_boxes((2, 3), 0, 7)


@given(shapes, st.integers(1, 40), st.data())
def test_bands_tile_in_order_and_meet_any_chunk_in_one_run(
    shape: tuple[int, ...], max_numel: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, 7), max_size=3))
    pieces = list(bands(whole(shape), max_numel, cuts))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    assert [n for b in pieces for n in numbers[b.slices()].flatten()] == list(
        range(math.prod(shape))
    )
    assert all(p.numel <= max_numel for p in pieces)
    chunk = data.draw(tilings(shape))[0]
    for piece in pieces:
        shared = piece.intersect(chunk)
        if shared is not None:
            assert is_flat(shared.within(chunk), chunk.sizes)


@given(full_shapes, st.data())
def test_flatness_is_what_numpy_says(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(tilings(shape))[0]
    if box.numel:
        numbers = np.arange(math.prod(shape)).reshape(shape)[box.slices()].flatten()
        assert is_flat(box, shape) == (numbers[-1] - numbers[0] + 1 == box.numel)
        assert flat_start(box, shape) == numbers[0]


@given(full_shapes, st.data())
def test_the_index_finds_just_the_boxes_that_overlap(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    query = data.draw(tilings(shape))[0]
    found = dict(BoxIndex(boxes).overlaps(query))
    for number, box in enumerate(boxes):
        shared = painted(shape, [box]) * painted(shape, [query])
        assert (number in found) == bool(shared.sum())
        if number in found:
            assert (painted(shape, [found[number]]) == shared).all()
