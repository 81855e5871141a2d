"""Which parameter a number of an optimizer means: the file, the user or the shapes must prove it.

The oracle is the live optimizer: it knows which moments belong to which parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools import FormatError, PlanError


class Attention(nn.Module):
    """Four weights of one shape, which shapes cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(6, 6, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(x) + self.v(x) ** 2)


def step(
    model: nn.Module, parameters: Any, width: int = 6, kind: Any = torch.optim.AdamW
) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(parameters)
    torch.manual_seed(1)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return optimizer


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def order_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def assert_each_has_its_own(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, key: str = "exp_avg"
) -> None:
    """Every parameter's moments lie under its name."""
    for name, parameter in model.named_parameters():
        got = {f"optimizer.state.{name}.{key}": torch.zeros_like(parameter)}
        ckpt_tools.load(checkpoint, got, strict=False)
        assert torch.equal(*got.values(), optimizer.state[parameter][key]), name


def assert_numbers_are_kept(path: Path, folder: Path) -> None:
    """Nothing was given a name: the note says how to, stock torch loads the same state, and the
    same program resumes.
    """
    result = ckpt_tools.convert(path, folder / "kept.pt", to="torch")
    assert any(
        "their shapes alone do not tell which is which: the numbers are kept; --param-order FILE"
        in note
        for note in result.notes
    )
    assert ckpt_tools.diff(path, folder / "kept.pt").is_same
    mine, theirs = (
        torch.load(p, weights_only=True)["optimizer"] for p in (path, folder / "kept.pt")
    )
    assert mine["state"].keys() == theirs["state"].keys()
    assert [g["params"] for g in mine["param_groups"]] == [
        g["params"] for g in theirs["param_groups"]
    ]


ORDERS: dict[str, Any] = {
    "reversed": lambda named: reversed(named),
    "by name": lambda named: sorted(named),
    "as in the model": lambda named: named,
    "two groups": lambda named: [*named[1::2], *named[::2]],
}


@pytest.mark.parametrize("how", ORDERS)
def test_weights_of_one_shape_keep_their_numbers_in_any_order(how: str, tmp_path: Path) -> None:
    model = Attention()
    optimizer = step(model, [p for _, p in ORDERS[how](list(model.named_parameters()))])
    assert_numbers_are_kept(save(tmp_path / "s.pt", model, optimizer), tmp_path)


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_param_names_of_the_file_are_believed(how: str, wrapper: str, tmp_path: Path) -> None:
    model = Attention()
    optimizer = step(
        model, [(f"{wrapper}{name}", p) for name, p in ORDERS[how](list(model.named_parameters()))]
    )
    path = save(tmp_path / "s.pt", model, optimizer)
    result = ckpt_tools.convert(path, tmp_path / "dcp", to="dcp", ranks=2)
    assert not result.notes
    assert_each_has_its_own(tmp_path / "dcp", model, optimizer)
    ckpt_tools.convert(
        path, tmp_path / "back.pt", to="torch", optimizer="ids", rename=[r"^(\w)\.=layer.\1."]
    )
    (group,) = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["param_names"] == [f"layer.{name}" for name in order_of(model, optimizer)]


def test_param_names_that_contradict_the_shapes_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    optimizer = step(model, model.named_parameters())
    names = optimizer.param_groups[0]["param_names"]
    for wrong, message in (
        (
            [names[2], *names[1:2], names[0], names[3]],
            (
                "param_names and the shapes differ: parameter 0 of optimizer has [3, 6], and"
                " '1.weight'"
            ),
        ),
        (["nowhere", *names[1:]], "param_names names 'nowhere', which is no tensor of the model"),
        (names[:2], "param_names does not name each of its 4 parameters"),
        ([names[0], names[1], names[2], names[2]], "param_names and the shapes differ"),
    ):
        optimizer.param_groups[0]["param_names"] = wrong
        with pytest.raises(FormatError) as caught:
            ckpt_tools.convert(save(tmp_path / "s.pt", model, optimizer), tmp_path / "no", to="dcp")
        assert message in str(caught.value)
    assert not (tmp_path / "no").exists()


