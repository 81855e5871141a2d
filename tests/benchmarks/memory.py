"""Peak memory of a rank: against the estimate, for every strategy; and of starting from pretrained
weights, against the model's size.

    PYTHONPATH=. python tests/benchmarks/memory.py strategies [RANKS]      # CKPT_DEVICE=cuda: on a
    GPU PYTHONPATH=. python tests/benchmarks/memory.py pretrained

Measured is the most resident memory of a rank, less what it held before the model was made; on a
GPU what PyTorch allocated there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt_tools
from tests.dist import device
from training import config as configuration
from training import model as models
from training.checks import check
from training.extras import estimate
from training.extras.plan import groups_of
from training.job import build
from training.metrics import gather, peak_mib
from training.prove import prove
from training.train import train

BASE = (
    "run.steps=2",
    "model.dim=1024",
    "model.num_layers=6",
    "model.num_heads=16",
    "model.hidden_dim=2752",
    "model.max_seq_len=512",
    "data.seq_len=256",
    "data.batch_size=8",
    "metrics.progress=false",
    "checkpoint.asynchronous=false",
    "optim.implementation=for-loop",
)
CASES = {
    "FULL_SHARD": "",
    "SHARD_GRAD_OP": "fsdp.strategy=SHARD_GRAD_OP",
    "NO_SHARD": "fsdp.strategy=NO_SHARD",
    "FULL_SHARD, checkpointed": "compute.checkpoint_every=1",
    "SHARD_GRAD_OP, checkpointed": "fsdp.strategy=SHARD_GRAD_OP compute.checkpoint_every=1",
    "FULL_SHARD, every 2nd": "compute.checkpoint_every=2",
    "FULL_SHARD, bfloat16": "precision.param=bfloat16 precision.reduce=float32",
    "FULL_SHARD, 4 micro-batches": "data.accumulation=4",
}
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
STARTS = (
    (1, "fsdp2"),
    (2, "fsdp2"),
    (4, "fsdp2"),
    (8, "fsdp2"),
    (4, "fsdp1"),
    (4, "from_pretrained on every rank"),
)
# freed tensors go back to the system, as they do on a GPU
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144"}


def rank_main(what: str, options: list[str]) -> None:
    """Does one thing on one rank, and prints the most that any rank took for it, in MiB."""
    here, ranks = device.begin(is_default=False), dist.get_world_size()
    torch.set_num_threads(1)
    if what == "train":
        plan = prove(configuration.resolve(None, options), ranks, ranks)
    with open("/proc/self/status") as file:
        before = next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    if what == "train":
        train(plan, here)
    elif what.startswith("fsdp"):
        config = configuration.resolve(
            None,
            [
                f"model.path={options[0]}",
                "data.batch_size=8",
                "fsdp.wrap_embeddings=true",
                f"fsdp.api={what}",
            ],
        )
        model = build(prove(config, ranks, ranks), here).model
        ckpt_tools.load(options[0], {"model": model}, cast=True)
    else:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(options[0], dtype=torch.float32)
    peaks = gather(
        torch.tensor([peak_mib(here) - (before if here.type == "cpu" else 0)], dtype=torch.float64)
    )
    if dist.get_rank() == 0:
        print("PEAK", max(p[0] for p in peaks), flush=True)
    dist.destroy_process_group()


def peak(
    num_ranks: int, what: str, *options: str, environment: dict[str, str] = GIVES_BACK
) -> float:
    """Runs a job and returns its largest rank's peak, in MiB."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        __file__,
        what,
        *options,
    ]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    line = next((line for line in result.stdout.splitlines() if line.startswith("PEAK")), None)
    if line is None:
        raise SystemExit(result.stderr)
    return float(line.split()[1])


def strategies(num_ranks: int = 2) -> None:
    """Prints the estimate and the measured peak of every strategy."""
    print("| strategy | estimated MiB | measured MiB | ratio |\n|---|---|---|---|")
    for name, options in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            chosen = [*BASE, *options.split(), f"run.dir={folder}/run"]
            config = configuration.resolve(None, chosen)
            sizes = check(config, num_ranks, num_ranks)
            expected = sum(estimate.memory_of(config, sizes).values()) / 2**20
            measured = peak(num_ranks, "train", *chosen)
            print(
                f"| {name} | {expected:,.0f} | {measured:,.0f} | {measured / expected:.2f} |",
                flush=True,
            )
    with tempfile.TemporaryDirectory() as folder:
        kept = peak(num_ranks, "train", *BASE, f"run.dir={folder}/run", environment={})
    total = sum(
        g.numel for g in groups_of(models.make(config), configuration.resolve(None, BASE)).values()
    )
    print(
        f"\n{total / 1e6:.0f} M parameters; FULL_SHARD with glibc's allocator as it comes:"
        f" {kept:,.0f} MiB"
    )


def pretrained() -> None:
    """Prints the peak of starting from weights on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **LLAMA)).to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="200MB")
        whole = sum(p.numel() for p in model.parameters()) * 4 / 2**20
        print(
            "| ranks | how | model, MiB | model / ranks | peak of a rank |\n|---|---|---|---|---|"
        )
        for num_ranks, how in STARTS:
            found = peak(num_ranks, how.split()[0], folder)
            print(
                f"| {num_ranks} | {how} | {whole:,.0f} | {whole / num_ranks:,.0f} | {found:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1], sys.argv[2:])
    else:
        {"strategies": strategies, "pretrained": pretrained}[sys.argv[1]](*map(int, sys.argv[2:]))
