"""Saves some steps of one small state: `steps.py ROOT STEPS`."""

import sys

import torch
import torch.distributed as dist

from ckpt_tools import CheckpointManager

dist.init_process_group("gloo")
with CheckpointManager(sys.argv[1]) as checkpoints:
    for step in range(1, int(sys.argv[2]) + 1):
        checkpoints.save(step, {"w": torch.ones(3), "step": step})
dist.destroy_process_group()
