"""Checksums of shards, computed where they lie."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from awscrt.checksums import crc64nvme

from ckpt_tools.loop.state import checksums
from ckpt_tools.loop.state.checksums import checksum_on_device, checksums_of

KINDS = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 8, 1001, 70_001])
def test_any_flipped_bit_changes_the_checksum_that_a_device_computes(
    dtype: torch.dtype, numel: int
) -> None:
    data = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    if dtype is not torch.bool:
        data = data * 57
    first = int(checksum_on_device(data.view(dtype)))
    assert first == int(checksum_on_device(data.clone().view(dtype)))
    for _ in range(100):
        other = data.clone()
        other[random.randrange(len(data))] ^= 1 if dtype is torch.bool else 1 << random.randrange(8)
        assert int(checksum_on_device(other.view(dtype))) != first


def test_the_checksum_of_a_device_sees_an_order_and_strides() -> None:
    table = torch.arange(40_000.0).view(200, 200)
    swapped = table.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert int(checksum_on_device(table)) != int(checksum_on_device(swapped))
    assert (
        int(checksum_on_device(table.T))
        == int(checksum_on_device(table.T.contiguous()))
        != int(checksum_on_device(table))
    )
    unaligned = torch.arange(9, dtype=torch.uint8)[1:]
    assert int(checksum_on_device(unaligned)) == int(checksum_on_device(unaligned.clone()))


def test_checksums_do_not_depend_on_strides() -> None:
    table = torch.rand(30, 40)
    conjugated = torch.complex(table, table).conj()
    for one in (table.T, table[:, ::3], conjugated, torch.empty(0), torch.tensor(3.0)):
        assert checksums_of([one]) == checksums_of(
            [one.resolve_conj().clone(memory_format=torch.contiguous_format)]
        )


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "signs": lambda t: t.neg(),
    "scale": lambda t: t * 2,
    "rows change places": lambda t: t.flip(0),
    "rows move on": lambda t: torch.cat([t[1:], t[:1]]),
    "every other sign": lambda t: t * torch.tensor([1.0, -1.0] * 32).to(t.dtype),
    "two columns": lambda t: t.index_fill(1, torch.tensor([3, 5]), 0),
}


@pytest.mark.parametrize("how", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_the_checksum_of_an_accelerator_sees_plain_changes(how: str, dtype: torch.dtype) -> None:
    """The same function on the host: it mixes words, and does not only add them."""
    for tensor in (torch.randn(64, 64), torch.ones(64, 64), torch.eye(64)):
        tensor = tensor.to(dtype)
        if not torch.equal(other := PLAIN[how](tensor), tensor):
            assert int(checksum_on_device(other)) != int(checksum_on_device(tensor))
    found = set()
    for i in range(64):
        for j in range(i):
            pair = torch.ones(64).to(dtype)
            pair[i], pair[j] = -1, -1
            found.add(int(checksum_on_device(pair)))
    assert len(found) == 64 * 63 // 2
    zeros = [int(checksum_on_device(torch.zeros(n).to(dtype))) for n in range(1, 40)]
    assert len(set(zeros)) == len(zeros)


@pytest.mark.parametrize("jobs", [1, 3])
def test_on_the_host_it_is_the_crc_of_the_bytes(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_PIECE_BYTES", 1000)
    tensors = [torch.rand(n) for n in (0, 1, 250, 251, 5000)]
    tensors.insert(2, torch.rand(40, 50).T)
    expected = [crc64nvme(t.contiguous().numpy().tobytes()) for t in tensors]
    assert checksums_of(tensors, jobs) == expected


def test_an_empty_shard_of_an_accelerator_has_a_checksum() -> None:
    """The device `meta` stands for one: it computes nothing, and nothing is to be computed."""
    assert checksums_of([torch.empty(0, 3, device="meta"), torch.ones(1)])[0] == 0
