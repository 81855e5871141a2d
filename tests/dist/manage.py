"""Real jobs that save and resume with the manager: `torchrun … tests/dist/manage.py ROOT
{save|resume|once|fallback|stock|titan|accelerate} CASE …`.

`save` trains, saves twice (blocking, then in the background), disturbs everything, resumes, and
compares bit for bit with what was live; rank 0 writes the live state as whole tensors to
ROOT/CASE.pt. `resume` loads it on another number of ranks.
"""

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_tools import CheckpointError, CheckpointManager, PerRank, Resuming, RngState
from tests.dist import device
from tests.dist.save import Net, adamw, whole


class Position:
    """A dataloader's, as a rank would keep it."""

    def __init__(self) -> None:
        self.at = 100 * dist.get_rank()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def mesh(*shape, names=("dp",)):
    return init_device_mesh(device.NAME, shape or (dist.get_world_size(),), mesh_dim_names=names)


def fsdp2(model, where=None):
    for child in (model.a, model.b, model.c, model.d):
        fully_shard(child, mesh=where)
    return fully_shard(model, mesh=where)


def build(case):
    """Returns a model and its optimizers."""
    torch.manual_seed(0)
    model = Net()
    if case == "fsdp2":
        fsdp2(model)
    elif case == "hsdp":
        fsdp2(model, mesh(2, dist.get_world_size() // 2, names=("replicate", "shard")))
    elif case == "tp":
        both = mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
        model = nn.Sequential(model.c, nn.ReLU(), model.d)
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=both["dp"])
    elif case == "fsdp1":
        model.frozen.weight.requires_grad_(True)
        model = FullyShardedDataParallel(model, use_orig_params=True, device_mesh=mesh(), device_id=torch.device(device.NAME))
    elif case == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif case == "wrapped":
        model.a = checkpoint_wrapper(model.a)
        if device.NAME == "cpu":  # with a GPU as default device, torch 2.11 compiles no nested model
            model.b = torch.compile(model.b, backend="eager")
        fsdp2(model)
        model = torch.compile(model, backend="eager")
    elif case == "big":  # tensors beyond the sizes at which neighbours are read together
        model = nn.Sequential(nn.Linear(6, 3001), nn.ReLU(), nn.Linear(3001, 701), nn.Linear(701, 6))
        fully_shard(model)
        return model, [torch.optim.AdamW(model.parameters())]
    elif case == "tied":
        model = nn.Sequential(nn.Linear(6, 11, bias=False), nn.ReLU(), nn.Linear(11, 6), nn.Linear(6, 11, bias=False))
        model[3].weight = model[0].weight
        fully_shard(model)
        return model, [torch.optim.AdamW(model.parameters())]
    # two optimizers, one of them without state; a parameter that never gets a gradient
    if case == "two":
        model.unused = nn.Parameter(torch.zeros(3))
        fsdp2(model)
        return model, [
            torch.optim.AdamW([*model.a.parameters(), model.unused]),
            torch.optim.SGD([*model.b.parameters(), *model.c.parameters()], lr=0.1),
        ]
    return model, [torch.optim.AdamW(model.parameters(), foreach=False) if case in ("tp", "fsdp1") else adamw(model)]


def train(model, optimizers, num_steps):
    # the same on all ranks, so that their replicated buffers stay the same
    inputs = torch.Generator(device.NAME).manual_seed(num_steps)
    for _ in range(num_steps):
        model(torch.randn(4, 6, generator=inputs)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def make_state(case):
    model, optimizers = build(case)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2) for o in optimizers]
    state = {"model": model, **{f"optimizer{i or ''}": o for i, o in enumerate(optimizers)}, "scheduler": schedulers[0]}
    state |= {
        "rng": RngState(),
        "data": PerRank(Position(), on_resize=deal),
        "epoch": 3,
        "history": [1.5, {"loss": 2.0}],
        "nested": {"ema": torch.arange(5.0)},
    }
    return model, optimizers, state


def deal(states, rank, world_size):
    return {"at": sum(s["at"] for s in states) + rank}


def snapshot(model, optimizers):
    """Everything as whole tensors, gathered from the live objects."""
    parts = {"model": whole(get_model_state_dict(model))}
    for number, optimizer in enumerate(optimizers):
        had = dict(optimizer.state)
        parts[f"optimizer{number or ''}"] = whole(get_optimizer_state_dict(model, optimizer)) if had else {}
    return parts


