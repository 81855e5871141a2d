"""How time and memory grow with ranks, tensors and bytes: `python -m tests.benchmarks.scale DIR
[--runs 3]`.

Checkpoints of giants on sparse files (see `giants`), each work in a process of its own, beside
torch's own reading of the same metadata. Those of 8b are medians, as torch's gather would write
them; the others ran once. Prints tables in Markdown with the slopes fitted on log-log, and draws
DIR/scale.png.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.giants import MODELS, build
from tests.many_chunks import as_torch_gathers

CASES = [("8b", ranks, True) for ranks in (8, 32, 128, 512, 1024)]
GIANTS = [("405b", 1024, False), ("405b", 4096, False), ("moe", 1024, False)]
WORKS = {
    "metadata": "read and prove",
    "torch": "`pickle.load` with torch's classes",
    "inspect": "`ckpt inspect`",
    "merge": "`ckpt merge --dry-run`",
    "reshard": "`ckpt reshard --to 64 --dry-run`",
    "rewrite": "`ckpt reshard --to` as many less one, `--dry-run`",
}
SHOWN = ("metadata", "torch", "reshard", "rewrite")


class Figure(NamedTuple):
    """Medians of a work: wall-clock seconds of a whole process, and its peak in MiB."""

    seconds: float
    mebibytes: float


def work(name: str, directory: Path, ranks: int) -> None:
    """Does one work and prints its peak."""
    if name == "torch":
        import torch.distributed.checkpoint  # noqa: F401  (what the pickle asks for)

        began = time.monotonic()
        with (directory / ".metadata").open("rb") as file:
            pickle.load(file)
    else:
        import ckpt_tools
        from ckpt_tools.formats.registry import open_source

        began, out = time.monotonic(), directory.parent / "out"
        if name == "metadata":
            open_source(directory)
        elif name == "inspect":
            ckpt_tools.inspect(directory)
        elif name == "merge":
            ckpt_tools.merge(directory, out.with_suffix(".safetensors"), dry_run=True)
        else:
            ckpt_tools.reshard(
                directory, out, to_ranks=64 if name == "reshard" else ranks - 1, dry_run=True
            )
    took = time.monotonic() - began
    # unlike getrusage, not what the parent had before exec
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(took, int(peak[1]) / 1024 if peak else 0)


def measure(name: str, directory: Path, ranks: int, runs: int) -> Figure:
    """Returns the medians of some runs, imports not counted, since torch's alone would be most of
    the small ones.
    """
    found = []
    for _ in range(runs):
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.scale",
            str(directory),
            "--work",
            name,
            "--ranks",
            str(ranks),
        ]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append([float(number) for number in out.split()])
    return Figure(*map(statistics.median, zip(*found, strict=True)))


def slope(xs: list[float], ys: list[float]) -> float:
    """Returns the slope of the straight line through points on log-log (least squares)."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def run(args: argparse.Namespace) -> None:
    """Measures everything; prints and draws."""
    table: dict[tuple[str, int], tuple[int, dict[str, Figure]]] = {}
    for model, ranks, with_adamw in CASES + GIANTS:
        directory = args.dir / f"{model}-{ranks}"
        chunks = build(MODELS[model](), ranks, directory, with_adamw)
        if with_adamw:
            metadata = directory / ".metadata"
            metadata.write_bytes(as_torch_gathers(metadata.read_bytes()))
        names = [n for n in WORKS if n != "rewrite" or (model, ranks, with_adamw) in CASES]
        runs = args.runs if with_adamw else 1
        table[model, ranks] = (
            chunks,
            {name: measure(name, directory, ranks, runs) for name in names},
        )
        shutil.rmtree(directory)
        print(f"{model} {ranks}: {chunks:,} chunks", file=sys.stderr)
    print(
        "| model | ranks | chunks | "
        + " | ".join(WORKS.values())
        + " |\n|---|---:|---:|"
        + "---:|" * len(WORKS)
    )
    for (model, ranks), (chunks, figures) in table.items():
        cells = [
            f"{f.seconds:.2f} s, {f.mebibytes:,.0f} MiB" if (f := figures.get(name)) else ""
            for name in WORKS
        ]
        print(f"| {model} | {ranks:,} | {chunks:,} | " + " | ".join(cells) + " |")
    grown = [(float(c), f) for (model, _), (c, f) in table.items() if model == "8b"]
    large = [(c, f) for c, f in grown if c >= 10_000]
    for name in SHOWN:
        seconds = slope([c for c, _ in large], [f[name].seconds for _, f in large])
        print(
            f"slope of {WORKS[name]} from {large[0][0]:,.0f} to {large[-1][0]:,.0f} chunks:"
            f" {seconds:.2f}"
        )
    draw(grown, args.dir / "scale.png")


def draw(grown: list[tuple[float, dict[str, Figure]]], path: Path) -> None:
    """Draws seconds and memory against chunks, both on log-log."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for name in SHOWN:
        axes[0].plot(
            [c for c, _ in grown],
            [f[name].seconds for _, f in grown],
            "o-",
            label=WORKS[name].replace("`", ""),
        )
        axes[1].plot([c for c, _ in grown], [f[name].mebibytes for _, f in grown], "o-")
    for axis, label in zip(axes, ("seconds", "peak memory, MiB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="chunks", ylabel=label)
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.dir, args.ranks)
    else:
        args.dir.mkdir(parents=True, exist_ok=True)
        run(args)


if __name__ == "__main__":
    main()
