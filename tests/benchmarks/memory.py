"""Peak memory of a rank against the estimate, for every strategy: `python tests/benchmarks/memory.py [--ranks 2]`.

Measured: the most resident memory of a rank during two steps, less what it held before the model was made.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from training import config as configuration
from training import estimate, train
from training import model as models
from training.metrics import gather, peak_mib
from training.plan import groups_of

BASE = (
    "run.steps=2", "model.dim=1024", "model.num_layers=6", "model.num_heads=16", "model.hidden_dim=2752", "model.max_seq_len=512",
    "data.seq_len=256", "data.batch_size=8", "metrics.progress=false", "checkpoint.asynchronous=false",
)  # fmt: skip
CASES = {
    "FULL_SHARD": "", "SHARD_GRAD_OP": "fsdp.strategy=SHARD_GRAD_OP", "NO_SHARD": "fsdp.strategy=NO_SHARD",
    "FULL_SHARD, checkpointed": "compute.checkpoint_every=1", "SHARD_GRAD_OP, checkpointed": "fsdp.strategy=SHARD_GRAD_OP compute.checkpoint_every=1",
    "FULL_SHARD, every 2nd": "compute.checkpoint_every=2", "FULL_SHARD, bfloat16": "precision.param=bfloat16 precision.reduce=float32",
    "FULL_SHARD, 4 micro-batches": "data.accumulation=4",
}  # fmt: skip


_QUIET = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}  # freed tensors go back to the system, as they do on a GPU


def rank_main(options: list[str]) -> None:
    """Trains, and prints the peak of each rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = configuration.resolve(None, options)
    train.open_tokens("", 8, 1, 256)
    with open("/proc/self/status") as file:
        before = next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    cpu = torch.device("cpu")
    train.train(config, cpu)
    peaks = gather(torch.tensor([peak_mib(cpu) - before], dtype=torch.float64))
    if dist.get_rank() == 0:
        print("PEAK", *(round(p[0]) for p in peaks), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(args.options)
    print("| strategy | estimated MiB | measured MiB | ratio |\n|---|---|---|---|")
    for name, options in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            chosen = [*BASE, *options.split(), f"run.dir={folder}/run"]
            config = configuration.resolve(None, chosen)
            sizes = configuration.check(config, args.ranks, args.ranks)
            groups = groups_of(models.make(config.model), config)
            sequences = config.data.batch_size // sizes.data // config.data.accumulation
            expected = estimate.memory_of(config, sizes, groups, estimate.activations_of(config, sequences)).peak / 2**20
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(args.ranks),
                __file__,
                *chosen,
            ]
            result = subprocess.run(command, capture_output=True, text=True, env=os.environ | _QUIET)
            line = next((line for line in result.stdout.splitlines() if line.startswith("PEAK")), None)
            if line is None:
                raise SystemExit(result.stderr)
            measured = max(map(float, line.split()[1:]))
            print(f"| {name} | {expected:,.0f} | {measured:,.0f} | {measured / expected:.2f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
