"""Modules for `model.factory`: those of the FSDP guides, and a small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    """Makes a multilayer perceptron that sets some of its first values itself."""
    made = nn.Sequential(
        nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 5)
    )
    nn.init.zeros_(made[0].bias)
    return made


class VisionTransformer(nn.Module):
    """Classifies images of [1, 28, 28]: its own parameter, a buffer, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        self.places = nn.Parameter(torch.randn(49, 16) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 10)
        self.register_buffer("mean", torch.tensor([i / 10 for i in range(5)]).mean())

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images - self.mean).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.second(self.first(x.mean(1))))


def vision() -> nn.Module:
    """Makes a small vision transformer."""
    return VisionTransformer()


def normed() -> nn.Module:
    """Makes a module that cannot be trained so."""
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


def number() -> int:
    """Makes no module."""
    return 3


class Inner(nn.Module):
    """A part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Outer(nn.Module):
    """A layer with a layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.inner(x))


def nested() -> nn.Module:
    """Makes layers within layers."""
    return nn.Sequential(Outer(), Outer(), nn.Linear(10, 5))


class Sometimes(nn.Module):
    """Uses its second layer in every other call only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.num_calls = nn.Linear(10, 5), nn.Linear(10, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        both = self.num_calls % 2 == 1
        return self.first(x) + (self.second(x) if both else 0)


def sometimes() -> nn.Module:
    """Makes a module of which a layer rests in some steps."""
    return Sometimes()
