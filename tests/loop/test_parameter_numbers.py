"""Optimizers whose parameters have numbers: in the file, as names of a `ParameterList`, or both.

The oracle is `Optimizer.load_state_dict`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError
from tests.states import one_step


def make() -> tuple[nn.ParameterList, torch.optim.AdamW]:
    """A model whose names are 0, 1 and 2, and an optimizer whose order is 2, 0, 1."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, 2)) for _ in range(3)])
    groups: list[dict[str, Any]] = [
        {"params": [model[2]], "lr": 0.1},
        {"params": [model[0], model[1]], "lr": 0.2},
    ]
    return model, torch.optim.AdamW(groups)


def trained() -> tuple[nn.ParameterList, torch.optim.AdamW]:
    model, optimizer = make()
    for number, parameter in enumerate(model):
        parameter.grad = torch.full((2, 2), 10.0 * (number + 1))
    optimizer.step()
    return model, optimizer


def moments(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[float]:
    return [optimizer.state[p]["exp_avg"][0, 0].item() for p in model]


def loaded(path: Path) -> tuple[list[float], list[float]]:
    model, optimizer = make()
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    ckpt_tools.load(path, {"model": model, "optimizer": optimizer})
    return moments(model, optimizer), [group["lr"] for group in optimizer.param_groups]


WANT = [1.0, 2.0, 3.0], [0.1, 0.2]


def test_numbers_of_a_file_are_no_names_of_a_parameter_list(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "p.pt")
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    assert loaded(tmp_path / "p.pt") == loaded(tmp_path / "d") == WANT
    ckpt_tools.seal(tmp_path / "d")
    assert loaded(tmp_path / "d") == WANT
    model, optimizer = make()
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.resume({"model": model, "optimizer": optimizer}, path=tmp_path / "d")
    assert moments(model, optimizer) == WANT[0]


@pytest.mark.parametrize("form", ["groups", "flat", "ids"])
def test_a_parameter_list_goes_through_every_naming(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    assert loaded(tmp_path / "s") == WANT
    ckpt_tools.convert(tmp_path / "s", tmp_path / "d", to="dcp", optimizer=form)
    assert loaded(tmp_path / "d") == WANT
    if form == "flat":
        ckpt_tools.convert(tmp_path / "d", tmp_path / "g", to="dcp", optimizer="groups")
        assert loaded(tmp_path / "g") == WANT


def test_torch_loads_the_numbers_that_convert_writes(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    ckpt_tools.convert(tmp_path / "s", tmp_path / "p.pt", to="torch", optimizer="ids")
    stored = torch.load(tmp_path / "p.pt")["optimizer"]
    assert [group["params"] for group in stored["param_groups"]] == [[0], [1, 2]]
    model, optimizer = make()
    optimizer.load_state_dict(stored)
    assert moments(model, optimizer) == WANT[0]
    ckpt_tools.convert(tmp_path / "s", tmp_path / "a", to="accelerate")
    assert loaded(tmp_path / "a") == WANT


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_without_state_gives_its_options(kind: Any, tmp_path: Path) -> None:
    """`torch.save` stores `state: {}` for plain SGD, and before the first step."""
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.5)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "p.pt")
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    ckpt_tools.convert(tmp_path / "p.pt", tmp_path / "c", to="dcp")
    ckpt_tools.reshard(tmp_path / "p.pt", tmp_path / "r", to_ranks=2)
    ckpt_tools.salvage(tmp_path / "p.pt", tmp_path / "s")
    for name in ("p.pt", "d", "c", "r", "s"):
        new = kind(model.parameters(), lr=0.1)
        ckpt_tools.load(tmp_path / name, {"model": model, "optimizer": new})
        assert new.param_groups[0]["lr"] == 0.5 and not new.state, name
    other = kind([model.weight], lr=0.1)
    with pytest.raises(PlanError, match="has 1 parameters, and the one in the checkpoint"):
        ckpt_tools.load(tmp_path / "p.pt", {"model": model, "optimizer": other})


@pytest.mark.parametrize("form", ["groups", "flat", "ids"])
def test_options_that_are_tensors_go_through_every_naming(form: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        groups = [
            {"params": list(model[0].parameters())},
            {"params": list(model[1].parameters()), "weight_decay": 0.3},
        ]
        return model, torch.optim.AdamW(groups, lr=torch.tensor(0.05))

    model, optimizer = build()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    ckpt_tools.convert(tmp_path / "s", tmp_path / "d", to="dcp", optimizer=form)
    back = "ids" if form == "ids" else "groups"
    ckpt_tools.convert(tmp_path / "d", tmp_path / "b", to="dcp", optimizer=back)
    for name in ("d", "b"):
        new_model, new = build()
        new.param_groups[0]["lr"].fill_(9.0)
        ckpt_tools.load(tmp_path / name, {"model": new_model, "optimizer": new})
        assert [group["lr"].item() for group in new.param_groups] == [pytest.approx(0.05)] * 2
        for ours, theirs in zip(new_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(new.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_parameters_of_one_group_with_other_tensor_options_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "lr": torch.tensor(0.1)},
        {"params": [model.bias], "lr": torch.tensor(0.2)},
    ]
    optimizer = torch.optim.AdamW(groups)
    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    ckpt_tools.convert(tmp_path / "s", tmp_path / "d", to="dcp", optimizer="flat")
    one = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(PlanError, match="parameters of one group were saved with different"):
        ckpt_tools.load(tmp_path / "d", {"model": model, "optimizer": one})


def lbfgs() -> tuple[nn.Module, torch.optim.LBFGS]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def train(model: nn.Module, optimizer: torch.optim.LBFGS) -> float:
    inputs = torch.arange(8.0).reshape(2, 4)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = (model(inputs) - 1).square().mean()
        found.backward()
        return found

    return float(optimizer.step(loss).detach())


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_state_that_is_a_list_goes_through_convert(to: str, tmp_path: Path) -> None:
    model, optimizer = lbfgs()
    for _ in range(3):
        train(model, optimizer)
    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    out = tmp_path / ("o.pt" if to == "torch" else "o")
    ckpt_tools.convert(tmp_path / "s", out, to=to)
    new_model, new = lbfgs()
    ckpt_tools.load(out, {"model": new_model, "optimizer": new})
    assert [train(new_model, new) for _ in range(3)] == [train(model, optimizer) for _ in range(3)]


def test_an_order_that_nothing_tells_does_not_become_numbers(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(4)).sum() for layer in model).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    state = {"model": model.state_dict(), "optimizer": dict(sorted(flat.items()))}
    dcp.save(state, checkpoint_id=tmp_path / "flat", no_dist=True)
    result = ckpt_tools.convert(tmp_path / "flat", tmp_path / "groups", to="dcp")
    assert any("in the order of the file" in note for note in result.notes)
    with pytest.raises(PlanError, match="nothing tells the order"):
        ckpt_tools.convert(tmp_path / "groups", tmp_path / "i.pt", to="torch", optimizer="ids")
    names = [name for name, _ in model.named_parameters()]
    ckpt_tools.convert(
        tmp_path / "groups", tmp_path / "i.pt", to="torch", optimizer="ids", param_order=names
    )
    new = torch.optim.AdamW(model.parameters())
    new.load_state_dict(torch.load(tmp_path / "i.pt")["optimizer"])
    for parameter in model.parameters():
        want = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(new.state[parameter]["exp_avg"], want)


def test_what_load_state_dict_takes_is_loaded(tmp_path: Path) -> None:
    """DDP's prefix, and names of parameters that only the job has."""
    model = nn.Linear(3, 3)
    optimizer = one_step(model, torch.ones(3), lr=0.3)
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "p.pt")
    new_model = nn.Linear(3, 3)
    new = torch.optim.AdamW(list(new_model.named_parameters()))
    ckpt_tools.load(tmp_path / "p.pt", {"model": new_model, "optimizer": new})
    assert torch.equal(new_model.weight, model.weight)
    assert new.param_groups[0]["lr"] == 0.3
    want = optimizer.state[model.weight]["exp_avg"]
    assert torch.equal(new.state[new_model.weight]["exp_avg"], want)


