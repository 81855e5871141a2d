"""Saves one state after many kinds of changes under FSDP2: `unchanged.py ROOT`.

Rank 0 compares each step with what torch's own functions gather just before the save. Prints how
often torch's function was asked to export the model.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager, Writing
from ckpt_tools.loop.state import state_dict as exporting
from ckpt_tools.loop.state.modules import module_state
from tests.dist import device
from tests.loop.cached_states import check, flat

root = Path(sys.argv[1])
here = device.begin()
calls = 0
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def export(module: nn.Module) -> Any:
    global calls
    calls += 1
    return module_state(module)


exporting.module_state = export


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = state["model"], state["optimizer"]
    found = {
        "model": dict(get_model_state_dict(model, options=WHOLE)),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
    }
    # torch gives the gathered values to rank 0, and other ranks need none
    return {
        name: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in flat(found).items()
    }


def train(state: dict[str, Any]) -> None:
    weight = next(state["model"].parameters())
    torch.manual_seed(dist.get_rank())
    values = torch.randn(3, 6, device=here, dtype=weight.dtype)
    state["model"](values).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def made(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).to(here, dtype)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    found = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    train(found)
    return found


state = made(torch.float32)
step = 0


def save(checkpoints: CheckpointManager, number: int) -> None:
    """Saves some steps, with training between them, and compares each."""
    global step
    for _ in range(number):
        step += 1
        wanted = gathered(state)
        checkpoints.save(step, state)
        train(state)
        checkpoints.wait()
        if dist.get_rank() == 0:
            check(root / f"step-{step:08d}", wanted)
        dist.barrier()


with CheckpointManager(root, keep_last=None, writing=Writing(overlap_copy=True)) as checkpoints:
    save(checkpoints, 3)
    assert calls == 1, calls
    # what only one rank knows
    weight = state["model"][0].weight
    if dist.get_rank() == 1:
        state["optimizer"].state[weight]["exp_avg"] = torch.zeros_like(weight)
    save(checkpoints, 3)
    # all ranks collect again, and only that one has to export
    assert calls == 1 + dist.get_rank(), calls
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
    train(state)
    save(checkpoints, 2)
    state |= made(torch.bfloat16)
    save(checkpoints, 2)
    assert calls == 3 + dist.get_rank(), calls
    assert checkpoints.resume(state, 9) == 9
    save(checkpoints, 2)


class Everywhere:
    """An object whose state needs all ranks."""

    def state_dict(self) -> dict[str, Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank())
        return {"ranks": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


# the writer of rank 0 is busy for longer than that of rank 1
with CheckpointManager(root / "other", timeout_s=60, on_commit=lambda _: time.sleep(0.3)) as other:
    for number in range(1, 6):
        if number == 4 and dist.get_rank() == 1:
            weight = state["model"][0].weight
            state["optimizer"].state[weight]["exp_avg"] = torch.zeros_like(weight)
        other.save(number, state | {"everywhere": Everywhere()})
        time.sleep(0.1)
print(f"rank {dist.get_rank()}: {calls} exports, {step} steps")
dist.destroy_process_group()
