"""Copies tensors to host memory, from which a save is written, and back to a device.

Imports torch.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ckpt_tools.errors import CheckpointError
from ckpt_tools.loop.state.shards import as_bytes
from ckpt_tools.loop.state.unchanged import plainly

_ALIGNMENT = 64


class _Room(NamedTuple):
    """Host memory for a tensor: as a tensor of its type and shape, and as bytes."""

    tensor: torch.Tensor
    memory: memoryview


class StagedTensors:
    """Tensors in host memory. Some may still be on their way.

    Attributes:
        waited_s: seconds for which `wait` has waited.
    """

    def __init__(
        self,
        memory: Sequence[memoryview],
        running: Sequence[Future[None] | torch.cuda.Event] = (),
        sources: Sequence[torch.Tensor] = (),
        error: BaseException | None = None,
    ) -> None:
        """Stores the copies that run, the tensors they read, and an error that has ended them."""
        self._memory, self._running, self._error = memory, running, error
        self._sources = sources  # kept alive
        self.waited_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Tells whether the tensors may change."""
        return all(
            task.done() if isinstance(task, Future) else task.query()  # type: ignore[no-untyped-call]
            for task in self._running
        )

    def wait(self) -> Sequence[memoryview]:
        """Waits for the copy, and returns the bytes of each tensor.

        Raises:
            Exception: the error that has ended the copy.
        """
        if self._error is not None and not isinstance(self._error, Exception):
            raise CheckpointError("the copy to host memory was interrupted") from self._error
        if self._error is not None:
            raise self._error
        began = time.monotonic()
        for task in self._running:
            if isinstance(task, Future):
                task.result()
            else:
                task.synchronize()
        self.waited_s += time.monotonic() - began
        self._sources, self._running = (), ()
        return self._memory

    def raise_interrupt(self) -> None:
        """Raises what has interrupted the copy, such as Ctrl-C: the loop is meant, not the save."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error

    def hold_updates(self) -> None:
        """Lets later changes of the tensors wait for the copy.

        Changes on a GPU wait there, on the current streams. Only for copies from the host's memory
        does this call itself wait. It raises nothing: `wait` does.
        """
        for task in self._running:
            if isinstance(task, Future):
                task.exception()
            else:
                torch.cuda.current_stream(task.device).wait_event(task)


class Stager:
    """Host memory for tensors that are not row-major host memory themselves.

    It is allocated once and reused. For CUDA it is pinned.
    """

    def __init__(self) -> None:
        self._buffer = _pageable(0)
        self._is_pinned = False
        # of the last use: the next one usually has the same tensors
        self._kept: tuple[list[tuple[Any, ...]], list[_Room]] = ([], [])
        self._busy: list[Future[None] | torch.cuda.Event] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[type[Stager], tuple[()]]:
        return Stager, ()  # another process allocates its own

    def live(self, tensors: Sequence[torch.Tensor]) -> StagedTensors:
        """Returns the memory of tensors; copies of those that are not row-major on the host."""
        views = [as_bytes(t) for t in tensors]
        away = [t for t, view in zip(tensors, views, strict=True) if view is None]
        copies = iter(self.copy(away).wait())
        return StagedTensors([next(copies) if view is None else view for view in views])

    def copy(self, tensors: Sequence[torch.Tensor], late: Collection[int] = ()) -> StagedTensors:
        """Copies tensors. The memory is valid until the next use.

        Args:
            tensors: on any device.
            late: numbers of tensors whose copies may still run afterwards.
        """
        rooms = self._rooms(tensors)
        targets = [room.tensor for room in rooms]
        early = [n for n in range(len(tensors)) if n not in late]
        if early:
            torch._foreach_copy_(
                [targets[n] for n in early], [tensors[n] for n in early], non_blocking=True
            )
            self._leave([tensors[n] for n in early])
        self.settle()
        if late:
            self._copy_late([(targets[n], tensors[n]) for n in sorted(late)])
        return StagedTensors([room.memory for room in rooms], tuple(self._busy), tensors)

    def _copy_late(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Starts copies: on streams of their own from GPUs, in a thread from the host's memory."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        with plainly():
            for pair in pairs:
                by_device.setdefault(pair[1].device, []).append(pair)
        for device, mine in by_device.items():
            targets, sources = [target for target, _ in mine], [source for _, source in mine]
            if device.type == "cuda":
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream = self._streams[device]
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self._busy.append(stream.record_event())
            else:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "ckpt-copy")
                self._busy.append(self._pool.submit(_copy_all, targets, sources))

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
        if away:
            pairs = list(zip(away, (room.tensor for room in rooms), strict=True))
            lazy = [pair for pair in pairs if pair[0].is_conj() or pair[0].is_neg()]
            for tensor, value in lazy:  # torch's batches refuse these views
                tensor.copy_(value)
            plain = [pair for pair in pairs if not (pair[0].is_conj() or pair[0].is_neg())]
            if plain:
                targets, values = map(list, zip(*plain, strict=True))
                torch._foreach_copy_(targets, values, non_blocking=True)
            self._leave(away)

    def settle(self) -> None:
        """Waits until no copy to or from this memory is running."""
        while self._busy:
            task = self._busy.pop()
            if isinstance(task, Future):
                task.exception()
            else:
                task.synchronize()

    def close(self) -> None:
        """Ends the thread, after its last copy."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes the copies that may still be running."""
        with plainly():
            devices = {t.device for t in tensors if t.is_cuda}
        for device in devices:
            self._busy.append(torch.cuda.current_stream(device).record_event())

    def _rooms(self, tensors: Sequence[torch.Tensor]) -> list[_Room]:
        """Returns memory for each tensor, of its type and shape, in one buffer."""
        self.settle()
        with plainly():
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
        with torch.inference_mode(False):  # a later use may be outside of that mode
            rooms = [
                _Room(part.view(t.dtype).view(t.shape), part.numpy().data)
                for part, t in zip(parts, tensors, strict=True)
            ]
        self._kept = key, rooms
        return rooms


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


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
