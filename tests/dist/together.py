"""Loads from a bucket what several ranks need, in many layouts: `together.py BUCKET-URL
TENSORS.pt`, on four ranks.

At the end two hosts are made of one, by namespaces with names of their own.
"""

import ctypes
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_tools import CheckpointError, IntegrityError, PeerError
from ckpt_tools.ranks.gloo import GlooGroup
from ckpt_tools.loop.loading.load import load_into
from ckpt_tools.loop.loading.load_request import LoadRequest
from tests.dist import device

LAYOUTS = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas": ((4,), [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "both": ((2, 2), [Shard(1), Shard(0)]),
    "tp": ((2, 2), [Replicate(), Shard(1)]),
    # whose memory is not row-major, like a device's, goes through the host's
    "strided": ((4,), [Replicate()]),
}
CLONE_NEWUTS = 0x04000000


def state_for(whole, layout):
    """Empty tensors of a layout, plain ones where there are too few dims, and what they should
    hold.
    """
    sizes, placements = LAYOUTS[layout]
    mesh = init_device_mesh(device.NAME, sizes)
    found = {}
    for name, value in whole.items():
        fits = all(not isinstance(p, Shard) or p.dim < value.dim() for p in placements)
        found[name] = distribute_tensor(torch.zeros_like(value), mesh, placements) if fits else torch.zeros_like(value)
    if layout == "strided":
        found = {n: torch.zeros_like(v).mT.contiguous().mT if v.dim() > 1 else torch.zeros_like(v) for n, v in whole.items()}
    want = {n: distribute_tensor(v, mesh, placements) if isinstance(found[n], DTensor) else v for n, v in whole.items()}
    return found, want


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def check(whole, url, layout, read_once, group):
    """Loads, compares, and returns what all ranks together have read, received and proved."""
    state, want = state_for(whole, layout)
    report = load_into(url, {"model": state}, group, LoadRequest(), read_once)
    for name, value in want.items():
        assert torch.equal(local(state[name]), local(value)), (layout, read_once, name)
    totals = torch.tensor([report.read_nbytes, report.received_nbytes, report.num_proved, report.needed_nbytes])
    dist.all_reduce(totals)
    return totals.tolist()


def main():
    url, device_of_rank = sys.argv[1], device.begin()
    whole = torch.load(sys.argv[2], map_location=device_of_rank)
    rank, nbytes = dist.get_rank(), sum(v.numel() * v.element_size() for v in whole.values())
    group = GlooGroup(60.0)
    for layout in LAYOUTS:
        read, received, proved, needed = check(whole, f"{url}/good", layout, None, group)
        alone = check(whole, f"{url}/good", layout, False, group)
        assert nbytes <= read <= 1.05 * nbytes and received > 0, (layout, read, received, nbytes)
        assert needed == nbytes and alone[1] == 0 and (layout == "rows" or alone[0] > 1.5 * nbytes), (layout, needed, alone)
        # of 16 chunks, whoever read their pieces
        assert proved == {"rows": 4, "both": 13}.get(layout, 16), (layout, proved)
        check(whole, f"{url}/elsewhere", layout, None, group)
    state, want = state_for({n: v for n, v in whole.items() if v.is_floating_point()}, "columns")
    state = {n: v.to(torch.float64) for n, v in state.items()}
    load_into(f"{url}/good", {"model": state}, group, LoadRequest(cast=True, strict=False))
    assert all(torch.equal(local(state[n]), local(v).to(torch.float64)) for n, v in want.items())

    for path, expected in (("flipped", IntegrityError), ("short", CheckpointError), ("gone", CheckpointError)):
        state, _ = state_for(whole, "replicas")
        try:
            load_into(f"{url}/{path}", {"model": state}, group, LoadRequest())
            raise AssertionError(path)
        except (expected, PeerError) as error:
            assert path != "flipped" or "damaged since they were written" in str(error), error

    try:
        with group.phase("ask all"):
            if rank == 2:
                raise CheckpointError("there is none", hint="make one")
        raise AssertionError("nobody was told")
    except CheckpointError as error:  # its own, or PeerError with its text
        assert error.hint == "make one" and "there is none" in str(error), error
        assert isinstance(error, PeerError) == (rank != 2), error

    libc = ctypes.CDLL(None, use_errno=True)
    may = torch.tensor([libc.unshare(CLONE_NEWUTS) == 0])
    dist.all_reduce(may, dist.ReduceOp.MIN)
    if may:
        socket.sethostname(f"host{rank // 3}")  # three ranks, and one by itself
        for layout in ("columns", "replicas"):
            read, received, *_ = check(whole, f"{url}/good", layout, None, group)
            assert 1.95 * nbytes <= read <= 2.05 * nbytes and received > 0, (layout, read, nbytes)
        read, *_ = check(whole, f"{url}/good", "replicas", True, group)
        assert read <= 1.05 * nbytes, read
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
