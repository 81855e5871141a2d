"""Publishes models from the memory of a job: `publish.py FOLDER CASE [VERSIONS [HOW]]`.

FOLDER/CASE-base is version 0 and FOLDER/CASE the directory of the versions, unless HOW (JSON) has a
`root`. Rank 0 writes what torch's own functions gather to FOLDER/CASE-N.pt just after `publish` of
version N has returned, before the next change. FOLDER/CASE.json has the results, by rank.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_tools import CheckpointError, Publisher
from tests.dist import device

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]
VERSIONS = int(sys.argv[3]) if len(sys.argv) > 3 else 3
HOW = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
device.begin()
RANK, SIZE = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(101, 36)
        self.up = nn.Linear(36, 50)
        self.down = nn.Linear(50, 36, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.one = nn.Parameter(torch.randn(1, 17))
        self.head = nn.Linear(36, 101, bias=False)
        self.register_buffer("count", torch.tensor(3))
        if tied:
            self.head.weight = self.embed.weight


def fsdp2(tied=False):
    model = Net(tied)
    for child in (model.up, model.down):
        fully_shard(child)
    fully_shard(model)
    return model


def tied():
    return fsdp2(tied=True)


def tp():
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Net(), init_device_mesh("cpu", (SIZE,)), plan)


def boxes():
    """Cuts that no file has in one piece, on a mesh of two dims; and dense and large ones."""
    mesh = init_device_mesh("cpu", (SIZE // 2, 2))
    both, inner = [Shard(0), Shard(1)], [Replicate(), Shard(1)]
    return {
        "plain": torch.randn(33),
        "both": distribute_tensor(torch.randn(37, 41), mesh, both),
        "columns": distribute_tensor(torch.randn(5, 70, 9), mesh, inner),
        "last": distribute_tensor(torch.randn(3, 4, 5, 26), mesh, [Shard(2), Shard(3)]),
        "one": distribute_tensor(torch.randn(1, 64, 30), mesh, both[::-1]),
        "single": distribute_tensor(torch.randn(7, 1), mesh, inner),
        "large": distribute_tensor(torch.randn(3000, 1100), mesh, both),
        "rows": distribute_tensor(torch.randn(1500, 2000), mesh, [Shard(0), Replicate()]),
        "bytes": distribute_tensor(torch.randint(0, 9, (50, 31), dtype=torch.uint8), mesh, both),
    }


def stages():
    """Stages of a pipeline: each rank has tensors of its own, and one that all have."""
    names = ("plain", *(f"stage{RANK}.{n}" for n in "abc"))
    return {name: torch.ones(40, 30) for name in names}


def hsdp():
    model = Net()
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("copies", "shards"))
    for child in (model.up, model.down):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensors(model):
    return model.state_dict() if isinstance(model, nn.Module) else model


def whole(model):
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors(model).items()
    }


def change(model, step, part):
    """Changes a part of the elements, the same on all ranks for what they have in common."""
    for number, (name, value) in enumerate(tensors(model).items()):
        torch.manual_seed(1000 * step + number + 50 * RANK * name.startswith("stage"))
        full = torch.rand(value.shape) < part
        new = torch.randn(value.shape) if value.is_floating_point() else torch.randint(0, 99, value.shape)
        if isinstance(value, DTensor):
            places = value.device_mesh, value.placements
            full, new = (distribute_tensor(t, *places).to_local() for t in (full, new))
            value = value.to_local()
        with torch.no_grad():
            value[full] = new.to(value.dtype)[full]


def main():
    torch.manual_seed(0)
    model = globals()[CASE.partition("-")[0]]()
    how = {"dtype": "bf16", "partial": True, **HOW}
    part, differs = how.pop("part", 0.05), how.pop("differs", False)
    root, base, full = how.pop("root", str(FOLDER / CASE)), FOLDER / f"{CASE}-base", how.pop("full", ())
    pause_s, others = how.pop("pause_s", 0), how.pop("last_rank", {})
    how |= others if RANK == SIZE - 1 else {}
    start = whole(model)
    if how.get("names_differ"):
        everybody = [None] * SIZE
        dist.all_gather_object(everybody, start)
        start = {name: value for theirs in everybody for name, value in theirs.items()}
    if RANK == 0 and not base.exists():
        base.mkdir(parents=True)
        names = ("head.weight",) if CASE.startswith("tied") else ()
        cast = {n: v.bfloat16() if v.is_floating_point() and how["dtype"] else v for n, v in start.items() if n not in names}
        save_file(cast, base / "model.safetensors", metadata={"format": "pt"})
        (base / "config.json").write_text('{"architectures": ["Mine"]}')
    dist.barrier()
    results = []
    told = lambda result: results.append(asdict(result))  # noqa: E731
    with Publisher(root, base=base, on_publish=told, **how) as publisher:
        first = int(os.environ.get("FIRST", 1))
        for step in range(first, first + VERSIONS):
            change(model, step, part)
            if differs and RANK == SIZE - 1:
                with torch.no_grad():
                    tensors(model)["up.weight"].to_local().view(-1)[0] += 1
            now = None if pause_s or how.get("names_differ") else whole(model)
            try:
                publisher.publish(model, full=step in full)
            except CheckpointError as error:
                results.append(f"{type(error).__name__}: {error}")
                break
            if pause_s:  # until somebody kills this job
                print("published", flush=True)
                time.sleep(pause_s)
            if now is not None:
                change(model, -step, 0.5)  # training goes on meanwhile
                for name, value in tensors(model).items():
                    there = now[name]
                    if isinstance(value, DTensor):
                        there = distribute_tensor(there, value.device_mesh, value.placements).to_local()
                        value = value.to_local()
                    with torch.no_grad():
                        value.copy_(there)
                if RANK == 0:
                    torch.save(now, FOLDER / f"{CASE}-{step}.pt")
        last = publisher.wait()
    assert RANK or isinstance(results[-1], str) or results[-1]["version"] == last.version
    everybody = [None] * SIZE
    dist.all_gather_object(everybody, results)
    if RANK == 0:
        (FOLDER / f"{CASE}.json").write_text(json.dumps(everybody, default=str))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
