"""Saves one checkpoint with `ckpt_tools.save` from all ranks: `single.py DIRECTORY`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_tools

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
value = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
ckpt_tools.save(sys.argv[1], {"w": distribute_tensor(value, mesh, [Shard(0)]), "n": 3})
dist.destroy_process_group()
