"""A job that saves, and everything that can end it: kills, full disks, faults of single system
calls, hanging ranks, signals.
"""

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
from ckpt_tools.loop.steps.retention import prune_steps
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import list_steps
from tests.command import run_job
from tests.conftest import HERE
from tests.jobs import LONG, torchrun_command


def fleet(root: Path, *args: str) -> str:
    command = [sys.executable, "-m", "tests.faults.fleet", str(root), *args]
    result = run_job(command, cwd=HERE.parent, timeout=800)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["stops", "limits", "unshared", "disagree"])
def test_the_failure_of_one_rank_is_told_by_all(scenario: str, tmp_path: Path) -> None:
    if scenario == "unshared" and os.geteuid():
        pytest.skip("a mount of one's own needs root")
    fleet(tmp_path, scenario)


@pytest.mark.slow
def test_a_kill_at_any_instant_loses_nothing_and_the_job_goes_on(tmp_path: Path) -> None:
    assert "0 lost" in fleet(
        tmp_path, "kills", "--runs", "25" if LONG else "12", "--seed", str(time.time_ns() % 10**6)
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
# kills at any instant are above
@pytest.mark.parametrize("fault", ["error=EIO", "signal=SIGKILL"] if LONG else ["error=EIO"])
def test_a_fault_at_every_call_of_a_save_that_changes_the_disk(fault: str, tmp_path: Path) -> None:
    fleet(tmp_path, "syscalls", "--faults", fault)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_going_back_to_an_older_step_is_safe_at_every_call_that_changes_the_disk(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.faults.rollbacks", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = run_job(command, cwd=HERE.parent, env=environment, timeout=600)
    assert result.returncode == 0 and "kills" in result.stdout, result.stdout + result.stderr


def test_a_disk_that_is_full_fails_the_save_and_once_there_is_room_saving_goes_on(
    tmp_path: Path,
) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        state = {"w": torch.arange(1_000_000, dtype=torch.float32)}
        with CheckpointManager(tmp_path, keep_last=100) as checkpoints:
            for step in range(1, 4):
                checkpoints.save(step, state, asynchronous=False)
            with pytest.raises(StorageError, match="no room: expected"):
                checkpoints.save(4, state, asynchronous=False)
            assert [(s.number, damage(s)) for s in list_steps(open_root(tmp_path))] == [
                (1, ""),
                (2, ""),
                (3, ""),
            ]
            prune_steps(open_root(tmp_path), Retention(1))
            checkpoints.save(5, state)
        assert [(s.number, damage(s)) for s in list_steps(open_root(tmp_path))] == [
            (3, ""),
            (5, ""),
        ]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# ---- the training program ------------------------------------------------------------------------


def training(
    num_ranks: int, folder: Path, *args: str, is_forked: bool = True
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        torchrun_command(
            num_ranks,
            "-m",
            "training",
            *(word for option in (f"run.dir={folder}", *args) for word in ("--set", option)),
            is_forked=is_forked,
        ),
        cwd=HERE.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate(timeout=400)[0]
    assert process.returncode == code, output
    return output


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [
        int(pid)
        for path in Path(f"/proc/{process.pid}/task").glob("*/children")
        for pid in path.read_text().split()
    ]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def losses(folder: Path) -> dict[int, float]:
    return {
        m["step"]: m["loss"]
        for m in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    }


SMALL = ("data.batch_size=4", "data.seq_len=32")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1] if LONG else [signal.SIGTERM])
def test_a_signal_ends_the_step_saves_it_and_exits_with_its_code(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = training(2, tmp_path, "run.steps=100000", *SMALL, is_forked=number != signal.SIGTERM)
    wait_for(tmp_path / "metrics.jsonl", process)
    if number == signal.SIGTERM:  # as a spot instance gets it: torchrun itself passes it on
        process.send_signal(number)
    else:  # as Slurm sends it to one of the tasks
        os.kill(ranks_of(process)[1], number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode
    if number == signal.SIGUSR1:
        assert "ended with status 138" in output
    assert f"got {number.name}: saved step" in output
    (step,) = list_steps(open_root(tmp_path))
    assert damage(step) == "" and step.number == max(losses(tmp_path))
    output = finish(training(2, tmp_path, f"run.steps={step.number + 2}", *SMALL))
    assert f"resumed at step {step.number}" in output
