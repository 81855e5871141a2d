"""Trains a few steps with DeepSpeed and saves: `deepspeed_job.py OUT STAGE DTYPE [UNIVERSAL]`,
under torchrun on a CPU.

With a universal checkpoint it loads that, and saves it again without training.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from net import Net, groups
from torch import nn


def config(stage, dtype):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def main():
    out, stage, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    universal = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    how = config(stage, dtype) | ({"checkpoint": {"load_universal": True}} if universal else {})
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=how)
    if universal:
        _, client = engine.load_checkpoint(str(universal.parent), tag=universal.name)
        assert client["epoch"] == 7
        engine.save_checkpoint(str(out), client_state={"epoch": 7})
        dist.barrier()
        return
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(3):
        ids = torch.randint(0, 13, (2, 4), generator=generator)
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out), client_state={"epoch": 7})
    if dist.get_rank() == 0:
        (out / "job.json").write_text(
            json.dumps({"stage": stage, "dtype": dtype, "deepspeed": deepspeed.__version__})
        )
    dist.barrier()


if __name__ == "__main__":
    main()
