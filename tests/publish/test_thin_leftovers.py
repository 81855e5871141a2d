"""What a thin in a bucket leaves when it is killed, or may not delete: told, and removed later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager
from ckpt_tools.run.roots import open_root
from tests.command import run_command
from tests.servers.faults import forbidding_deletes, out_of_order
from tests.servers.servers import Server
from tests.states import one_step

THIN = ("--keep-full", "1")


@pytest.fixture
def run(server: Server) -> str:
    """A run of two steps, each with an optimizer."""
    server.bucket("thinned")
    root = f"s3://thinned/{uuid.uuid4()}/run"
    with CheckpointManager(root, storage_options=server.options, keep_last=None) as checkpoints:
        for step in (1, 2):
            model = torch.nn.Linear(3, 3)
            optimizer = one_step(model, torch.ones(1, 3))
            checkpoints.save(step, {"model": model, "optimizer": optimizer}, asynchronous=False)
    time.sleep(1.1)  # S3 tells times in seconds
    return root


def files_of(server: Server, step: str) -> list[str]:
    fs = server.bucket("thinned")
    return sorted(path.rpartition("/")[2] for path in fs.find(step.removeprefix("s3://")))


def words(server: Server, url: str) -> dict[str, str]:
    return os.environ | server.environment | {"AWS_ENDPOINT_URL": url}


@pytest.mark.slow
def test_a_killed_thin_is_finished_by_the_next_prune(server: Server, run: str) -> None:
    step, options = f"{run}/step-00000001", server.options
    before = files_of(server, step)
    command = [sys.executable, "-m", "ckpt_tools", "thin", run, *THIN]
    with (
        out_of_order(server.endpoint, ("POST",), "silent") as (url, refused),
        subprocess.Popen(command, env=words(server, url)) as process,
    ):
        while not refused:  # it removes the old files now
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert set(before) < set(files_of(server, step))
    found = ckpt_tools.verify(step, storage_options=options)
    assert not found.problems and "other attempts" in found.notes[0]
    done = run_command("prune", run, "--keep-last", "5", env=words(server, server.endpoint))
    assert done.returncode == 0 and done.stdout.count("what a dead job left") == 2, (
        done.stdout + done.stderr
    )
    left = set(before) & set(files_of(server, step))
    assert left == {".metadata"}, "at once: no attempt can commit them any more"
    assert ckpt_tools.verify(step, storage_options=options).notes == []
    assert len(ckpt_tools.steps(run, storage_options=options)[0].thinned) == 1


@pytest.mark.slow
def test_old_files_that_may_not_be_removed_are_told(server: Server, run: str) -> None:
    step = f"{run}/step-00000001"
    before = files_of(server, step)
    with forbidding_deletes(server.endpoint) as url:
        done = run_command("thin", run, *THIN, env=words(server, url))
    assert done.returncode == 15, done.stderr
    assert "thinned" in done.stderr and "could not be removed" in done.stderr
    assert "freed 0 B" in done.stdout
    assert set(before) < set(files_of(server, step))
    assert run_command("thin", run, *THIN, env=words(server, server.endpoint)).returncode == 0
    left: list[Any] = [name for name in files_of(server, step) if name in before]
    assert left == [".metadata"]


def test_a_key_with_the_name_of_a_step_is_no_step(server: Server, run: str) -> None:
    fs, options = server.bucket("thinned"), server.options
    fs.pipe_file(f"{run.removeprefix('s3://')}/step-00000001", b"mine")
    assert [s.number for s in ckpt_tools.thin(run, 1, storage_options=options).thinned] == [1]
    assert fs.cat_file(f"{run.removeprefix('s3://')}/step-00000001") == b"mine"
    assert not ckpt_tools.verify(f"{run}/step-00000001", storage_options=options).problems


@pytest.mark.slow
def test_the_files_of_a_slow_attempt_stay_beside_a_complete_step(server: Server, run: str) -> None:
    """Another attempt at a complete step that is still at work is younger than any grace."""
    fs, step = server.bucket("thinned"), f"{run}/step-00000002"
    data = next(name for name in files_of(server, step) if name.endswith(".distcp"))
    mark = {"ckpt-upload": "a", "ckpt-attempt": "abcdef12-0000-4000-8000-000000000000"}
    key = {"Bucket": "thinned", "Key": f"{step.removeprefix('s3://thinned/')}/x.abcdef12.distcp"}
    fs.call_s3("put_object", **key, Body=b"data", Metadata=mark)
    root = open_root(run, server.options)
    assert root.remove_leftovers(grace_s=3600) == []
    gone = [left.url.rpartition("/")[2] for left in root.remove_leftovers(grace_s=-5)]
    assert gone == ["x.abcdef12.distcp"] and data in files_of(server, step)
