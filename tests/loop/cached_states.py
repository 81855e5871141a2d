"""A state of every kind, as it is trained and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from tests.stock import assert_stock_torch_reads

Values = dict[str, Any]


class Block(nn.Module):
    """Two square layers, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count += 1
        found: torch.Tensor = self.second(torch.relu(self.first(values)))
        return found


def made() -> Values:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "mean": torch.ones(3), "note": 1}
    train(state)
    return state


def train(state: Values) -> None:
    model, optimizer = state["model"], state["optimizer"]
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["mean"].add_(1)
    state["note"] += 1


def flat(value: Any, path: str = "") -> Values:
    """Returns the leaves of nested dicts, by dotted names."""
    if isinstance(value, dict):
        return {
            name: leaf
            for key, item in value.items()
            for name, leaf in flat(item, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: value}


def expected(state: Values) -> Values:
    """Returns what torch's functions say of a state, as copies."""
    whole = {
        "model": dict(get_model_state_dict(state["model"])),
        "optimizer": get_optimizer_state_dict(state["model"], state["optimizer"]),
        "mean": state["mean"],
        "note": state["note"],
    }
    return {
        name: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in flat(whole).items()
    }


def check(step: Path, wanted: Values) -> None:
    found = flat(assert_stock_torch_reads(step))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = (
            torch.equal(found[name], value) and found[name].dtype == value.dtype
            if isinstance(value, torch.Tensor)
            else found[name] == value
        )
        assert same, (name, found[name], value)


def parameter(state: Values) -> nn.Parameter:
    found: nn.Parameter = state["model"][0].first.weight
    return found
