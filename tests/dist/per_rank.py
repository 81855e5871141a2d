"""Writes one `torch.save` file a rank, as verl does, for several meshes: `per_rank.py OUT`;
`OUT/CASE.pt` is the whole.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def model():
    torch.manual_seed(3)
    # 7 over 4 ranks is uneven
    return nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 7), nn.BatchNorm1d(7))


def sharded(case):
    net, size = model(), dist.get_world_size()
    if case == "fsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (size,))) or net
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    if case == "tp":
        parallelize_module(net, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["outer"]) or net
    return fully_shard(net, mesh=mesh) or net  # HSDP


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in ("fsdp", "tp", "hsdp"):
        net = sharded(case)
        optimizer = torch.optim.AdamW(net.parameters())
        torch.manual_seed(4)
        net(torch.randn(6, 10)).sum().backward()
        optimizer.step()
        (out / case).mkdir(exist_ok=True)
        torch.save(net.state_dict(), out / case / f"model_world_size_{size}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), out / case / f"optim_world_size_{size}_rank_{rank}.pt")
        torch.save({"rng": torch.full((5056,), rank, dtype=torch.uint8), "step": 5, "mine": rank}, out / case / f"extra_state_world_size_{size}_rank_{rank}.pt")
        whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in net.state_dict().items()}
        moments = {f"{i}.{n}": getattr(t, "full_tensor", lambda t=t: t)() for i, s in optimizer.state_dict()["state"].items() for n, t in s.items()}
        if rank == 0:
            torch.save({"model": whole, "moments": moments}, out / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
