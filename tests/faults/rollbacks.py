"""A job goes back to step 1 and saves step 2 anew, and is killed at every call that changes the
disk.

    python -m tests.faults.rollbacks FOLDER

Until the new step is committed the old branch is the run; from then on the new one is. Nothing of
either is ever lost.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckpt_tools import CheckpointManager, load
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import RunListing, find_latest
from tests.faults.fleet import Fleet, inject

CALLS = ("mkdir", "pwrite64", "fsync", "fchmod", "renameat2", "rename", "unlink", "unlinkat")


def go_back(root: Path, tell: Callable[[str], None], go: Path) -> None:
    with CheckpointManager(root, keep_last=None, handle_signals=False) as checkpoints:
        checkpoints.resume({"w": torch.zeros(2)}, step=1)
        tell("ready")
        while not go.exists():
            time.sleep(0.002)
        checkpoints.save(2, {"w": torch.full((2,), 20.0)}, asynchronous=False)


def check(root: Path) -> str:
    """Proves that a run is whole, and returns which branch it is on."""
    steps = RunListing(open_root(root)).all_steps
    assert all(damage(s) == "" for s in steps if not s.problem), steps
    held = set()
    for step in steps:
        state = {"w": torch.zeros(2)}
        if not step.problem:
            load(step.path, state)
            held.add(float(state["w"][0]))
    assert held >= {1.0, 2.0, 3.0}, (held, steps)
    newest = find_latest(open_root(root)).step
    assert newest is not None
    is_new = 20.0 in held
    assert newest.number == (2 if is_new else 3), (newest, held)
    state = {"w": torch.zeros(2)}
    with CheckpointManager(root, keep_last=None) as checkpoints:
        assert checkpoints.resume(state) == newest.number
    assert float(state["w"][0]) == (20.0 if is_new else 3.0)
    return "new" if is_new else "old"


def main() -> None:
    folder = Path(sys.argv[1])
    base, root, go, trace = (folder / name for name in ("base", "run", "go", "trace"))
    with CheckpointManager(base, keep_last=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((2,), float(step))})
    tally: dict[str, list[str]] = {}
    for call in CALLS:
        for number in range(1, 60):
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(base, root)
            go.unlink(missing_ok=True)
            fleet = Fleet(1, lambda tell: go_back(root, tell, go))
            fleet.wait_for("ready", 0)
            tracer = inject(fleet.pids[0], call, "signal=SIGKILL", number, trace)
            go.touch()
            (code,) = fleet.end()
            tracer.wait()
            assert code in (0, -9), (code, fleet.said(0))
            fleet.remove()
            first, second = check(root), check(root)
            assert first == second
            if code == 0:
                assert first == "new" and len(list(root.glob(".ckpt.rollback*"))) == 1, os.listdir(
                    root
                )
                break
            tally.setdefault(call, []).append(first)
    assert len(tally) >= 5 and {b for branches in tally.values() for b in branches} == {
        "old",
        "new",
    }, tally
    print(
        "; ".join(f"{call}: {' '.join(branches)}" for call, branches in tally.items()),
        f"{sum(map(len, tally.values()))} kills",
    )


if __name__ == "__main__":
    main()
