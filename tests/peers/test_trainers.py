"""Our saves and resumes inside the trainers that people use, each a real job of several ranks.

A job that is killed during a save and resumes has the losses of one that was never interrupted,
number by number.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from tests import jobs
from tests.jobs import LONG, PYTHON_PATH, torchrun_command
from tests.peers.environments import JOBS, python_of
from tests.servers.servers import running

RANKS = (2, 3) if LONG else (2,)
HOSTS = {"transformers": "", "accelerate": ""}  # the environment; "" is that of the tests


def command(host: str, num_ranks: int, out: Path, wanted: dict[str, Any]) -> list[str]:
    words = [JOBS / f"{host}_job.py", out, json.dumps(wanted)]
    python = python_of(HOSTS[host]) if HOSTS[host] else sys.executable
    return [python, *(torchrun_command(num_ranks, *words)[1:] if num_ranks else map(str, words))]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def run(
    host: str, num_ranks: int, out: Path, wanted: dict[str, Any], code: int = 0, **more: str
) -> str:
    words = command(host, num_ranks, out, wanted)
    done = subprocess.run(
        words, env=environment(**more), capture_output=True, text=True, timeout=600, cwd=jobs.ROOT
    )
    assert (done.returncode == 0) == (code == 0), done.stdout[-2000:] + done.stderr[-6000:]
    return done.stderr + done.stdout


def kill(host: str, num_ranks: int, out: Path, root: Path, wanted: dict[str, Any]) -> None:
    """Kills a rank at random while a save is under way, or right after it."""
    words = command(host, num_ranks, out, wanted)

    def is_saving() -> bool:
        return (len(steps_in(root)) >= 2 and any(root.glob(".tmp.*"))) or len(steps_in(root)) >= 3

    os.environ |= environment()
    done = jobs.interrupt(words, is_saving, signal.SIGKILL, random.randrange(num_ranks))
    assert done.returncode != 0 and steps_in(root)


def steps_in(root: Path) -> list[int]:
    return sorted(
        int(path.name.rpartition("-")[2])
        for path in root.glob("*-*")
        if path.is_dir() and not path.name.startswith(".") and "superseded" not in path.name
    )


def losses(out: Path) -> dict[str, dict[int, str]]:
    """Each rank's losses by step; of a step that was taken twice, the last one."""
    return {
        path.name: {
            int(line.split()[0]): line.partition(" ")[2] for line in path.read_text().splitlines()
        }
        for path in out.glob("losses*.txt")
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("host", "fsdp"),
    [("transformers", 2), ("accelerate", 2), ("accelerate", 1)]
    + [("transformers", 1), ("transformers", 0), ("accelerate", 0)] * LONG,
)
def test_a_killed_job_has_the_losses_of_one_that_was_not(
    host: str, fsdp: int, num_ranks: int, tmp_path: Path
) -> None:
    wanted = {"steps": 20, "fsdp": fsdp, "save": 3}
    run(host, num_ranks, tmp_path / "whole", wanted)
    part = tmp_path / "part"
    root = part / "run" if host == "accelerate" else part
    kill(host, num_ranks, part, root, wanted)
    run(host, num_ranks, part, {**wanted, "resume": True})
    want, got = losses(tmp_path / "whole"), losses(part)
    assert got == want and all(len(found) == 20 for found in want.values())


# ---- transformers --------------------------------------------------------------------------------


def test_the_trainer_switches_from_its_own_checkpoint(tmp_path: Path) -> None:
    """The first ten steps are the Trainer's own. What follows is as if it had gone on itself."""
    wanted = {"steps": 20, "fsdp": 2, "save": 10}
    run("transformers", 2, tmp_path / "whole", {**wanted, "stock": True})
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoint-20")
    (tmp_path / "part" / "losses.txt").unlink()
    told = run("transformers", 2, tmp_path / "part", {**wanted, "resume": True})
    assert "checkpoint-10 was written by the trainer itself" in told
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "part")
    assert got["losses.txt"] == {n: w for n, w in want["losses.txt"].items() if n > 10}
    assert ckpt_tools.verify(tmp_path / "part" / "checkpoint-20").problems == []


