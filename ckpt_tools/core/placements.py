"""Placements: which boxes of a tensor each rank of a mesh holds.

This is integer geometry that agrees with DTensor's. It knows no file and no format, and does not
import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ckpt_tools.core.box import Box, flat_range_boxes, whole


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """A split along tensor dim `dim` over one axis of the mesh.

    It splits as `torch.chunk` does: the last parts may be short or empty.
    """

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShardPlacement:
    """A split along `dim` that applies after the splits of the mesh axes to its right.

    FSDP over tensor parallelism on one dim needs it.
    """

    dim: int


@dataclass(frozen=True, slots=True)
class ReplicatePlacement:
    """The same elements on every rank of the axis."""


Placement = ShardPlacement | StridedShardPlacement | ReplicatePlacement


def split(box: Box, dim: int, num_parts: int, part: int) -> Box:
    """Returns part `part` of `num_parts` of a box along `dim`; an empty part lies at its end."""
    step = -(-box.sizes[dim] // num_parts)
    low, high = min(part * step, box.sizes[dim]), min((part + 1) * step, box.sizes[dim])
    offsets = (*box.offsets[:dim], box.offsets[dim] + low, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :]))


def rank_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[list[Box]]:
    """Returns the boxes that each rank of a mesh holds, in row-major order of the mesh.

    Args:
        shape: global shape of the tensor.
        mesh_shape: number of ranks along each axis.
        placements: one per axis.

    Returns:
        `[R]` lists of one box each, where R is the product of `mesh_shape`. A rank without elements
        has an empty box.

    Source: torch.distributed.tensor's `compute_local_shape_and_global_offset`. The tests compare
    the results.
    """
    if len(mesh_shape) != len(placements):
        raise ValueError(
            f"{len(mesh_shape)} mesh axes need as many placements, got {len(placements)}"
        )
    order = list(_split_order(placements))
    return [
        [_local_box(shape, mesh_shape, coordinate, order)]
        for coordinate in product(*map(range, mesh_shape))
    ]


def rank_box(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], rank: int
) -> Box:
    """Returns the box that one rank of a mesh holds; see `rank_boxes`.

    Args:
        shape, mesh_shape, placements: as for `rank_boxes`.
        rank: number of the rank, in row-major order of the mesh.
    """
    if len(mesh_shape) != len(placements):
        raise ValueError(
            f"{len(mesh_shape)} mesh axes need as many placements, got {len(placements)}"
        )
    coordinate: list[int] = []
    for size in reversed(mesh_shape):
        rank, index = divmod(rank, size)
        coordinate.insert(0, index)
    return _local_box(shape, mesh_shape, coordinate, list(_split_order(placements)))


def _split_order(placements: Sequence[Placement]) -> Iterator[tuple[int, int]]:
    """Yields (axis, dim) in the order in which the splits apply.

    Plain splits apply from left to right. Strided splits follow, from right to left.
    """
    plain = [(axis, p.dim) for axis, p in enumerate(placements) if isinstance(p, ShardPlacement)]
    strided = [
        (axis, p.dim) for axis, p in enumerate(placements) if isinstance(p, StridedShardPlacement)
    ]
    yield from plain
    yield from reversed(strided)


def _local_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    order: Sequence[tuple[int, int]],
) -> Box:
    box = whole(shape)
    for axis, dim in order:
        box = split(box, dim, mesh_shape[axis], coordinate[axis])
    return box


def flat_boxes(shape: Sequence[int], num_ranks: int) -> list[list[Box]]:
    """Returns each rank's boxes of a tensor whose flattened elements are cut into equal parts.

    ZeRO and FSDP1 cut tensors like this, into `num_ranks` parts.
    """
    total = math.prod(shape)
    step = -(-total // num_ranks)
    return [
        flat_range_boxes(shape, min(r * step, total), min((r + 1) * step, total))
        for r in range(num_ranks)
    ]


def split_dims(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the dims along which these boxes split a tensor; none for a replicated or whole one.

    A dim of size 1 (or 0) counts if an empty part lies at its end. DTensor leaves such parts: (1,
    17) over 2 ranks.
    """
    return tuple(d for d, full in enumerate(shape) if any(b.sizes[d] != full for b in boxes))


def reshard_boxes(boxes: Sequence[Box], shape: Sequence[int], num_ranks: int) -> list[Box | None]:
    """Returns the box that each of `num_ranks` FSDP ranks saves of a tensor now split into `boxes`.

    One split dim is split again. Several split dims (a 2-D mesh) become a split of dim 0. A tensor
    in one piece stays whole, on rank 0. DCP keeps one chunk per offset, so only the first rank
    without elements saves an (empty) chunk.

    Returns:
        `[num_ranks]` boxes; None for a rank that saves nothing of the tensor.
    """
    dims = split_dims(boxes, shape)
    if not dims:
        return [whole(shape), *[None] * (num_ranks - 1)]
    dim = dims[0] if len(dims) == 1 else 0
    num_full = -(-shape[dim] // -(-shape[dim] // num_ranks)) if shape[dim] else 0
    return [
        split(whole(shape), dim, num_ranks, rank) if rank <= num_full else None
        for rank in range(num_ranks)
    ]
