"""Tokens/s of `training` against a bare FSDP2 loop written straight to PyTorch, in turn.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 tests/benchmarks/loop.py [TABLE.KEY=VALUE
    …]    # CKPT_DEVICE=cuda: on a GPU

Both train the same model on the same sequences on the same ranks; the bare loop does nothing else:
no metrics, no checkpoints, no clipping, no schedule. Medians of the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from tests.dist import device
from training import config as configuration
from training import model as models
from training.config import Config
from training.data import open_tokens
from training.prove import prove
from training.train import train
from training.units import dtype_of

WARM = 3  # steps that are not counted


def bare(config: Config) -> float:
    """Returns tokens/s of the bare loop."""
    model = models.make(config)
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        dtype_of(config.precision.param), dtype_of(config.precision.reduce)
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device.here())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = config.data
    tokens, part = (
        open_tokens("", data.seq_len, data.batch_size, 256),
        data.batch_size // dist.get_world_size(),
    )
    times = []
    for step in range(config.run.steps):
        began = time.perf_counter()
        start = step * data.batch_size + dist.get_rank() * part
        inputs, targets = (
            t.to(device.here())
            for t in tokens.batch(list(range(start, start + part)), slice(None))[:2]
        )
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as whoever looks at a loss waits for it
        times.append(time.perf_counter() - began)
    return data.batch_size * data.seq_len / statistics.median(times[WARM:])


def ours(config: Config) -> float:
    """Returns tokens/s of the program, everything included that it does in a step without a
    checkpoint.
    """
    train(prove(config, dist.get_world_size(), dist.get_world_size()), device.here())
    lines = [
        json.loads(line)
        for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    ]
    return (
        config.data.batch_size
        * config.data.seq_len
        / statistics.median(line["step_s"] for line in lines[WARM:-1])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    device.begin(is_default=False)
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {"bare": [], "training": []}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            options = [
                f"run.steps={args.steps}",
                "metrics.progress=false",
                f"run.dir={shared[0]}/run",
                *args.options,
            ]
            config = configuration.resolve(None, options)
            for name, loop in (("bare", bare), ("training", ours))[:: 1 if number % 2 else -1]:
                rates[name].append(loop(config))
            dist.barrier()
    if dist.get_rank() == 0:
        for name, values in rates.items():
            print(
                f"{name:10} {statistics.median(values):10,.0f} tokens/s  "
                f" {' '.join(f'{v:,.0f}' for v in values)}"
            )
        ratios = [b / a for a, b in zip(rates["bare"], rates["training"], strict=True)]
        print(
            f"ratio      {harness.ratio(rates['training'], rates['bare']):10.3f}           "
            f" {' '.join(f'{r:.3f}' for r in ratios)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
