"""Lists the shards of each tensor on this rank, with their memory as bytes.

Only this module distinguishes DTensor, ShardedTensor and plain tensors. Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOfDim
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.placements import (
    Placement,
    ReplicatePlacement,
    ShardPlacement,
    StridedShardPlacement,
    rank_boxes,
)
from ckpt_tools.errors import PlanError, printable


class Shard(NamedTuple):
    """A part of a tensor that this rank holds.

    `tensor` has the elements of `box`, on any device, with any strides.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the elements."""
        return self.box.numel * self.dtype.itemsize


class BoxTensor(torch.Tensor):
    """A box of a tensor, for a load that needs no more of it; the box lies on no borders of a mesh.

    It has shape and type of the whole tensor. Nothing computes with it.
    """

    box: Box
    elements: torch.Tensor

    @staticmethod
    def __new__(cls, shape: Sequence[int], box: Box, dtype: torch.dtype) -> BoxTensor:
        """Takes the shape of the whole, the box, and the type; gets memory for the box."""
        part: BoxTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        part.box, part.elements = box, torch.zeros(box.sizes, dtype=dtype, device="cpu")
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """Refuses all operators."""
        raise TypeError(f"no operator takes a part of a tensor: {func}")


def local_shards(tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Returns this rank's shards of all tensors, in their order.

    A tensor whose mesh does not include this rank has none.

    Raises:
        PlanError: a tensor cannot be stored: partial sums, a sparse or quantized layout, an unknown
            element type.
    """
    known: dict[Any, Box] = {}
    return [
        Shard(fqn, _dtype(fqn, value), tuple(value.shape), box, local)
        for fqn, value in tensors.items()
        for box, local in _pieces(fqn, value, known)
    ]


def _pieces(
    fqn: str, value: torch.Tensor, known: dict[Any, Box]
) -> Sequence[tuple[Box, torch.Tensor]]:
    """Returns this rank's shards of a tensor, as boxes and local tensors.

    `known` caches the box for each shape, mesh and placements.
    """
    if isinstance(value, ShardedTensor):
        return [
            (Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor.detach())
            for s in value.local_shards()
        ]
    if isinstance(value, BoxTensor):
        return [(value.box, value.elements)]
    if not isinstance(value, DTensor):
        _check_own_memory(fqn, value)
        check_one_tensor(fqn, value)
        return [(whole(value.shape), value.detach())]
    check_one_tensor(fqn, value._local_tensor)
    mesh, placements = value.device_mesh, value.placements
    if mesh.get_coordinate() is None:
        return []
    box = known.get(key := (value.shape, mesh, placements))
    if box is None:
        if any(isinstance(p, Partial) for p in placements):
            raise PlanError(
                f"a tensor is a partial sum and cannot be stored: {placements}"
                f" ({printable(fqn)!r})",
                hint="redistribute it first",
            )
        sizes, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
        box = known[key] = Box(tuple(offsets), tuple(sizes))
    # to_local() would wait for a collective and record a gradient
    local = value._local_tensor
    if local.shape != box.sizes and box.numel + local.numel():
        raise PlanError(
            f"this rank's part of {printable(fqn)!r} has the shape {list(local.shape)}, and its"
            f" placements say {list(box.sizes)}",
            hint="make it with distribute_tensor, or tell from_local the whole shape",
        )
    return [(box, local.detach())]


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a DTensor or a `BoxTensor`; any other tensor itself."""
    if isinstance(value, BoxTensor):
        return value.elements
    return value._local_tensor if isinstance(value, DTensor) else value


def shared_like(
    model: torch.Tensor, local: torch.Tensor, shape: Sequence[int], placements: Any = None
) -> torch.Tensor:
    """Returns a tensor of this rank's part, on the mesh of another tensor.

    Args:
        model: the other tensor. If it is no DTensor, the part is the whole.
        local: this rank's part.
        shape: of the whole.
        placements: on the mesh; those of `model` if None.
    """
    if not isinstance(model, DTensor):
        return local
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local,
        model.device_mesh,
        model.placements if placements is None else placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def boxes_of_ranks(value: torch.Tensor) -> list[Box]:
    """Returns the boxes that all ranks of a tensor's mesh have; the whole, if it has no mesh."""
    if not isinstance(value, DTensor):
        return [whole(value.shape)]
    mesh = value.device_mesh
    placements = [_placement(one) for one in value.placements]
    return [box for boxes in rank_boxes(value.shape, mesh.shape, placements) for box in boxes]


