"""A model with dropout on the stream that all ranks of a tensor group hold: their replicated
weights must stay the same.

    torchrun --nproc-per-node 2 dropout.py CONFIG_ARGS…
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from training import config as configuration
from training.job import build
from training.metrics import Meter
from training.prove import prove
from training.train import take_step


def main() -> None:
    config = configuration.resolve(None, sys.argv[1:])
    dist.init_process_group("gloo")
    job = build(prove(config, dist.get_world_size(), dist.get_world_size()), torch.device("cpu"))
    meter = Meter(config, 0)
    for _ in range(3):
        take_step(job, meter)
    held = [p for p in job.model.parameters() if p.requires_grad]
    replicated = [p.to_local() if isinstance(p, DTensor) else p for p in held if not is_split(p)]
    assert len(replicated) >= 4 and len(replicated) < len(held), (len(replicated), len(held))
    for value in replicated:
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value.detach().contiguous())
        assert all(torch.equal(other, value) for other in others), "replicated weights have drifted apart"
    dist.destroy_process_group()


def is_split(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        not p.is_replicate() and size > 1 for p, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


if __name__ == "__main__":
    main()
