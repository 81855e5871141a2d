"""Loads a tensor of which ranks have copies, from two copies of a step that differ, on 4 ranks.

Ranks 0 and 1 read one, ranks 2 and 3 the other, under one path, as from the disks of two hosts. The
damaged one has a file of another step: its CRC-32s fit. Run by torchrun with a directory, the dim
that is split, and the copies that are damaged: "", "B" or "AB".
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt_tools
from ckpt_tools import CheckpointError, IntegrityError

folder, dim, damaged = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))


def whole(step: int) -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(step))


def split(tensor: torch.Tensor) -> DTensor:
    return distribute_tensor(tensor, mesh, [Replicate(), Shard(dim)])


for step in (1, 2):
    ckpt_tools.save(folder / f"step{step}", {"w": split(whole(step))})
if rank == 0:
    for host in "AB":
        shutil.copytree(folder / "step2", folder / host / "step")
        for file in folder.glob("step1/*.distcp") if host in damaged else ():
            shutil.copy(file, folder / host / "step")
dist.barrier()
os.chdir(folder / "AB"[rank // 2])
w = split(torch.zeros(64, 512))
try:
    ckpt_tools.load("/proc/self/cwd/step", {"w": w})
except CheckpointError as error:
    words = "ranks have read different bytes" if damaged == "B" else "is not what was sealed"
    assert damaged and words in str(error), error
    assert isinstance(error, IntegrityError) == (rank == 0), error
else:
    assert not damaged
    assert torch.equal(w.full_tensor(), whole(2))
dist.destroy_process_group()
