"""One job at a time on a root: a lock on a disk, a lease in a bucket. Real processes, real
kills.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import CheckpointManager, StorageError
from ckpt_tools.publish.bucket.lease import Lease
from ckpt_tools.publish.holder import own_holder
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import list_steps
from tests.conftest import HERE
from tests.servers.buckets import until
from tests.servers.faults import refusing
from tests.servers.gate import gated
from tests.servers.servers import Server

STATE = {"w": torch.ones(3)}
HOLDER = """
import json, sys, time, torch
from ckpt_tools import CheckpointManager
with CheckpointManager(sys.argv[1], storage_options=json.loads(sys.argv[2])) as checkpoints:
    print("held", flush=True)
    for step in range(1, 10**6):
        if sys.stdin.readline() == "":
            break
        checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
        print("saved", flush=True)
"""


@contextmanager
def holder(
    root: str | Path, options: dict[str, Any] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Another process that has a manager on a root."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", HOLDER, str(root), json.dumps(options)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_job_on_a_bucket_is_refused_and_a_dead_one_s_lease_is_taken_over_at_once(
    server: Server,
) -> None:
    fs, root = server.bucket("lease"), "s3://lease/run"
    with holder(root, server.options) as other:
        began = time.monotonic()
        with pytest.raises(
            StorageError,
            match=rf"another job writes to s3://lease/run: host .+, pid {other.pid}, since 20",
        ):
            CheckpointManager(root, storage_options=server.options)
        assert time.monotonic() - began < 20
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert fs.exists("lease/run/.ckpt.lock")
        began = time.monotonic()
        with CheckpointManager(root, storage_options=server.options) as checkpoints:
            assert time.monotonic() - began < 20
            checkpoints.save(1, STATE)
            with pytest.raises(
                StorageError, match="this process has another manager open on s3://lease/run"
            ) as caught:
                CheckpointManager(root, storage_options=server.options)
            assert "close() on it first" in (caught.value.hint or "")
    assert not fs.exists("lease/run/.ckpt.lock")
    assert [s.number for s in list_steps(open_root(root, server.options))] == [1]


def elsewhere(fs: Any, path: str, turn: int = 0) -> None:
    """Writes the lease of a job on another machine."""
    lease = {
        "host": "elsewhere",
        "pid": 1,
        "since": "2026",
        "boot": "another",
        "started": "1",
        "id": "theirs",
        "turn": turn,
        "expires_after_s": 60.0,
    }
    fs.pipe_file(path, json.dumps(lease).encode())


def test_the_lock_of_a_disk_that_was_copied_into_a_bucket_is_no_lease(server: Server) -> None:
    fs = server.bucket("raw")
    fs.pipe_file("raw/run/.ckpt.lock", json.dumps(own_holder()).encode())
    began = time.monotonic()
    Lease("s3://raw/run", server.options).release()
    assert time.monotonic() - began < 30, "it was not watched until it expires"


def test_a_lease_that_could_not_be_removed_does_not_bar_its_own_process(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.bucket("stays")
    with refusing(server.endpoint, "", "403 ExpiredToken") as (url, refuser):
        lease = Lease("s3://stays/run", Server(server.name, url).options)
        refuser.wanted = ".ckpt.lock"
        lease.release()
    assert "could not be removed; it expires within 60 s" in caplog.text
    Lease("s3://stays/run", server.options).release()


@pytest.mark.slow
def test_a_lease_of_another_machine_holds_while_it_is_renewed_and_expires_after_that(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt_tools.publish.bucket.lease.LEASE_S", 4.0)
    fs, root, path = server.bucket("elsewhere"), "s3://elsewhere/run", "elsewhere/run/.ckpt.lock"
    elsewhere(fs, path)
    renewing = threading.Timer(1.5, elsewhere, (fs, path, 1))
    renewing.start()
    with pytest.raises(
        StorageError,
        match="another job writes to s3://elsewhere/run: host elsewhere, pid 1, since 2026",
    ):
        CheckpointManager(root, storage_options=server.options)
    renewing.join()
    began = time.monotonic()
    CheckpointManager(root, storage_options=server.options).close()
    assert 1.0 < time.monotonic() - began < 15
    assert (
        "another job has a lease: host elsewhere, pid 1, since 2026; waiting until it is renewed or"
        " expires" in caplog.text
    )
    elsewhere(fs, path)
    time.sleep(5.5)  # whole seconds by the store's clock
    began = time.monotonic()
    # it has expired by the store's clock
    CheckpointManager(root, storage_options=server.options).close()
    assert time.monotonic() - began < 4


def test_a_lease_is_renewed_and_a_job_that_lost_it_saves_no_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_tools.publish.bucket.lease.RENEW_S", 0.3)
    fs, root, path = server.bucket("lost"), "s3://lost/run", "lost/run/.ckpt.lock"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        first = fs.cat_file(path)
        until(lambda: fs.cat_file(path) != first)
        checkpoints.save(1, STATE, asynchronous=False)
        elsewhere(fs, path)
        until(lambda: checkpoints._writer.lock._lost)
        with pytest.raises(
            StorageError, match="another job has taken over s3://lost/run: host elsewhere, pid 1"
        ):
            checkpoints.save(2, STATE, asynchronous=False)
    assert json.loads(fs.cat_file(path))["id"] == "theirs"  # and it stays theirs
    assert [s.number for s in list_steps(open_root(root, server.options))] == [1]


@pytest.mark.slow
def test_a_job_that_was_cut_off_looks_at_its_lease_before_it_saves(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_tools.publish.bucket.lease.LEASE_S", 1.0)
    fs, root, path = server.bucket("cutoff"), "s3://cutoff/run", "cutoff/run/.ckpt.lock"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        time.sleep(1.2)  # the thread that renews comes after 20 s
        checkpoints.save(1, STATE, asynchronous=False)  # nobody took it: it is renewed
        elsewhere(fs, path)
        time.sleep(1.2)
        with pytest.raises(
            StorageError, match="another job has taken over s3://cutoff/run: host elsewhere, pid 1"
        ):
            checkpoints.save(2, STATE, asynchronous=False)
    assert [s.number for s in list_steps(open_root(root, server.options))] == [1]


def test_a_job_that_loses_its_lease_while_it_writes_does_not_commit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_tools.publish.bucket.lease.RENEW_S", 0.3)
    fs, root = server.bucket("overtaken"), "s3://overtaken/run"
    with (
        gated(server) as (behind, gate),
        CheckpointManager(root, storage_options=behind.options) as checkpoints,
    ):
        gate.hold(b"PUT /overtaken/run/step-00000001/")
        checkpoints.save(1, STATE)
        assert gate.holding.wait(60)
        elsewhere(fs, "overtaken/run/.ckpt.lock")
        until(lambda: checkpoints._writer.lock._lost)
        gate.let_go()
        with pytest.raises(
            StorageError,
            match="another job has taken over s3://overtaken/run: host elsewhere, pid 1",
        ):
            checkpoints.wait()
    assert list_steps(open_root(root, server.options)) == []
    assert not [path for path in fs.find("overtaken/run") if "/step-" in path]


@pytest.mark.slow
def test_of_several_that_start_at_once_one_gets_the_lease(server: Server) -> None:
    server.bucket("race")
    managers: list[CheckpointManager] = []
    errors: list[StorageError] = []

    def start() -> None:
        try:
            managers.append(CheckpointManager("s3://race/run", storage_options=server.options))
        except StorageError as error:
            errors.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(managers) == 1 and len(errors) == 3, errors
        managers.pop().close()
        errors.clear()


# ---- on a disk -----------------------------------------------------------------------------------


def sleep_long(started: Any) -> None:
    started.set()
    time.sleep(60)


def work_with_children(root: str, started: Any, pids: Any) -> None:
    checkpoints = CheckpointManager(root)
    checkpoints.save(1, STATE)
    child = multiprocessing.get_context("fork").Process(target=sleep_long, args=(started,))
    child.start()
    pids.put(child.pid)
    time.sleep(60)


def test_a_child_that_outlives_a_killed_job_does_not_keep_the_root_locked(tmp_path: Path) -> None:
    """A DataLoader's worker is forked, and shares the job's open files."""
    context = multiprocessing.get_context("fork")
    started, pids = context.Event(), context.Queue()
    job = context.Process(target=work_with_children, args=(str(tmp_path), started, pids))
    job.start()
    worker = pids.get(timeout=60)
    try:
        assert started.wait(60)
        with pytest.raises(StorageError, match=f"another job writes to .*pid {job.pid}"):
            CheckpointManager(tmp_path)
        os.kill(job.pid or 0, signal.SIGKILL)
        job.join()
        os.kill(worker, 0)  # it lives
        CheckpointManager(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_cell_that_is_run_twice_is_told_which_manager_is_open(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path),
        pytest.raises(StorageError, match="this process has another manager open on") as caught,
    ):
        CheckpointManager(tmp_path)
    assert "close() on it first" in (caught.value.hint or "")


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_root_that_is_removed_while_a_job_runs_is_made_and_locked_again_with_a_warning(
    asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
        shutil.rmtree(root)
        with caplog.at_level(logging.WARNING, "ckpt_tools"):
            checkpoints.save(2, STATE)
            checkpoints.wait()
        assert "the earlier steps are gone" in caplog.text
        with pytest.raises(StorageError, match=re.escape("another manager open on")):
            CheckpointManager(root)
        shutil.rmtree(root)
        with (
            holder(root) as other,
            pytest.raises(StorageError, match=f"another job writes to .*, pid {other.pid}"),
        ):
            checkpoints.save(3, STATE, asynchronous=False)


@pytest.mark.slow
def test_a_root_is_free_at_once_although_a_child_was_just_forked(tmp_path: Path) -> None:
    for _ in range(20):
        checkpoints = CheckpointManager(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(0.2)
            os._exit(0)
        checkpoints.close()
        CheckpointManager(tmp_path).close()
        os.waitpid(child, 0)
