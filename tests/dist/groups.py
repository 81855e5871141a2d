"""Two groups of two ranks, each with a manager of its own root: `groups.py FOLDER`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from ckpt_tools import CheckpointManager


def main() -> None:
    dist.init_process_group("gloo")
    number = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    root = f"{sys.argv[1]}/{number}"
    with CheckpointManager(root, process_group=groups[number], timeout_s=30) as checkpoints:
        state = {"w": torch.full((4,), float(number))}
        checkpoints.save(1, state)
        checkpoints.wait()
        state["w"].zero_()
        assert checkpoints.resume(state) == 1 and state["w"].eq(number).all()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
