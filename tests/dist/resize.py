"""Shards of tensors that have grown, were skipped or are made by a function, on uneven numbers of
rows; and shards within a tuple.

    torchrun --nproc-per-node 3 resize.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt_tools
from ckpt_tools import CheckpointManager
from tests.dist import device


def make(num: int, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential()
    model.add_module("embed", nn.Embedding(num, 3))
    model.add_module("head", nn.Linear(3, 2))
    model.to(device.NAME)
    for child in (*model.children(), model):
        fully_shard(child)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seed + 1.0)
    optimizer.step()
    return model, optimizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main() -> None:
    root = Path(sys.argv[1]) / "run"
    device.begin()
    model, optimizer = make(5, 0)
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizers": [optimizer], "pair": ({"w": model.embed.weight}, 3)})
    path, want = root / "step-00000001", whole(model.embed.weight)
    for read_once in (None, True):
        larger, other = make(9, 1)
        before, moments = whole(larger.embed.weight), whole(other.state[larger.embed.weight]["exp_avg"])
        state: dict[str, Any] = {"model": larger, "optimizers": [other], "pair": None}
        report = ckpt_tools.load(path, state, on_mismatch={"*embed*": "grow"}, read_once=read_once)
        got, theirs = whole(larger.embed.weight), whole(other.state[larger.embed.weight]["exp_avg"])
        assert torch.equal(got[:5], want) and torch.equal(got[5:], before[5:])
        assert torch.equal(theirs[:5], whole(optimizer.state[model.embed.weight]["exp_avg"])) and torch.equal(theirs[5:], moments[5:])
        assert torch.equal(whole(larger.head.weight), whole(model.head.weight))
        assert sum("its elements are loaded, the others keep their values" in note for note in report.notes) == 3, report.notes
        assert type(state["pair"]) is tuple and torch.equal(state["pair"][0]["w"], want) and state["pair"][1] == 3
    smaller, _ = make(4, 2)
    ckpt_tools.load(path, {"model": smaller}, on_mismatch={"*embed*": lambda stored, shape: stored[: shape[0]] * 2})
    assert torch.equal(whole(smaller.embed.weight), want[:4] * 2)
    smaller, _ = make(4, 2)
    before = whole(smaller.embed.weight)
    ckpt_tools.load(path, {"model": smaller}, on_mismatch={"*embed*": "skip"})
    assert torch.equal(whole(smaller.embed.weight), before) and torch.equal(whole(smaller.head.bias), whole(model.head.bias))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
