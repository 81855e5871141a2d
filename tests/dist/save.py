"""Real jobs that save real checkpoints, one case after the other: `torchrun … tests/dist/save.py
OUT CASE …`.

Each case saves with stock `dcp.save` and, on rank 0, writes what the checkpoint must hold as whole
tensors to OUT/CASE.pt: the oracle, gathered from the live objects and never from files.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, ShardedOptimStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist import device


class Net(nn.Module):
    """Uneven, tiny, replicated, 0-d, frozen: dims of 6, 7 and 1 do not divide by anybody's number
    of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 7)
        self.b = nn.Linear(7, 6, bias=False)
        self.c = nn.Linear(6, 16)
        self.d = nn.Linear(16, 6)
        self.one = nn.Parameter(torch.randn(1, 17))
        self.bn = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        return self.bn(self.d(torch.relu(self.c(self.b(self.a(x))))) + self.frozen(x)) * self.one.sum()


def whole(value):
    if isinstance(value, DTensor):
        return device.on_cpu(value).full_tensor().detach().clone()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return value


def train(model, optimizer):
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model):
    decay = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-2}], lr=1e-3)


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 7, "note": "ünï\n"}


def fsdp2(mesh=None, optimizer=adamw):
    torch.manual_seed(0)
    model = Net()
    for child in (model.a, model.b, model.c, model.d):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = optimizer(model)
    train(model, optim)
    return state_of(model, optim)


def case_adamw():
    return fsdp2()


def case_sgd():
    return fsdp2(optimizer=lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9))


def case_hsdp():
    return fsdp2(init_device_mesh(device.NAME, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))


def case_tp():
    mesh = init_device_mesh(device.NAME, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net()
    parallelize_module(model, mesh["tp"], {"c": ColwiseParallel(), "d": RowwiseParallel()})
    for child in (model.c, model.d):
        fully_shard(child, mesh=mesh["dp"])
    optim = torch.optim.AdamW([p for p in [*model.c.parameters(), *model.d.parameters()]], foreach=False)
    for p in [*model.c.parameters(), *model.d.parameters()]:
        p.grad = torch.ones_like(p)
    optim.step()
    holder = nn.ModuleDict({"c": model.c, "d": model.d})
    model_state, optimizer_state = get_state_dict(holder, optim)
    return {"model": model_state, "optimizer": optimizer_state}


def case_columns():
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    torch.manual_seed(0)
    shapes = {"even": (5, 16), "uneven": (5, 13), "few": (3, 2), "cube": (3, 11, 4), "last": (2, 3, 9)}
    dims = {"cube": 1, "last": 2}
    return {"model": {k: distribute_tensor(torch.randn(s), mesh, [Shard(dims.get(k, 1))]) for k, s in shapes.items()}}


def case_dtypes():
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 uint16 uint32 uint64 float8_e4m3fn float8_e5m2".split()
    torch.manual_seed(0)
    state = {}
    for name in names:
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (9 * dtype.itemsize, 5), dtype=torch.uint8)
        full = raw.view(-1).view(dtype).view(9, 5)
        state[name] = DTensor.from_local(_rows(full), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
        _FULL[name] = full
    state["scalar"], state["empty"], state["none"] = torch.tensor(3.5), torch.empty(0), torch.empty(3, 0, 2)
    state["nonfinite"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return {"model": state}


_FULL = {}


def _rows(full):
    step = -(-full.shape[0] // dist.get_world_size())
    return full[dist.get_rank() * step :][:step].clone()


def case_strided():
    torch.manual_seed(0)
    big = torch.randn(20, 30)
    state = {
        "transposed": big.t(),
        "slice": big[3:9, 5:20],
        "row": big[4],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    full = torch.randn(13, 8)
    local = _rows(full).t().contiguous().t()
    _FULL["columns_first"] = full
    state["columns_first"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    return {"model": state}


def case_names():
    names = ["dots.in.name", "a/b", "with space", "ünïcödé-名前", "line\nbreak", "\x1b]0;pwn\x07", "\u202eright", "x" * 300, ".", "0"]
    return {
        "model": {n: torch.full((3,), float(i)) for i, n in enumerate(names)},
        "objects": {"list": [1, {"k": (2, 3)}], "none": None, "bytes": b"\0\1"},
    }


def case_fsdp1():
    torch.manual_seed(0)
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)), use_orig_params=True, device_mesh=mesh, device_id=torch.device(device.NAME)
    )
    optim = torch.optim.AdamW(model.parameters())
    train(model, optim)
    config, optim_config = ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config, optim_config):
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optim)}


def case_compiled():
    torch.manual_seed(0)
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    names = ["_orig_mod.a._checkpoint_wrapped_module.w", "b._fsdp_wrapped_module._orig_mod.w", "module.module.c.w", "d.module.w"]
    return {
        "model": {n: distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)]) for n in names},
        "optimizer": {"state": {names[0]: torch.ones(2)}},
    }


def case_titan():
    """torchtitan's way: the model's names at the top."""
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = {
        n: distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
        for n in ("tok_embeddings.weight", "layers.0.wq.weight", "model.x", "lm_head.weight")
    }
    return {
        **model,
        "optimizer": {"state.layers.0.wq.weight.exp_avg": torch.ones(3)},
        "train_state": {"step": torch.tensor(5)},
        "lr_scheduler": {"last_epoch": 3},
    }


def case_flat():
    """torchtitan's way with an optimizer: flattened, every option kept per parameter."""
    torch.manual_seed(0)
    model = Net()
    for child in (model.a, model.b, model.c, model.d):
        fully_shard(child)
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {**model_state, "optimizer": optimizer_state, "train_state": {"step": torch.tensor(5)}}


def case_headless():
    """The coordinator holds nothing: the mesh starts at rank 1; and tensors of which every shard is
    empty.
    """
    mesh = DeviceMesh(device.NAME, list(range(1, dist.get_world_size())))
    torch.manual_seed(0)
    full = {"w": torch.randn(9, 4), "one": torch.randn(1, 17), "empty": torch.empty(0, 5)}
    _FULL.update(full)
    if dist.get_rank() == 0:
        return {"model": {}}
    rank, size = dist.get_rank() - 1, dist.get_world_size() - 1
    state = {}
    for name, value in full.items():
        step = -(-value.shape[0] // size)
        local = value[rank * step :][:step].clone()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
    return {"model": state}


def case_local():
    """No collectives: one `__{rank}.metadata` each; the replicated buffer is saved by everybody."""
    return fsdp2()


def case_differ():
    """As `local`, but one rank's replica is another."""
    return {"model": {"buffer": torch.full((4,), 1.0 + (dist.get_rank() == 1)), "same": torch.ones(2)}}


def main() -> None:
    out = Path(sys.argv[1])
    device.begin()
    for case in sys.argv[2:]:
        _FULL.clear()
        state = globals()[f"case_{case}"]()
        if case in ("local", "differ"):
            path = out / case
            dcp.save(state, checkpoint_id=path, use_collectives=False)
            dist.barrier()
        else:
            dcp.save(state, checkpoint_id=out / case)
        oracle = {"model": {k: whole(v) for k, v in state["model"].items() if k not in _FULL} | _FULL} if "model" in state else whole(state)
        oracle |= {k: whole(v) for k, v in state.items() if k != "model"} if case != "fsdp1" else {}
        if dist.get_rank() == 0:
            torch.save(oracle, out / f"{case}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
