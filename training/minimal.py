"""A whole FSDP2 job in one file: it trains on the bytes of a file, and continues after any kill.

    torchrun --standalone --nproc-per-node 2 -m training.minimal run README.md --steps 200

Start the same command again, on any number of ranks: it resumes from the newest step. At the end,
the model lies in `run/model.safetensors`. Copy this file and change what you like; it imports
nothing else of this package. `training` itself has the same loop with everything around it.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import ckpt_tools
from ckpt_tools import CheckpointManager

LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 4, 4
BATCH = 16  # rows of all ranks together


class Block(nn.Module):
    """Attention to earlier bytes, and two linear layers, each with a residual."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [rows, bytes, width] for the same."""
        rows, length, _ = x.shape
        shape = (rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A decoder of bytes."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits [rows, bytes, 256] for ids [rows, bytes]."""
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rows_of(data: Tensor, step: int, rank: int, world_size: int) -> Tensor:
    """Returns this rank's rows of a step: [rows, LENGTH + 1].

    The order depends on the step alone, so a resume needs no state of the data. All ranks together
    see the same rows, however many they are.
    """
    num_rows = (len(data) - 1) // LENGTH
    generator = torch.Generator().manual_seed(step)
    numbers = torch.randint(num_rows, (BATCH,), generator=generator)[rank::world_size]
    return torch.stack([data[n * LENGTH : (n + 1) * LENGTH + 1] for n in numbers]).long()


def sharded_model(device: torch.device) -> Model:
    """Returns the model, each block a unit of FSDP2 that computes in bfloat16 on a GPU."""
    torch.manual_seed(0)  # the same on all ranks
    model = Model().to(device)
    short = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def train(folder: Path, data: Tensor, num_steps: int, save_every: int) -> None:
    """Trains up to a step, and saves on the way; ends early after SIGTERM, with a save."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    model = sharded_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / 20) * 0.5 * (1 + math.cos(math.pi * n / num_steps))
    )
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with CheckpointManager(folder, keep_last=2) as checkpoints:
        first = checkpoints.resume(state) or 0
        for step in range(first + 1, num_steps + 1):
            rows = rows_of(data, step, rank, world_size).to(device)
            logits = model(rows[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            signal = checkpoints.preempted()
            if step % save_every == 0 or step == num_steps or signal:
                total = loss.detach().clone()
                dist.all_reduce(total)
                mean = total.item() / world_size
                checkpoints.save(step, state, asynchronous=not signal, metrics={"loss": mean})
                if rank == 0:
                    print(f"step {step}: loss {mean:.4f}", flush=True)
            if signal:
                raise SystemExit(128 + signal)
        checkpoints.wait()
        if rank == 0 and (newest := checkpoints.latest()) is not None:
            ckpt_tools.merge(newest, folder / "model.safetensors", overwrite=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the run: its steps and the model")
    parser.add_argument("data", type=Path, help="a file to learn")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    given = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    text = torch.frombuffer(bytearray(given.data.read_bytes()), dtype=torch.uint8)
    train(given.folder, text, given.steps, given.save_every)
    dist.destroy_process_group()
