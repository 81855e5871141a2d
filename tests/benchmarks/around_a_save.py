"""Times a training loop around saves in the background: how long a save holds it, and how fast the
ten steps after it are, beside ten steps without a save.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 tests/benchmarks/around_a_save.py DIR
    [--width 1024] [--layers 4] [--batch 64] [--runs 9] [--skip REGEX]

The model is a stack of FSDP2 blocks with AdamW, in float32 on a CPU; with CKPT_DEVICE=cuda on the
machine's GPU, in bfloat16 with --bf16. Contenders take turns. `tokens/s` counts the time of the
steps alone, with any wait of an optimizer for a copy. A save is durable at the earliest when its ten
steps are over.

A model of 8 billion parameters on one GPU: --width 4096 --layers 60 --bf16.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager, Writing
from tests.dist import device

STEPS = 10
Save = Callable[[int], Callable[[], object]]  # begins a save; the result waits for its end


class Block(nn.Module):
    """Two matrices with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = values + self.down(torch.relu(self.up(values)))
        return found


def build(width: int, layers: int, dtype: torch.dtype, here: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(layers)]).to(here, dtype)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def contenders(folder: Path, state: dict[str, Any], stack: ExitStack) -> dict[str, Save]:
    """Returns the ways to save, by name."""
    found: dict[str, Save] = {"no save": lambda _: lambda: None}
    variants: dict[str, dict[str, Any]] = {
        "CheckpointManager": {},
        "CheckpointManager, overlap_copy": {"writing": Writing(overlap_copy=True)},
        "the same, background_jobs=1": {"writing": Writing(overlap_copy=True, background_jobs=1)},
    }
    for number, (name, options) in enumerate(variants.items()):
        manager = CheckpointManager(folder / f"ours{number}", keep_last=1, **options)
        stack.enter_context(manager)

        def ours(step: int, manager: CheckpointManager = manager) -> Callable[[], object]:
            manager.save(step, state)
            return manager.wait

        found[name] = ours

    def stock(is_pinned: bool) -> Save:
        group = dist.new_group(backend="gloo")  # its thread must not mix with the training's

        def call(step: int) -> Callable[[], object]:
            model, optimizer = get_state_dict(state["model"], state["optimizer"])
            target = folder / "dcp"
            shutil.rmtree(target, ignore_errors=True)
            # `async_save` closes a stager, so it serves once
            stager = DefaultStager(StagingOptions(True, False, True, True)) if is_pinned else None
            done: Any = dcp.async_save(
                {"model": model, "optimizer": optimizer},
                checkpoint_id=target,
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                async_stager=stager,
                process_group=group,
            )
            if hasattr(done, "staging_completion"):
                done.staging_completion.result()  # without it, the next update could be saved
                return lambda: done.upload_completion.result()
            return lambda: done.result()

        return call

    found["dcp.async_save, thread"] = stock(False)
    if device.NAME == "cuda":
        found["dcp.async_save, thread, pinned stager"] = stock(True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="tokens of a rank's step")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--skip", default="$^", metavar="REGEX")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    here = device.begin()
    torch.set_num_threads(1)
    is_cuda = device.NAME == "cuda"
    model = build(args.width, args.layers, torch.bfloat16 if args.bf16 else torch.float32, here)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4)}
    values = torch.randn(args.batch, args.width, device=here, dtype=next(model.parameters()).dtype)

    def steps(number: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(number):
            model(values).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - began

    steps(3)
    root = args.dir / "work"
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
    dist.barrier()
    held: dict[str, list[float]] = {}
    speed: dict[str, list[float]] = {}
    durable: dict[str, list[float]] = {}
    with ExitStack() as stack:
        found = contenders(root, state, stack)
        names = [name for name in found if not re.search(args.skip, name)]
        for number in range(-2, args.runs):
            for name in names:
                alone = steps(STEPS)
                began = time.perf_counter()
                wait = found[name](100 + number)
                blocked = time.perf_counter() - began
                after = steps(STEPS)
                wait()
                until_durable = time.perf_counter() - began
                dist.barrier()
                time.sleep(0.5)
                if number >= 0:  # the first rounds make pinned memory and caches
                    held.setdefault(name, []).append(blocked)
                    speed.setdefault(name, []).append(alone / after)
                    durable.setdefault(name, []).append(until_durable)
    if dist.get_rank() == 0:
        size = sum(p.numel() * p.element_size() for p in model.parameters()) * 3 / 1e9
        print(f"{size:.2f} GB of state, {dist.get_world_size()} ranks, {args.batch} tokens a step")
        print(
            "| contender | held, ms (min – max) | tokens/s after (min – max) | durable after, s |"
        )
        print("|---|---:|---:|---:|")
        for name in names:
            h, s = [x * 1e3 for x in held[name]], speed[name]
            print(
                f"| {name} | {statistics.median(h):.1f} ({min(h):.1f} – {max(h):.1f}) |"
                f" {statistics.median(s):.2f} ({min(s):.2f} – {max(s):.2f}) |"
                f" {statistics.median(durable[name]):.2f} |"
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"largest memory of rank 0: {peak:.0f} MiB")
        shutil.rmtree(root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