def test_the_trainer_on_three_ranks_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    wanted = {"steps": 9, "fsdp": 2, "save": 3, "arguments": {"save_total_limit": 2}}
    run("transformers", 2, tmp_path, wanted)
    assert steps_in(tmp_path) == [6, 9]
    data = bytearray((tmp_path / "checkpoint-9" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "checkpoint-9" / "__0_0.distcp").write_bytes(data)
    told = run("transformers", 3, tmp_path, {**wanted, "steps": 12, "resume": True})
    assert "passed over" in told and "checkpoint-9" in told
    assert steps_in(tmp_path) == [9, 12]  # the limit of two; 9 was replaced
    assert all(
        ckpt_tools.verify(tmp_path / f"checkpoint-{n}").problems == [] for n in steps_in(tmp_path)
    )


def test_the_best_step_stays_and_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The loss rises, so the first step is the best one."""
    arguments = {
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    wanted = {"steps": 8, "save": 2, "evaluate": True, "arguments": arguments}
    run("transformers", 0, tmp_path / "stock", {**wanted, "stock": True})
    run("transformers", 0, tmp_path / "ours", {**wanted, "install": True})
    assert steps_in(tmp_path / "ours") == steps_in(tmp_path / "stock")
    want, got = (torch.load(tmp_path / kind / "end.pt") for kind in ("stock", "ours"))
    assert Path(got["best"]).name == Path(want["best"]).name
    assert all(torch.equal(got["model"][n], t) for n, t in want["model"].items())


def test_only_the_model(tmp_path: Path) -> None:
    wanted = {"steps": 4, "save": 2, "arguments": {"save_only_model": True}}
    run("transformers", 0, tmp_path, wanted)
    with ckpt_tools.open(tmp_path / "checkpoint-4") as step:
        assert not any(name.startswith("optimizer") for name in step.names())
    told = run("transformers", 0, tmp_path, {**wanted, "steps": 6, "resume": True})
    assert "checkpoint-4 has no optimizer, scheduler: it starts anew" in told


def test_a_bucket_as_the_root(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with running("moto", tmp_path / "server") as server:
        server.bucket("runs")
        root, more = "s3://runs/a", server.environment
        wanted = {"steps": 10, "fsdp": 2, "save": 5, "root": root}
        run("transformers", 2, tmp_path / "whole", {**wanted, "root": None})
        run("transformers", 2, tmp_path / "part", {**wanted, "steps": 10}, **more)
        (tmp_path / "part" / "losses.txt").unlink()
        server.bucket("runs").rm("runs/a/checkpoint-10", recursive=True)
        run("transformers", 2, tmp_path / "part", {**wanted, "resume": True}, **more)
        want, got = losses(tmp_path / "whole"), losses(tmp_path / "part")
        assert got["losses.txt"] == {n: w for n, w in want["losses.txt"].items() if n > 5}
        assert not any((tmp_path / "part").glob("checkpoint-*"))


# ---- Accelerate ----------------------------------------------------------------------------------


def test_accelerate_switches_from_its_own_checkpoint(tmp_path: Path) -> None:
    wanted = {"steps": 10, "fsdp": 2, "save": 5}
    run("accelerate", 2, tmp_path / "whole", wanted)
    run("accelerate", 2, tmp_path / "stock", {**wanted, "stock": True, "steps": 5})
    step, epoch, batch = json.loads((tmp_path / "stock" / "at.json").read_text())
    there = {"load": str(tmp_path / "stock" / "stock-5"), "at": step, "epoch": epoch}
    run("accelerate", 2, tmp_path / "part", {**wanted, **there, "batch": batch})
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "part")
    assert got.keys() == want.keys()
    for name, found in got.items():
        assert found == {n: w for n, w in want[name].items() if n > 5}
    assert ckpt_tools.verify(tmp_path / "part" / "run" / "step-00000010").problems == []
