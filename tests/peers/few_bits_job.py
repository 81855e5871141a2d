"""torchao's optimizers of few bits: `few_bits_job.py RUN KIND WHAT [WIDE] [BF16] [DDP]`.

WHAT: `steps` trains four steps and saves after the second; `resume` loads that on any number of
ranks, and saves it again; `used` does so into an optimizer that has a state; `again` trains the
last two steps, too; `columns` and `uneven` have ranks that cut blocks. WIDE has parameters whose rows are no
whole blocks; DDP has the whole model on each rank.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torchao import optim

from ckpt_tools import CheckpointManager, PlanError

RUN, KIND, WHAT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
IS_CUT = WHAT in ("columns", "uneven")
IS_WIDE, IS_BF16, IS_DDP = (name in sys.argv[4:] for name in ("WIDE", "BF16", "DDP"))


class Net(nn.Module):
    """Layers, a parameter of one dim, and one that has fewer rows than there are ranks."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        if not IS_WIDE:
            self.scale, self.head = (
                nn.Parameter(torch.ones(12288)),
                nn.Parameter(torch.ones(1, 4096)),
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.layers(inputs)
        if IS_WIDE:
            return found
        return found + (self.scale * inputs.mean()).square().mean() + self.head.square().mean()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.Linear(512, 256)]
    if IS_WIDE:  # 96 columns are no block; of 85 rows, only some ranks keep codes
        layers = [nn.Linear(256, 96), nn.Linear(96, 512), nn.Linear(512, 128), nn.Linear(128, 85)]
    model = Net(layers).to(torch.bfloat16 if IS_BF16 else torch.float32)
    if WHAT == "uneven":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        distribute_module(model, mesh, shard_columns)
    elif dist.get_world_size() > 1 and not IS_DDP:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        placed = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)} if WHAT == "columns" else {}
        fully_shard(model, mesh=mesh, **placed)
    return model, getattr(optim, KIND)(model.parameters(), lr=1e-2)


