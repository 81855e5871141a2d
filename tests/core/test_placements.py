from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tools.core.box import whole
from ckpt_tools.core.placements import (
    ReplicatePlacement,
    ShardPlacement,
    StridedShardPlacement,
    flat_boxes,
    rank_boxes,
    reshard_boxes,
)
from tests.core.painting import painted
from tests.strategies import full_shapes


@given(full_shapes.filter(bool), st.lists(st.integers(1, 5), min_size=1, max_size=2), st.data())
def test_boxes_are_dtensors_own(
    shape: tuple[int, ...], mesh: list[int], data: st.DataObject
) -> None:
    dims = st.integers(0, len(shape) - 1)
    ours = [
        data.draw(st.one_of(st.just(ReplicatePlacement()), dims.map(ShardPlacement))) for _ in mesh
    ]
    theirs = [
        TorchReplicate() if isinstance(p, ReplicatePlacement) else TorchShard(p.dim) for p in ours
    ]
    check(shape, mesh, ours, theirs)


@pytest.mark.parametrize("shape", [(8,), (16, 3), (4, 4), (12, 5), (24,)])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 4)])
def test_fsdp_over_tensor_parallelism_on_one_dim(
    shape: tuple[int, ...], mesh: tuple[int, int]
) -> None:
    if shape[0] % (mesh[0] * mesh[1]) == 0:
        check(
            shape,
            mesh,
            [StridedShardPlacement(0), ShardPlacement(0)],
            [_StridedShard(0, split_factor=mesh[1]), TorchShard(0)],
        )


def check(shape, mesh, ours, theirs) -> None:
    boxes = rank_boxes(shape, mesh, ours)
    for coordinate, (box,) in zip(product(*map(range, mesh)), boxes, strict=True):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh, lambda d, c=coordinate: c[d], theirs
        )
        assert box.sizes == tuple(sizes)
        if box.numel:
            assert box.offsets == tuple(offsets)


@given(full_shapes, st.integers(1, 9))
def test_flat_parts_cover_everything_once(shape: tuple[int, ...], num_ranks: int) -> None:
    boxes = flat_boxes(shape, num_ranks)
    assert len(boxes) == num_ranks
    assert (painted(shape, [b for rank in boxes for b in rank]) == 1).all()


@given(full_shapes.filter(bool), st.integers(2, 9), st.integers(1, 9), st.data())
def test_a_reshard_covers_everything_once_along_the_same_dim(
    shape: tuple[int, ...], old: int, new: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    before = [b for (b,) in rank_boxes(shape, [old], [ShardPlacement(dim)])]
    after = reshard_boxes(before, shape, new)
    assert len(after) == new
    assert (painted(shape, [b for b in after if b is not None]) == 1).all()
    assert all(
        b.sizes[d] == shape[d]
        for b in after
        if b is not None
        for d in range(len(shape))
        if d != dim
    )


def test_what_is_whole_stays_whole() -> None:
    assert reshard_boxes([whole((3, 4))], (3, 4), 3) == [whole((3, 4)), None, None]
    assert reshard_boxes([whole(())], (), 2) == [whole(()), None]
