"""Trains a decoder with FSDP2 and AdamW, saves while it trains, and resumes by itself: from the newest complete step.

    torchrun --standalone --nproc-per-node 8 -m training --dir run --steps 60 --save-every 30
    torchrun --standalone --nproc-per-node 4 -m training --dir run --steps 80          # goes on where it stopped

SIGTERM and SIGUSR1 end it after the step, which is saved: exit status 143 or 138, and started again it goes on from there.

On CUDA with nccl where there is one, on CPU with gloo elsewhere. A skeleton: FSDP2 and full sharding only.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from ckpt_tools import CheckpointManager, RngState
from training.data import batch, standard_library
from training.model import MODELS, Decoder, ModelConfig

PROMPT = b"def main():\n    parser = argparse"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the run: checkpoints and model.json")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--steps", type=int, default=60, help="last step, counted from the very first")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of all ranks together")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; the last step is always saved")
    parser.add_argument("--keep-last", type=int, default=3, help="how many of the newest checkpoints stay")
    parser.add_argument("--keep-every", type=int, help="checkpoints of every so many steps stay for good")
    parser.add_argument("--from", dest="resume_from", type=Path, help="checkpoint to go on from, instead of the newest in --dir")
    parser.add_argument("--logits", type=Path, help="write the final model's logits for a fixed prompt to this file")
    return parser.parse_args()


def build(config: ModelConfig, device: torch.device, seed: int) -> Decoder:
    """Returns a sharded model: made on the meta device, sharded block by block, then given memory and weights."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        model = Decoder(config)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(seed)
    model.reset_parameters()
    return model


def logits_for(model: nn.Module, device: torch.device) -> Tensor:
    """Returns `[1, T, V]` logits for the fixed prompt."""
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([list(PROMPT)], device=device)).cpu()


def main() -> None:
    args = parse_args()
    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        run(args, is_cuda)
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace, is_cuda: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} is not a multiple of {world_size} ranks")
    device = torch.device("cuda", rank % torch.cuda.device_count()) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    config = MODELS[args.model]
    model = build(config, device, args.seed)
    seed_all(args.seed + rank)  # from here on, ranks draw numbers of their own
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    state = {"model": model, "optimizer": optimizer, "rng": RngState(), "train_state": {"step": 0}}
    with CheckpointManager(args.dir, keep_last=args.keep_last, keep_every=args.keep_every) as checkpoints:
        checkpoints.resume(state, path=args.resume_from)
        first = state["train_state"]["step"]
        if rank == 0:
            (args.dir / "model.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
        size = sum(p.numel() for p in model.parameters())
        log(f"{size:,} parameters on {world_size} ranks ({device.type}), " + (f"resumed at step {first}" if first else "from scratch"))
        number = train(args, state, checkpoints, first, device)
    if checkpoints.last_save:
        log(f"saved {checkpoints.last_save.path}")
    if number:
        raise SystemExit(128 + number)
    if args.logits:
        logits = logits_for(model, device)
        if rank == 0:
            torch.save(logits, args.logits)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(args: argparse.Namespace, state: dict[str, Any], checkpoints: CheckpointManager, first: int, device: torch.device) -> int:
    """Takes the steps behind `first`, saving on the way and at the end; returns the signal that ended it early, or 0."""
    model, optimizer, text = state["model"], state["optimizer"], standard_library()
    began, tokens = time.perf_counter(), 0
    for step in range(first + 1, args.steps + 1):
        loss = take_step(args, model, optimizer, text, step, device)
        tokens += args.batch_size * args.seq_len
        if step % 10 == 0 or step == args.steps:
            log(f"step {step:5d}  loss {loss:.4f}  {tokens / (time.perf_counter() - began):,.0f} tokens/s")
            began, tokens = time.perf_counter(), 0
        if dist.get_rank() == 0:
            with (args.dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        number = checkpoints.preempted()
        if number or step == args.steps or (args.save_every and step % args.save_every == 0):
            state["train_state"]["step"] = step
            checkpoints.save(step, state, asynchronous=False if number else None)
        if number:
            log(f"got {signal.Signals(number).name}: saved step {step}, start again to go on")
            return number
    return 0


def take_step(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, step: int, device: torch.device
) -> float:
    """Takes one step and returns the mean loss over all ranks."""
    world_size = dist.get_world_size()
    inputs, targets = batch(
        text, step, seed=args.seed, batch_size=args.batch_size, seq_len=args.seq_len, rank=dist.get_rank(), world_size=world_size
    )
    logits = model(inputs.to(device))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / world_size