def test_a_group_without_parameters_gets_its_options(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)

    def optimizer(*rates: float) -> torch.optim.AdamW:
        groups = [{"params": list(model.parameters())}, {"params": []}]
        return torch.optim.AdamW([g | {"lr": lr} for g, lr in zip(groups, rates, strict=True)])

    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer(0.1, 0.3)})
    new = optimizer(0.7, 0.9)
    ckpt_tools.load(tmp_path / "s", {"model": model, "optimizer": new})
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.3]


def test_numbers_of_an_optimizer_without_state_are_loaded_by_torch(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    ckpt_tools.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    ckpt_tools.convert(tmp_path / "s", tmp_path / "p.pt", to="torch", optimizer="ids")
    new = torch.optim.AdamW(model.parameters())
    new.load_state_dict(torch.load(tmp_path / "p.pt")["optimizer"])
    assert new.param_groups[0]["lr"] == 0.7


def test_conjugated_and_negated_views_are_loaded(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, torch.Tensor]:
        flat = torch.full((2,), value)
        return {"conj": torch.complex(flat, flat).conj(), "neg": torch._neg_view(flat)}

    ckpt_tools.save(tmp_path / "s", state(1.0))
    got = state(0.0)
    ckpt_tools.load(tmp_path / "s", got)
    assert all(torch.equal(got[name], value) for name, value in state(1.0).items())
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state(2.0), asynchronous=False)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume(got) == 1
    assert all(torch.equal(got[name], value) for name, value in state(2.0).items())
