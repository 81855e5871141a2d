"""Groups of processes that run one command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.command import run_job
from tests.jobs import torchrun_command

ROOT = Path(__file__).parents[2]


def group(size: int, *words: object, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Runs `ckpt` as so many processes."""
    return run_job(torchrun_command(size, "-m", "ckpt_tools", *words), timeout=timeout, cwd=ROOT)