def assert_same(got, want, path=""):
    if isinstance(want, dict):
        assert set(got) == set(want), (path, set(got) ^ set(want))
        for key in want:
            assert_same(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want.cpu()), path
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), path
        for i, (a, b) in enumerate(zip(got, want)):
            assert_same(a, b, f"{path}[{i}]")
    else:
        assert got == want, (path, got, want)


def draw():
    return torch.randn(3).tolist(), random.random(), float(np.random.rand())


def run_of(root, name):
    """Where the steps of a case lie: in the bucket that the environment names, or under the root.
    """
    return f"{os.environ['RUNS']}/{name}" if "RUNS" in os.environ else root / name


def save(root, case):
    model, optimizers, state = make_state(case)
    random.seed(dist.get_rank()), np.random.seed(dist.get_rank()), torch.manual_seed(100 + dist.get_rank())
    with CheckpointManager(run_of(root, case), timeout_s=60) as checkpoints:
        assert checkpoints.resume(state) is None
        train(model, optimizers, 1)
        checkpoints.save(1, state, asynchronous=False)
        train(model, optimizers, 1)
        state["scheduler"].step()
        want = snapshot(model, optimizers)
        scheduled = state["scheduler"].state_dict()
        assert checkpoints.save(2, state)
        drawn = draw()
        train(model, optimizers, 1)  # while the save is being written
        checkpoints.wait()
        state["epoch"], state["history"], state["data"].value.at = 9, [], -1
        state["nested"]["ema"].zero_()
        assert checkpoints.resume(state) == 2
        assert draw() == drawn
        assert_same(snapshot(model, optimizers), want)
        assert state["scheduler"].state_dict() == scheduled
        assert (state["epoch"], state["history"]) == (3, [1.5, {"loss": 2.0}])
        assert state["nested"]["ema"].tolist() == [0, 1, 2, 3, 4] and state["data"].value.at == 100 * dist.get_rank()
        train(model, optimizers, 1)
    if dist.get_rank() == 0:
        torch.save(want, root / f"{case}.pt")


def resume(root, case):
    """On another number of ranks; the source is only read."""
    model, optimizers, state = make_state(case)
    with CheckpointManager(run_of(root, f"{case}-{dist.get_world_size()}"), timeout_s=60) as checkpoints:
        assert checkpoints.resume(state, path=f"{run_of(root, case)}/step-00000002") == 2
        loaded = checkpoints.last_load
        assert case != "big" or loaded.read_nbytes <= 1.02 * loaded.needed_nbytes, (loaded.read_nbytes, loaded.needed_nbytes)
        notes = "\n".join(loaded.notes)
        assert "rng: the checkpoint has the states of" in notes and "reset" in notes and "data" in notes and "redistributed" in notes
    want = torch.load(root / f"{case}.pt", weights_only=False)
    assert_same(snapshot(model, optimizers), want)
    train(model, optimizers, 1)


def once(root, case):
    """Every byte is read by one rank and sent to the others that need it."""
    model, optimizers, state = make_state(case)
    del state["data"]
    with CheckpointManager(root / f"{case}-once", resuming=Resuming(read_once=True)) as checkpoints:
        checkpoints.resume(state, path=root / case / "step-00000002", strict=False)
        report = checkpoints.last_load
    assert_same(snapshot(model, optimizers), torch.load(root / f"{case}.pt", weights_only=False))
    totals = torch.tensor([report.needed_nbytes, report.received_nbytes, *[0] * dist.get_world_size()])
    totals[2 + dist.get_rank()] = report.needed_nbytes
    dist.all_reduce(totals)
    stored = (
        sum(
            v.numel() * v.element_size() for v in flatten_state_dict(snapshot(model, optimizers))[0].values() if isinstance(v, torch.Tensor)
        )
        + 20
    )
    needed, received, *each = totals.tolist()
    assert needed == stored, (needed, stored)
    assert received > 0 and max(each) < 0.7 * stored, (each, received)


