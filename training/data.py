"""Real text that every machine has: the sources of Python's own standard library, as bytes.

The sequences of a step depend on the seed and the step alone, so a run goes on with the same data on any number of ranks.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library() -> Tensor:
    """Returns the top-level modules of the standard library, in order of their names, as one `[n]` uint8 tensor."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: Tensor, step: int, *, seed: int, batch_size: int, seq_len: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of one rank for one step, `[batch_size / world_size, seq_len]` each, int64.

    Args:
        text: `[n]` uint8.
        step: number of the step, from 1.
        batch_size: sequences of all ranks together; a multiple of `world_size`.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq_len - 1, (batch_size,), generator=generator)
    mine = starts.view(-1, world_size)[:, rank]
    tokens = torch.stack([text[s : s + seq_len + 1] for s in mine.tolist()]).long()
    return tokens[:, :-1], tokens[:, 1:]
