"""The second save of an adapter on a frozen base, beside a full save; the first one of a job that
has resumed; and what the search for unchanged parameters costs where all have changed.

    python tests/benchmarks/incremental.py DIR [--gb 1] [--runs 9]

The base has the given bytes of float32, in matrices of 16 MB. One matrix in a hundred is trained.
The modes take turns within each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import harness
import torch
from torch import nn

from ckpt_tools import CheckpointManager, SaveReport, Writing

SIDE = 2000


def make(gb: float) -> nn.Module:
    side = SIDE if gb >= 0.1 else 300
    number = max(2, round(gb * 1e9 / (4 * side * side)))
    model = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(number))
    model.append(nn.Linear(side, max(1, round(side * number / 100)), bias=False))
    return model.requires_grad_(False)


def measure(
    folder: Path, model: nn.Module, incremental: str | bool, trains_all: bool
) -> SaveReport:
    """Returns the report of the second save in the background."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # what another mode has written must not slow this one down
    reports: list[SaveReport] = []
    trained = list(model.parameters()) if trains_all else list(model[-1].parameters())  # type: ignore[index]
    with CheckpointManager(
        folder, on_commit=reports.append, writing=Writing(incremental=incremental)
    ) as checkpoints:
        for step in (1, 2):
            with torch.no_grad():
                torch._foreach_add_(trained, 1e-3)
            checkpoints.save(step, {"model": model})
            checkpoints.wait()
    return reports[1]


def resumed(folder: Path, model: nn.Module, incremental: str | bool) -> float:
    """Returns the seconds of the first save of a job, from the call to the commit."""
    shutil.rmtree(folder, ignore_errors=True)
    writing = Writing(incremental=incremental)
    with CheckpointManager(folder, writing=writing) as checkpoints:
        checkpoints.save(1, {"model": model})
    with CheckpointManager(folder, writing=writing) as checkpoints:
        checkpoints.resume({"model": model})
        with torch.no_grad():
            model[-1].weight.add_(1e-3)  # type: ignore[index,operator,union-attr]
        os.sync()
        began = time.monotonic()
        checkpoints.save(2, {"model": model})
        checkpoints.wait()
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = make(args.gb)
    modes = {
        "full": (False, False),
        "1 % trained": ("auto", False),
        "all trained": ("auto", True),
        "all trained, incremental=False": (False, True),
    }
    found: dict[str, list[SaveReport]] = {name: [] for name in modes}
    for name, counts in harness.in_turn(list(modes), args.runs):
        incremental, trains_all = modes[name]
        model.requires_grad_(trains_all)
        for parameter in model[-1].parameters():  # type: ignore[index]
            parameter.requires_grad_(True)
        report = measure(args.dir / "run", model, incremental, trains_all)
        found[name] += [report] if counts else []
    model.requires_grad_(False)
    model[-1].weight.requires_grad_(True)  # type: ignore[union-attr,operator]
    firsts: dict[str, list[float]] = {"auto": [], "False": []}
    for name, counts in harness.in_turn(list(firsts), args.runs):
        seconds = resumed(args.dir / "run", model, "auto" if name == "auto" else False)
        firsts[name] += [seconds] if counts else []
    shutil.rmtree(args.dir / "run")
    print(f"{'':32}{'MB written':>12}{'seconds':>10}{'stall, ms':>12}")
    for name, reports in found.items():
        written = (reports[0].nbytes - reports[0].linked_nbytes) / 1e6
        seconds = statistics.median(report.seconds for report in reports)
        stall = statistics.median(report.stall_s for report in reports) * 1e3
        print(f"{name:32}{written:12.1f}{seconds:10.3f}{stall:12.1f}")
    seconds_of = {name: [report.seconds for report in reports] for name, reports in found.items()}
    both = {name: [r.seconds + r.stall_s for r in reports] for name, reports in found.items()}
    part = harness.ratio(seconds_of["1 % trained"], seconds_of["full"])
    print(f"1 % trained / full, seconds: median {part:.3f}")
    part = harness.ratio(both["all trained"], both["all trained, incremental=False"])
    print(f"all trained, with the search / without: median {part:.3f}")
    linked, full = (statistics.median(firsts[name]) for name in ("auto", "False"))
    print(f"first save after a resume, seconds: {linked:.3f}, without links {full:.3f}")


if __name__ == "__main__":
    main()
