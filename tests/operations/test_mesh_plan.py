"""`reshard --mesh` and `--plan`: what they take, tell and refuse. `dist/test_meshes.py` has jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import ckpt_tools
from ckpt_tools import PlanError
from ckpt_tools.operations.mesh_plan import mesh_of_axes, read_plan
from tests.stock import chunks


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A model that no plan that comes along knows, with moments."""
    weights = {"proj.weight": torch.arange(48.0).reshape(8, 6), "bias": torch.arange(8.0)}
    state = {n: {"exp_avg": t + 1, "step": torch.tensor(1.0)} for n, t in weights.items()}
    groups = [{"params": [*weights], "lr": 0.1}]
    whole = {"model": weights, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=tmp_path / "step", no_dist=True)
    return tmp_path / "step"


def plan(tmp_path: Path, **axes: object) -> Path:
    (tmp_path / "plan.json").write_text(json.dumps(axes))
    return tmp_path / "plan.json"


def test_a_plan_of_ones_own(step: Path, tmp_path: Path) -> None:
    rules = plan(tmp_path, tp={r"proj\.weight": 1}, fsdp={"bias": None}, about="mine")
    done = ckpt_tools.reshard(step, tmp_path / "out", mesh="fsdp=2,tp=3", plan=rules)
    assert done.notes[0] == "split for fsdp=2,tp=3 by the plan plan.json"
    want = {((r, c), (4, 2)) for r in (0, 4) for c in (0, 2, 4)}
    got = chunks(tmp_path / "out")
    assert got["model.proj.weight"] == got["optimizer.state.proj.weight.exp_avg"] == want
    assert got["model.bias"] == {((0,), (8,))}
    state = {"w": torch.zeros(8, 6)}
    dcp.load({"model": {"proj.weight": state["w"]}}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["w"], torch.arange(48.0).reshape(8, 6))


def test_the_first_rule_counts(step: Path, tmp_path: Path) -> None:
    rules = plan(tmp_path, tp={"bias": None, ".*": 1})
    ckpt_tools.reshard(step, tmp_path / "out", mesh="tp=2", plan=rules)
    got = chunks(tmp_path / "out")
    assert len(got["model.bias"]) == 1 and len(got["model.proj.weight"]) == 2


@pytest.mark.parametrize("key", ["state", "app"])
def test_state_goes_with_its_parameter_below_any_key(key: str, tmp_path: Path) -> None:
    weights = {"proj.weight": torch.arange(48.0).reshape(8, 6)}
    moments = {
        "exp_avg": torch.ones(8, 6),
        "codes": torch.ones(8, 3),
        "row": torch.ones(8, 1),
        "one": torch.ones(1, 1),
    }
    whole = {"model": weights, "optimizer": {"state": {"proj.weight": moments}}}
    dcp.save({key: whole}, checkpoint_id=tmp_path / "step", no_dist=True)
    rules = plan(tmp_path, tp={r"proj\.weight": 1})
    done = ckpt_tools.reshard(tmp_path / "step", tmp_path / "out", mesh="fsdp=2,tp=3", plan=rules)
    got = chunks(tmp_path / "out")
    front = f"{key}.optimizer.state.proj.weight"
    assert len(got[f"{key}.model.proj.weight"]) == len(got[f"{front}.exp_avg"]) == 6
    assert got[f"{front}.codes"] == {((r, c), (4, 1)) for r in (0, 4) for c in (0, 1, 2)}
    assert got[f"{front}.row"] == {((0, 0), (4, 1)), ((4, 0), (4, 1))}  # fsdp alone
    assert got[f"{front}.one"] == {((0, 0), (1, 1))}
    assert any(f"fsdp alone splits 1 tensors ({front}.row)" in note for note in done.notes)


def test_what_tp_does_not_split_is_told(step: Path, tmp_path: Path) -> None:
    done = ckpt_tools.reshard(
        step, tmp_path / "out", mesh="tp=2", plan=plan(tmp_path, tp={"bias": 0})
    )
    assert done.notes[1] == (
        "the plan has no rule of tp for 1 tensors (proj.weight): tp does not split them"
    )


def test_state_of_an_unknown_parameter_is_told(step: Path, tmp_path: Path) -> None:
    whole = {"model": {"bias": torch.zeros(8)}, "optim": {"state": {"0": {"m": torch.zeros(8)}}}}
    dcp.save(whole, checkpoint_id=tmp_path / "numbers", no_dist=True)
    rules = plan(tmp_path, tp={"bias": 0})
    done = ckpt_tools.reshard(
        tmp_path / "numbers", tmp_path / "out", mesh="fsdp=2,tp=2", plan=rules
    )
    told = [note for note in done.notes if "no parameter of the model has these names" in note]
    assert len(told) == 1 and told[0].startswith("fsdp alone splits 1 tensors (optim.state.0.m)")
    got = chunks(tmp_path / "out")
    assert len(got["optim.state.0.m"]) == 2 and len(got["model.bias"]) == 4


