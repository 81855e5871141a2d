"""Loads a checkpoint whose replicas differ, with other names on each rank: `replicas.py DIR OUT`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt_tools

dist.init_process_group("gloo")
names = ("a", "b") if dist.get_rank() == 0 else ("c", "d")
try:
    ckpt_tools.load(sys.argv[1], {"model": {n: torch.zeros(2) for n in names}}, strict=False)
    text = "loaded"
except ckpt_tools.CheckpointError as error:
    text = str(error)
found = [None, None]
dist.all_gather_object(found, text)
if dist.get_rank() == 0:
    Path(sys.argv[2]).write_text(json.dumps(found))
dist.destroy_process_group()
