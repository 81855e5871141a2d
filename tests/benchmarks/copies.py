"""The cost of proving copies: blocking saves and stalls of FSDP, DDP and HSDP jobs.

    torchrun --nproc-per-node 2 tests/benchmarks/copies.py FOLDER [--mib 1024] [--rounds 9]

Each round saves once with each choice of `replicas`, in turn, after the first save of each manager.
The order of the choices changes from round to round. The table has medians: of the seconds, of the
ratios to "trust" in the same round, and of the seconds that the comparison itself took.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_tools import CheckpointManager, Writing

CHOICES = ("trust", "first-save", "check")


def model_of(kind: str, mib: int) -> nn.Module:
    torch.manual_seed(0)
    width = 1024  # 4 MiB each, and AdamW has two more of them
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(mib // 12)))
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    return fully_shard(model, mesh=mesh) if kind == "hsdp" else fully_shard(model)


def measure(
    kind: str, folder: Path, mib: int, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Returns by choice the medians of seconds, ratio to "trust", and seconds of comparing."""
    model = model_of(kind, mib)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    managers = {
        c: CheckpointManager(folder / f"{kind}-{c}", keep_last=1, writing=Writing(replicas=c))
        for c in CHOICES
    }
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, (choice, counts) in enumerate(harness.in_turn(CHOICES, rounds)):
        manager = managers[choice]
        for what, is_background in (("blocking", False), ("stall", True)):
            dist.barrier()
            began = time.perf_counter()
            manager.save(2 * number + is_background, state, asynchronous=is_background)
            spent = time.perf_counter() - began
            manager.wait()
            if counts:
                compared = manager.last_save.timing["compare"]
                times.setdefault((what, choice), []).append((spent, compared))
    for manager in managers.values():
        manager.close()
    found = {}
    for (what, choice), mine in times.items():
        ratio = harness.ratio([a for a, _ in mine], [b for b, _ in times[what, "trust"]])
        seconds, compared = (statistics.median(column) for column in zip(*mine, strict=True))
        found[f"{what} {choice}"] = (seconds, ratio, compared)
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--mib", type=int, default=1024)
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    dist.init_process_group("gloo")
    for kind in ("fsdp", "ddp", "hsdp"):
        found = measure(kind, given.folder, given.mib, given.rounds)
        if dist.get_rank() == 0:
            for name, (seconds, ratio, compared) in found.items():
                print(f"{kind:5} {name:20} {seconds:8.4f} s {ratio:6.3f} x, {compared:.4f} s")
            shutil.rmtree(given.folder)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
