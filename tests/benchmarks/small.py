"""Times small work beside its peers: rows, small saves and loads, and a run of a thousand steps.

python tests/benchmarks/small.py DIR [--runs 60] [--steps 1000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import CheckpointManager

warnings.simplefilter("ignore")
VERBS = ("latest", "ls", "check", "prune --keep-last 3 --dry-run")


def show(name: str, work: Callable[[int], object], runs: int) -> None:
    """Prints the median time of a piece of work, which gets the number of the run."""
    median = statistics.median(
        harness.seconds(lambda number=number: work(number)) for number in range(runs)
    )
    print(f"{name:<44} {median * 1e6:>9,.0f} µs", flush=True)


def durable_torch_save(value: object, path: Path) -> None:
    torch.save(value, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def saves(root: Path, runs: int) -> None:
    state, target = {"w": torch.randn(512, 512)}, {"w": torch.zeros(512, 512)}
    show("save 1 MB", lambda n: ckpt_tools.save(root / f"a{n}", state), runs)
    show("  dcp.save", lambda n: dcp.save(state, checkpoint_id=root / f"d{n}", no_dist=True), runs)
    show("  torch.save + fsync", lambda n: durable_torch_save(state, root / f"t{n}"), runs)
    show("load 1 MB", lambda _: ckpt_tools.load(root / "a0", target), runs)
    show("  dcp.load", lambda _: dcp.load(target, checkpoint_id=root / "d0", no_dist=True), runs)
    show("  torch.load", lambda _: torch.load(root / "t0"), runs)


def rows(root: Path, runs: int) -> None:
    state = {f"l.{i}": torch.randn(64, 64) for i in range(1000)}
    ckpt_tools.save(root / "many", state)
    save_file(state, root / "many.safetensors")
    for name in ("many", "many.safetensors"):
        show(
            f"open and one small tensor, {name}",
            lambda _, n=name: ckpt_tools.open(root / n)["l.7"].torch(),
            runs,
        )
        with ckpt_tools.open(root / name) as opened:
            show(
                f"a row of an open handle, {name}",
                lambda n, o=opened: o[f"l.{n % 1000}"][3],
                10 * runs,
            )
            show(
                f"64 rows by rows(), {name}",
                lambda _, o=opened: o.rows("l.1", range(63, -1, -1)),
                runs,
            )
    with safe_open(root / "many.safetensors", "pt") as peer:
        show("  safe_open: a row", lambda n: peer.get_slice(f"l.{n % 1000}")[3], 10 * runs)


def steps(root: Path, number: int, runs: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root / "run", keep_last=None) as checkpoints:
        for step in range(1, number + 1):
            checkpoints.save(step, state, asynchronous=False, metrics={"loss": 1 / step})
    time.sleep(2.5)  # what has just changed is always read again
    with CheckpointManager(root / "run", keep_last=2 * number) as checkpoints:
        show(f"steps() of {number:,} steps, first", lambda _: checkpoints.steps(), 1)
        show("  again", lambda _: checkpoints.steps(), max(1, runs // 10))
        began = time.perf_counter()
        for step in range(number + 1, number + 21):
            checkpoints.save(step, state, asynchronous=False)
        saved = time.perf_counter() - began
        began = time.perf_counter()
    print(f"20 saves {saved:.2f} s, and close {time.perf_counter() - began:.2f} s", flush=True)
    for verb in VERBS:
        first, *more = verb.split()
        words = [sys.executable, "-m", "ckpt_tools", first, str(root / "run"), *more]
        show(
            f"ckpt {verb}",
            lambda _, w=words: subprocess.run(w, capture_output=True, check=False),
            max(1, runs // 6),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    args.dir.mkdir(parents=True)
    saves(args.dir, args.runs)
    rows(args.dir, args.runs)
    steps(args.dir, args.steps, args.runs)


if __name__ == "__main__":
    main()
