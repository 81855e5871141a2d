"""Reading from S3: `ckpt merge s3://…` to a local file against boto3's own parallel download of the
same bytes, in turn.

    python tests/benchmarks/remote.py DIR --gb 1 --runs 5

Starts a RadosGW in DIR on this machine, uploads a checkpoint of 8 ranks, and prints medians of
whole processes, files durable.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.jobs import torchrun_command
from tests.servers import servers

UPLOAD = """
import sys
from tests.servers.servers import Server
Server("radosgw", sys.argv[1]).bucket("bench").put(sys.argv[2] + "/", "bench/step/", recursive=True)
"""
DOWNLOAD = """
import os, sys, boto3
from boto3.s3.transfer import TransferConfig
s3, out = boto3.client("s3"), sys.argv[1]
config = TransferConfig(max_concurrency=int(sys.argv[2]), multipart_chunksize=8 << 20)
os.makedirs(out, exist_ok=True)
for item in s3.list_objects_v2(Bucket="bench", Prefix="step/")["Contents"]:
    path = os.path.join(out, item["Key"].rpartition("/")[2])
    s3.download_file("bench", item["Key"], path, Config=config)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    source = args.dir / "input"
    if not source.exists():
        make = torchrun_command(
            8, Path(__file__).with_name("make_input.py"), source, "--gb", args.gb
        )
        subprocess.run(make, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    with servers.running("radosgw", args.dir) as server:
        # a process of its own: peaks are inherited
        upload = [sys.executable, "-c", UPLOAD, server.endpoint, str(source)]
        subprocess.run(upload, check=True, env=os.environ | server.environment)
        merge = [
            sys.executable,
            "-m",
            "ckpt_tools",
            "merge",
            "s3://bench/step",
            str(args.dir / "out.safetensors"),
            "-q",
            "--overwrite",
        ]
        commands = {
            "ckpt merge s3://, with obstore": merge,
            "ckpt merge s3://, s3fs alone": ["env", "CKPT_S3_CLIENT=s3fs", *merge],
            "boto3 download, 10 threads": [
                sys.executable,
                "-c",
                DOWNLOAD,
                str(args.dir / "boto"),
                "10",
            ],
            "boto3 download, 4 threads": [
                sys.executable,
                "-c",
                DOWNLOAD,
                str(args.dir / "boto"),
                "4",
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        peaks: dict[str, float] = {}
        for number in range(args.runs + 1):
            order = list(commands)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                began = time.perf_counter()
                process = subprocess.Popen(commands[name], env=os.environ | server.environment)
                _, status, usage = os.wait4(process.pid, 0)
                assert status == 0, name
                if number:
                    times[name].append(time.perf_counter() - began)
                    peaks[name] = usage.ru_maxrss / 1024
    base = min(
        statistics.median(values) for name, values in times.items() if name.startswith("boto3")
    )
    print("| | median s | min – max s | against boto3 | peak MiB |\n|---|---:|---:|---:|---:|")
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"| {name} | {median:.2f} | {min(values):.2f} – {max(values):.2f} |"
            f" {median / base:.2f}× | {peaks[name]:.0f} |"
        )


if __name__ == "__main__":
    main()
