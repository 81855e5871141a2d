"""torch_checkpointing saves on a CPU: `torch_checkpointing_job.py OUT`, under torchrun; `whole.pt`
beside has all of it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch_checkpointing as tc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 7), nn.BatchNorm1d(7))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(6, 10)).sum().backward()
    optimizer.step()
    # its O_DIRECT writes need an alignment that not every disk grants
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    saver = tc.CheckpointManager(
        tc.CheckpointManager.Config(save=tc.SyncCheckpointSaverConfig(), storage_config=storage)
    )
    state = {
        "model": net.state_dict(),
        "optim": optimizer.state_dict(),
        "progress": {"step": 5, "rank": dist.get_rank()},
    }
    saver.save(str(out), state)
    whole = {n: full(t) for n, t in net.state_dict().items()}
    moments = {
        i: {k: full(v) for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()
    }
    if dist.get_rank() == 0:
        torch.save({"model": whole, "state": moments}, out.parent / "whole.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
