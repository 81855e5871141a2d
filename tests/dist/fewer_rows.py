"""FSDP1 with more ranks than rows: some ranks have no shard: `fewer_rows.py ROOT`. Saves, resumes in
a fresh model, and compares.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

from ckpt_tools import CheckpointManager
from tests.dist import device


def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Fsdp(torch.nn.Linear(4, 1), use_orig_params=True, device_id=torch.device(device.NAME))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device=device.NAME)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with Fsdp.summon_full_params(model):
        values = [p.detach().clone() for p in model.parameters()]
    state = Fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return [*values, *(state[name]["exp_avg"] for name in sorted(state))]


def main() -> None:
    device.begin()
    model, optimizer = make(0)
    want = whole(model, optimizer)
    with CheckpointManager(sys.argv[1]) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer})
        checkpoints.wait()
        other, theirs = make(1)
        assert checkpoints.resume({"model": other, "optimizer": theirs}) == 1
    for got, expected in zip(whole(other, theirs), want, strict=True):
        assert torch.equal(got, expected)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
