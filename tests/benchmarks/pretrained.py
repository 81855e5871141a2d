"""Peak memory of a rank that starts from pretrained weights, against the model's size: `python tests/benchmarks/pretrained.py`.

Measured: the most resident memory of a rank while the model is made, sharded and loaded from bfloat16 safetensors into float32 shards,
less what it held before; beside it, the same of `from_pretrained`, which every rank of a job would call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ckpt_tools
from training import config as configuration
from training import train
from training.metrics import gather, peak_mib

_QUIET = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16}


def rank_main(path: str, how: str) -> None:
    """Loads, and prints each rank's peak and how many bytes of parameters it ended up with, in MiB."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    with open("/proc/self/status") as file:
        before = next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    if how == "ours":
        config = configuration.resolve(None, [f"model.path={path}", "data.batch_size=8", "fsdp.wrap_embeddings=true"])
        model = train.build(config, cpu).model
        ckpt_tools.load(path, {"model": model}, cast=True)
        held = sum(p.to_local().nbytes for p in model.parameters()) / 2**20
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        held = sum(p.nbytes for p in model.parameters()) / 2**20
    peaks = gather(torch.tensor([peak_mib(cpu) - before, held], dtype=torch.float64))
    if dist.get_rank() == 0:
        print("PEAK", max(p[0] for p in peaks), max(p[1] for p in peaks), flush=True)
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        return rank_main(*sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **SIZES)).to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="200MB")
        whole = sum(p.numel() for p in model.parameters()) * 4 / 2**20
        print("| ranks | how | model, MiB | a rank's shards | peak of a rank |\n|---|---|---|---|---|")
        for num_ranks, how in ((1, "ours"), (2, "ours"), (4, "ours"), (8, "ours"), (4, "from_pretrained")):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(num_ranks),
                __file__,
                folder,
                how,
            ]
            result = subprocess.run(command, capture_output=True, text=True, env=os.environ | _QUIET)
            line = next((line for line in result.stdout.splitlines() if line.startswith("PEAK")), None)
            if line is None:
                raise SystemExit(result.stderr)
            peak, held = map(float, line.split()[1:])
            print(f"| {num_ranks} | {how} | {whole:,.0f} | {held:,.0f} | {peak:,.0f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
