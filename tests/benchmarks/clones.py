"""Merge on a file system that shares blocks, beside `cp --reflink=always` of the result.

    python tests/benchmarks/clones.py DIR [--gb 4] [--ranks 8] [--runs 5]

DIR lies on XFS or Btrfs. Elsewhere, the merge copies, and the table shows that instead.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import harness
import torch

import ckpt_tools

SIDE = 2048


def used(folder: Path) -> int:
    os.sync()
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def make(folder: Path, gb: float, ranks: int) -> Path:
    side = SIDE if gb >= 0.1 else 64
    number = max(1, round(gb * 1e9 / (4 * side * side)))
    state = {f"model.layers.{i}.weight": torch.randn(side, side) for i in range(number)}
    ckpt_tools.save(folder / "one", state)
    ckpt_tools.reshard(folder / "one", folder / "src", to_ranks=ranks)
    shutil.rmtree(folder / "one")
    return folder / "src"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    source = make(args.dir, args.gb, args.ranks)
    merged, linked = args.dir / "m.safetensors", args.dir / "linked"
    seconds: dict[str, list[float]] = {"ckpt merge": [], "cp --reflink": []}
    written: list[int] = []
    for _ in range(args.runs):
        for path in args.dir.glob("m.safetensors*"):
            path.unlink()
        linked.unlink(missing_ok=True)
        before, began = used(args.dir), time.perf_counter()
        result = ckpt_tools.merge(source, merged)
        seconds["ckpt merge"].append(time.perf_counter() - began)
        written.append(used(args.dir) - before)
        began = time.perf_counter()
        words = ["cp", "--reflink=always" if result.store_nbytes else "--reflink=auto"]
        subprocess.run([*words, merged, linked], check=True)
        subprocess.run(["sync", linked], check=True)
        seconds["cp --reflink"].append(time.perf_counter() - began)
    print(
        f"{merged.stat().st_size / 1e9:.2f} GB, {result.store_nbytes / 1e9:.2f} GB cloned;", end=" "
    )
    print(f"{statistics.median(written) / 1e6:.3f} MB more in use after a merge")
    harness.show("Merge on a disk that clones", seconds)


if __name__ == "__main__":
    main()
