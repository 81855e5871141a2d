"""What statistics cost a save: `PYTHONPATH=. torchrun --standalone --nproc-per-node 2
tests/benchmarks/statistics_cost.py DIR [MIB]`; with CKPT_DEVICE=cuda on the machine's GPU.

Saves with and without statistics in turns, in one job of several ranks with FSDP2: blocking saves,
and the stall of saves in the background. Medians, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager
from tests.dist import device

ROUNDS = 7


def main() -> None:
    device.begin()
    root, mib = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    width = int((mib * (1 << 20) / 4 / 24) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
    fully_shard(model)
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    seconds: dict[tuple[bool, bool], list[float]] = {}
    step = 0
    with CheckpointManager(root, keep_last=1) as checkpoints:
        for in_background in (False, True):
            for number in range(2 * ROUNDS + 2):
                measures = bool(number % 2)
                checkpoints.statistics, step = measures, step + 1
                with torch.no_grad():
                    model[0].weight.add_(1e-3)
                if device.NAME == "cuda":
                    torch.cuda.synchronize()
                dist.barrier()
                began = time.perf_counter()
                checkpoints.save(step, {"model": model}, asynchronous=in_background)
                took = time.perf_counter() - began
                checkpoints.wait()
                if number > 1:
                    seconds.setdefault((in_background, measures), []).append(took)
    if dist.get_rank() == 0:
        for in_background in (False, True):
            plain, measured = (seconds[in_background, measures] for measures in (False, True))
            name = "stall in the background" if in_background else "blocking save"
            print(
                f"{name:24} {statistics.median(plain):.3f} s, with statistics"
                f" {statistics.median(measured):.3f} s, median of the ratios"
                f" {harness.ratio(measured, plain):.3f}"
            )
    dist.destroy_process_group()


main()
