"""Trains until something raises: python raising.py ROOT CASE. The last complete step is 6.

CASE: all (every rank raises), one (rank 1 only), update (within the optimizer's step), apart (after
different steps), saved (step 6 is saved already), exit (SystemExit), killed (rank 1 is).
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager


def main(root: str, case: str) -> None:
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), 0
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root) as checkpoints:
        resumed = checkpoints.resume(state)
        if resumed:
            print(f"resumed {resumed}")
            return
        with checkpoints.save_on_exception(lambda: last, state, wait_s=4):
            for step in range(1, 8):
                model(torch.ones(1, 8)).sum().backward()
                if step == 7:
                    began = time.monotonic()
                    if case == "killed":
                        be_killed(checkpoints, rank)
                    fail(case, rank, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                last = step
                if step == 6 and case == "saved":
                    checkpoints.save(6, state)
                if step == 6 and case == "apart":
                    last = 6 - rank
            dist.barrier()  # where the others are when one rank raises
            assert time.monotonic() > began


def be_killed(checkpoints: CheckpointManager, rank: int) -> None:
    """Kills rank 1; another rank notices."""
    checkpoints.preempted()  # from now on SIGTERM is noted
    checkpoints.should_save(7)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.should_save(7)


def fail(case: str, rank: int, optimizer: torch.optim.Optimizer) -> None:
    if case == "exit":
        raise SystemExit(3)
    if case == "update":

        def hook(*_: object) -> None:
            raise ValueError("in the update")

        optimizer.register_step_pre_hook(hook)
    elif case != "one" or rank == 1:
        raise ValueError("no more data")


if __name__ == "__main__":
    main(*sys.argv[1:])
