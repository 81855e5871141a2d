"""A real model on one GPU: a save while it trains, a kill, a resume and an export, beside the peers.

    PYTHONPATH=. CKPT_DEVICE=cuda python tests/benchmarks/one_gpu.py DIR [--model 8b]
    [--batch 1 --seq-len 1024] [--only ours,dcp,torch_checkpointing]

The model has the shapes of Llama 3.1 8B in bfloat16, under FSDP2 with fused AdamW: 48 GB of state.
Each contender runs in a process of its own and saves twice: the first save allocates its pinned
memory. The disk holds one checkpoint, so the first one is removed. The process of `ours` kills
itself right after its second save is durable; other processes resume it and merge its model.

On a machine without a GPU, `--model tiny` shows that the program works.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saving import fsync_all
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ckpt_tools import CheckpointManager, Writing
from tests.dist import device
from training import config as configuration
from training import model as models

STEPS = 10  # before and after a save
IS_CUDA = device.NAME == "cuda"
SECONDS = 400  # of one process, at most
Save = Callable[[int], tuple[float, Callable[[], object]]]


def build(name: str, seq_len: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """Returns the model, and an optimizer that has not made a step."""
    config = configuration.resolve(
        None, [f"model.name={name}", f"model.max_seq_len={seq_len}", f"data.seq_len={seq_len}"]
    )
    model = models.make(config).to(torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device.here())
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=IS_CUDA)


def settled() -> float:
    """Waits for the GPU, and returns the time."""
    if IS_CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def ours(folder: Path, state: dict[str, Any], overlaps: bool) -> Save:
    checkpoints = CheckpointManager(folder, keep_last=1, writing=Writing(overlap_copy=overlaps))

    def save(step: int) -> tuple[float, Callable[[], object]]:
        began = time.perf_counter()
        checkpoints.save(step, state)
        return time.perf_counter() - began, checkpoints.wait

    return save


def stock(folder: Path, state: dict[str, Any]) -> Save:
    group = dist.new_group(backend="gloo")  # its thread must not mix with the training's

    def save(step: int) -> tuple[float, Callable[[], object]]:
        began = time.perf_counter()
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        done: Any = dcp.async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=folder / f"step-{step}",
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            # `async_save` closes a stager, so it serves once
            async_stager=DefaultStager(StagingOptions(IS_CUDA, False, True, IS_CUDA)),
            process_group=group,
        )
        done.staging_completion.result()  # without it, the next update could be saved
        return time.perf_counter() - began, done.upload_completion.result

    return save


def torch_checkpointing(folder: Path, state: dict[str, Any]) -> Save:
    import torch_checkpointing as tc
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(
        use_pinned_memory=IS_CUDA, use_async_staging=False, use_non_blocking_copy=IS_CUDA
    )
    saver = tc.CheckpointManager(
        tc.CheckpointManager.Config(
            save=tc.AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )

    def save(step: int) -> tuple[float, Callable[[], object]]:
        began = time.perf_counter()
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        done = saver.save(str(folder / f"step-{step}"), {"model": model, "optimizer": optimizer})
        return time.perf_counter() - began, done.result

    return save


CONTENDERS: dict[str, Callable[[Path, dict[str, Any]], Save]] = {
    "ours": lambda folder, state: ours(folder, state, overlaps=True),
    "ours, without overlap_copy": lambda folder, state: ours(folder, state, overlaps=False),
    "dcp": stock,
    "torch_checkpointing": torch_checkpointing,
}


def peak_gib() -> float:
    """Returns the most resident memory of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**20


def train(args: argparse.Namespace, folder: Path) -> None:
    """Trains, saves twice, and prints what the loop noticed."""
    model, optimizer = build(args.model, args.seq_len)
    tokens = torch.randint(0, 256, (args.batch, args.seq_len + 1), device=device.here())

    def steps(number: int) -> float:
        """Returns tokens per second."""
        began = settled()
        for _ in range(number):
            output = model(tokens[:, :-1]).flatten(0, 1)
            F.cross_entropy(output.float(), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return number * args.batch * args.seq_len / (settled() - began)

    steps(3)
    state = {"model": model, "optimizer": optimizer}
    save = CONTENDERS[args.contender](folder, state)
    for step in (1, 2):
        alone = steps(STEPS)
        began = settled()
        blocked, wait = save(step)
        after = steps(STEPS)
        wait()
        fsync_all(folder)
        durable = time.perf_counter() - began
        print(
            f"| {args.contender}, save {step} | {blocked:.3f} | {durable:.1f} | {alone:,.0f} |"
            f" {after / alone:.3f} | {peak_gib():.1f} |",
            flush=True,
        )
        if step == 1:
            # the disk holds one checkpoint
            for path in folder.glob("step-*"):
                shutil.rmtree(path)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(args: argparse.Namespace, folder: Path) -> None:
    """Resumes, and prints how long it took and what it proved."""
    model, optimizer = build(args.model, args.seq_len)
    with CheckpointManager(folder) as checkpoints:
        began = settled()
        number = checkpoints.resume({"model": model, "optimizer": optimizer})
        took = settled() - began
        report = checkpoints.last_load
        print(
            f"resumed step {number} in {took:.1f} s, {report.needed_nbytes / 1e9:.1f} GB,"
            f" host memory at most {peak_gib():.1f} GiB; {report.timing}",
            flush=True,
        )


def run(*arguments: str) -> int:
    try:
        return subprocess.run([sys.executable, *arguments], timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(arguments)}: not over after {SECONDS} s")
        return 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--only", default=";".join(CONTENDERS), help="names, with a semicolon between"
    )
    parser.add_argument("--export", type=Path, help="where the merged model goes")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = args.dir / "work"
    if args.contender:
        device.begin(is_default=False)
        (resume if args.contender == "resume" else train)(args, folder)
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    print("| | blocked s | durable after s | tokens/s before | after, of before | host GiB |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    again = [__file__, *sys.argv[1:], "--contender"]
    for name in args.only.split(";"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        status = run(*again, name)
        if status != -signal.SIGKILL:
            print(f"{name} failed: {status}", flush=True)
        elif name == "ours":
            run(*again, "resume")
            began = time.perf_counter()
            target = args.export or args.dir / "model.safetensors"
            run(
                "-m",
                "ckpt_tools",
                "merge",
                str(folder / "step-00000002"),
                str(target),
                "--overwrite",
            )
            print(f"merged in {time.perf_counter() - began:.1f} s", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
