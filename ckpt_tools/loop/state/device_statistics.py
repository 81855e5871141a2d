"""Measures tensors on their accelerator, before they are copied to the host.

There, a pass over the values costs little beside the copy. Only three numbers of each tensor go to
the host. The engine measures all other tensors: those of the host, those with NaN or infinity, and
those whose squares leave the range of float64.

Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ckpt_tools.core.logs import log
from ckpt_tools.engine.statistics import Moments, add_moments

_PIECE_NUMEL = 1 << 26  # of a type that has to be converted first: 256 MiB on the device
DEVICE_TYPES = ("cuda",)  # devices that measure their tensors
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _Row(NamedTuple):
    """The results of one device: `[3, n]` on the host, complete after the event."""

    numbers: list[int]
    results: torch.Tensor
    event: torch.cuda.Event | None


class DeviceMoments:
    """The statistics of tensors, which may still be on their way from the device."""

    def __init__(self, numels: Mapping[int, int], rows: Sequence[_Row]) -> None:
        """Stores the number of elements of each tensor, and the results of each device."""
        self._numels, self._rows = numels, rows

    def hold_updates(self) -> None:
        """Lets later changes of the tensors wait on their device until they are measured."""
        for row in self._rows:
            if row.event is not None:
                torch.cuda.current_stream(row.event.device).wait_event(row.event)

    def result(self) -> dict[int, Moments]:
        """Waits for the device, and returns the statistics by the number of the tensor."""
        found: dict[int, Moments] = {}
        for row in self._rows:
            if row.event is not None:
                row.event.synchronize()
            norms, most, nonzeros = row.results.tolist()
            for number, norm, top, nonzero in zip(row.numbers, norms, most, nonzeros, strict=True):
                is_exact = math.isfinite(norm) and math.isfinite(norm * norm)
                if not is_exact or (nonzero and not norm * norm):
                    continue
                numel = self._numels[number]
                found[number] = Moments(numel, norm * norm, top, numel - int(nonzero))
        return found


def measure_on_device(tensors: Sequence[torch.Tensor]) -> DeviceMoments | None:
    """Starts to measure the tensors that are on an accelerator.

    On a GPU, the kernels run on a stream of their own, beside the copy to the host. They see the
    values of this moment. Call `hold_updates` once the copy has been started.

    Args:
        tensors: on any device.

    Returns:
        The statistics; None if the device has no room, and the engine has to measure all of them.
    """
    try:
        return _started(tensors)
    except torch.OutOfMemoryError as error:
        log.info("the device has no room to measure its tensors: %s", error)
        return None


def _started(tensors: Sequence[torch.Tensor]) -> DeviceMoments:
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device.type in DEVICE_TYPES and tensor.numel():
            by_device.setdefault(tensor.device, []).append(number)
    numels = {n: _plain(tensors[n]).numel() for numbers in by_device.values() for n in numbers}
    rows = [
        _row(device, numbers, [_plain(tensors[n]) for n in numbers])
        for device, numbers in by_device.items()
    ]
    return DeviceMoments(numels, rows)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the one stream of a device: memory that is freed on a stream is reused there only."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _row(device: torch.device, numbers: list[int], tensors: Sequence[torch.Tensor]) -> _Row:
    """Measures the tensors of a device. Another thread may read the results after the event."""
    if device.type != "cuda":
        order, results = _measure(tensors)
        return _Row([numbers[n] for n in order], results.cpu(), None)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        order, results = _measure(tensors)
        host = torch.empty(results.shape, dtype=results.dtype, device="cpu", pin_memory=True)
        host.copy_(results, non_blocking=True)
        return _Row([numbers[n] for n in order], host, stream.record_event())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements; the two parts of a complex number count separately."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _measure(tensors: Sequence[torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Returns norms, largest magnitudes and numbers of nonzero elements: `[3, n]`, float64.

    The host never waits for the device. The list has the number of the tensor of each column.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    columns = []
    for dtype, numbers in by_dtype.items():
        mine = [tensors[n] for n in numbers]
        if dtype in _PLAIN:
            norms = torch.stack(torch._foreach_norm(mine, 2, dtype=torch.float64))
            most = torch.stack(torch._foreach_norm(mine, math.inf)).double()
            nonzeros = torch.stack([torch.count_nonzero(t) for t in mine]).double()
            columns.append(torch.stack([norms, most, nonzeros]))
        else:
            columns.append(torch.stack([_measure_converted(t) for t in mine], dim=1))
    order = [number for numbers in by_dtype.values() for number in numbers]
    return order, torch.cat(columns, dim=1)


def _measure_converted(tensor: torch.Tensor) -> torch.Tensor:
    """Measures a tensor of a type without norms, such as integers or fp8, piece by piece: `[3]`."""
    total = torch.zeros(3, dtype=torch.float64, device=tensor.device)
    for piece in torch.split(tensor.reshape(-1), _PIECE_NUMEL):
        values = piece.double()
        total[0] += values.square().sum()
        total[1] = torch.maximum(total[1], values.abs().max())
        total[2] += torch.count_nonzero(values)
    total[0] = total[0].sqrt()
    return total


def moments_by_name(names: Sequence[str], moments: Mapping[int, Moments]) -> dict[str, Moments]:
    """Returns the statistics of the tensors of which all shards were measured.

    Args:
        names: the tensor of each shard.
        moments: of some shards, by number.
    """
    partly = {name for number, name in enumerate(names) if number not in moments}
    found: dict[str, Moments] = {}
    add_moments(found, ((names[n], one) for n, one in moments.items() if names[n] not in partly))
    return found
