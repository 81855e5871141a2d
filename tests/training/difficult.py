"""Modules for `model.factory` that are easy to train wrongly without a word."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def drawn_elsewhere() -> nn.Module:
    """Draws first values from numpy and from random."""
    made = nn.Linear(10, 5)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(np.random.randn(5, 10)))
        made.bias.fill_(random.random())
    return made


def drawn_from_the_system() -> nn.Module:
    """Draws first values that no seed decides."""
    made = nn.Linear(10, 5)
    nn.init.constant_(made.bias, random.SystemRandom().random())
    return made


@functools.cache
def always_the_same() -> nn.Module:
    """Returns one module at every call."""
    return nn.Linear(10, 5)


class PartlyEvaluated(nn.Module):
    """Its frozen part is in eval mode, and stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5)).requires_grad_(False).eval()
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.frozen[1].training:
            raise RuntimeError("the frozen part is in training mode")
        return self.head(self.frozen(x))


class KeepsAnAverage(nn.Module):
    """Changes a buffer by the rows that this rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean().detach()
        return self.linear(x)


class KeepsAReference(nn.Module):
    """Holds a parameter in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)
        self.weights = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.weights[0].sum()


class KeepsAClosure(nn.Module):
    """Holds a parameter in a function, which a search of its attributes does not find."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)
        weight = self.linear.weight
        self._total = lambda: weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self._total()


class Unusual(nn.Module):
    """Has names, a mode and layouts that other parts of a job also use."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"num_heads": [2, 4], "max_position_embeddings": None}
        self.module = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5))
        self.module[0].weight = nn.Parameter(torch.randn(10, 8).t())
        self.register_buffer("scale", torch.tensor(0.5).expand(5))
        self.register_buffer("last", torch.zeros(()), persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().sum()
        return self.module(x) * self.scale


class Centred(nn.Module):
    """Has a buffer that is used together with the inputs, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((10,), 0.25))
        self.linear, self.idle = nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - self.mean)


class CountsCalls(nn.Module):
    """Its blocks count their forward passes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        print(f"calls so far: {CountsCalls.calls}", flush=True)
        return self.head(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        CountsCalls.calls += torch.is_grad_enabled()  # not in the trial before the training
        return self.linear(x).relu()


class ReadsValues(nn.Module):
    """Decides by a value, so it cannot be called with tensors that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > -1e9 else self.linear(-x)


def reads_values() -> nn.Module:
    return ReadsValues()


def scalar() -> nn.Module:
    """Has a parameter without a dimension."""
    made = nn.Linear(10, 5)
    made.scale = nn.Parameter(torch.ones(()))
    return made


def frozen() -> nn.Module:
    """Has nothing to train."""
    return nn.Linear(10, 5).requires_grad_(False)


def partly_frozen() -> nn.Module:
    """Has both kinds of parameters."""
    return nn.Sequential(nn.Linear(10, 10).requires_grad_(False), nn.Linear(10, 5))


def lazy() -> nn.Module:
    """Has a layer whose shape is not known."""
    return nn.Sequential(nn.LazyLinear(10), nn.Linear(10, 5))


def instance_normed() -> nn.Module:
    """Keeps statistics of its inputs."""
    return nn.Sequential(nn.InstanceNorm1d(10, track_running_stats=True), nn.Linear(10, 5))


def leaves() -> nn.Module:
    """Ends the process."""
    raise SystemExit(7)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is no mean."""
    return F.mse_loss(outputs, targets, reduction="sum")


def by_row(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of several numbers."""
    return (outputs - targets).square().mean(1)


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss without a gradient."""
    return F.mse_loss(outputs, targets).detach()
