"""Accelerate's own `save_state` and `load_state` on a CPU: `accelerator.py FOLDER save`, or `… load
CONVERTED`, which compares with what was saved.

An Accelerator that shards wants an accelerator; its methods are called for an object that has what
they ask of one.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import get_linear_schedule_with_warmup


def build():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 7, bias=False), nn.LayerNorm(7))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, optimizer, get_linear_schedule_with_warmup(optimizer, 3, 10)


def train(net, optimizer, scheduler, steps):
    torch.manual_seed(4)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(6, 10)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def snapshot(net, optimizer, scheduler):
    def full(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    model = {n: full(p).clone() for n, p in net.state_dict().items()}
    return {
        "model": model,
        "state": {i: {k: full(v).clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()},
        "scheduler": scheduler.state_dict(),
        "lr": optimizer.param_groups[0]["lr"],
    }


def accelerator(net, optimizer, scheduler):
    rank = dist.get_rank()
    state = PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    return SimpleNamespace(
        is_fsdp2=True, process_index=rank, is_main_process=rank == 0, num_processes=dist.get_world_size(), wait_for_everyone=dist.barrier,
        multi_device=False, distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin, process_index=rank),
        _models=[net], _optimizers=[optimizer], _schedulers=[scheduler], _dataloaders=[], _custom_objects=[], scaler=None, step=0,
        _load_model_state_pre_hook={}, _save_model_state_pre_hook={}, project_configuration=ProjectConfiguration(), device=state.device,
        save_iteration=0,
    )


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    parts = build()
    job = accelerator(*parts)
    if what == "save":
        train(*parts, 2)
        Accelerator.save_state(job, str(folder / "saved"))
        plugin, (net, optimizer, _) = job.state.fsdp_plugin, parts
        save_fsdp_model(plugin, job, net, str(folder / "ranks"), 0, use_dcp=False)
        save_fsdp_optimizer(plugin, job, optimizer, net, str(folder / "ranks"), 0, use_dcp=False)
        full = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
        (folder / "full").mkdir(exist_ok=True)
        save_fsdp_model(full, job, net, str(folder / "full"), 0)
        save_fsdp_optimizer(full, job, optimizer, net, str(folder / "full"), 0)
        whole = snapshot(*parts)
        if dist.get_rank() == 0:
            torch.save(whole, folder / "whole.pt")
    else:
        train(*parts, 1)  # so that there is something to be replaced
        Accelerator.load_state(job, sys.argv[3])
        want, got = torch.load(folder / "whole.pt"), snapshot(*parts)
        assert got["model"].keys() == want["model"].keys() and all(torch.equal(got["model"][n], v) for n, v in want["model"].items())
        assert all(torch.equal(got["state"][i][k], v) for i, s in want["state"].items() for k, v in s.items())
        assert got["scheduler"] == want["scheduler"] and got["lr"] == want["lr"] != 1e-2, (got["scheduler"], want["scheduler"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
