"""Saves one model under FSDP2 with statistics: `save_statistics.py OUT`, on any number of ranks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(301, 77), nn.Linear(77, 5))
    fully_shard(model)
    with CheckpointManager(sys.argv[1], statistics=True) as checkpoints:
        checkpoints.save(1, {"model": model, "replicated": torch.arange(1000.0)})
    dist.destroy_process_group()


main()
