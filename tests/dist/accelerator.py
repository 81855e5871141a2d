"""Accelerate's own FSDP functions on a CPU: `accelerator.py FOLDER save`, or `… load CONVERTED`, which compares with what was saved."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.fsdp import fully_shard


def build():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 7, bias=False), nn.LayerNorm(7))
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, optimizer, steps):
    torch.manual_seed(4)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(6, 10)).square().sum().backward()
        optimizer.step()


def snapshot(net, optimizer):
    def full(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    model = {n: full(p).clone() for n, p in net.state_dict().items()}
    return model, {i: {k: full(v).clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    PartialState(cpu=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    job = SimpleNamespace(
        is_fsdp2=True, process_index=rank, is_main_process=rank == 0, num_processes=size, wait_for_everyone=dist.barrier,
        multi_device=True, distributed_type=None,
    )  # fmt: skip
    net, optimizer = build()
    if what == "save":
        train(net, optimizer, 2)
        save_fsdp_model(plugin, job, net, str(folder / "saved"), 0)
        save_fsdp_optimizer(plugin, job, optimizer, net, str(folder / "saved"), 0)
        save_fsdp_model(plugin, job, net, str(folder / "ranks"), 0, use_dcp=False)
        save_fsdp_optimizer(plugin, job, optimizer, net, str(folder / "ranks"), 0, use_dcp=False)
        model, state = snapshot(net, optimizer)
        if rank == 0:
            torch.save({"model": model, "state": state}, folder / "whole.pt")
    else:
        train(net, optimizer, 1)  # so that there is something to be replaced
        load_fsdp_model(plugin, job, net, sys.argv[3], 0)
        load_fsdp_optimizer(plugin, job, optimizer, net, sys.argv[3], 0)
        want = torch.load(folder / "whole.pt")
        model, state = snapshot(net, optimizer)
        assert model.keys() == want["model"].keys() and all(torch.equal(model[n], v) for n, v in want["model"].items())
        assert all(torch.equal(state[i][k], v) for i, s in want["state"].items() for k, v in s.items())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
