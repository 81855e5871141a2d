"""Which boxes of a tensor each rank of a mesh holds.

Integer geometry that agrees with DTensor's; knows no file and no format, and does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ckpt_tools.core.box import Box, flat_range_boxes, whole


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Split along tensor dim `dim` over one axis of the mesh, as `torch.chunk` splits: the last
    parts may be short or empty.
    """

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShardPlacement:
    """Split along `dim` after the axes to its right have split it: FSDP over tensor parallelism on
    one dim.
    """

    dim: int


@dataclass(frozen=True, slots=True)
class ReplicatePlacement:
    """The same elements on every rank of the axis."""


Placement = ShardPlacement | StridedShardPlacement | ReplicatePlacement


def split(box: Box, dim: int, num_parts: int, part: int) -> Box:
    """Returns part `part` of `num_parts` of a box along `dim`; an empty part stands at the end of
    the box.
    """
    step = -(-box.sizes[dim] // num_parts)
    low, high = min(part * step, box.sizes[dim]), min((part + 1) * step, box.sizes[dim])
    offsets = (*box.offsets[:dim], box.offsets[dim] + low, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :]))


def rank_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[list[Box]]:
    """Returns the boxes that each rank of a mesh holds, ranks in row-major order of the mesh.

    Args:
        shape: global shape of the tensor.
        mesh_shape: number of ranks along each axis.
        placements: one per axis.

    Returns:
        `[R]` lists of one box each, R = product of `mesh_shape`; empty boxes stand for ranks
        without elements.

    Source: torch.distributed.tensor's `compute_local_shape_and_global_offset`, which the tests
    compare with.
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


def _split_order(placements: Sequence[Placement]) -> Iterator[tuple[int, int]]:
    """Yields (axis, dim) in the order the splits apply: left to right, strided ones after all
    others on their dim.
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
    """Returns the boxes of a tensor whose flattened elements are cut into `num_ranks` equal parts
    (ZeRO, FSDP1).
    """
    total = math.prod(shape)
    step = -(-total // num_ranks)
    return [
        flat_range_boxes(shape, min(r * step, total), min((r + 1) * step, total))
        for r in range(num_ranks)
    ]


def split_dims(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the dims along which a tensor is split into these boxes: none for a replicated or
    whole one.

    A dim of size 1 (or 0) counts where an empty part stands at its end, as DTensor leaves behind:
    (1, 17) over 2 ranks.
    """
    return tuple(d for d, full in enumerate(shape) if any(b.sizes[d] != full for b in boxes))


def reshard_boxes(boxes: Sequence[Box], shape: Sequence[int], num_ranks: int) -> list[Box | None]:
    """Returns the box each of `num_ranks` ranks of an FSDP job saves of a tensor that is now split
    into `boxes`.

    One split dim is split again; several (a 2-D mesh) become dim 0; a tensor in one piece stays
    whole, on rank 0. DCP keeps one chunk per offset, so of the ranks left without elements only the
    first saves an (empty) chunk.

    Returns:
        `[num_ranks]` boxes; None for a rank that saves nothing of it.
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
