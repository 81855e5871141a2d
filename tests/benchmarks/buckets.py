"""Saving to S3 and loading from it, beside DCP's own fsspec writer and reader, in turn, by ranks of
one job.

`s3fs` is ours without obstore. `replicas` is a model that each of 4 ranks holds whole.

    python tests/benchmarks/buckets.py DIR --gb 1 --runs 5

Starts a RadosGW in DIR on this machine. `save` is by 4 ranks, blocking; `load` is of what 4 ranks
saved along dim 0, by 3 ranks along dim 0 and by 4 along dim 1. Fetched bytes are half of what the
loopback interface saw: each byte goes from the OSD to the gateway, and from there to a rank. Memory
is the most that a rank held, less what it held before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt_tools
from ckpt_tools import CheckpointManager
from tests.jobs import torchrun_command
from tests.servers import servers

COLUMNS = 4096


def state(gb: float, dim: int, seed: int) -> dict[str, DTensor]:
    """Eight matrices in float32, `gb` GB together."""
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),)), int(gb * 1e9 / 4 / COLUMNS / 8)
    made = {}
    for number in range(8):
        torch.manual_seed(seed + number)
        made[f"layer{number}.weight"] = distribute_tensor(
            torch.randn(rows, COLUMNS), mesh, [Shard(dim)]
        )
    return made


def received() -> int:
    """Bytes that came in over loopback so far."""
    line = next(
        text
        for text in Path("/proc/net/dev").read_text().splitlines()
        if text.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[0])


def measured(work: Callable[[], object]) -> tuple[float, int]:
    """Returns the seconds from the first rank's start to the last one's end, and the bytes over
    loopback.
    """
    before = received()
    took = harness.seconds_of_ranks(work)
    return took, received() - before


def status(key: str) -> float:
    """Returns an entry of this process's memory, in MiB: VmRSS, or VmHWM since the mark was last
    cleared.
    """
    line = next(
        text
        for text in Path("/proc/self/status").read_text().splitlines()
        if text.startswith(f"{key}:")
    )
    return int(line.split()[1]) / 1024


def watch() -> float:
    """Returns the memory of now, and begins its high-water mark anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def chosen(args: argparse.Namespace, runs: dict[str, list[float]]) -> list[str]:
    return [who for who in runs if args.only in ("", who)]


def save(args: argparse.Namespace) -> None:
    values = state(args.gb, 0, 0)
    before = watch()
    runs: dict[str, list[float]] = {"ours": [], "dcp": []}
    # the job that measures memory alone has a run of its own: its steps are not newer
    with CheckpointManager(f"s3://bench/ours{args.only}", keep_last=1) as checkpoints:
        for number, (who, counts) in enumerate(harness.in_turn(chosen(args, runs), args.runs)):
            if who == "ours":
                took = harness.seconds_of_ranks(
                    lambda number=number: checkpoints.save(
                        number, {"model": values}, asynchronous=False
                    )
                )
                checkpoints.wait()
            else:
                # the first one stays, for those who load
                at = f"bench/dcp/{number if counts else 0}"
                writer = FsspecWriter(f"s3://{at}", **options())
                took = harness.seconds_of_ranks(
                    lambda writer=writer: dcp.save({"model": values}, storage_writer=writer)
                )
                if dist.get_rank() == 0 and counts:
                    filesystem().rm(at, recursive=True)
            runs[who] += [took] if counts else []
            dist.barrier()
    tell(args, f"save, {dist.get_world_size()} ranks", before, runs, {})


def load(args: argparse.Namespace) -> None:
    values: dict[str, Any] = dict(state(args.gb, args.dim, 1000))
    if args.mode == "replicas":
        values = {name: torch.zeros(value.shape) for name, value in values.items()}
        for value in values.values():
            value.fill_(1.0)  # so that it lies in memory
    before = watch()
    runs: dict[str, list[float]] = {"ours": [], "s3fs": [], "dcp": []}
    fetched: dict[str, list[int]] = {who: [] for who in runs}
    for who, counts in harness.in_turn(chosen(args, runs), args.runs):
        if who != "dcp":
            os.environ["CKPT_S3_CLIENT"] = "s3fs" if who == "s3fs" else ""
            took, nbytes = measured(lambda: ckpt_tools.load("s3://bench/dcp/0", {"model": values}))
        else:
            reader = FsspecReader("s3://bench/dcp/0", **options())
            took, nbytes = measured(
                lambda reader=reader: dcp.load({"model": values}, storage_reader=reader)
            )
        runs[who] += [took] if counts else []
        fetched[who].append(nbytes)
    there = "all of it on each" if args.mode == "replicas" else f"dim {args.dim}"
    tell(
        args, f"load, dim 0 of 4 ranks to {there} of {dist.get_world_size()}", before, runs, fetched
    )


def tell(
    args: argparse.Namespace,
    what: str,
    before: float,
    runs: dict[str, list[float]],
    fetched: dict[str, list[int]],
) -> None:
    peak = torch.tensor([status("VmHWM") - before])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank():
        return
    if args.only:
        print(f"| {what}: {args.only} | a rank takes {peak.item():.0f} MiB |", flush=True)
        return
    parts = {w: f"{statistics.median(n) / 2 / args.gb / 1e9:.2f}" for w, n in fetched.items()}
    more = {"fetched / size": parts} if parts else {}
    harness.show(what, runs, against="ours", more=more)


def options() -> dict[str, Any]:
    return {"use_listings_cache": False}


def filesystem() -> Any:
    import fsspec

    return fsspec.filesystem("s3", **options())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mode", choices=["save", "load", "replicas"])
    parser.add_argument("--dim", type=int, default=0)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.mode:
        dist.init_process_group("gloo")
        {"save": save, "load": load, "replicas": load}[args.mode](args)
        dist.destroy_process_group()
        return
    args.dir.mkdir(parents=True, exist_ok=True)
    with servers.running("radosgw", args.dir) as server:
        server.bucket("bench")
        jobs = [(4, "save", 0, ""), (3, "load", 0, ""), (4, "load", 1, ""), (4, "replicas", 0, "")]
        jobs += [
            (n, mode, dim, who)
            for who in ("ours", "s3fs", "dcp")
            for n, mode, dim, _ in jobs
            if (mode, who) != ("save", "s3fs")
        ]
        for num_ranks, mode, dim, who in jobs:
            command = torchrun_command(num_ranks, __file__, args.dir)
            command += [
                "--mode",
                mode,
                "--gb",
                str(args.gb),
                "--runs",
                str(1 if who else args.runs),
                "--dim",
                str(dim),
                "--only",
                who,
            ]
            subprocess.run(
                command, check=True, env=os.environ | server.environment | {"OMP_NUM_THREADS": "1"}
            )


if __name__ == "__main__":
    main()
