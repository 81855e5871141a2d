"""States whose copies differ between ranks: `copies.py FOLDER OUT CASE...`.

Each case makes a state, saves it, and notes what every rank got: the text of the error, or the
notes of the save. OUT has them as JSON, by case.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckpt_tools
from ckpt_tools import CheckpointManager, Ema, Writing
from ckpt_tools.distributed import StorageWriter

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def step_of(model, optimizer):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        torch.manual_seed(1 + RANK)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return sum(expert(self.shared(x)) for expert in self.experts)


def experts():
    """Experts that each rank numbers from 0."""
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters())
    model.shared.requires_grad_(False)  # else its moments differ, too
    step_of(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def linear():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(RANK + 1.0)
    return {"model": model}


def plain():
    return {"x": {"w": torch.full((3,), float(RANK))}}


def two_meshes():
    """One name, and a tensor on another mesh for each group of experts."""
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("ep", "fsdp"))
    local = torch.full((2, 3), 10.0 * mesh.get_local_rank("ep") + RANK)
    return {"w": DTensor.from_local(local, mesh["fsdp"], [Shard(0)])}


def other_split():
    """The first half of the ranks has the tensor whole, the others split it."""
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("half", "ranks"))["ranks"]
    whole = RANK < SIZE // 2
    return {"w": distribute_tensor(torch.ones(4, 3), mesh, [Replicate() if whole else Shard(0)])}


class Plain(torch.optim.Optimizer):
    """Keeps state of the local shape, or one number per row of it."""

    def __init__(self, params, kind):
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local()
                make = {"local": torch.zeros_like, "scales": lambda t: torch.zeros(3)}[self.kind]
                self.state[p].setdefault("m", make(local)).add_(RANK + 1)


def local_state(rows=4, kind="local"):
    model = nn.Linear(4, rows, bias=False)
    fully_shard(model)
    optimizer = Plain(model.parameters(), kind)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def hsdp():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        if mesh.get_local_rank("replicate"):
            model.weight.to_local()[0, 0] += 0.25
    return {"model": model}


def ddp():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    with torch.no_grad():
        if RANK == 1:
            model.module[1].weight[2, 3] += 0.5
    return {"model": model}


def batch_norm(is_sharded=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    wrapped = fully_shard(model) if is_sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    torch.manual_seed(RANK)
    wrapped(torch.rand(8, 4)).square().sum().backward()
    optimizer.step()
    if RANK == 0:
        torch.save({n: b.clone() for n, b in model.named_buffers()}, FOLDER / f"{'sharded_' * is_sharded}batch_norm.pt")
    return {"model": wrapped, "optimizer": optimizer}


class Sampler:
    def state_dict(self):
        return {"generator": torch.full((4,), RANK)}

    def load_state_dict(self, state):
        pass


def average():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    ema = Ema(model)
    ema.shadow["weight"].add_(RANK)
    return {"model": model, "ema": ema}


def plain_state():
    """A module whose own state_dict renames its parameters."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def state_dict(self, *args, **kwargs):
            return self.inner.state_dict()

        def load_state_dict(self, *args, **kwargs):
            return self.inner.load_state_dict(*args, **kwargs)

    model = Inner()
    with torch.no_grad():
        model.inner.weight.fill_(RANK)
    return {"model": model}


class Holder:
    """Stands before the model, and returns its tensors."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"w": self.model.weight}

    def load_state_dict(self, state):
        pass


def held():
    return {"a": Holder(model := linear()["model"]), "model": model}


def own_and_buffer():
    """A tensor of the state that a module holds as a buffer, by whose name it is stored."""
    model, value = nn.Module(), torch.full((3,), float(RANK))
    model.register_buffer("b", value)
    return {"model": model, "own": value}


def one_kind_each():
    """A parameter on rank 0, and a buffer on the others."""
    model, value = nn.Module(), torch.full((3,), float(RANK))
    if RANK:
        model.register_buffer("w", value)
    else:
        model.w = nn.Parameter(value)
    return {"model": model}


def equal():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    step_of(model, optimizer)
    return {"model": model, "optimizer": optimizer, "x": torch.ones(3)}


class Trainer:
    """An object of the user's own that holds a module."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"net": self.model.state_dict(), "seen": torch.full((2,), RANK)}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["net"])