def shard_columns(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, value in module.named_parameters(recurse=False):
        sharded = distribute_tensor(value.detach(), mesh, [Shard(value.dim() - 1)])
        module.register_parameter(name, nn.Parameter(sharded))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    if IS_BF16:  # without torch.compile, torchao's step knows float32 alone
        make_moments(optimizer)
        return
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 256, generator=generator)  # the same on every rank
        model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_moments(optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in optimizer.param_groups[0]["params"]:
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            moment = optimizer._new_buffer(parameter, signed)
            local = moment._local_tensor if isinstance(moment, DTensor) else moment
            local.copy_(torch.rand(local.shape, generator=generator))
            optimizer.state[parameter][key] = moment
        optimizer.state[parameter]["step"] = torch.tensor(1.0)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a moment or a parameter on all ranks."""
    if not isinstance(value, DTensor):
        return value.dequantize() if hasattr(value, "dequantize") and value.dim() else value
    local = value._local_tensor
    plain = local.dequantize(torch.float32) if "OptimState" in type(local).__name__ else local
    there = DTensor.from_local(
        plain.reshape(local.shape).float(),  # ranks may keep different types
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return there.redistribute(placements=[Replicate()])._local_tensor


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: whole(value.detach()).clone() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if torch.is_tensor(value):
                found[f"{name}.{key}"] = whole(value).clone()
    return found


def kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = type(local).__name__
    return found


def check_select(checkpoints: CheckpointManager, state: dict[str, Any]) -> None:
    """What is not selected keeps its values, or gets none; no part of a moment is loaded alone."""
    one, (model, optimizer) = "layers.0.weight", state.values()
    checkpoints.resume(state, select=["model.*", f"optimizer.state.{one}.*"])
    named = dict(model.named_parameters())
    assert [n for n, p in named.items() if optimizer.state[p]] == [one]
    assert optimizer.state[named[one]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    make_moments(optimizer)
    kept = numbers(model, optimizer)
    checkpoints.resume(state, select=["optimizer.param_groups.*"])
    for name, value in numbers(model, optimizer).items():
        assert torch.equal(value, kept[name]), name
    wide = Net([nn.Linear(256, 600), nn.Linear(600, 256)])
    distribute_module(wide, init_device_mesh("cpu", (dist.get_world_size(),)), shard_columns)
    other = getattr(optim, KIND)(wide.parameters())
    before = numbers(wide, other)
    for how, error in (({"*": "skip"}, "takes no parts of"), ({}, "does not fit")):
        with pytest.raises(PlanError, match=error):
            checkpoints.resume({"model": wide, "optimizer": other}, on_mismatch=how)
        after = numbers(wide, other)
        assert before.keys() == after.keys() and all(
            torch.equal(after[n], before[n]) for n in after
        )
    with pytest.raises(PlanError, match="a part of a moment of few bits would be left out"):
        checkpoints.resume(state, select=[f"optimizer.state.{one}.exp_avg.codes"])


def moments_of(model: nn.Module, optimizer: Any, names: set[str]) -> list[torch.Tensor]:
    """Returns moments by parameter and key."""
    of = dict(model.named_parameters())
    return [optimizer.state[of[n.rpartition(".")[0]]][n.rpartition(".")[2]] for n in names]


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    state = {"model": model, "optimizer": optimizer}
    rank = dist.get_rank()
    with CheckpointManager(RUN) as checkpoints:
        if WHAT == "steps":
            train(model, optimizer, 0, 2)
            before = kinds(model, optimizer)
            checkpoints.save(2, state)
            got = numbers(model, optimizer)
            checkpoints.wait()
            assert kinds(model, optimizer) == before
            assert any(kind.startswith("OptimState") for kind in before.values())
            notes = [] if checkpoints.last_save is None else checkpoints.last_save.notes
            is_widened = any("moments of few bits are stored as float32" in n for n in notes)
            assert is_widened == IS_WIDE or rank, notes
            train(model, optimizer, 2, 4)
            torch.save((got, numbers(model, optimizer), before), RUN / f"want-{rank}.pt")
        else:
            check(checkpoints, state)
    dist.barrier()
    dist.destroy_process_group()


def resume(checkpoints: CheckpointManager, state: dict[str, Any]) -> None:
    if IS_CUT:
        with pytest.raises(PlanError, match="cut the blocks of a moment of few bits"):
            checkpoints.resume(state, on_mismatch={"optimizer.*": "refuse"})
    assert checkpoints.resume(state, on_mismatch={} if IS_CUT else {"*": "refuse"}) == 2


def check(checkpoints: CheckpointManager, state: dict[str, Any]) -> None:
    """Loads the save of `steps`, and compares what the job has then."""
    model, optimizer = state["model"], state["optimizer"]
    want, last, before = torch.load(RUN / "want-0.pt")
    if WHAT == "used":
        train(model, optimizer, 0, 1)
    if WHAT == "uneven":
        check_select(checkpoints, state)
        model, optimizer = state["model"], state["optimizer"] = model_and_optimizer()
    resume(checkpoints, state)
    notes = [] if checkpoints.last_load is None else checkpoints.last_load.notes
    assert any("cut the blocks of" in note for note in notes) == IS_CUT, notes
    got = numbers(model, optimizer)
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), (name, (got[name] - value).abs().max())
    now = kinds(model, optimizer)
    if not IS_WIDE and dist.get_rank() == 0 and not IS_CUT:  # others lack the row of one
        assert now == before, (now, before)
    if IS_CUT:
        cut = {n for n in before if before[n].startswith("OptimState") and now[n] == "Tensor"}
        assert cut and all(x.dtype == torch.float32 for x in moments_of(model, optimizer, cut))
        if WHAT == "columns":
            train(model, optimizer, 2, 3)
    if WHAT == "again":
        train(model, optimizer, 2, 4)
        for name, value in numbers(model, optimizer).items():
            assert IS_WIDE or torch.equal(value, last[name]), name
    # it can be saved again, and that loads, too
    kept = numbers(model, optimizer)
    checkpoints.save(3, state)
    checkpoints.wait()
    again, other = model_and_optimizer()
    assert checkpoints.resume({"model": again, "optimizer": other}) == 3
    for name, value in numbers(again, other).items():
        assert torch.equal(value, kept[name]), name


if __name__ == "__main__":
    main()
