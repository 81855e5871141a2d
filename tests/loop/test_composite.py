"""Weights that consist of several tensors, of a class that nobody knows. tests/peers has torchao's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError
from ckpt_tools.distributed import LoadPlanner, SavePlanner


class Coded(torch.Tensor):
    """Codes, and a scale for each row."""

    qdata: torch.Tensor
    scale: torch.Tensor
    is_swapped: Any

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, is_swapped: Any = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype)
        made.qdata, made.scale, made.is_swapped = qdata, scale, is_swapped
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["qdata", "scale"], {"is_swapped": self.is_swapped}

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, torch.Tensor], told: Any, *_: Any) -> Any:
        return Coded(inside["qdata"], inside["scale"], told["is_swapped"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            first = args[0]
            return type(first)(func(first.qdata), func(first.scale), first.is_swapped)
        raise NotImplementedError(func)


class Other(Coded):
    """The same tensors with another meaning."""


def layer(
    seed: int, kind: Any = Coded, dtype: torch.dtype = torch.float32, **more: Any
) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (8, 6), generator=generator, dtype=torch.int8)
    made = nn.Module()
    value = kind(codes, torch.rand(8, generator=generator).to(dtype), **more)
    made.weight = nn.Parameter(value, requires_grad=False)
    made.bias = nn.Parameter(torch.rand(8, generator=generator))
    return nn.ModuleDict({"layer": made})


def parts(model: nn.Module) -> list[torch.Tensor]:
    weight: Any = model["layer"].weight  # type: ignore[index]
    return [weight.qdata.clone(), weight.scale.clone(), model["layer"].bias.detach().clone()]  # type: ignore[index]


def are_same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": layer(0)})
    return tmp_path / "run"


def test_the_tensors_inside_have_names_of_their_own(root: Path) -> None:
    (step,) = ckpt_tools.steps(root)
    found = ckpt_tools.inspect(step.path)
    names = ["model.layer._weight_qdata", "model.layer._weight_scale", "model.layer.bias"]
    assert sorted(found.catalog.tensors) == names
    stored: dict[str, Any] = {
        names[0]: torch.zeros(8, 6, dtype=torch.int8),
        "model.layer.weight": "",
    }
    dcp.load(stored, checkpoint_id=step.path, no_dist=True)
    assert torch.equal(stored[names[0]], parts(layer(0))[0])
    about = json.loads(stored["model.layer.weight"])
    told = {"dtype": "float32", "is_swapped": False, "shape": [8, 6]}
    assert about["_type"] == "Coded" and about["_data"] == told
    assert not any(b"Coded\n" in file.read_bytes() for file in Path(step.path).iterdir())  # a class


def test_a_resume_fills_them_where_they_lie(root: Path) -> None:
    model = layer(1)
    codes = model["layer"].weight.qdata  # type: ignore[index,union-attr]
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume({"model": model}) == 1
        assert are_same(model, layer(0)) and codes is model["layer"].weight.qdata  # type: ignore[index,union-attr]
        checkpoints.save(2, {"model": model})
    ckpt_tools.load(root / "step-00000002", {"model": (other := layer(2))})
    assert are_same(other, layer(0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (layer(1, Other), "is of another kind"),
        (layer(1, is_swapped=True), "is of another kind"),
        (layer(1, dtype=torch.bfloat16), "types differ"),
        (nn.ModuleDict({"layer": nn.Linear(6, 8)}), "kinds differ"),
    ],
    ids=["class", "meaning", "type", "plain"],
)
def test_what_would_read_them_otherwise_is_refused(
    model: nn.Module, words: str, root: Path
) -> None:
    before = [
        value.clone()
        for value in model["layer"].state_dict().values()
        if type(value) is torch.Tensor
    ]  # type: ignore[index,union-attr]
    with CheckpointManager(root) as checkpoints:
        lax = [{}] if words == "kinds differ" else [{}, {"strict": False}]
        for how in (*lax, {"cast": True}):
            with pytest.raises(PlanError, match=words):
                checkpoints.resume({"model": model}, **how)  # type: ignore[arg-type]
    after = [value for value in model["layer"].state_dict().values() if type(value) is torch.Tensor]  # type: ignore[index,union-attr]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_part_goes_nowhere_alone(root: Path) -> None:
    model = layer(1)
    one = "model.layer._weight_scale"
    with CheckpointManager(root) as checkpoints:
        with pytest.raises(PlanError, match="a part of a weight would not be loaded"):
            checkpoints.resume({"model": model}, select=[one])
        with pytest.raises(PlanError, match="a part of a weight would be left out"):
            checkpoints.save(2, {"model": model}, only=lambda name: name != one)
        with pytest.raises(PlanError, match="consists of several tensors"):
            checkpoints.save(2, {"model": model.state_dict()})
        with pytest.raises(PlanError, match="a part of a weight would not be loaded"):
            checkpoints.resume({"model": model}, select=["model.layer.weight"])
        checkpoints.resume({"model": model}, select=["model.*weight*"])
        assert torch.equal(parts(model)[0], parts(layer(0))[0])
        assert torch.equal(parts(model)[2], parts(layer(1))[2])
        model["layer"].register_buffer("_weight_scale", torch.zeros(1))  # type: ignore[index,union-attr]
        with pytest.raises(PlanError, match="has the name of a part"):
            checkpoints.save(2, {"model": model})


def test_what_no_tensor_tells_is_compared(tmp_path: Path) -> None:
    """A number of its own, also where not selected; and parts that the state lacks."""

    class Scaled(Coded):
        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["qdata", "scale"], (self.is_swapped, 3)

    class Wider(Coded):
        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["qdata", "scale", "zero"], {"is_swapped": False}

    Wider.__name__ = Scaled.__name__ = "Coded"
    ckpt_tools.save(tmp_path / "a", {"model": layer(0, Scaled, is_swapped=0.5)})
    for how in ({}, {"select": ["*_weight_*"]}):
        with pytest.raises(PlanError, match="of another kind"):
            ckpt_tools.load(tmp_path / "a", {"model": layer(1, Scaled, is_swapped=0.25)}, **how)
    ckpt_tools.load(tmp_path / "a", {"model": layer(1, Scaled, is_swapped=0.5)})
    wide = layer(2)
    flat = {"layer._weight_qdata": parts(wide)[0], "layer._weight_scale": parts(wide)[1]}
    flat |= {"layer._weight_zero": torch.ones(8), "layer.bias": parts(wide)[2]}
    save_file(flat, tmp_path / "x.safetensors")
    with pytest.raises(PlanError, match="has a part that the state lacks"):
        ckpt_tools.load(tmp_path / "x.safetensors", {"model": layer(1)}, strict=False)
    del flat["layer._weight_zero"]
    save_file(flat, tmp_path / "x.safetensors")
    report = ckpt_tools.load(tmp_path / "x.safetensors", {"model": (model := layer(1))})
    assert are_same(model, wide)
    assert any("does not tell the kind of 1 quantized weights" in note for note in report.notes)


def test_only_what_trains(root: Path) -> None:
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(2, {"model": layer(5)}, only="trainable")
    (_, step) = ckpt_tools.steps(root)
    assert [*ckpt_tools.inspect(step.path).catalog.tensors] == ["model.layer.bias"]
    with CheckpointManager(root) as checkpoints:
        model = layer(1)
        assert checkpoints.resume({"model": model}) == 2
    assert torch.equal(parts(model)[0], parts(layer(1))[0])
    assert torch.equal(parts(model)[2], parts(layer(5))[2])


def test_a_hook_that_copies_gets_its_weight_back(root: Path) -> None:
    """Its state dict has no live memory, so the module has to take what was loaded."""
    taken = list[torch.Tensor]()

    class Copying(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.layer = inner["layer"]  # type: ignore[index]

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value.clone() for name, value in super().state_dict().items()}

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            taken.extend((state_dict["layer.weight"].qdata, state_dict["layer.bias"]))

    ckpt_tools.load(root / "step-00000001", {"model": Copying(layer(1))})
    assert torch.equal(taken[0], parts(layer(0))[0]) and torch.equal(taken[1], parts(layer(0))[2])


def test_the_planners_of_dcp(tmp_path: Path) -> None:
    dcp.save({"model": layer(0).state_dict()}, checkpoint_id=tmp_path / "a", planner=SavePlanner())
    model = layer(1)
    state = {"model": model.state_dict(), "step": [1, {"x": 2}]}
    dcp.save({**state, "step": [3, {"x": 4}]}, checkpoint_id=tmp_path / "b", planner=SavePlanner())
    dcp.load({"model": state["model"]}, checkpoint_id=tmp_path / "a", planner=LoadPlanner())
    assert are_same(model, layer(0))
    dcp.load(state, checkpoint_id=tmp_path / "b", planner=LoadPlanner())
    assert are_same(model, layer(1)) and state["step"] == [3, {"x": 4}]
    with pytest.raises(CheckpointException, match="is of another kind"):
        dcp.load(
            {"model": layer(1, Other).state_dict()},
            checkpoint_id=tmp_path / "a",
            planner=LoadPlanner(),
        )
    for wrong in ([model["layer"].weight], ({"w": model["layer"].weight},)):  # type: ignore[index,union-attr]
        with pytest.raises(CheckpointException, match="in a list or a tuple"):
            dcp.save({"w": wrong}, checkpoint_id=tmp_path / "c", planner=SavePlanner())
    both = {**layer(0).state_dict(), "layer._weight_scale": torch.zeros(1)}
    with pytest.raises(CheckpointException, match="has the name of a part"):
        dcp.save(both, checkpoint_id=tmp_path / "c", planner=SavePlanner())
    for made in (SavePlanner, LoadPlanner):
        with pytest.raises(ValueError, match="flatten_state_dict"):
            made(flatten_state_dict=False)
    with pytest.raises(ValueError, match="must be of one rank"):
        SavePlanner(dedup_save_to_lowest_rank=False)
    short = {"model": layer(1, dtype=torch.bfloat16).state_dict()}
    with pytest.raises(CheckpointException, match="types differ"):
        dcp.load(short, checkpoint_id=tmp_path / "a", planner=LoadPlanner())
    half = {"layer._weight_qdata": parts(layer(0))[0], "layer.bias": parts(layer(0))[2]}
    dcp.save({"model": half}, checkpoint_id=tmp_path / "d")
    with pytest.raises(CheckpointException, match="on one side alone"):
        dcp.load(
            {"model": layer(1).state_dict()},
            checkpoint_id=tmp_path / "d",
            planner=LoadPlanner(allow_partial_load=True),
        )
    ckpt_tools.load(tmp_path / "a", {"model": (third := layer(2))})
    assert are_same(third, layer(0))
