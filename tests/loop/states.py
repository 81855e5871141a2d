"""Optimizers and states, saved and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools import CheckpointManager
from ckpt_tools.distributed import StorageReader


def by_plugin(path: Path, shape: tuple[int, ...] = (4,)) -> Any:
    state = {"model.w": torch.ones(shape)}
    dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    return state["model.w"]


def step(optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Compares by torch's own state dicts, whose parameters are numbered."""
    one, other = a.state_dict(), b.state_dict()
    return one["param_groups"] == other["param_groups"] and all(
        torch.equal(one["state"][n][key], other["state"][n][key])
        for n in one["state"] | other["state"]
        for key in one["state"][n]
    )


def same_state_of(
    a: torch.optim.Optimizer, b: torch.optim.Optimizer, pairs: list[tuple[Any, Any]]
) -> bool:
    return all(
        torch.equal(a.state[x][key], b.state[y][key]) for x, y in pairs for key in b.state[y]
    )


def roundtrip(
    root: Path, saved: dict[str, Any], into: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Saves a state with one manager and resumes into another state with the next, as a restarted
    job does.
    """
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, saved)
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(into, **options) == 1
    return into
