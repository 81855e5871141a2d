"""Lists the shards of each tensor on this rank, with their memory as bytes.

Only this module distinguishes DTensor, ShardedTensor and plain tensors. Imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.errors import PlanError, printable

_ALIGNMENT = 64


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
    if not isinstance(value, DTensor):
        _check_own_memory(fqn, value)
        return [(whole(value.shape), value.detach())]
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
    return [(box, value._local_tensor.detach())]


def is_meta(value: torch.Tensor) -> bool:
    """Tells whether a tensor, or this rank's shard of it, has no memory."""
    if isinstance(value, ShardedTensor):  # it refuses the question where a rank has no shard
        return any(shard.tensor.is_meta for shard in value.local_shards())
    return value.is_meta


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
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def as_bytes(tensor: torch.Tensor) -> memoryview | None:
    """Returns the memory of a tensor's elements; None if `has_bytes` is false."""
    if not has_bytes(tensor):
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class _Room(NamedTuple):
    """Host memory for a tensor: as a tensor of its type and shape, and as bytes."""

    tensor: torch.Tensor
    memory: memoryview


class Stage:
    """Host memory for tensors that are not row-major host memory themselves.

    It is allocated once and reused. For CUDA it is pinned.
    """

    def __init__(self) -> None:
        self._buffer = _pageable(0)
        self._is_pinned = False
        # of the last use: the next one usually has the same tensors
        self._kept: tuple[list[tuple[Any, ...]], list[_Room]] = ([], [])
        self._busy: list[torch.cuda.Event] = []

    def __reduce__(self) -> tuple[type[Stage], tuple[()]]:
        return Stage, ()  # another process allocates its own

    def live(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Returns the memory of tensors; copies of those that are not row-major on the host."""
        views = [as_bytes(t) for t in tensors]
        copies = iter(
            self.copy([t for t, view in zip(tensors, views, strict=True) if view is None])
        )
        return [next(copies) if view is None else view for view in views]

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Copies tensors and returns when all copies are complete.

        The views are valid until the next use.
        """
        rooms = self._rooms(tensors)
        for room, tensor in zip(rooms, tensors, strict=True):
            room.tensor.copy_(tensor, non_blocking=tensor.is_cuda)
        self._leave(tensors)
        self.settle()
        return [room.memory for room in rooms]

    @contextmanager
    def fill(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[memoryview]]:
        """Yields memory for the row-major elements of tensors.

        It is the tensors' own memory where possible. The rest is copied to the tensors at the end.

        Copies to CUDA may still run afterwards. Work that is queued later on the stream runs after
        them. `settle` waits for them.
        """
        views = [as_bytes(t) for t in tensors]
        away = [t for t, view in zip(tensors, views, strict=True) if view is None]
        rooms = self._rooms(away)
        theirs = iter(rooms)
        yield [next(theirs).memory if view is None else view for view in views]
        for room, tensor in zip(rooms, away, strict=True):
            tensor.copy_(room.tensor, non_blocking=tensor.is_cuda)
        self._leave(away)

    def settle(self) -> None:
        """Waits until no copy to or from this memory is running."""
        while self._busy:
            self._busy.pop().synchronize()

    def _leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes the copies that may still be running."""
        for device in {t.device for t in tensors if t.is_cuda}:
            self._busy.append(torch.cuda.current_stream(device).record_event())

    def _rooms(self, tensors: Sequence[torch.Tensor]) -> list[_Room]:
        """Returns memory for each tensor, of its type and shape, in one buffer."""
        self.settle()
        wants_pin = any(t.is_cuda for t in tensors)
        key = [(t.shape, t.dtype) for t in tensors]
        if key == self._kept[0] and (self._is_pinned or not wants_pin):
            return self._kept[1]
        ends = list(
            accumulate(
                (-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors),
                initial=0,
            )
        )
        if len(self._buffer) < ends[-1] or (wants_pin and not self._is_pinned):
            # release the old buffer before allocating the new one
            self._kept, self._buffer = ([], []), _pageable(0)
            self._buffer, self._is_pinned = (
                (_pinned if wants_pin else _pageable)(max(ends[-1], 1)),
                wants_pin,
            )
        parts = [
            self._buffer[start : start + t.numel() * t.element_size()]
            for start, t in zip(ends, tensors, strict=False)
        ]
        rooms = [
            _Room(part.view(t.dtype).view(t.shape), part.numpy().data)
            for part, t in zip(parts, tensors, strict=True)
        ]
        self._kept = key, rooms
        return rooms


def _pageable(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _pinned(nbytes: int) -> torch.Tensor:
    """Returns pinned memory of that size, which is released with the tensor.

    torch's own pinned memory takes the next power of two, and is never released.
    """
    buffer, runtime = _pageable(nbytes), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0)) == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    else:  # copies are slower then; the next CUDA call would raise the old error
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return buffer


def alias_key(shard: Shard) -> Any:
    """Returns a key that is equal for shards of the same memory (tied weights).

    Returns None for a shard without memory.
    """
    tensor = shard.tensor
    if not shard.nbytes:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.stride(), shard.shape, shard.box)
