"""The verbs for runs beside what they are measured by: `python tests/benchmarks/run_verbs.py DIR`.

DIR needs 25 GB. Each figure is the median of ROUNDS alternating rounds, in processes of their own;
memory is the peak of the process.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from pathlib import Path

import harness
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager

ROUNDS = 5
CKPT = [sys.executable, "-m", "ckpt_tools"]
TORCH_MEAN = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from safetensors.torch import save_file
total = {}
for path in sys.argv[2:]:
    state = {}
    reader = dcp.FileSystemReader(path)
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for name, tensor in state["model"].items():
        total[name] = total.get(name, 0) + tensor.double()
save_file({n: (t / len(sys.argv[2:])).float() for n, t in total.items()}, sys.argv[1])
"""


def shell(line: str) -> float:
    return harness.command(["sh", "-c", line])[0]


def show(name: str, seconds: list[float], mib: float = 0.0, more: str = "") -> float:
    median = statistics.median(seconds)
    memory = f", {mib:.0f} MiB" if mib else ""
    print(f"{name:44} {median:7.2f} s{memory}{more}", flush=True)
    return median


def model(nbytes: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    numel = nbytes // 4 // 40
    return {f"layers.{i}.w": torch.randn(numel // 1024, 1024) for i in range(40)}


def stats(work: Path) -> None:
    ckpt_tools.save(work / "one", {"model": model(4 << 30, 0)})
    seconds, mib = [], 0.0
    for _ in range(ROUNDS):
        took, used = harness.command([*CKPT, "stats", work / "one", "--quiet"])
        seconds.append(took)
        mib = max(mib, used)
    median = show("ckpt stats, 4.3 GB", seconds, mib)
    print(f"{'':44} {4 * 1.0737 / median:7.2f} GB/s")
    shutil.rmtree(work / "one")


def average(work: Path) -> None:
    paths = []
    for number in range(8):
        ckpt_tools.save(work / "whole", {"model": model(1 << 30, number)}, overwrite=True)
        paths.append(work / f"of-{number}")
        ckpt_tools.reshard(work / "whole", paths[-1], to_ranks=8)
    shutil.rmtree(work / "whole")
    out = work / "mean.safetensors"
    ours, base, mib = [], [], 0.0
    for _ in range(ROUNDS):
        took, used = harness.command([*CKPT, "average", *paths, out, "--quiet", "--overwrite"])
        ours.append(took)
        mib = max(mib, used)
        reads = " ".join(f"{p}/*.distcp" for p in paths)
        base.append(shell(f"cat {reads} > /dev/null && cp {out} {work}/copy && sync {work}/copy"))
    mine = show("ckpt average, 8 x 1 GB from 8 ranks", ours, mib)
    theirs = show("cat of the inputs, cp of the output", base)
    print(f"{'':44} {mine / theirs:7.2f} times")
    took, used = harness.command(
        [sys.executable, "-c", TORCH_MEAN, work / "torch.safetensors", *paths]
    )
    show("a torch script, once", [took], used)
    for path in (*paths, out):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def thin(work: Path) -> None:
    weights = model(1 << 30, 0)
    moments = {
        f"state.{name}.{kind}": tensor
        for kind in ("exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    ours, base, mib = [], [], 0.0
    for _ in range(3):
        shutil.rmtree(work / "run", ignore_errors=True)
        with CheckpointManager(work / "run", keep_last=None) as checkpoints:
            checkpoints.save(1, {"model": weights, "optimizer": moments}, asynchronous=False)
            checkpoints.save(2, {"model": {"x": torch.ones(2)}}, asynchronous=False)
        took, used = harness.command([*CKPT, "thin", work / "run", "--keep-full", 1, "--quiet"])
        ours.append(took)
        mib = max(mib, used)
        data = work / "run" / "step-00000001" / "__0_0.distcp"
        base.append(shell(f"cp {data} {work}/copy && sync {work}/copy"))
    mine = show("ckpt thin of a step of 3.2 GB", ours, mib)
    theirs = show("cp of the 1 GB that stays, and sync", base)
    print(f"{'':44} {mine / theirs:7.2f} times")
    shutil.rmtree(work / "run")


def report(work: Path) -> None:
    state = {f"layers.{i // 10}.m{i % 10}.w": torch.randn(16, 16) for i in range(1000)}
    with CheckpointManager(work / "run", keep_last=None, statistics=True) as checkpoints:
        for step in range(100):
            state["layers.0.m0.w"] += 0.1
            checkpoints.save(step, {"model": state}, metrics={"loss": 1 / (1 + step)})
    seconds, mib = [], 0.0
    page = work / "page.html"
    for _ in range(ROUNDS):
        took, used = harness.command(
            [*CKPT, "report", work / "run", "-o", page, "--overwrite", "--quiet"]
        )
        seconds.append(took)
        mib = max(mib, used)
    more = f", {page.stat().st_size / 1e6:.2f} MB"
    show("ckpt report, 100 steps of 1,000 tensors", seconds, mib, more)
    shutil.rmtree(work / "run")


def main() -> None:
    work = Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    chosen = sys.argv[2:] or ["stats", "average", "thin", "report"]
    for name in chosen:
        {"stats": stats, "average": average, "thin": thin, "report": report}[name](work)


if __name__ == "__main__":
    main()
