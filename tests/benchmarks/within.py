"""Work within one S3: what the store copies by itself against the same bytes through this machine,
in turn.

    python tests/benchmarks/within.py DIR --gb 1 --ranks 8 --runs 3

Starts a RadosGW in DIR on this machine and uploads a checkpoint of large matrices, once with the
checksums of its pieces and once without. Prints medians of whole processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import harness

import ckpt_tools
from ckpt_tools.publish.manifest import parse_manifest
from tests.jobs import torchrun_command
from tests.servers import servers


def upload(args: argparse.Namespace, server: servers.Server) -> None:
    """Puts the checkpoint into the bucket: `sealed`, and `bare`, of whose pieces the manifest says
    nothing.
    """
    stock = args.dir / "stock"
    if not stock.exists():
        words = ["make_input.py", stock, "--gb", args.gb, "--hidden", 4096]
        make = torchrun_command(args.ranks, Path(__file__).with_name(words[0]), *words[1:])
        subprocess.run(make, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        ckpt_tools.seal(stock)
    fs = server.bucket("within")
    for name in ("sealed", "bare"):
        ckpt_tools.copy(stock, f"s3://within/{name}", storage_options=server.options)
    note = next(n for n in fs.find("within/bare") if "ckpt.manifest" in n)
    sealed = parse_manifest(fs.cat(note), note)
    files = {name: entry._replace(ranges=()) for name, entry in sealed.files.items()}
    fs.pipe(note, replace(sealed, files=files).render())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with servers.running("radosgw", args.dir) as server:
        upload(args, server)
        half, reshard = str(args.ranks // 2), ["reshard", "--overwrite", "--to"]
        commands = {
            "merge": ["merge", "--overwrite", "s3://within/sealed", "s3://within/m.safetensors"],
            f"reshard {args.ranks} to {half}": [
                *reshard,
                half,
                "s3://within/sealed",
                "s3://within/half",
            ],
            f"reshard {args.ranks} to {half}, through the client": [
                *reshard,
                half,
                "s3://within/bare",
                "s3://within/half",
            ],
            f"reshard {args.ranks} to 1": [*reshard, "1", "s3://within/sealed", "s3://within/one"],
            f"reshard {args.ranks} to {args.ranks}": [
                *reshard,
                str(args.ranks),
                "s3://within/sealed",
                "s3://within/same",
            ],
            f"reshard {args.ranks} to {2 * args.ranks}": [
                *reshard,
                str(2 * args.ranks),
                "s3://within/sealed",
                "s3://within/double",
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        passed: dict[str, str] = {}

        def told(words: list[str]) -> dict[str, int]:
            call = [sys.executable, "-m", "ckpt_tools", *words, "--json"]
            environment = os.environ | server.environment
            done = subprocess.run(call, check=True, stdout=subprocess.PIPE, env=environment)
            return dict(json.loads(done.stdout))

        for _ in range(args.runs):  # in this order: some overwrite what others have read
            for name, words in commands.items():
                began = time.perf_counter()
                result = told(words)
                times[name].append(time.perf_counter() - began)
                passed[name] = f"{1 - result['store_nbytes'] / result['written_nbytes']:.2%}"
    harness.show("Within one S3", times, more={"through the client": passed})


if __name__ == "__main__":
    main()
