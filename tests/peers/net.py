"""The model of the DeepSpeed jobs, and of what goes on with it afterwards."""

import torch
from torch import nn


class Net(nn.Module):
    """Uneven shapes, a tied weight, a buffer, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.Sequential(
            nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7, bias=False), nn.LayerNorm(7)
        )
        self.frozen = nn.Linear(7, 7, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))

    def forward(self, ids):
        x = self.layers(self.frozen(self.embed(ids)))
        return self.head(x * self.scale[0])


def groups(model):
    """Returns two groups with options of their own."""
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0, "lr": 5e-3},
    ]
