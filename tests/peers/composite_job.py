"""torchao's quantized weights: `composite_job.py RUN KIND WHAT`.

KIND: `int8` is trained under FSDP2, `nf4` is frozen below an adapter there; `rows` and `columns` are
parts of fp8 weights under tensor parallelism; `each` is what `quantize_` makes, whole on each rank.
WHAT: `steps` trains four steps and saves after the second; `resume` loads that on any number of
ranks; `again` trains the last two steps, too; `dcp` saves and loads with torch's functions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchao import optim
from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError
from ckpt_tools.distributed import LoadPlanner, SavePlanner, StorageReader, StorageWriter

RUN, KIND, WHAT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
IS_TRAINED = KIND in ("int8", "nf4")
DTYPE = torch.bfloat16 if KIND == "nf4" else torch.float32


class Adapted(nn.Module):
    """A frozen weight of NF4 with an adapter, as QLoRA has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=DTYPE) / 30
        self.weight = nn.Parameter(to_nf4(weight, 64, 256), requires_grad=False)
        self.a = nn.Parameter(torch.randn(8, inputs, dtype=DTYPE) / inputs)
        self.b = nn.Parameter(torch.randn(outputs, 8, dtype=DTYPE) / 30)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear_nf4(inputs, self.weight) + inputs @ self.a.T @ self.b.T


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    if KIND == "nf4":
        model = nn.Sequential(Adapted(512, 256), nn.GELU(), Adapted(256, 512))
    else:
        model = nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 512, bias=False))
    for layer in (model[0], model[2]) if KIND == "int8" else ():
        made = Int8QuantizedTrainingLinearWeight.from_float(layer.weight.detach())
        layer.weight = nn.Parameter(made)
    if KIND == "each":
        model.append(nn.Linear(512, 128))
        quantize_(model[0], Int8WeightOnlyConfig())
        quantize_(model[2], Float8WeightOnlyConfig())
        quantize_(model[3], IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
    for layer in (model[0], model[2]) if KIND in ("rows", "columns") else ():
        quantize_(layer, Float8WeightOnlyConfig())
        layer.weight = nn.Parameter(shared(layer.weight.detach()), requires_grad=False)
    if IS_TRAINED:
        fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if WHAT == "dcp":
        return model, optim.AdamW8bit(trained, lr=1e-2)
    return model, torch.optim.SGD(trained, lr=1e-3, momentum=0.9)  # int8 lacks what Adam calls


def shared(weight: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows or columns of a weight, as tensor parallelism has them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    step = weight.shape[KIND == "columns"] // size
    mine = slice(rank * step, (rank + 1) * step)
    part = weight[mine] if KIND == "rows" else weight[:, mine]
    placed = [Shard(int(KIND == "columns"))]
    return DTensor.from_local(part, init_device_mesh("cpu", (size,)), placed, run_check=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last) if IS_TRAINED else ():
        torch.manual_seed(step)  # weights of int8 are rounded at random
        model(torch.randn(8, 512).to(DTYPE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def inside(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the tensors that this rank has of one."""
    local: Any = (value._local_tensor if isinstance(value, DTensor) else value).detach()
    names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
    return {name: getattr(local, name).clone() for name in names} or {"": local.clone()}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns copies of all that this rank has."""
    found = dict[str, torch.Tensor]()
    for name, value in model.named_parameters():
        every = {"": value, **optimizer.state.get(value, {})}
        for key, one in every.items():
            if torch.is_tensor(one):
                found |= {f"{name} {key} {k}": v for k, v in inside(one).items()}
    return found


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name].float(), value.float()), name


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the numbers of all ranks' weights, as torchao computes them."""
    found = dict[str, torch.Tensor]()
    for name, value in model.named_parameters():
        local: Any = (value._local_tensor if isinstance(value, DTensor) else value).detach()
        plain = local.get_original_weight() if hasattr(local, "get_original_weight") else local
        plain = (
            plain.dequantize() if hasattr(plain, "int_data") or "8T" in str(type(plain)) else plain
        )
        if isinstance(value, DTensor):
            there = DTensor.from_local(
                plain,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
            plain = there.redistribute(placements=[Replicate()])._local_tensor
        found[name] = plain.dequantize() if hasattr(plain, "zero_point") else plain
    return found


def main() -> None:
    dist.init_process_group("gloo")
    if WHAT == "dcp":
        with_dcp()
    else:
        with CheckpointManager(RUN) as checkpoints:
            with_manager(checkpoints)
    dist.barrier()
    dist.destroy_process_group()


def with_manager(checkpoints: CheckpointManager) -> None:
    model, optimizer = make(0 if WHAT == "steps" else 1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    file = RUN / f"want-{dist.get_rank()}.pt"
    if WHAT == "steps":
        train(model, optimizer, 0, 2)
        checkpoints.save(2, state)
        checkpoints.wait()
        kept, plain = held(model, optimizer), numbers(model)
        train(model, optimizer, 2, 4)
        torch.save((kept, plain, held(model, optimizer)), file)
        return
    assert checkpoints.resume(state) == 2
    kept, plain, last = torch.load(RUN / "want-0.pt")
    same(numbers(model), plain)
    if WHAT == "again":
        kept, _, last = torch.load(file)
        same(held(model, optimizer), kept)
        train(model, optimizer, 2, 4)
        same(held(model, optimizer), last)
    checkpoints.save(3, state)  # and again
    checkpoints.wait()
    again, other = make(2)
    assert checkpoints.resume({"model": again, "optimizer": other}) == 3
    same(held(again, other), held(model, optimizer))
    check_refusals(checkpoints)
    if KIND == "each" and dist.get_rank() == 0:
        check_names(again)


def check_refusals(checkpoints: CheckpointManager) -> None:
    model, optimizer = make(3)
    state, before = {"model": model, "optimizer": optimizer}, held(model, optimizer)
    stored = ckpt_tools.inspect(RUN / "step-00000003").catalog.tensors
    one = next(name for name in stored if "0._weight" in name)
    with pytest.raises(PlanError, match="a part of a weight would not be loaded"):
        checkpoints.resume(state, select=[one])
    with pytest.raises(PlanError, match="a part of a weight would be left out"):
        checkpoints.save(9, state, only=lambda name: name != one)
    with pytest.raises(PlanError, match="consists of several tensors"):
        checkpoints.save(9, {"weights": dict(model.state_dict())})
    same(held(model, optimizer), before)
    if KIND != "each":
        return
    sizes = [(512, 256), (256, 512), (512, 128)]
    plain = [nn.Linear(a, b, bias=a != 256) for a, b in sizes]
    layers: list[nn.Module] = [plain[0], nn.GELU(), plain[1], plain[2]]
    with pytest.raises(PlanError, match="kinds differ") as caught:
        checkpoints.resume({"model": nn.Sequential(*layers)})
    assert "quantize the model as before" in str(caught.value.hint)
    for layer in plain:
        quantize_(layer, IntxWeightOnlyConfig(torch.int8, PerGroup(layer.in_features)))
    with pytest.raises(PlanError, match="IntxUnpackedToInt8Tensor"):
        checkpoints.resume({"model": nn.Sequential(*layers)}, select=["model.0.*"], strict=False)
    wide = nn.Sequential(nn.Linear(512, 512))
    quantize_(wide, Int8WeightOnlyConfig())
    with pytest.raises(PlanError, match="takes no parts of"):
        checkpoints.resume({"model": wide}, select=["model.0.*"], on_mismatch={"*": "grow"})


def check_names(model: nn.Module) -> None:
    """The names are those of torchao's own safetensors files, and stock torch reads the parts."""
    weights = {n: v for n, v in model.state_dict().items() if n.endswith("weight")}
    theirs, told = flatten_tensor_state_dict(weights)
    stored: dict[str, Any] = {f"model.{n}": torch.empty_like(v) for n, v in theirs.items()}
    stored |= {f"model.{name}": "" for name in weights}
    dcp.load(stored, checkpoint_id=RUN / "step-00000003", no_dist=True)
    for name, value in theirs.items():
        assert torch.equal(stored[f"model.{name}"].float(), value.float()), name
    for name in weights:
        about, mine = json.loads(told[name]), json.loads(stored[f"model.{name}"])
        assert about["_type"] == mine["_type"]
        assert set(about["_tensor_data_names"]) == set(mine["_tensor_data_names"])


def with_dcp() -> None:
    """The planners with torch's storage, and with that of this package."""
    model, optimizer = make()
    train(model, optimizer, 0, 2)
    weights, moments = get_state_dict(model, optimizer)
    want = held(model, optimizer)
    for number in (0, 1):
        step = RUN / str(number)
        writer, reader = (StorageWriter(step), StorageReader(step)) if number else (None, None)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 2}
        dcp.save(state, checkpoint_id=step, storage_writer=writer, planner=SavePlanner())
        again, other = make(1)
        weights_2, moments_2 = get_state_dict(again, other)
        theirs: dict[str, Any] = {"model": weights_2, "optimizer": moments_2, "step": 0}
        dcp.load(theirs, checkpoint_id=step, storage_reader=reader, planner=LoadPlanner())
        assert theirs["step"] == 2
        set_state_dict(again, other, model_state_dict=weights_2, optim_state_dict=moments_2)
        same(held(again, other), want)
        third, last = make(2)
        ckpt_tools.load(step, {"model": third, "optimizer": last, "step": 0})
        same(held(third, last), want)
    check_copies()


def check_copies() -> None:
    """Of copies that differ, codes and scales are of one rank; the manager refuses them."""

    def each(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        for layer in layers:
            made = Int8QuantizedTrainingLinearWeight.from_float(layer.weight.detach())
            layer.weight = nn.Parameter(made)
        return layers

    mine, loaded = each(dist.get_rank()), each(7)
    dcp.save({"m": mine.state_dict()}, checkpoint_id=RUN / "2", planner=SavePlanner())
    dcp.load({"m": loaded.state_dict()}, checkpoint_id=RUN / "2", planner=LoadPlanner())
    for number, layer in enumerate(loaded):
        ranks = [inside(each(rank)[number].weight) for rank in range(dist.get_world_size())]
        got = inside(layer.weight)
        assert all(torch.equal(got[key], ranks[0][key]) for key in got), number
    for how in ("trust", "check"):
        with pytest.raises(PlanError, match="differ"):
            ckpt_tools.save(RUN / "3", {"m": mine}, replicas=how)
    # each rank's own scale of its columns is not taken for one of all
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(128, 64, bias=False)
    quantize_(layer, Float8WeightOnlyConfig())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(layer.weight.detach(), mesh, [Shard(1)], run_check=False)
    with pytest.raises(dcp.CheckpointException, match="copies are not compared here"):
        dcp.save({"w": whole}, checkpoint_id=RUN / "4", planner=SavePlanner())
    holder = nn.Module()
    holder.weight = nn.Parameter(whole, requires_grad=False)
    with pytest.raises(PlanError, match="differ"):
        ckpt_tools.save(RUN / "4", {"m": holder}, replicas="trust")


if __name__ == "__main__":
    main()
