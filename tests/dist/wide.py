"""Saves tensors with pieces of more than 5 MiB a rank, by all three writers: `wide.py OUT`, below
which `manager/`, `ours` and `stock` are made.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt_tools import CheckpointManager
from ckpt_tools.loop.dcp_plugin import StorageWriter


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"long": (3204, 2048), "columns": (2048, 1601), "small": (130, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def sharded() -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {n: distribute_tensor(t, mesh, [Shard(1 if n == "columns" else 0)]) for n, t in values().items()}


def main() -> None:
    dist.init_process_group("gloo")
    out, state = Path(sys.argv[1]), sharded()
    model = nn.Module()
    for name, value in state.items():
        model.register_parameter(name, nn.Parameter(value))
    with CheckpointManager(out / "manager") as checkpoints:
        checkpoints.save(1, {"model": model})
    dcp.save(state, storage_writer=StorageWriter(out / "ours"))
    dcp.save(state, checkpoint_id=out / "stock")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
