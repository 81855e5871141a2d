"""What of each tensor this rank holds, and its memory as bytes.

The one place that knows DTensor, ShardedTensor and plain tensors apart. Imports torch. May import levels 0 to 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt_tools.box import Box, whole
from ckpt_tools.dtypes import BY_NAME, DType
from ckpt_tools.errors import PlanError, printable

_ALIGNMENT = 64


class Shard(NamedTuple):
    """A piece of a tensor that this rank holds: `tensor` has the elements of `box`, on any device, with any strides."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.dtype.itemsize


def local_shards(tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Returns this rank's pieces of all tensors, in their order; none for a tensor whose mesh leaves this rank out.

    Raises:
        PlanError: a tensor cannot be stored: partial sums, a sparse or quantized layout, an unknown element type.
    """
    return [
        Shard(fqn, _dtype(fqn, value), tuple(value.shape), box, local)
        for fqn, value in tensors.items()
        for box, local in _pieces(fqn, value)
    ]


def _pieces(fqn: str, value: torch.Tensor) -> Sequence[tuple[Box, torch.Tensor]]:
    if isinstance(value, ShardedTensor):
        return [(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor.detach()) for s in value.local_shards()]
    if not isinstance(value, DTensor):
        return [(whole(value.shape), value.detach())]
    if value.device_mesh.get_coordinate() is None:
        return []
    if any(isinstance(p, Partial) for p in value.placements):
        raise PlanError(
            f"a tensor is a partial sum and cannot be stored: {value.placements} ({printable(fqn)!r})", hint="redistribute it first"
        )
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    local = value._local_tensor.detach()  # to_local() would wait for a collective and record a gradient
    return [(Box(tuple(offsets), tuple(sizes)), local)]


def _dtype(fqn: str, value: torch.Tensor) -> DType:
    name = str(value.dtype).removeprefix("torch.")
    if name not in BY_NAME or value.layout is not torch.strided:
        raise PlanError(f"a tensor of this kind cannot be stored: {value.dtype}, {value.layout} ({printable(fqn)!r})")
    return BY_NAME[name]


def as_bytes(tensor: torch.Tensor) -> memoryview | None:
    """Returns the memory of a tensor's elements in row-major order; None where they do not lie so in the host's memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def on_host(shards: Sequence[Shard]) -> Iterator[list[memoryview]]:
    """Yields host memory in which the elements of shards are to be put, row-major: their own, where it is such."""
    views: list[memoryview] = []
    bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shard in shards:
        view = as_bytes(shard.tensor)
        if view is None:  # on a device, or strided
            host = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, pin_memory=shard.tensor.device.type == "cuda")
            bounced.append((shard.tensor, host))
            view = as_bytes(host)
        assert view is not None
        views.append(view)
    yield views
    for tensor, host in bounced:
        tensor.copy_(host)


class Stage:
    """Host memory that shards are copied to, made once and used again from save to save; pinned where they come from CUDA."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def live(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Returns the memory of tensors itself where it can be written from as it lies, and copies of the others."""
        views = [as_bytes(t) for t in tensors]
        copies = iter(self.copy([t for t, view in zip(tensors, views, strict=True) if view is None]))
        return [next(copies) if view is None else view for view in views]

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Copies tensors side by side, and returns once all of them are there; the views hold until the next copy."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        devices = {t.device for t in tensors if t.device.type == "cuda"}
        if len(self._buffer) < end or (devices and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
        views = []
        for start, tensor in zip(starts, tensors, strict=True):
            part = self._buffer[start : start + tensor.numel() * tensor.element_size()]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            views.append(part.numpy().data)
        for device in devices:
            torch.cuda.synchronize(device)
        return views


def alias_key(shard: Shard) -> Any:
    """Returns what two shards have in common that are the same memory (tied weights); None for one without memory."""
    tensor = shard.tensor
    if not shard.nbytes:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.stride(), shard.shape, shard.box)