def fallback(root, case):
    """One rank meets a flipped bit in the newest step: all go on from the one before."""
    model, optimizers, state = make_state(case)
    with CheckpointManager(root / f"{case}-flipped") as checkpoints:
        checkpoints.save(1, state, asynchronous=False)
        want = snapshot(model, optimizers)
        train(model, optimizers, 1)
        checkpoints.save(2, state, asynchronous=False)
        newest = checkpoints.latest().path / "__1_0.distcp"
        if dist.get_rank() == 0:
            data = bytearray(newest.read_bytes())
            data[len(data) // 2] ^= 1
            newest.write_bytes(data)
        dist.barrier()
        assert checkpoints.resume(state) == 1
        assert_same(snapshot(model, optimizers), want)
        checkpoints.save(2, state)  # it takes the place of the damaged one
        train(model, optimizers, 1)
        assert checkpoints.resume(state) == 2
        assert_same(snapshot(model, optimizers), want)


def stock(root, case):
    """What `tests/dist/save.py` wrote with stock `dcp.save` on 8 ranks."""
    torch.manual_seed(99)
    model = fsdp2(Net())
    state = {"model": model, "optimizer": adamw(model), "step": 0, "note": ""}
    with CheckpointManager(root / f"scratch-{case}-{dist.get_world_size()}") as checkpoints:
        checkpoints.resume(state, path=root / case)
    want = torch.load(root / f"{case}.pt", weights_only=False)
    assert_same(snapshot(model, [state["optimizer"]]), {k: want[k] for k in ("model", "optimizer")})
    assert (state["step"], state["note"]) == (7, "ünï\n")


def titan(root, case):
    """What `tests/dist/save.py` wrote as torchtitan does: the model at the top, the optimizer
    flattened.
    """
    torch.manual_seed(99)
    model = fsdp2(Net())
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 77.0
    state = {"model": model, "optimizer": optimizer, "train_state": {"step": torch.tensor(0)}}
    with CheckpointManager(root / f"scratch-{case}-{dist.get_world_size()}") as checkpoints:
        checkpoints.resume(state, path=root / case)
        assert any("model.* was stored as *" in note for note in checkpoints.last_load.notes)
    want = torch.load(root / f"{case}.pt", weights_only=False)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    assert_same(whole(get_optimizer_state_dict(model, optimizer, options=options)), want["optimizer"])
    assert_same(whole(get_model_state_dict(model)), {k: v for k, v in want.items() if k not in ("optimizer", "train_state")})
    assert state["train_state"]["step"].item() == 5
    # groups them in another way: some had weight decay, others none
    one = torch.optim.AdamW(model.parameters())
    try:
        with CheckpointManager(root / f"scratch-{case}-{dist.get_world_size()}") as checkpoints:
            checkpoints.resume({"model": model, "optimizer": one}, path=root / case, strict=False)
    except CheckpointError as error:
        assert "parameters of one group were saved with different options" in str(error), error
    else:
        raise AssertionError("not refused")


def accelerate(root, case):
    """Accelerate's own functions save, and read what the manager saved."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, merge_fsdp_weights, save_fsdp_model, save_fsdp_optimizer

    model, optimizers = build("fsdp2")
    train(model, optimizers, 2)
    outer = root / f"{case}-{dist.get_world_size()}" / "checkpoint-2"
    if dist.get_rank() == 0:
        outer.mkdir(parents=True)
    dist.barrier()
    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    rank = dist.get_rank()
    job = SimpleNamespace(
        is_fsdp2=True, process_index=rank, is_main_process=rank == 0, num_processes=dist.get_world_size(), wait_for_everyone=dist.barrier,
        multi_device=True, distributed_type=None,
    )
    save_fsdp_model(plugin, job, model, str(outer), 0)
    save_fsdp_optimizer(plugin, job, optimizers[0], model, str(outer), 0)
    dist.barrier()
    want = snapshot(model, optimizers)
    train(model, optimizers, 1)
    with CheckpointManager(outer.parent / "run") as checkpoints:
        assert checkpoints.resume({"model": model, "optimizer": optimizers[0]}, path=outer) == 2
        assert_same(snapshot(model, optimizers), want)
        # a model alone: Accelerate's merge takes nothing else, of stock DCP either
        checkpoints.save(3, {"model": model})
    merge_fsdp_weights(str(outer.parent / "run" / "step-00000003"), str(outer.parent / "merged"))
    if rank == 0:
        torch.save(want, outer.parent / "want.pt")
        from safetensors.torch import load_file

        assert_same(load_file(outer.parent / "merged" / "model.safetensors"), want["model"])


def main() -> None:
    root, action = (
        Path(sys.argv[1]),
        {"save": save, "resume": resume, "stock": stock, "once": once, "fallback": fallback, "titan": titan, "accelerate": accelerate}[
            sys.argv[2]
        ],
    )
    device.begin()
    for case in sys.argv[3:]:
        action(root, case)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
