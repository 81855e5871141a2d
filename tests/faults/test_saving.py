"""A job that saves, and everything that can end it: kills, full disks, faults of single system calls, hanging ranks, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ckpt_tools import CheckpointManager, StorageError
from ckpt_tools.steps import damage, list_steps, prune
from tests.conftest import HERE
from tests.dist.test_real_jobs import assert_same, stock_load


def fleet(root: Path, *args: str) -> str:
    command = [sys.executable, "-m", "tests.faults.fleet", str(root), *args]
    result = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("scenario", ["stops", "limits", "unshared", "disagree"])
def test_the_failure_of_one_rank_is_told_by_all(scenario: str, tmp_path: Path) -> None:
    if scenario == "unshared" and os.geteuid():
        pytest.skip("a mount of one's own needs root")
    fleet(tmp_path, scenario)


def test_a_kill_at_any_instant_loses_nothing_and_the_job_goes_on(tmp_path: Path) -> None:
    assert "0 lost" in fleet(tmp_path, "kills", "--runs", "25", "--seed", str(time.time_ns() % 10**6))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("fault", ["error=EIO", "signal=SIGKILL"])
def test_a_fault_at_every_call_of_a_save_that_changes_the_disk(fault: str, tmp_path: Path) -> None:
    fleet(tmp_path, "syscalls", "--faults", fault)


def test_a_disk_that_is_full_fails_the_save_and_once_there_is_room_saving_goes_on(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        state = {"w": torch.arange(1_000_000, dtype=torch.float32)}
        with CheckpointManager(tmp_path, keep_last=100) as checkpoints:
            for step in range(1, 4):
                checkpoints.save(step, state, asynchronous=False)
            with pytest.raises(StorageError, match="no room: expected"):
                checkpoints.save(4, state, asynchronous=False)
            assert [(s.number, damage(s)) for s in list_steps(tmp_path)] == [(1, ""), (2, ""), (3, "")]
            prune(tmp_path, 1)
            checkpoints.save(5, state)
        assert [(s.number, damage(s)) for s in list_steps(tmp_path)] == [(3, ""), (5, "")]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# ---- the training program ----------------------------------------------------------------------------------------------------


def training(num_ranks: int, folder: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m", "training"]
    return subprocess.Popen(
        [*command, "--dir", str(folder), *map(str, args)],
        cwd=HERE.parent, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate(timeout=200)[0]
    assert process.returncode == code, output
    return output


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for path in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in path.read_text().split()]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def losses(folder: Path) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


STEPS = ("--steps", 40, "--save-every", 10, "--batch-size", 12, "--seq-len", 64)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(training(3, folder, *STEPS, "--keep-last", 9))
    return folder


def test_a_run_that_was_killed_goes_on_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    process = training(3, tmp_path, *STEPS)
    wait_for(tmp_path / "step-00000010", process)
    for pid in (process.pid, *ranks_of(process)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert [s.number for s in list_steps(tmp_path) if not s.problem][-1] < 40
    assert "resumed at step" in finish(training(3, tmp_path, *STEPS))
    assert losses(tmp_path) == losses(uninterrupted)
    got, want = (stock_load(folder / "step-00000040", tmp_path) for folder in (tmp_path, uninterrupted))
    assert_same(got, want)


def test_a_run_goes_on_with_another_number_of_ranks(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "step-00000020", tmp_path / "step-00000020")
    output = finish(training(2, tmp_path, *STEPS))
    assert "rng: the checkpoint has the states of 3 ranks, this job has 2; reset" in output
    want = losses(uninterrupted)
    assert all(abs(loss - want[step]) <= 1e-6 * want[step] for step, loss in losses(tmp_path).items() if step <= 22)
    assert set(losses(tmp_path)) == set(range(21, 41))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_it_and_exits_with_its_code(number: signal.Signals, tmp_path: Path) -> None:
    process = training(2, tmp_path, "--steps", 100_000, "--batch-size", 4, "--seq-len", 32)
    wait_for(tmp_path / "metrics.jsonl", process)
    if number == signal.SIGTERM:  # as a spot instance gets it: torchrun passes it on
        process.send_signal(number)
    else:  # as Slurm sends it to one of the tasks
        os.kill(ranks_of(process)[1], number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode
    if number == signal.SIGUSR1:
        assert "exitcode  : 138" in output
    assert f"got {number.name}: saved step" in output
    (step,) = list_steps(tmp_path)
    assert damage(step) == "" and step.number == max(losses(tmp_path))
    output = finish(training(2, tmp_path, "--steps", step.number + 2, "--batch-size", 4, "--seq-len", 32))
    assert f"resumed at step {step.number}" in output
