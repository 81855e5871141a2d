"""Kills at random instants: `PYTHONPATH=. python tests/benchmarks/kills.py ROOT --kills 4000
[--seed 1]`; a table. ROOT may be a URL.

One process saves steps as fast as it can, in turn blocking and in the background, with a new root
every 200 kills; it is forked from one that has imported what it needs, so a kill costs a tenth of a
second; a third of them come before it has resumed. After each SIGKILL the next process resumes:
what it gets must be one step, whole, and none older than the last one of which a save, or a wait,
had returned. What is complete is also read by stock torch now and then.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from ckpt_tools import CheckpointManager
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import list_steps

NUM_TENSORS, NUMEL = 5, 30_000


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((NUMEL + i,), float(step)) for i in range(NUM_TENSORS)}


def is_uniform(values: dict[str, torch.Tensor], step: int) -> bool:
    return all(bool((tensor == float(step)).all()) for tensor in values.values())


def save_for_ever(root: str, asynchronous: bool, out: int) -> None:
    """The job: tells where it resumed, then every step that it was promised."""
    with CheckpointManager(root, keep_last=2, asynchronous=asynchronous) as checkpoints:
        values = state(0)
        step = checkpoints.resume({"model": values}) or 0
        os.write(out, b"r%d\n" % step if is_uniform(values, step) else b"wrong\n")
        while True:
            step += 1
            checkpoints.save(step, {"model": state(step)})
            if asynchronous and step % 3 == 0:
                checkpoints.wait()
            if not asynchronous or step % 3 == 0:
                os.write(out, b"s%d\n" % step)


def run_and_kill(root: str, asynchronous: bool, seconds: float) -> list[str]:
    """Returns what the job said until it was killed, so long after it had resumed, or, where that
    is negative, after it began.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            save_for_ever(root, asynchronous, writer)
        finally:
            os._exit(3)
    os.close(writer)
    said = os.read(reader, 4096) if seconds >= 0 else b""
    time.sleep(abs(seconds))
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    while data := os.read(reader, 1 << 16):
        said += data
    os.close(reader)
    assert os.WIFSIGNALED(status), f"the job ended by itself: {said!r}"
    return said.decode().split()


def check_all(root: str) -> int:
    """Reads every complete step with stock torch, in a process of its own, and returns how many
    there are.
    """
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        complete = [step for step in list_steps(open_root(root)) if not step.problem]
        for step in complete:
            got = {"model": state(0)}
            dcp.load(
                got,
                storage_reader=(
                    FsspecReader(str(step.path)) if "://" in root else FileSystemReader(step.path)
                ),
                no_dist=True,
            )
            assert is_uniform(got["model"], step.number) and damage(step) == "", step
        os._exit(len(complete))
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root")
    parser.add_argument(
        "--longest", type=float, default=0.12, metavar="SECONDS", help="from the resume to the kill"
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rng, began = random.Random(args.seed), time.perf_counter()
    seen: dict[str, Counter[str]] = {"blocking": Counter(), "in the background": Counter()}
    promised = 0
    for number in range(args.kills):
        if number % 200 == 0:
            root, promised = f"{args.root.rstrip('/')}/{args.seed}-{number // 200}", 0
            shutil.rmtree(f"{args.root}/{args.seed}-{number // 200 - 1}", ignore_errors=True)
        kind = list(seen)[number % 2]
        said = run_and_kill(root, kind != "blocking", rng.uniform(-args.longest / 2, args.longest))
        resumed = (int(said[0][1:]) if said[0][0] == "r" else -1) if said else promised
        steps = [int(word[1:]) for word in said[1:]]
        seen[kind]["kills"] += 1
        seen[kind]["lost"] += resumed < promised
        seen[kind]["steps"] += len(steps)
        if resumed < promised:
            print(
                f"kill {number}: resumed at {resumed}, {promised} was promised; the job said"
                f" {said[:3]}",
                flush=True,
            )
        promised = max([resumed, *steps])
        if number % 21 == 0:
            num_read = check_all(root)
            assert num_read < 100
            seen[kind]["read by stock torch"] += num_read
    print(
        "| saves | kills | steps promised | lost or wrong | also read by stock `dcp.load`"
        " |\n|---|---:|---:|---:|---:|"
    )
    for kind, found in seen.items():
        print(
            f"| {kind} | {found['kills']:,} | {found['steps']:,} | {found['lost']:,} |"
            f" {found['read by stock torch']:,} |"
        )
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
