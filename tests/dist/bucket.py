"""A loop that saves steps of known contents to a run for as long as it lives: `bucket.py ROOT
[MIRROR]`. It says what it resumed from.
"""

import sys
import time

import torch
from torch import nn

from ckpt_tools import CheckpointManager


def contents(step):
    generator = torch.Generator().manual_seed(step)
    return {f"w{i}": torch.randn(1_000_000 + i, generator=generator) for i in range(5)}


def main():
    root, mirror = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else None)
    model = nn.Module()
    for name, value in contents(0).items():
        model.register_parameter(name, nn.Parameter(value))
    state = {"model": model, "step": 0}
    with CheckpointManager(root, keep_last=2, mirror=mirror) as checkpoints:
        first = checkpoints.resume(state) or 0
        right = state["step"] == first and all(torch.equal(p, contents(first)[n]) for n, p in model.named_parameters())
        print("resumed", first, right, flush=True)
        for step in range(first + 1, 10_000):
            with torch.no_grad():
                for name, value in contents(step).items():
                    getattr(model, name).copy_(value)
            state["step"] = step
            checkpoints.save(step, state)
            print("began", step, flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
