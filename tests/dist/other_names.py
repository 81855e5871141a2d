"""Saves states with other tensors on rank 1: refused on every rank, unless the call says so. Run by
torchrun with a directory, on 2 ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager

root = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
more = {"b": torch.ones(2)} if rank else {}
for state in ({"a": torch.ones(2), **more}, {"m": torch.nn.Linear(2, 2, bias=not rank)}):
    try:
        ckpt_tools.save(root / "c", state)
    except CheckpointError as error:
        assert "differ: the tensor" in str(error), error
    else:
        raise AssertionError(state)
    assert not (root / "c").exists()
with CheckpointManager(root / "run", asynchronous=False) as checkpoints:
    checkpoints.save(1, {"a": torch.ones(2), **more}, names_differ=True)
    state = {"a": torch.zeros(2), **{name: torch.zeros(2) for name in more}}
    assert checkpoints.resume(state) == 1
    assert all(value.tolist() == [1.0, 1.0] for value in state.values())
dist.destroy_process_group()
