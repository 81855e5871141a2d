"""Saves to a bucket and resumes: `stalled.py ROOT OPTIONS`, on any number of ranks."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager, Outages

ROOT, OPTIONS = sys.argv[1], json.loads(sys.argv[2])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(6)])
    fully_shard(model)
    before = [p.to_local().clone() for p in model.parameters()]
    with CheckpointManager(ROOT, storage_options=OPTIONS, outages=Outages(retry_s=60)) as checkpoints:
        checkpoints.save(1, {"model": model}, asynchronous=False)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert checkpoints.resume({"model": model}) == 1
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
