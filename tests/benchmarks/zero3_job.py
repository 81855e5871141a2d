"""A checkpoint of ZeRO-3 of about 1 GB, saved by DeepSpeed: `zero3_job.py OUT`, under torchrun in
DeepSpeed's environment.
"""

import sys

import deepspeed
import torch
from torch import nn


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    # 75 M parameters, 12 bytes each, and 2
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(18)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )
    engine.backward(engine(torch.randn(1, 2048, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.save_checkpoint(sys.argv[1])


if __name__ == "__main__":
    main()
