"""A script of a user with all common calls. Type checkers accept it; see test_types.py."""

import torch
from torch import nn

import ckpt_tools
from ckpt_tools import (
    CheckpointManager,
    Ema,
    HuggingFace,
    Mirror,
    Outages,
    PerRank,
    Resuming,
    Retention,
    RngState,
    SaveReport,
    Writing,
)

model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())


def told(report: SaveReport) -> None:
    print(report.path, report.timing)


with CheckpointManager(
    "run",
    retention=Retention(3, every=1000),
    mirror=Mirror("s3://bucket/run", every=10),
    writing=Writing(jobs=2, max_mbps=100),
    resuming=Resuming(read_once=True),
    outages=Outages(retry_s=10),
    on_commit=told,
) as checkpoints:
    state = {
        "model": model,
        "optimizer": optimizer,
        "rng": RngState(),
        "mine": PerRank(3),
        "ema": Ema(model),
    }
    first = checkpoints.resume(state) or 0
    for step in range(first + 1, 3):
        if checkpoints.should_save(step):
            checkpoints.save(step, state, metrics={"loss": 1.0})
    newest = checkpoints.latest()
    print(newest.number if newest else None)

report = ckpt_tools.inspect("run/step-1")
print(report.world_size, report.total.nbytes)
result = ckpt_tools.merge("run/step-1", "m.safetensors", dtype=torch.bfloat16, overwrite=True)
print(result.written_nbytes)
ckpt_tools.merge("run/step-1", "m.safetensors", dtype="bf16", select=["*.weight"])
ckpt_tools.reshard("run/step-1", "four", to_ranks=4)
ckpt_tools.convert("run/step-1", "hf", to="hf", base="base")
for one in ckpt_tools.steps("run"):
    print(one.path, one.manifest.metrics if one.manifest else None)
with ckpt_tools.open("run/step-1") as opened:
    tensor = opened["model.weight"].torch()
    print(tensor.shape)
print(ckpt_tools.verify("run/step-1").problems, ckpt_tools.diff("a", "b").is_same)
export = HuggingFace(base="base")
for problem in ckpt_tools.check_run("run"):
    print(problem.kind, problem.step)