def _placement(placed: Any) -> Placement:
    if isinstance(placed, Replicate | Partial):
        return ReplicatePlacement()
    # torch's strided shard may be a subclass of the plain one, or not
    if type(placed) is ShardOfDim:
        return ShardPlacement(placed.dim)
    return StridedShardPlacement(placed.dim)


def is_sharded(value: torch.Tensor) -> bool:
    """Tells whether a tensor knows which part of it lies on which rank."""
    return isinstance(value, DTensor | ShardedTensor | BoxTensor)


def is_meta(value: torch.Tensor) -> bool:
    """Tells whether a tensor, or this rank's shard of it, has no memory."""
    if isinstance(value, ShardedTensor):  # it refuses the question where a rank has no shard
        return any(shard.tensor.is_meta for shard in value.local_shards())
    return value.is_meta


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor's address says where its elements lie.

    It does not for sharded, sparse and nested tensors, and for subclasses that wrap others.
    """
    if (
        isinstance(tensor, ShardedTensor | BoxTensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
    ):
        return False
    return tensor.is_meta or not tensor.numel() or tensor.data_ptr() != 0


def _check_own_memory(fqn: str, value: torch.Tensor) -> None:
    """Refuses a tensor whose elements share memory: nothing could be loaded into it."""
    if value.layout is torch.strided and any(
        step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)
    ):
        raise PlanError(
            f"a tensor has elements that share memory: {list(value.shape)}, strides"
            f" {list(value.stride())} ({printable(fqn)!r})",
            hint="it was expanded, and nothing could be loaded into it: call clone() on it first",
        )


def check_one_tensor(fqn: str, value: torch.Tensor) -> None:
    """Refuses a tensor that consists of several: its elements do not tell those of all.

    Raises:
        PlanError: with the name of its class.
    """
    if len(tensors_in(value)) > 1:
        raise PlanError(
            f"a tensor consists of several tensors: {type(value).__name__} ({printable(fqn)!r})",
            hint="give CheckpointManager or ckpt_tools.save the module or the optimizer itself;"
            " give dcp.save the SavePlanner of ckpt_tools.distributed; or give the tensors names",
        )


def tensors_in(value: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that a tensor consists of; a plain one alone."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) or not is_traceable_wrapper_subclass(
        value
    ):
        return [value]
    inside = (getattr(value, name) for name in value.__tensor_flatten__()[0])
    return [tensor for one in inside for tensor in tensors_in(one)]


def _dtype(fqn: str, value: torch.Tensor) -> DType:
    name = str(value.dtype).removeprefix("torch.")
    if name not in BY_NAME or value.layout is not torch.strided:
        raise PlanError(
            f"a tensor of this kind cannot be stored: {value.dtype}, {value.layout}"
            f" ({printable(fqn)!r})"
        )
    return BY_NAME[name]


def has_bytes(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor's elements lie in the host's memory in row-major order."""
    return (
        tensor.device.type == "cpu"
        and has_own_memory(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_bytes(tensor: torch.Tensor) -> memoryview | None:
    """Returns the memory of a tensor's elements; None if `has_bytes` is false."""
    if not has_bytes(tensor):
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def alias_key(shard: Shard) -> Any:
    """Returns a key that is equal for shards of the same memory (tied weights).

    Returns None for a shard without memory.
    """
    tensor = shard.tensor
    if not shard.nbytes or not has_own_memory(tensor):
        return None
    where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.stride())
    return (*where, tensor.is_conj(), tensor.is_neg(), shard.shape, shard.box)
