"""Starts each benchmark on tiny data, so that none of them stops working unseen.

    make bench-check

It proves that a script runs to its end. It measures nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# the words after the interpreter; DIR is a new folder
SCRIPTS = {
    "agree": "agree.py --ranks 2 --tensors 4",
    "alarms": "alarms.py DIR --runs 2",
    "around_a_save": "@around_a_save.py DIR --width 8 --layers 1 --batch 2 --runs 1",
    "incremental": "incremental.py DIR --gb 0.002 --runs 1",
    "names": "names.py DIR --layers 1 --ranks 2 --runs 1 --tiny",
    "clones": "clones.py DIR --gb 0.001 --ranks 2 --runs 1",
    "compression": "compression.py --runs 1 --mb 8",
    "copies": "@copies.py DIR --mib 24 --rounds 1",
    "flips": "flips.py DIR --flips 2",
    "giants": "-m tests.benchmarks.giants 8b DIR --ranks 2",
    "kills": "kills.py DIR --kills 1",
    "loop": "@loop.py --rounds 1 --steps 6 model.dim=24 model.num_layers=1",
    "make_input": "@make_input.py DIR --gb 0.001",
    "mlperf_storage": "@mlperf_storage.py DIR --scale 0.0002 --runs 1",
    "quantized": "quantized.py DIR --rows 256 --layers 1 --runs 1",
    "publish": "publish.py DIR --gb 0.002 --runs 1",
    "publisher": "@publisher.py DIR --gb 0.002 --runs 1 --dim 1",
    "saving": "@saving.py DIR --gb 0.002 --runs 1 --hidden 32",
    "small": "small.py DIR --runs 2 --steps 3",
    "trust": "trust.py DIR --gb 0.001 --runs 1",
}
# what they need is not there, or is another script's part
NOT_TRIED = {
    "buckets": "S3 servers",
    "check": "this script",
    "compare": "accelerate's environment",
    "formats": "DeepSpeed's environment",
    "harness": "no script: the others use it",
    "hosts": "the trainers' environments",
    "memory": "minutes",
    "one_gpu": "a GPU",
    "peers": "part of compare",
    "remote": "S3 servers",
    "run_verbs": "gigabytes",
    "scale": "minutes",
    "statistics_cost": "minutes",
    "throttled": "S3 servers",
    "trainers": "the trainers' environments",
    "within": "S3 servers",
    "zero3_job": "part of formats",
}


def main() -> int:
    """Runs all, or those that are named; returns how many failed."""
    there = {path.stem for path in HERE.glob("*.py")} - {"__init__"}
    assert there == SCRIPTS.keys() | NOT_TRIED.keys(), there ^ (SCRIPTS.keys() | NOT_TRIED.keys())
    failed = 0
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SETTLE_MIB": "1"}
    for name, line in SCRIPTS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = line.removeprefix("@").replace("DIR", f"{folder}/new").split()
            if words[0].endswith(".py"):
                words[0] = str(HERE / words[0])
            words = [*TWO_RANKS * line.startswith("@"), *words]
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *words],
                env=env,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
        is_right = done.returncode == 0
        failed += not is_right
        print(
            f"{name:<16} {'ok' if is_right else 'FAILED':<7} {time.perf_counter() - began:5.1f} s",
            flush=True,
        )
        if not is_right:
            print(done.stdout[-1000:], done.stderr[-3000:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
