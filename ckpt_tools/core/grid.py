"""A relation: a grid of elements that lies in two tensors, at strides of its own in each.

`core.relations` cuts and joins tensors by relations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ckpt_tools.core.box import row_major_strides


class GridPlace(NamedTuple):
    """Where a grid lies in a tensor: element `offset + Σ index[axis] · strides[axis]`.

    Offset and strides count elements in the row-major order of the tensor.
    """

    name: str
    offset: int
    strides: tuple[int, ...]


class Relation(NamedTuple):
    """A grid of elements that two tensors share. `sizes` has its axes."""

    sizes: tuple[int, ...]
    left: GridPlace
    right: GridPlace

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def inverse(self) -> Relation:
        """Returns the same grid with the other tensor on the left."""
        return Relation(self.sizes, self.right, self.left)

    @property
    def is_stretch(self) -> bool:
        """Tells whether its elements follow each other in both tensors."""
        plain = row_major_strides(self.sizes)
        return all(
            size == 1 or a == b == stride
            for size, a, b, stride in zip(
                self.sizes, self.left.strides, self.right.strides, plain, strict=True
            )
        )


def same_elements(left: str, right: str, shape: tuple[int, ...]) -> Relation:
    """Returns the relation of a tensor with itself under another name."""
    strides = row_major_strides(shape)
    return Relation(shape, GridPlace(left, 0, strides), GridPlace(right, 0, strides))
