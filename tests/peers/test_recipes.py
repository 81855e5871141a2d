"""Runs the blocks of docs/how-to/loops.md as they stand, each with a few lines of a small model."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ckpt_tools import steps, verify
from tests import jobs
from tests.jobs import PYTHON_PATH, torchrun_command
from tests.peers.environments import JOBS, python_of

PAGE = (jobs.ROOT / "docs" / "how-to" / "loops.md").read_text()
MODEL = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

OUT = Path({out!r})


def make_state():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {{"model": model, "optimizer": optimizer, "rng": ckpt_tools.RngState()}}


def train(state, step):
    fault(step)
    loss = state["model"](torch.full((4, 8), step / 10)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    with (OUT / f"losses-{{dist.get_rank()}}.txt").open("a") as file:
        file.write(f"{{step}} {{loss.item()!r}}\\n")
    return loss.item()
"""


def block(heading: str, kind: str = "python", number: int = 0) -> str:
    """Returns a block of code below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[number]


def losses(folder: Path) -> dict[str, dict[int, str]]:
    return {
        path.name: {int(line.split()[0]): line.split()[1] for line in path.read_text().splitlines()}
        for path in folder.glob("losses-*.txt")
    }


def environment(folder: Path) -> dict[str, str]:
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    more = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(paths)}
    return os.environ | more | {"FOLDER": str(folder), "PYTHONWARNINGS": "ignore"}


def commands() -> list[list[str]]:
    heading = "A loop under torchelastic, SLURM, SkyPilot or Kubernetes"
    job, managed = (yaml.safe_load(block(heading, "yaml", number)) for number in (0, 1))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["kind"] == "Job" and job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    return [container["command"], shlex.split(managed["run"])]


@pytest.mark.parametrize("command", commands(), ids=["kubernetes", "skypilot"])
def test_the_loop_ends_after_sigterm_and_continues(command: list[str], tmp_path: Path) -> None:
    fault = "def fault(step):\n    time.sleep(0.1 if (OUT / 'slow').exists() else 0)\n"
    loop = block("A loop under torchelastic, SLURM, SkyPilot or Kubernetes")
    loop = loop.replace("train(step)", "train(state, step)")
    given = "import ckpt_tools\nmade = make_state()\nlast = 20\n"
    given += "model, optimizer = made['model'], made['optimizer']\n"
    for name in ("whole", "part"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(MODEL.format(out=str(folder)) + fault + given + loop)
    how = {"env": environment(tmp_path), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    subprocess.run(command, cwd=tmp_path / "whole", check=True, timeout=600, **how)
    part = tmp_path / "part"
    (part / "slow").touch()
    with subprocess.Popen(command, cwd=part, **how) as job:
        while len(losses(part).get("losses-1.txt", ())) < 3:
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) != 0
    (saved,) = steps(part / "run")
    assert 1 <= saved.number < 20 and not verify(part / "run").problems
    (part / "slow").unlink()
    subprocess.run(command, cwd=part, check=True, timeout=600, **how)
    assert losses(part) == losses(tmp_path / "whole")
    assert all(len(found) == 20 for found in losses(part).values())


def test_ray_starts_again_after_a_killed_worker(tmp_path: Path) -> None:
    """Rank 1 dies at step 13; the losses are those of a run without that."""
    fault = """
def fault(step):
    mark = OUT / "died"
    if step == 13 and dist.get_rank() == 1 and KILLS and not mark.exists():
        mark.touch()
        os._exit(9)
"""
    python = python_of("ray")
    for name in ("whole", "part"):
        folder = tmp_path / name
        folder.mkdir()
        text = "import ckpt_tools\n" + MODEL.format(out=str(folder)) + fault
        text += f"KILLS, STORAGE = {name == 'part'}, {str(folder / 'storage')!r}\n"
        text += "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
        text += block("Ray Train") + "print('ends with', result.checkpoint.path)\n"
        (folder / "job.py").write_text(text)
        done = subprocess.run(
            [python, str(folder / "job.py")],
            env=environment(folder) | {"RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert f"ends with {folder}/storage/my-run/step-00000020" in done.stdout
    assert (tmp_path / "part" / "died").exists()
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_composer_resumes(tmp_path: Path) -> None:
    python = python_of("composer")
    (tmp_path / "recipe.py").write_text(block("Composer"))
    folders = {name: tmp_path / name for name in ("whole", "part")}
    for name, batches in (("whole", 9), ("part", 4), ("part", 9)):
        folders[name].mkdir(exist_ok=True)
        words = [JOBS / "composer_saves_job.py", folders[name], batches]
        paths = os.pathsep.join([str(tmp_path), str(JOBS), PYTHON_PATH])
        done = subprocess.run(
            [python, *torchrun_command(2, *words)[1:]],
            env=environment(tmp_path) | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    want = losses(folders["whole"])
    assert losses(folders["part"]) == want and all(len(found) == 9 for found in want.values())