class Container:
    """Moments that differ, in an object that is no optimizer of torch."""

    def state_dict(self):
        return {"state": {"w": {"exp_avg": torch.full((4,), float(RANK))}}}

    def load_state_dict(self, state):
        pass


def trainer():
    return {"job": Trainer(linear()["model"])}


STATES = {
    "experts": experts,
    "linear": linear,
    "plain": plain,
    "two meshes": two_meshes,
    "other split": other_split,
    "local, even": local_state,
    "local, uneven": lambda: local_state(5),
    "scales": lambda: local_state(kind="scales"),
    "hsdp": hsdp,
    "ddp": ddp,
    "batch norm": batch_norm,
    "sharded batch norm": lambda: batch_norm(True),
    "sampler": lambda: {"sampler": Sampler()},
    "ema": average,
    "renamed": plain_state,
    "held": held,
    "own and buffer": own_and_buffer,
    "one kind each": one_kind_each,
    "conjugated": lambda: {"w": torch.full((3,), complex(RANK, 1)).conj()},
    "equal": equal,
    "trainer": trainer,
    "container": lambda: {"optimizer": Container()},
    "far": lambda: {"w": torch.full((4,), [0.0, 1.0, 100.0, 3.0][RANK])},
    "fp4": lambda: {"w": torch.full((4,), RANK + 1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
    "statistics": lambda: {"model": batch_norm()["model"].module.state_dict()},
}


def save(how, path, state):
    """Returns the text of the error, or the notes of the save."""
    try:
        if how == "save":
            return list(ckpt_tools.save(path, state).notes)
        if how in ("stages", "background", "trust"):
            options = {"writing": Writing(replicas="trust")} if how == "trust" else {}
            with CheckpointManager(path, **options) as checkpoints:
                checkpoints.save(1, state, names_differ=how == "stages", asynchronous=how == "background")
                checkpoints.wait()
                return list(checkpoints.last_save.notes)
        flat = {"model": state["model"].state_dict()} if "model" in state else state
        with warnings.catch_warnings(record=True):
            dcp.save(flat, storage_writer=StorageWriter(path))
        return []
    except (ckpt_tools.CheckpointError, CheckpointException) as error:
        return f"{error} {getattr(error, 'hint', '')}"


def small_drift(path):
    """A small replica that drifts as a whole: the number of saves until it is found."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    with CheckpointManager(path, keep_last=1) as checkpoints:
        for number in range(1, 100):
            if number == 5:
                for parameter in model.parameters():
                    parameter.data.fill_(RANK)
            try:
                checkpoints.save(number, {"model": model}, asynchronous=False)
            except ckpt_tools.CheckpointError:
                return number
    return 0


def drift(path):
    """A copy that drifts after the first save: the first two refusals, with the number of saves."""
    weights = {"w": torch.zeros(1 << 16), "large": torch.zeros(1 << 22), **{f"s{n}": torch.ones(3) for n in range(99)}}
    with CheckpointManager(path, keep_last=1) as checkpoints:
        checkpoints.save(1, weights)
        weights["w"][12345] += 0.5 * RANK
        found = []
        for number in range(2, 100):
            try:
                checkpoints.save(number, weights)
            except ckpt_tools.CheckpointError as error:
                found.append([number - 1, str(error)])
                if len(found) == 2:
                    break
    return found


def main():
    found = {}
    for case in sys.argv[3:]:
        how, _, name = case.partition(": ")
        path = FOLDER / case.replace(": ", "-").replace(" ", "_").replace(",", "")
        drifts = {"drift": drift, "small drift": small_drift}
        mine = drifts[how](path) if how in drifts else save(how, path, STATES[name]())
        told = [None] * SIZE
        dist.all_gather_object(told, mine)
        found[case] = told
    if RANK == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    dist.init_process_group("gloo")
    main()
