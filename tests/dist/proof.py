"""Loads a sealed safetensors file into tensors sharded by rows, by columns and not at all, on
several ranks. One bit of it may be wrong: then every rank must raise. Run by torchrun with the file,
and the name of the tensor that is wrong, or "none".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt_tools
from ckpt_tools import CheckpointError, IntegrityError

path, wrong = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
placements = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "narrow": Shard(1)}
width = {name: 30 if name == "narrow" else 3000 for name in placements}
state = {
    name: distribute_tensor(torch.zeros(6, width[name]), mesh, [placement])
    for name, placement in placements.items()
}
try:
    ckpt_tools.load(path, state)
except CheckpointError as error:
    assert wrong != "none" and wrong in str(error), error
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, isinstance(error, IntegrityError))
    assert any(told)
else:
    assert wrong == "none", wrong
    for number, name in enumerate(placements):
        assert torch.equal(state[name].full_tensor(), torch.full((6, width[name]), number + 1.0))
dist.destroy_process_group()
