"""A project of its own: a ViT with FSDP2, and two files that were copied from `training`.

    torchrun --nproc-per-node 2 vit.py RUN LOSSES

It trains on all images of a step together, however many ranks there are. It saves its last step,
and resumes from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from initialize import FirstValues  # the copy
from parallel import Policy, clip_gradients, local, make_mesh, reducing, shard  # the copy
from torch import Tensor, nn

from ckpt_tools import CheckpointManager

WIDTH, PATCH, SIZE, CLASSES, IMAGES = 32, 4, 16, 5, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.empty(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images * self.scale).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def fill(_: str, module: nn.Module) -> None:
    """Sets the first values of one module."""
    if isinstance(module, ViT):
        nn.init.normal_(module.first, std=0.02)
        module.scale.fill_(2.0)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def images_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(CLASSES, (IMAGES,), generator=generator)


def main(folder: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    with torch.device("meta"):
        model = ViT()
    units = {name: None for name, m in model.named_modules() if isinstance(m, Layer)} | {"": None}
    policy = Policy(forward_prefetch=1)
    shard(
        model,
        make_mesh(device, world_size),
        policy,
        units,
        device,
        FirstValues(model, fill, 0, device),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = {}
    with CheckpointManager(folder) as checkpoints:
        first = checkpoints.resume({"model": model, "optimizer": optimizer}) or 0
        for step in range(first + 1, first + 4):
            images, labels = (part.chunk(world_size)[rank] for part in images_of(step))
            with reducing(model, is_last=True, every=False):
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
            norm = clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = local(loss.detach())
            dist.all_reduce(total)
            losses[step] = total.item() / world_size, norm.item()
        checkpoints.save(first + 3, {"model": model, "optimizer": optimizer})
    assert not any(name.partition(".")[0] == "training" for name in sys.modules)
    if rank == 0:
        out.write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