_DIMS = {
    "embedding_rowwise": 0,
    "colwise": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "grouped_gemm": 0,
}
_WHOLE = "replicated_with_grad_allreduce"


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral", "Qwen3Moe", "Glm4Moe"])
def test_the_plan_of_transformers_is_that_of_its_configs(kind: str) -> None:
    """Where one rank has one box. Packed experts of tensor parallelism have two."""
    config, ours = getattr(transformers, f"{kind}Config"), read_plan("transformers")
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config(num_hidden_layers=1))
    num_seen = 0
    for name, how in model.tp_plan.items():
        plain = ".experts" not in name and ".shared_experts" not in name and how in (*_DIMS, _WHOLE)
        if plain:
            weight = f"{name.replace('*', '3')}.weight"
            assert ours.dims("tp", weight) == ((_DIMS[how],) if how in _DIMS else ()), weight
            num_seen += 1
    assert num_seen >= 8
    for name, how in (getattr(config, "base_model_ep_plan", None) or {}).items():
        if how == "grouped_gemm":
            assert ours.dims("ep", f"model.{name.replace('*', '3')}") == (_DIMS[how],), name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fsdp", "not an axis of a mesh: 'fsdp'"),
        ("fsdp=0", "not an axis of a mesh: 'fsdp=0'"),
        ("fsdp=-1", "not an axis"),
        ("fsdp=1.5", "not an axis"),
        ("fsdp=²", "not an axis"),
        ("fsdp=2,fsdp=2", "not an axis of a mesh: 'fsdp=2'"),
        ("fsdp=2,pp=2", "not an axis of a mesh: 'pp=2'"),
        ("", "not an axis of a mesh: ''"),
        ("fsdp=9999999,tp=9999999", "a mesh has at most"),
        ("fsdp=4,tp=2,ep=3", "ep=3 does not divide the ranks of fsdp and tp, which are 8"),
    ],
)
def test_a_mesh_of_another_form_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        mesh_of_axes(text)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({}, "give one of the two"),
        ({"to_ranks": 2, "mesh": "fsdp=2"}, "give one of the two"),
        ({"to_ranks": 2, "plan": "torchtitan"}, "--plan means nothing without --mesh"),
        ({"mesh": "fsdp=2,tp=2"}, "tp: no single plan fits the names of the model"),
        (
            {"mesh": "fsdp=2", "plan": "torchtitan"},
            "no rule of the plan torchtitan fits a parameter",
        ),
        ({"mesh": "tp=2", "tp": {"bias": None}}, "tp=2 splits no parameter by the plan"),
        (
            {"mesh": "tp=2", "tp": {"bias": 0, "b.*": 0}},
            "fits no parameter that no earlier one fits",
        ),
        ({"mesh": "tp=2", "tp": {"(" * 3000 + ")" * 3000: 0}}, "not a plan of a mesh"),
        ({"mesh": "tp=2", "tp": {"a{99999999999999999999}": 0}}, "not a plan of a mesh"),
        ({"mesh": "tp=2", "tp": {"[[]bias|bias": 0}}, "not a plan of a mesh: Possible nested set"),
        ({"mesh": "tp=2", "plan": "nowhere.json"}, "not a plan of a mesh"),
        (
            {"mesh": "tp=2", "tp": {"other": 0}},
            "fits no parameter that no earlier one fits: tp: 'other'",
        ),
        ({"mesh": "tp=2", "tp": {"bias": 1}}, "splits 'bias' along dim 1, and its shape is"),
        ({"mesh": "tp=2", "tp": {"bias": -1}}, "expected a dim or null, got -1"),
        ({"mesh": "tp=2", "tp": {"bias": True}}, "expected a dim or null, got True"),
        ({"mesh": "tp=2", "tp": {"bias": [0]}}, "expected a dim or null"),
        ({"mesh": "tp=2", "tp": {"(": 0}}, "not a plan of a mesh"),
        ({"mesh": "tp=2", "tp": ["bias"]}, "expected a table of regular expressions"),
        ({"mesh": "tp=2", "pp": {"bias": 0}}, "expected a table with some of fsdp, tp, ep"),
        ({"mesh": "tp=2,ep=2", "tp": {"bias": 0}}, "ep=2 splits no parameter by the plan"),
    ],
)
def test_what_has_no_meaning_is_refused(
    how: dict[str, object], told: str, step: Path, tmp_path: Path
) -> None:
    rules = {axis: how.pop(axis) for axis in ("fsdp", "tp", "ep", "pp") if axis in how}
    given = {"plan": plan(tmp_path, **rules)} if rules else {}
    with pytest.raises(PlanError) as error:
        ckpt_tools.reshard(step, tmp_path / "out", **given, **how)
    assert told in str(error.value)
    assert not (tmp_path / "out").exists()
