"""Runs in a bucket: real jobs, real kills, faults on the way, two writers, a mirror."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.utils.serialization import config

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager
from ckpt_tools.cli.process import CUT
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import find_latest, list_steps
from tests.command import run_ckpt
from tests.conftest import HERE, torchrun
from tests.servers.buckets import MIB, names, real, save_locally, uploads
from tests.servers.faults import WRITES, faulty
from tests.servers.servers import Server
from tests.states import tensors

Saved = Callable[[int], Path]


@pytest.mark.slow
def test_real_jobs_save_to_a_bucket_and_resume_on_other_ranks(
    server: Server, tmp_path: Path
) -> None:
    real(server)
    fs = server.bucket("jobs")
    environment = server.environment | {"RUNS": "s3://jobs"}
    torchrun(4, "manage.py", str(tmp_path), "save", "fsdp2", "tp", "two", **environment)
    torchrun(3, "manage.py", str(tmp_path), "resume", "fsdp2", "two", **environment)
    done = run_ckpt("ls", "s3://jobs/fsdp2", **server.environment)
    assert done.returncode == 0 and done.stdout.count("complete") == 2, done.stderr
    done = run_ckpt("latest", "s3://jobs/fsdp2", "--verify", **server.environment)
    assert done.stdout == "s3://jobs/fsdp2/step-00000002\n", done.stderr
    reader = FsspecReader("s3://jobs/fsdp2/step-00000002", **server.options)
    want = torch.load(tmp_path / "fsdp2.pt", weights_only=False)["model"]
    stock = {"model": {n: torch.zeros_like(t) for n, t in want.items()}}
    dcp.load(stock, storage_reader=reader, no_dist=True)
    assert all(torch.equal(stock["model"][n], want[n]) for n in want)
    done = run_ckpt("prune", "s3://jobs/fsdp2", "--keep-last", 1, **server.environment)
    assert done.stdout.startswith("removed s3://jobs/fsdp2/step-00000001"), done.stderr
    assert (
        not names(fs, "jobs/fsdp2/step-00000001")
        and len(names(fs, "jobs/fsdp2/step-00000002")) == 6
    )


def job(server: Server, *words: object) -> subprocess.Popen[str]:
    environment = (
        os.environ | server.environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    )
    command = [sys.executable, str(HERE / "dist" / "bucket.py"), *map(str, words)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(process.stderr.read())


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_kill_during_an_upload_costs_nothing(server: Server) -> None:
    real(server)
    fs, rng, newest = server.bucket("killed"), random.Random(3), 0
    for _ in range(3):
        process = job(server, "s3://killed/run")
        first = until(process, "resumed").split()
        assert first[2] == "True" and int(first[1]) >= newest, first
        newest = int(first[1])
        until(process, f"began {newest + 2}")
        time.sleep(rng.random() * 0.6)
        kill(process)
    before = list_steps(open_root("s3://killed/run", server.options))
    assert before and all(damage(step) == "" for step in before)
    left = open_root("s3://killed/run", server.options).remove_leftovers(grace_s=-5)
    assert not uploads(fs, "killed")
    assert list_steps(open_root("s3://killed/run", server.options)) == before, left
    kept = {step.name for step in before}
    # nothing of what was never finished is left
    assert {name.split("/")[2] for name in names(fs, "killed/run")} == {*kept, ".ckpt.lock"}
    assert all(len(names(fs, f"killed/run/{name}")) == 3 for name in kept)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_an_upload_leaves_nothing(
    number: int, server: Server, tmp_path: Path
) -> None:
    real(server)
    source, seen = save_locally(tmp_path / "run", tensors(4, 10 * MIB)), set()
    for attempt in range(24):
        bucket = f"signal{int(number)}-{attempt}"
        fs = server.bucket(bucket)
        delay = (0.0, 0.05, 0.1, 0.2)[attempt % 4]
        command = [
            sys.executable,
            "-m",
            "ckpt_tools",
            "reshard",
            str(source),
            f"s3://{bucket}/new",
            "--to",
            "2",
        ]
        process = subprocess.Popen(
            command,
            env=os.environ | server.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while not uploads(fs, bucket) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (0, 128 + number), said
        if CUT in said:
            continue  # this machine was too busy to clean up in time
        assert not uploads(fs, bucket)
        there = names(fs, bucket)
        assert len(there) in (0, 4) and (there or process.returncode), (there, said)
        seen.add(process.returncode)
        if attempt >= 3 and 128 + number in seen:
            break
    assert 128 + number in seen


@pytest.mark.slow
def test_a_run_outlives_its_machine_in_a_mirror(server: Server, tmp_path: Path) -> None:
    real(server)
    server.bucket("mirrored")
    process = job(server, tmp_path / "run", "s3://mirrored/run")
    until(process, "resumed")
    deadline = time.monotonic() + 60
    while (
        not list_steps(open_root("s3://mirrored/run", server.options))
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    kill(process)
    newest = find_latest(open_root("s3://mirrored/run", server.options)).step
    assert newest is not None and damage(newest) == ""
    # the same machine: its own disk is newer
    process = job(server, tmp_path / "run", "s3://mirrored/run")
    here = until(process, "resumed").split()
    kill(process)
    assert int(here[1]) >= newest.number and here[2] == "True"
    newest = find_latest(open_root("s3://mirrored/run", server.options)).step
    assert newest is not None
    process = job(server, tmp_path / "another", "s3://mirrored/run")  # another machine
    assert until(process, "resumed").split()[1:] == [str(newest.number), "True"]
    kill(process)


@pytest.mark.slow
def test_of_two_writers_of_one_step_exactly_one_wins(server: Server) -> None:
    fs = server.bucket("raced")
    for number in range(6):
        told: list[object] = [None, None]

        def save(who: int, number: int = number, told: list[object] = told) -> None:
            try:
                with CheckpointManager(
                    "s3://raced/run", storage_options=server.options, handle_signals=False
                ) as checkpoints:
                    checkpoints.save(
                        number, {"who": torch.full((50_000,), float(who))}, asynchronous=False
                    )
            except CheckpointError as error:
                told[who] = error

        threads = [threading.Thread(target=save, args=(who,)) for who in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told.count(None) == 1, told
        assert any(
            words in str(told)
            for words in (
                "appeared",
                "there already",
                "exists",
                "another writer",
                "another manager",
            )
        ), told
        state = {"who": torch.zeros(50_000)}
        with CheckpointManager(
            "s3://raced/run", storage_options=server.options, handle_signals=False
        ) as checkpoints:
            assert checkpoints.resume(state) == number
        assert set(state["who"].tolist()) == {float(told.index(None))}
        assert len(names(fs, f"raced/run/step-{number:08d}")) == 3  # nothing of the other is left


def attempt(
    server: Server, url: str, seed: int, share: float, kinds: tuple[str, ...]
) -> tuple[list[str], bool]:
    """Saves a second step through a proxy that breaks requests; returns the faults, and whether it
    was said to be saved.
    """
    with faulty(server.endpoint, share, seed, kinds, writes=True) as (proxy, log):
        options = server.options | {"endpoint_url": proxy, "skip_instance_cache": True}
        try:
            with CheckpointManager(
                url, storage_options=options, handle_signals=False
            ) as checkpoints:
                checkpoints.save(2, {"model": tensors(3, 1_500_000, seed)}, asynchronous=False)
        except CheckpointError:
            return log, False
        return log, True


def check_after(server: Server, url: str, seed: int, is_saved: bool) -> int:
    """A save that was told to be done is there, bit for bit; one that failed is not, or it is
    whole. Returns the step resumed.
    """
    state = {"model": tensors(3, 1_500_000, 10**6)}
    with CheckpointManager(
        url, storage_options=server.options, handle_signals=False
    ) as checkpoints:
        step = checkpoints.resume(state)
    want = tensors(3, 1_500_000, {1: 0, 2: seed}[step])
    assert all(torch.equal(state["model"][n], want[n]) for n in want), step
    assert step == 2 or not is_saved
    return step


@pytest.mark.slow
def test_faults_on_the_way_to_a_bucket_end_in_a_whole_step_or_in_a_clear_error(
    server: Server,
) -> None:
    real(server)
    server.bucket("broken")
    # moto compares no checksum
    kinds = (*WRITES, "corrupt") if server.name == "radosgw" else WRITES
    seen: list[str] = []
    for seed in range(1, 5):
        url = f"s3://broken/{seed}"
        with CheckpointManager(
            url, storage_options=server.options, handle_signals=False
        ) as checkpoints:
            checkpoints.save(1, {"model": tensors(3, 1_500_000)}, asynchronous=False)
        log, is_saved = attempt(server, url, seed, 0.35, kinds)
        check_after(server, url, seed, is_saved)
        seen += log
    assert set(seen) >= set(WRITES), seen


def test_what_is_not_permitted_is_said_with_action_and_key(server: Server, saved: Saved) -> None:
    if server.name == "moto":
        pytest.skip("moto believes anybody")
    fs = server.bucket("forbidden")
    denied = (
        '{"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Principal": "*", "Action":'
        ' ["s3:%s"], "Resource": ["%s"]}]}'
    )
    source, resource = saved(4) / "adamw", "arn:aws:s3:::forbidden/*"
    for action, words, message in (
        ("PutObject", ("reshard", source, "s3://forbidden/new", "--to", 2), "cannot write: "),
        ("ListBucket", ("ls", "s3://forbidden/run"), "cannot list: "),
    ):
        fs.call_s3(
            "put_bucket_policy",
            Bucket="forbidden",
            Policy=denied % (action, resource if action == "PutObject" else resource[:-2]),
        )
        done = run_ckpt(*words, **server.environment)
        fs.call_s3("delete_bucket_policy", Bucket="forbidden")
        assert (
            done.returncode == 15 and message in done.stderr and "s3://forbidden/" in done.stderr
        ), done.stderr
        assert "do not permit" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not names(fs, "forbidden")
    with CheckpointManager("s3://forbidden/run", storage_options=server.options) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
    before = names(fs, "forbidden")
    fs.call_s3("put_bucket_policy", Bucket="forbidden", Policy=denied % ("DeleteObject", resource))
    done = run_ckpt("prune", "s3://forbidden/run", "--keep-last", 1, **server.environment)
    fs.call_s3("delete_bucket_policy", Bucket="forbidden")
    assert (
        done.returncode == 15
        and "cannot remove: PermissionError AccessDenied status=403 (s3://forbidden/run/step-00000001/"
        in done.stderr
    ), done.stderr
    assert names(fs, "forbidden") == before


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
def test_a_clock_that_is_an_hour_off_is_said(server: Server) -> None:
    if server.name == "moto":
        pytest.skip("moto looks at no clock")
    fs = server.bucket("skewed")
    with CheckpointManager("s3://skewed/run", storage_options=server.options) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    command = ["faketime", "-f", "+1h", sys.executable, "-m", "ckpt_tools", "ls", "s3://skewed/run"]
    done = subprocess.run(
        command, env=os.environ | server.environment, capture_output=True, text=True, timeout=120
    )
    assert (
        done.returncode == 15 and "clock is wrong" in done.stderr and "Traceback" not in done.stderr
    ), done.stdout + done.stderr
    assert len(names(fs, "skewed")) == 3


@pytest.mark.slow
def test_what_the_ranks_of_a_host_need_is_fetched_once(server: Server, tmp_path: Path) -> None:
    """Rows, columns, replicas, of three ranks' files; also where payloads lie elsewhere, bits are
    wrong, or an object is short or gone.
    """
    real(server)
    fs, generator = server.bucket("together"), torch.Generator().manual_seed(3)
    whole = {
        "large": torch.randn(3001, 2000, generator=generator),  # 24 MB: several rounds
        "deep": torch.randn(5, 67, 301, generator=generator),
        "half": torch.randn(1003, 77, generator=generator).bfloat16(),
        "ids": torch.randint(0, 1 << 40, (50, 9), generator=generator),
        "vector": torch.randn(1001, generator=generator),
        "scalar": torch.tensor(3.5),
    }
    torch.save(whole, tmp_path / "whole.pt")
    with warnings.catch_warnings(), config.patch({"save.storage_alignment": 4096}):
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(whole)}, checkpoint_id=tmp_path / "elsewhere", no_dist=True)
    ckpt_tools.reshard(tmp_path / "elsewhere", tmp_path / "good", to_ranks=3)
    fs.put(f"{tmp_path}/elsewhere/", "together/elsewhere/", recursive=True)
    for name in ("good", "flipped", "short", "gone"):
        fs.put(f"{tmp_path}/good/", f"together/{name}/", recursive=True)
    data = (tmp_path / "good" / "__1_0.distcp").read_bytes()
    fs.pipe(
        "together/flipped/__1_0.distcp",
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    )
    fs.pipe("together/short/__1_0.distcp", data[: len(data) // 2])
    fs.rm("together/gone/__1_0.distcp")
    torchrun(
        4,
        "together.py",
        "s3://together",
        str(tmp_path / "whole.pt"),
        GLOO_SOCKET_IFNAME="lo",
        **server.environment,
    )
