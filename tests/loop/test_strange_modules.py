"""Modules with code of their own in their state dicts. torch's own functions are the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.ao.quantization import prepare_qat, qconfig
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.testing._internal.two_tensor import TwoTensor

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError
from tests.conftest import torchrun

Values = dict[str, Any]


class Scaled(nn.Module):
    """Its first version stored another unit."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(
        self, state_dict: Values, prefix: str, local_metadata: Values, *args: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "w"] = state_dict[prefix + "w"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def versions() -> nn.Module:
    return nn.Sequential(Scaled(), nn.Linear(2, 2))


def observers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2)).train()
    model.qconfig = qconfig.default_symmetric_qnnpack_qat_qconfig
    prepared: nn.Module = prepare_qat(model)
    prepared(torch.ones(1, 2))
    return prepared


class Doubled(nn.Linear):
    """Keeps twice its weight in checkpoints."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)

        def double(module: nn.Module, found: Values, prefix: str, _: Values) -> None:
            found[prefix + "weight"] = found[prefix + "weight"] * 2

        def halve(module: nn.Module, given: Values, prefix: str, *_: Any) -> None:
            given[prefix + "weight"] = given[prefix + "weight"] / 2

        self.register_state_dict_post_hook(double)
        self.register_load_state_dict_pre_hook(halve)


def tied_to_a_hook() -> nn.Module:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(2, 2), Doubled()
    model.head.weight = model.embed.weight
    return model


def conjugated() -> nn.Module:
    model = nn.Module()
    value = torch.tensor([1 + 2j, 3 + 4j])
    model.register_buffer("z", value)
    model.register_buffer("conjugated", value.conj())
    model.register_buffer("negated", value.conj().imag)
    return model


def no_wrapper() -> nn.Module:
    """A child called `_orig_mod`, whose weight another module shares."""
    model = nn.Module()
    model.a, model.b = nn.Module(), nn.Linear(2, 2, bias=False)
    model.a._orig_mod = nn.Linear(2, 2, bias=False)
    model.a.weight = nn.Parameter(torch.full((2, 2), 2.0))
    model.b.weight = model.a._orig_mod.weight
    return model


def scripted() -> nn.Module:
    module: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    return module


KINDS = [versions, observers, tied_to_a_hook, conjugated, no_wrapper, scripted]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_a_module_loads_what_torch_s_functions_load(
    made: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = made()
    stored = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        for step in (1, 2):  # the second one from kept names
            checkpoints.save(step, {"model": model})
        for step in (1, 2):
            found = {name: torch.zeros_like(value) for name, value in stored.items()}
            dcp.load({"model": found}, checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
            for name, value in stored.items():
                assert torch.equal(found[name], value), name
            for value in (*model.parameters(), *model.buffers()):
                if not value.is_conj() and not value.is_neg():
                    value.data.zero_()
            checkpoints.resume({"model": model}, step=step)
            for name, value in get_model_state_dict(model).items():
                assert torch.equal(value, stored[name]), name


def test_a_name_that_a_module_does_not_take_back_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)

    def rename(module: nn.Module, found: Values, prefix: str, _: Values) -> None:
        found[prefix + "other"] = found.pop(prefix + "weight").clone()

    model.register_state_dict_post_hook(rename)
    with pytest.raises(RuntimeError, match="other"):
        set_model_state_dict(model, get_model_state_dict(model))
    ckpt_tools.save(tmp_path / "c", {"model": model})
    with pytest.raises(PlanError, match=r"do not take back: model\.other"):
        ckpt_tools.load(tmp_path / "c", {"model": model})
    notes = ckpt_tools.load(tmp_path / "c", {"model": model}, strict=False).notes
    assert any("model.other" in note for note in notes)


@pytest.mark.parametrize("name", ["\ud800", "x" * 70_000], ids=["surrogate", "long"])
def test_a_name_that_no_checkpoint_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not valid, or too long"):
        ckpt_tools.save(tmp_path / "c", {name: torch.ones(1)})
    assert not (tmp_path / "c").exists()


def test_a_tensor_of_several_tensors_is_refused_but_as_a_weight(tmp_path: Path) -> None:
    two = TwoTensor(torch.ones(3), torch.zeros(3))
    with pytest.raises(PlanError, match="consists of several tensors: TwoTensor"):
        ckpt_tools.save(tmp_path / "c", {"p": two})
    model = nn.Module()  # a weight is another thing: see test_composite.py
    model.p = nn.Parameter(two)
    ckpt_tools.save(tmp_path / "c", {"model": model})
    model.p.a.data.zero_()
    ckpt_tools.load(tmp_path / "c", {"model": model})
    assert torch.equal(model.p.a, torch.ones(3)) and torch.equal(model.p.b, torch.zeros(3))


def test_a_child_called_state_is_no_state_of_an_optimizer(tmp_path: Path) -> None:
    def made() -> Values:
        model = nn.ModuleDict({"state": nn.Linear(3, 3)})
        return {"model": model, "optimizer": torch.optim.Adafactor(model.parameters())}

    state = made()
    state["model"]["state"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    ckpt_tools.save(tmp_path / "c", state)
    fresh = made()
    ckpt_tools.load(tmp_path / "c", fresh)
    for mine, theirs in zip(
        state["optimizer"].state.values(), fresh["optimizer"].state.values(), strict=True
    ):
        assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine)


def test_ranks_with_tensors_of_other_names_are_refused(tmp_path: Path) -> None:
    torchrun(2, "other_names.py", str(tmp_path))
