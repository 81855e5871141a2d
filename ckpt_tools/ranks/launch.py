"""Joins the processes that a launcher has started.

Examples are `torchrun -m ckpt_tools …` and `srun python -m ckpt_tools …`.

Source: torch 2.13 `torch/distributed/run.py`; Slurm's `srun` manual, "output environment
variables".
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from ckpt_tools.core import ending
from ckpt_tools.errors import PlanError
from ckpt_tools.ranks.gloo import GlooGroup

TIMEOUT_S = 3600.0
_PORTS, _FIRST_PORT = 10_000, 20_000  # below the ephemeral ports of Linux


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torch's variables for a job step: rank, size, and address of process 0.

    Raises:
        PlanError: one of Slurm's variables is missing or malformed.
    """
    try:
        first = first_host(
            environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        )
        number = int(environment["SLURM_JOB_ID"]) * 31 + int(environment.get("SLURM_STEP_ID", "0"))
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": (
                environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
                .partition("(")[0]
                .partition(",")[0]
            ),
            "MASTER_ADDR": environment.get("MASTER_ADDR", first),
            "MASTER_PORT": environment.get("MASTER_PORT", str(_FIRST_PORT + number % _PORTS)),
        }
    except (KeyError, ValueError) as error:
        raise PlanError(
            f"not a job step of Slurm: {error}", hint="start it with srun, or with torchrun"
        ) from error


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: `gpu[007-009,12],login1` gives gpu007."""
    match = re.fullmatch(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?(?:,.*)?", nodes)
    if match is None:
        raise ValueError(f"cannot read the list of nodes: {nodes!r}")
    return match[1] + (match[2] or "") + (match[3] or "")


@contextmanager
def joined() -> Iterator[GlooGroup]:
    """Yields the group of all processes of the job, over gloo.

    Each process waits for the others for at most an hour, or `CKPT_TEAM_TIMEOUT_S` seconds.

    Raises:
        PlanError: a variable of the launcher is missing or malformed.
    """
    try:
        timeout_s = float(os.environ.get("CKPT_TEAM_TIMEOUT_S", TIMEOUT_S))
    except ValueError:
        raise PlanError(
            "CKPT_TEAM_TIMEOUT_S: expected a number of seconds, got"
            f" {os.environ['CKPT_TEAM_TIMEOUT_S']!r}"
        ) from None
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ.update(slurm_variables(os.environ))
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=timeout_s))
    group = GlooGroup(timeout_s, is_interruptible=True)
    try:
        yield group
    finally:
        if not ending.has_begun():  # the process ends without its threads and its connections
            group.close()
            dist.destroy_process_group()
