"""Reading from S3: `ckpt merge s3://…` to a local file against boto3's own parallel download of the
same bytes, in turn.

    python tests/benchmarks/remote.py DIR --gb 1 --runs 5

Starts a RadosGW in DIR on this machine, uploads a checkpoint of 8 ranks, and prints medians of
whole processes, files durable.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import harness

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
        harness.race(
            f"{args.gb:g} GB from S3",
            commands,
            args.runs,
            against="boto3",
            environment=server.environment,
        )


if __name__ == "__main__":
    main()
