"""Goes on from files of ranks as a job of FSDP2 does that saved them itself: `per_rank_on.py
WHOLE.pt FOLDER:AXIS …`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    want = torch.load(sys.argv[1])
    for word in sys.argv[2:]:
        folder, _, axis = word.partition(":")
        torch.manual_seed(rank)  # as good as none: all of it is loaded
        net = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 7), nn.BatchNorm1d(7))
        fully_shard(net, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=(axis,) if axis else None))
        state = torch.load(Path(folder) / f"model_world_size_{size}_rank_{rank}.pt", weights_only=True)
        net.load_state_dict(state)
        assert all(torch.equal(full(t), want["model"][n]) for n, t in net.state_dict().items()), folder
        for name, mine in net.state_dict().items():
            assert isinstance(mine, DTensor) == isinstance(state[name], DTensor) and getattr(mine, "_spec", None) == getattr(state[name], "_spec", None)
        optimizer = torch.optim.AdamW(net.parameters())
        saved = Path(folder) / f"optim_world_size_{size}_rank_{rank}.pt"
        if saved.exists():
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
            moments = {f"{i}.{n}": full(t) for i, s in optimizer.state_dict()["state"].items() for n, t in s.items()}
            assert moments.keys() == want["moments"].keys() and all(torch.equal(t, want["moments"][n]) for n, t in moments.items()), folder
        net(torch.randn(6, 10)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
