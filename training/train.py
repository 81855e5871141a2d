"""Trains a decoder with FSDP2 and AdamW, saves with stock `dcp.save`, and resumes from the newest finished step.

    torchrun --standalone --nproc-per-node 8 -m training --dir run --steps 60 --save-every 30
    torchrun --standalone --nproc-per-node 4 -m training --dir run --steps 80          # goes on where it stopped

On CUDA with nccl where there is one, on CPU with gloo elsewhere. A skeleton: FSDP2 and full sharding only.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from training.data import batch, standard_library
from training.model import MODELS, Decoder, ModelConfig

T = TypeVar("T")
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


def newest(folder: Path) -> Path | None:
    """Returns the finished checkpoint of the highest step; torch writes `.metadata` last, so its presence means finished."""
    steps = [(int(m[1]), p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and (p / ".metadata").exists()]
    return max(steps)[1] if steps else None


def train_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Returns all that a checkpoint holds."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "train_state": {"step": step}}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads a checkpoint of any number of ranks into this one's shards, and returns its step."""
    state = train_state(model, optimizer, 0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["train_state"]["step"])


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start_from = args.resume_from or from_rank_0(newest(args.dir))
    first = load(start_from, model, optimizer) if start_from else 0
    if rank == 0:
        args.dir.mkdir(parents=True, exist_ok=True)
        (args.dir / "model.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    size = sum(p.numel() for p in model.parameters())
    log(
        f"{size:,} parameters on {world_size} ranks ({device.type}), "
        + (f"resumed {start_from} at step {first}" if first else "from scratch")
    )
    train(args, model, optimizer, first, device)
    if args.logits:
        logits = logits_for(model, device)
        if rank == 0:
            torch.save(logits, args.logits)


def from_rank_0(value: T) -> T:
    """Returns rank 0's value on every rank, so that all decide alike on what stands on a disk."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, device: torch.device) -> None:
    """Takes the steps behind `first`, saving on the way and at the end."""
    text, began, tokens = standard_library(), time.perf_counter(), 0
    for step in range(first + 1, args.steps + 1):
        inputs, targets = batch(
            text,
            step,
            seed=args.seed,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += args.batch_size * args.seq_len
        if step % 10 == 0 or step == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            log(f"step {step:5d}  loss {mean.item() / dist.get_world_size():.4f}  {tokens / (time.perf_counter() - began):,.0f} tokens/s")
            began, tokens = time.perf_counter(), 0
        if step == args.steps or (args.save_every and step % args.save_every == 0):
            save(args.dir / f"step-{step:08d}", model, optimizer, step)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Saves one step; torch would write into what is there already, so it must not be."""
    if from_rank_0(path.exists()):  # a rank that looked for itself might see the folder that rank 0 is making
        raise SystemExit(f"{path} exists already: move it away, or choose another --dir")
    dcp.save(train_state(model, optimizer, step), checkpoint_id=path)
    log(f"saved {path}")
