"""Saves a model as stock torch does, on a mesh: `meshes.py OUT AXES`, such as `fsdp=2,tp=2,ep=2`.

The model has torchtitan's names. FSDP2 and tensor parallelism are torch's own, and experts lie as
torchtitan places them. OUT has the step of `dcp.save`, with the moments of AdamW.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

EXPERTS = 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(EXPERTS, 24, 16))
        self.w2_EDF = nn.Parameter(torch.randn(EXPERTS, 16, 24))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"wq": nn.Linear(16, 32), "wk": nn.Linear(16, 12), "wo": nn.Linear(32, 16)}
        )
        self.feed_forward = nn.ModuleDict(
            {"w1": nn.Linear(16, 40, bias=False), "w2": nn.Linear(40, 16, bias=False)}
        )
        self.moe = nn.ModuleDict({"experts": Experts()})
        self.ffn_norm = nn.RMSNorm(16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 16)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = nn.RMSNorm(16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.register_buffer("table", torch.arange(6.0))


def main() -> None:
    out, axes = sys.argv[1:]
    told = {axis: int(n) for axis, n in (part.split("=") for part in axes.split(","))}
    replicate, fsdp, tp, ep = (told.get(axis, 1) for axis in ("replicate", "fsdp", "tp", "ep"))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (replicate, fsdp, tp), mesh_dim_names=("replicate", "fsdp", "tp"))
    efsdp = fsdp * tp // ep
    sparse = init_device_mesh(
        "cpu", (replicate, efsdp, ep), mesh_dim_names=("replicate", "efsdp", "ep")
    )
    if tp > 1:
        plan = {"tok_embeddings": RowwiseParallel(), "lm_head": ColwiseParallel()}
        for i in range(2):
            for name in ("attention.wq", "attention.wk", "feed_forward.w1"):
                plan[f"layers.{i}.{name}"] = ColwiseParallel()
            for name in ("attention.wo", "feed_forward.w2"):
                plan[f"layers.{i}.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    has_copies = replicate > 1
    dense = mesh["replicate", "fsdp"] if has_copies else mesh["fsdp"]
    for block in model.layers.values():
        experts = block.moe["experts"]
        if ep > 1:
            place(experts, sparse["ep"], dict.fromkeys(("w1_EFD", "w2_EDF"), 0))
        elif tp > 1:
            place(experts, mesh["tp"], {"w1_EFD": 1, "w2_EDF": 2})
        outer = int((efsdp * ep if ep > 1 else dense.size()) > EXPERTS)
        of_experts = sparse["replicate", "efsdp"] if has_copies else sparse["efsdp"]
        fully_shard(
            experts,
            mesh=of_experts if ep > 1 else dense,
            shard_placement_fn=lambda _, dim=outer: Shard(dim),
        )
        fully_shard(block, mesh=dense)
    fully_shard(model, mesh=dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out)
    dist.barrier()
    dist.destroy_process_group()


def place(module: nn.Module, mesh, dims: dict[str, int]) -> None:
    for name, dim in dims.items():
        value = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(dim)])
        module.register_parameter(name, nn.Parameter(value))


if __name__ == "__main__":
    main()
