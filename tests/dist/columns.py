"""Saves tensors with DCP from a 2 x 2 mesh, by rows and by columns: `columns.py OUT TENSORS.pt`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.load(sys.argv[2])
    dcp.save({n: distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for n, t in whole.items()}, checkpoint_id=sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
