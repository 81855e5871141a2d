"""States that several tests save."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def filled(value: float, numel: int = 5) -> dict[str, Any]:
    """Returns a state of one tensor, so that a test can tell steps apart."""
    return {"w": torch.full((numel,), value)}


def tensors(num: int, numel: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns tensors of one dim with random values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}.weight": torch.randn(numel, generator=generator) for i in range(num)}


def one_step(model: nn.Module, inputs: torch.Tensor, **options: Any) -> torch.optim.AdamW:
    """Takes one step of AdamW on a model, and returns the optimizer, which has moments then."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(inputs).sum().backward()
    optimizer.step()
    return optimizer
