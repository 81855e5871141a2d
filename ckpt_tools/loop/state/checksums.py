"""Computes a checksum of each shard's values, where they lie: on the host or on an accelerator.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from ckpt_tools.core.checksum import crc64nvme, join_crc64
from ckpt_tools.loop.state.shards import as_bytes

_PIECE_BYTES = 32 << 20  # of a tensor, for one thread
_WORDS = 1 << 20  # mixed at one time, so that about 32 MiB beside the tensor are enough
# odd numbers with about as many ones as zeros, as signed words
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def checksums_of(tensors: Sequence[torch.Tensor], jobs: int = 1) -> list[int]:
    """Returns a number below 2**64 for each tensor; equal tensors on like devices have equal ones.

    On the host it is the CRC-64/NVME of the bytes. An accelerator computes another checksum, with
    one wait for all tensors.

    Args:
        tensors: without a graph of gradients.
        jobs: threads that compute on the host.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in tensors]
    pieces: list[tuple[int, memoryview]] = []
    away: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if not tensor.numel():
            continue  # its checksum is 0
        if tensor.device.type != "cpu":
            away.setdefault(tensor.device, []).append(number)
        elif (data := as_bytes(tensor)) is not None:
            starts = range(0, len(data), _PIECE_BYTES)
            pieces += [(number, data[start : start + _PIECE_BYTES]) for start in starts]
        else:  # at once, since this takes memory
            data = as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
            assert data is not None
            found[number].append((crc64nvme(data), len(data)))
    # every device begins before one is waited for
    waiting = [torch.stack([checksum_on_device(tensors[n]) for n in of]) for of in away.values()]
    with ThreadPoolExecutor(jobs, "ckpt-prove") if jobs > 1 and pieces else nullcontext() as pool:
        crcs = (pool.map if pool else map)(crc64nvme, (piece for _, piece in pieces))
        for (number, piece), crc in zip(pieces, crcs, strict=True):
            found[number].append((crc, len(piece)))
    values = list(map(join_crc64, found))
    for of, results in zip(away.values(), waiting, strict=True):
        for number, value in zip(of, results.tolist(), strict=True):
            values[number] = value & ((1 << 64) - 1)
    return values


def checksum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of a tensor's bytes, computed where it lies: 0-d int64.

    Each word of 8 bytes is added to a multiple of its position and mixed, and the results are
    summed modulo 2**64. So values that change places, signs or scale change it, too.

    Source of the mixing: Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014, figure 14 (variant 13).
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    num_words = flat.numel() // 8
    body, rest = flat[: num_words * 8], torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[: flat.numel() - num_words * 8] = flat[num_words * 8 :]
    if body.storage_offset() % 8 or body.data_ptr() % 8:
        body = body.clone()
    words = body.view(torch.int64)
    length = torch.full((1,), flat.numel(), dtype=torch.int64, device=flat.device)
    total = _mix(rest.view(torch.int64) + length * _STEP).sum()
    for start in range(0, num_words, _WORDS):
        part = words[start : start + _WORDS]
        positions = torch.arange(start + 1, start + 1 + len(part), device=flat.device)
        total = total + _mix(positions.mul_(_STEP).add_(part)).sum()
    return total


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mixes words, so that each bit of the result depends on all bits."""
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)
