"""Credentials from a profile of the AWS configuration, as `--storage-option profile=NAME`."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from ckpt_tools import CheckpointManager
from tests.command import run_command
from tests.servers.servers import KEY, SECRET, Server


@pytest.mark.parametrize(("name", "code"), [("training", 0), ("missing", 15)])
def test_a_profile_gives_the_credentials(
    name: str, code: int, server: Server, tmp_path: Path
) -> None:
    server.bucket("profiles")
    root = f"s3://profiles/{uuid.uuid4()}"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        checkpoints.save(1, {"x": 1}, asynchronous=False)
    text = f"[training]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "credentials").write_text(text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    options = [f"profile={name}", f"endpoint_url={server.endpoint}"]
    done = run_command("ls", root, *(f"--storage-option={o}" for o in options), env=environment)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert code or "step" in done.stdout
    assert not code or "missing" in done.stderr
