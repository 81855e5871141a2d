"""Resumes a converted DeepSpeed checkpoint under FSDP2 and takes a step; compares with one process:
`continue_fsdp.py FOLDER DEEPSPEED`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from net import Net, groups
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager


def optimizer_of(model):
    return torch.optim.AdamW(groups(model), lr=1e-2)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model, optimizer):
    ids = torch.arange(12).reshape(3, 4)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    return loss


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    model = Net()
    fully_shard(model)
    optimizer = optimizer_of(model)
    with CheckpointManager(folder / "run") as manager:
        assert manager.resume({"model": model, "optimizer": optimizer}, cast=True) == 3
    torch.manual_seed(10)
    direct = Net()  # and without converting first
    fully_shard(direct)
    other = optimizer_of(direct)
    with CheckpointManager(folder / "other") as manager:
        manager.resume({"model": direct, "optimizer": other}, path=Path(sys.argv[2]), cast=True)
    for one, two in zip(model.parameters(), direct.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
    for one, two in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(full(one[k]), full(two[k])) for k in one)
    loss = step(model, optimizer)

    saved = torch.load(folder / "whole.pt")
    whole = Net()
    whole.load_state_dict(saved["model"], strict=False)
    if "frozen.weight" not in saved["model"]:
        whole.frozen.weight.data.copy_(model.frozen.weight.full_tensor())
    plain = optimizer_of(whole)
    names = {id(p): n for n, p in whole.named_parameters()}
    for group in plain.param_groups:
        for parameter in group["params"]:
            plain.state[parameter] = {
                "step": torch.tensor(3.0),
                **{k: v.clone() for k, v in saved["moments"][names[id(parameter)]].items()},
            }
    want = step(whole, plain)
    assert torch.allclose(loss, want, rtol=1e-6), (loss, want)
    parameters = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(full(parameter), parameters[name], rtol=1e-6, atol=1e-7), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
