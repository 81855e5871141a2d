"""Buckets of the test servers: what they hold, and checkpoints for them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import CheckpointManager
from tests.servers import servers
from tests.servers.servers import Server

MIB = 1 << 20


def names(fs: Any, prefix: str) -> list[str]:
    fs.invalidate_cache()
    return sorted(fs.find(prefix))


def uploads(fs: Any, bucket: str) -> list[str]:
    return [
        u["Key"] for u in fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads") or ()
    ]


def save_locally(path: Path, values: dict[str, torch.Tensor]) -> Path:
    with CheckpointManager(path) as checkpoints:
        checkpoints.save(1, {"model": values}, asynchronous=False)
    return path / "step-00000001"


def real(server: Server) -> None:
    """Skips what takes long where the other server is the real one."""
    if server.name == "moto" and not servers.missing("radosgw"):
        pytest.skip("RadosGW is here, and it is the real one")


def until(is_so: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def deny(fs: Any, bucket: str, *actions: str) -> None:
    """Has a bucket refuse some actions to everybody."""
    what = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": list(actions),
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    fs.call_s3(
        "put_bucket_policy",
        Bucket=bucket,
        Policy=json.dumps({"Version": "2012-10-17", "Statement": [what]}),
    )
