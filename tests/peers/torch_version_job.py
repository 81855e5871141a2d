"""Another release of torch saves and loads: `torch_version_job.py save OUT`, `… load FOLDER …`,
under its own torchrun. Needs nothing else.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # before 2.5
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor
try:
    from torch.distributed.device_mesh import init_device_mesh
except ImportError:  # before 2.2
    from torch.distributed._tensor import DeviceMesh

    def init_device_mesh(device, shape, mesh_dim_names):
        return DeviceMesh(device, torch.arange(*shape))


def save(values, folder):
    if hasattr(dcp, "save"):
        dcp.save(values, storage_writer=dcp.FileSystemWriter(folder))
    else:  # before 2.2
        dcp.save_state_dict(values, dcp.FileSystemWriter(folder))


def load(values, folder):
    if hasattr(dcp, "load"):
        dcp.load(values, storage_reader=dcp.FileSystemReader(folder))
    else:
        dcp.load_state_dict(values, dcp.FileSystemReader(folder))


def whole():
    """What is saved; uneven over two ranks, of several types, one of it with nothing for rank 1."""
    torch.manual_seed(5)
    return {
        "rows": torch.randn(7, 3),
        "columns": torch.randn(4, 5).to(torch.bfloat16),
        "one": torch.randn(1, 2, dtype=torch.float64),
        "copy": torch.randn(6).half(),
        "plain": torch.arange(9),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False]),
    }


def state(values):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    placements = {
        "rows": Shard(0),
        "columns": Shard(1),
        "one": Shard(0) if hasattr(dcp, "save") else Replicate(),
        "copy": Replicate(),
    }

    def shared(tensor, placement):
        # gloo sent none of these before 2.2
        wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        return distribute_tensor(wide, mesh, [placement]).to(tensor.dtype)

    model = {
        n: shared(t, placements[n]) if n in placements else t.clone() for n, t in values.items()
    }
    return {"model": model, "epoch": 3, "lr": [0.1, 0.2], "name": "a run"}


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if sys.argv[1] == "save":
        out, mine = Path(sys.argv[2]), state(whole())
        save(mine, out / "dcp")
        (out / "ranks").mkdir(exist_ok=True)
        torch.save(mine["model"], out / "ranks" / f"model_world_size_{size}_rank_{rank}.pt")
        if rank == 0:
            torch.save(mine | {"model": whole()}, out / "whole.pt")
    for folder in sys.argv[2:] if sys.argv[1] == "load" else []:
        got = state({n: torch.zeros_like(t) for n, t in whole().items()}) | {
            "epoch": 0,
            "lr": [0, 0],
            "name": "",
        }
        load(got, folder)
        for name, value in whole().items():
            tensor = got["model"][name]
            assert torch.equal(
                tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, value
            ), (folder, name)
        assert (got["epoch"], list(got["lr"]), got["name"]) == (3, [0.1, 0.2], "a run"), folder
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