def test_shapes_that_occur_once_prove_any_order(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    optimizer = step(model, [p for _, p in sorted(model.named_parameters(), reverse=True)])
    result = ckpt_tools.convert(
        save(tmp_path / "s.pt", model, optimizer), tmp_path / "dcp", to="dcp"
    )
    assert ["the only parameter of its shape" in note for note in result.notes] == [True]
    assert_each_has_its_own(tmp_path / "dcp", model, optimizer)


def write_order(path: Path, names: Iterable[str], kind: str) -> Path:
    names = list(names)
    forms = {
        "lines": "\n".join(names) + "\n",
        "list": json.dumps(names),
        "object": json.dumps({"optimizer": names}),
    }
    path.write_text(forms[kind])
    return path


@pytest.mark.parametrize("kind", ["lines", "list", "object"])
@pytest.mark.parametrize("how", ORDERS)
def test_a_file_says_what_the_numbers_mean(
    how: str, kind: str, tmp_path: Path, ckpt: Callable[..., Any]
) -> None:
    model = Attention()
    optimizer = step(model, [p for _, p in ORDERS[how](list(model.named_parameters()))])
    path, order = (
        save(tmp_path / "s.pt", model, optimizer),
        write_order(tmp_path / "order", order_of(model, optimizer), kind),
    )
    done = ckpt("convert", path, tmp_path / "dcp", "--to", "dcp", "--param-order", order)
    assert done.returncode == 0, done.stderr
    assert_each_has_its_own(tmp_path / "dcp", model, optimizer)


def test_the_model_s_order_fits_groups_by_kind_where_nothing_else_does(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    kinds = [
        [p for p in model.parameters() if p.dim() == 1],
        [p for p in model.parameters() if p.dim() > 1],
    ]
    optimizer = step(model, [{"params": kinds[0], "weight_decay": 0.0}, {"params": kinds[1]}])
    result = ckpt_tools.convert(
        save(tmp_path / "s.pt", model, optimizer), tmp_path / "dcp", to="dcp", param_order="model"
    )
    assert not result.notes
    assert_each_has_its_own(tmp_path / "dcp", model, optimizer)
    square = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    doubtful = step(square, [{"params": [square[1].weight]}, {"params": [square[0].weight]}])
    with pytest.raises(
        PlanError,
        match="--param-order model: the parameters of optimizer fit the model's in several ways",
    ):
        ckpt_tools.convert(
            save(tmp_path / "d.pt", square, doubtful),
            tmp_path / "no",
            to="dcp",
            param_order="model",
        )
    backwards = step(nn.Sequential(*model), [*reversed(list(model.parameters()))])
    with pytest.raises(PlanError, match="do not have the shapes of the model's in its order"):
        ckpt_tools.convert(
            save(tmp_path / "b.pt", model, backwards),
            tmp_path / "no",
            to="dcp",
            param_order="model",
        )


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["q.weight"], "--param-order names 1 parameters, and optimizer has 4"),
        (
            ["q.weight", "k.weight", "v.weight", "w.weight"],
            "--param-order names 'w.weight', which is no tensor of the model",
        ),
        (["q.weight", "k.weight", "v.weight", "q.weight"], "--param-order names 'q.weight' twice"),
        (
            {"optim": []},
            "--param-order names 'optim', which is no optimizer that numbers its parameters",
        ),
        ([1, 2], "expected names of parameters"),
        ("nowhere.txt", "--param-order nowhere.txt: .*No such file"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(order: Any, message: str, tmp_path: Path) -> None:
    model = Attention()
    path = save(tmp_path / "s.pt", model, step(model, model.parameters()))
    with pytest.raises(PlanError, match=message):
        ckpt_tools.convert(path, tmp_path / "no", to="dcp", param_order=order)
    assert not (tmp_path / "no").exists()


def test_an_order_that_nothing_needs_is_refused(tmp_path: Path) -> None:
    model = Attention()
    path = save(tmp_path / "s.pt", model, step(model, model.parameters()))
    ckpt_tools.convert(path, tmp_path / "named", to="dcp", param_order="model")
    for source, how, message in (
        (tmp_path / "named", {"to": "torch"}, "no optimizer here numbers its parameters"),
        (path, {"to": "safetensors"}, "only the model is written"),
        (path, {"to": "dcp", "model_only": True}, "only the model is written"),
    ):
        with pytest.raises(PlanError, match=message):
            ckpt_tools.convert(
                source,
                tmp_path / {"torch": "no.pt", "dcp": "no"}.get(str(how["to"]), "no.safetensors"),
                param_order="model",
                **how,
            )


@pytest.mark.parametrize(
    "how",
    [
        {"to": "accelerate"},
        {"to": "deepspeed-universal"},
        {"to": "dcp", "optimizer": "flat"},
        {"to": "dcp", "optimizer": "groups"},
        {"to": "dcp", "key_map": "qkv_split", "settings": {"heads": 2, "kv_heads": 2}},
    ],
)
def test_what_needs_names_refuses_numbers_that_nothing_explains(how: Any, tmp_path: Path) -> None:
    model = Attention()
    path = save(tmp_path / "s.pt", model, step(model, model.parameters()))
    with pytest.raises(PlanError, match="optimizer has numbers for its parameters") as caught:
        ckpt_tools.convert(path, tmp_path / "no", **how)
    assert "--param-order FILE or --param-order model" in (caught.value.hint or "")


def test_state_of_another_shape_than_its_parameter_proves_nothing(tmp_path: Path) -> None:
    """Adafactor keeps rows and columns: a row of one weight may have the shape of another."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    optimizer = step(model, model.parameters(), kind=torch.optim.Adafactor)
    assert_numbers_are_kept(save(tmp_path / "s.pt", model, optimizer), tmp_path)


def test_a_plain_sgd_without_state_keeps_its_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    optimizer = step(model, model.parameters(), kind=lambda p: torch.optim.SGD(p, lr=0.1))
    assert_numbers_are_kept(save(tmp_path / "s.pt", model, optimizer), tmp_path)


def test_batch_norm_s_buffers_are_no_parameters_and_another_buffer_leaves_a_doubt(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    optimizer = step(model, model.parameters())
    ckpt_tools.convert(
        save(tmp_path / "n.pt", model, optimizer), tmp_path / "norms", to="dcp", param_order="model"
    )
    assert_each_has_its_own(tmp_path / "norms", model, optimizer)
    model[0].register_buffer("mask", torch.ones(6))
    with pytest.raises(PlanError, match="in several ways"):
        ckpt_tools.convert(
            save(tmp_path / "d.pt", model, optimizer),
            tmp_path / "no",
            to="dcp",
            param_order="model",
        )


# ---- loading a stored optimizer with numbers into a live one -------------------------------------


@pytest.mark.parametrize("where", ["torch", "dcp"])
def test_a_stored_optimizer_with_numbers_loads_by_position_as_torch_does(
    where: str, tmp_path: Path
) -> None:
    model = Attention()
    optimizer = step(model, reversed(list(model.parameters())))
    source = save(tmp_path / "s.pt", model, optimizer)
    if where == "dcp":
        ckpt_tools.convert(source, tmp_path / "dcp", to="dcp", ranks=2)
        source = tmp_path / "dcp"
    other = Attention()
    fresh = torch.optim.AdamW(reversed(list(other.parameters())), lr=9.0)
    report = ckpt_tools.load(source, {"model": other, "optimizer": fresh})
    assert any(
        "was stored by numbers of parameters: they are taken in the order of this job's optimizer"
        in note
        for note in report.notes
    )
    for name, parameter in model.named_parameters():
        theirs = dict(other.named_parameters())[name]
        assert torch.equal(fresh.state[theirs]["exp_avg"], optimizer.state[parameter]["exp_avg"]), (
            name
        )
        assert fresh.state[theirs]["step"] == 1
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_names_in_the_file_find_their_parameters_in_another_order(tmp_path: Path) -> None:
    model, other = Attention(), Attention()
    optimizer = step(model, model.named_parameters())
    source = save(tmp_path / "s.pt", model, optimizer)
    fresh = torch.optim.AdamW(reversed(list(other.named_parameters())))
    report = ckpt_tools.load(source, {"model": other, "optimizer": fresh})
    assert any("its param_names name them" in note for note in report.notes)
    for name, parameter in other.named_parameters():
        assert torch.equal(
            fresh.state[parameter]["exp_avg"],
            optimizer.state[dict(model.named_parameters())[name]]["exp_avg"],
        ), name


def test_numbers_that_do_not_fit_the_live_optimizer_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    source = save(tmp_path / "s.pt", model, step(model, model.parameters()))
    few = torch.optim.AdamW(list(model.parameters())[:3])
    with pytest.raises(
        PlanError,
        match=(
            "the optimizer at 'optimizer' has 3 parameters, and the one in the checkpoint numbers 4"
        ),
    ):
        ckpt_tools.load(source, {"model": model, "optimizer": few})
    # nothing of the optimizer is wanted
    ckpt_tools.load(source, {"model": model, "optimizer": few}, select=["model.*"])
    turned = torch.optim.AdamW(reversed(list(model.parameters())))
    with pytest.raises(
        PlanError,
        match=(
            r"parameter 0 of the stored optimizer is not '1.bias': exp_avg has \[3, 6\], the"
            r" parameter \[5\]"
        ),
    ):
        ckpt_tools.load(source, {"model": model, "optimizer": turned})
