"""Signals end every verb soon, also while a store does not answer. Long waits are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from ckpt_tools import CheckpointManager
from ckpt_tools.cli.process import CUT
from tests.servers.buckets import MIB, save_locally, uploads
from tests.servers.faults import faulty, out_of_order
from tests.servers.servers import Server
from tests.states import tensors

READS, WRITES = ("GET",), ("PUT", "POST")
LONG_S = 15  # every store's own patience is longer: without an end by the signal, it takes minutes


pytestmark = pytest.mark.parametrize("server", ["moto"], indirect=True)


@pytest.fixture(scope="module")
def root(server: Server) -> str:
    server.bucket("ends")
    root = f"s3://ends/{uuid.uuid4()}/run"
    with CheckpointManager(root, storage_options=server.options, keep_last=None) as checkpoints:
        for step in (1, 2, 3):
            state = {"model": {"w": torch.full((1000,), float(step))}}
            checkpoints.save(step, state, asynchronous=False)
    return root


@contextmanager
def started(server: Server, url: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | server.environment | {"AWS_ENDPOINT_URL": url}
    command = [sys.executable, "-m", "ckpt_tools", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "methods"),
    [
        (("ls", "{root}"), READS),
        (("prune", "{root}", "--keep-last", "1", "--no-verify"), READS),
        (("thin", "{root}", "--keep-full", "1"), READS),
        (("check", "{root}", "--verify"), READS),
        (("report", "{root}", "-o", "{folder}/page.html"), READS),
        (("verify", "{root}/step-00000003"), READS),
        (("reshard", "{root}/step-00000003", "{root}-resharded", "--to", "2"), WRITES),
        (("copy", "{root}/step-00000003", "{root}-copy/step-00000003"), WRITES),
    ],
    ids=lambda value: value[0],
)
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [("silent", signal.SIGTERM, 143), ("busy", signal.SIGINT, 130)],
)
def test_a_signal_ends_a_verb_that_waits_for_a_store(
    words: tuple[str, ...],
    methods: tuple[str, ...],
    how: str,
    number: signal.Signals,
    code: int,
    server: Server,
    root: str,
    tmp_path: Path,
) -> None:
    words = tuple(word.format(root=root, folder=tmp_path) for word in words)
    with (
        out_of_order(server.endpoint, methods, how) as (url, refused),
        started(server, url, *words) as process,
    ):
        while not refused:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == code, errors
    assert "Traceback" not in errors and ("terminated" if code == 143 else "interrupted") in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_upload_that_is_being_started_at_a_signal_is_given_up(
    number: signal.Signals, server: Server, tmp_path: Path
) -> None:
    source = str(save_locally(tmp_path / "run", tensors(4, 10 * MIB)))
    for attempt in range(5):
        bucket = f"started{int(number)}-{attempt}"
        fs = server.bucket(bucket)
        with (
            faulty(server.endpoint, 1.0, 1, ("late",), writes=True) as (url, late),
            started(server, url, "reshard", source, f"s3://{bucket}/new", "--to", "2") as process,
        ):
            while not late:  # the first write starts an upload; its answer is half a second late
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            process.send_signal(number)
            _, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 128 + number
        assert CUT in errors or uploads(fs, bucket) == []
        if CUT not in errors:
            return
    pytest.skip("this machine was too busy to clean up in time, five times")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["each rank", "one rank", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["reshard", "copy"])
def test_a_signal_ends_the_ranks_of_a_shared_verb(
    verb: str, number: signal.Signals, to: str, server: Server, tmp_path: Path
) -> None:
    """The ranks wait for a store, or for each other: they end, each at another place of the work."""
    bucket = f"ranks{verb}{int(number)}{to.replace(' ', '')}"
    server.bucket(bucket)
    source = save_locally(tmp_path / "run", tensors(4, 10 * MIB))
    words = [verb, str(source), f"s3://{bucket}/new", *(["--to", "2"] * (verb == "reshard"))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "ckpt_tools", *words]
    with (
        out_of_order(server.endpoint, WRITES, "silent") as (url, refused),
        subprocess.Popen(
            command,
            env=os.environ | server.environment | {"AWS_ENDPOINT_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process,
    ):
        try:
            while not refused:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            time.sleep(0.5)
            ranks = children_of(process.pid)
            assert len(ranks) == 2
            began = time.monotonic()
            for pid in {"each rank": ranks, "one rank": ranks[:1]}.get(to, [process.pid]):
                os.kill(pid, number)
            while any(map(is_alive, ranks)) and time.monotonic() - began < LONG_S:
                time.sleep(0.05)
            assert not any(map(is_alive, ranks)), time.monotonic() - began
            said, _ = process.communicate(timeout=LONG_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode
    if number == signal.SIGINT and to == "each rank":  # torchrun ends the others with SIGTERM
        assert "error: interrupted" in said, said
    assert CUT in said or not uploads(server.bucket(bucket), bucket), said


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(child) for path in found for child in path.read_text().split()})


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_long_wait_is_told(server: Server, root: str) -> None:
    with (
        out_of_order(server.endpoint, READS, "silent") as (url, _),
        started(server, url, "latest", root) as process,
    ):
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LONG_S)
    assert line.startswith("waiting for the store, for ") and "read s3://ends/" in line
