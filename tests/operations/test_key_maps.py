"""Key maps and names: every tensor is explained, every rule matches, and the result has the names
that its config's model has.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError
from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.relations import assemble
from ckpt_tools.operations.convert.key_map import _rope
from tests.operations.llamas import base, llama

Run = Callable[..., subprocess.CompletedProcess[str]]


def write_map(folder: Path, **rules: Any) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps(rules))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({f"{n}.weight": torch.ones(4, 2) for n in "abc"}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_a_name_that_no_rule_explains_is_refused_with_a_list(
    model: Path, tmp_path: Path, ckpt: Run
) -> None:
    rules = write_map(tmp_path, rename=[["^a\\.", "first."]])
    out = tmp_path / "o.safetensors"
    words = ("convert", model, out, "--to", "safetensors", "--map", rules)
    done = ckpt(*words)
    assert done.returncode == 13 and "matches 2 names: b.weight, c.weight" in done.stderr
    assert not out.exists()
    done = ckpt(*words, "--partial")
    assert done.returncode == 0, done.stderr
    assert "no rule of the key map matches 2 names: b.weight, c.weight" in done.stdout
    assert load_file(out).keys() == {"first.weight", "b.weight", "c.weight"}


def test_names_that_a_map_keeps_or_drops_are_explained(model: Path, tmp_path: Path) -> None:
    rules = write_map(tmp_path, rename=[["^a\\.", "first."]], keep=["b\\..*"], drop=["c\\..*"])
    out = tmp_path / "o.safetensors"
    result = ckpt_tools.convert(model, out, to="safetensors", key_map=rules)
    assert load_file(out).keys() == {"first.weight", "b.weight"}
    assert any("left out by the key map: 1 (c.weight)" in note for note in result.notes)


@pytest.mark.parametrize(
    "rules",
    [
        {"rename": [[".", "\\g<0>"], ["^z\\.", "y."]]},
        {
            "keep": [".*"],
            "rename": [["^a\\.", "x."]],
            "rope": [{"match": "z", "heads": 2, "to": "pairs"}],
        },
        {
            "keep": [".*"],
            "rename": [["^a\\.", "x."]],
            "fuse": [{"match": "z", "from": ["z"], "into": "y"}],
        },
    ],
    ids=["rename", "rope", "fuse"],
)
def test_a_rule_that_matches_nothing_is_refused_unless_it_is_optional(
    rules: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.safetensors"
    with pytest.raises(PlanError, match="a rule of the key map matches nothing: '.*z"):
        ckpt_tools.convert(model, out, to="safetensors", key_map=write_map(tmp_path, **rules))
    for kind in ("rope", "fuse"):
        rules[kind] = [{**rule, "optional": True} for rule in rules.get(kind, [])]
    rules["rename"] = [[*rule, "optional"] for rule in rules["rename"]]
    ckpt_tools.convert(model, out, to="safetensors", key_map=write_map(tmp_path, **rules))


SPLIT = {"match": "(.*)\\.qkv", "into": ["\\1.q", "\\1.k", "\\1.v"], "parts": [4, 2, 2]}
FUSE = {"match": "(.*)\\.q", "from": ["\\1.q", "\\1.k", "\\1.v"], "into": "\\1.qkv"}


def test_rows_in_groups_are_split_and_fused(tmp_path: Path) -> None:
    """Two groups of query heads, each with its key and its value, as in Megatron and GPT-NeoX."""
    whole = torch.arange(16 * 3, dtype=torch.float32).reshape(16, 3)
    save_file({"l.qkv": whole}, tmp_path / "m.safetensors")
    rules = write_map(tmp_path, split=[{**SPLIT, "groups": "kv"}])
    ckpt_tools.convert(
        tmp_path / "m.safetensors",
        tmp_path / "s.safetensors",
        to="safetensors",
        key_map=rules,
        settings={"kv": 2},
    )
    rows = whole.view(2, 4, 2, 3)  # groups, heads in a group, rows of a head
    got = load_file(tmp_path / "s.safetensors")
    assert torch.equal(got["l.q"], rows[:, :2].reshape(8, 3))
    assert torch.equal(got["l.k"], rows[:, 2].reshape(4, 3))
    assert torch.equal(got["l.v"], rows[:, 3].reshape(4, 3))
    rules = write_map(tmp_path, fuse=[{**FUSE, "groups": 2}])
    ckpt_tools.convert(
        tmp_path / "s.safetensors", tmp_path / "b.safetensors", to="safetensors", key_map=rules
    )
    assert torch.equal(load_file(tmp_path / "b.safetensors")["l.qkv"], whole)
    rules = write_map(tmp_path, split=[{**SPLIT, "groups": 3}])
    with pytest.raises(PlanError, match=r"16 rows cannot be split as \[4, 2, 2\] in 3 groups"):
        ckpt_tools.convert(
            tmp_path / "m.safetensors", tmp_path / "x.safetensors", to="safetensors", key_map=rules
        )


def job(path: Path, model: dict[str, torch.Tensor], states: dict[str, Any], groups: Any) -> Path:
    optimizer = {"state": states, "param_groups": groups}
    torch.save({"model": model, "optimizer": optimizer}, path)
    return path


def adam(rows: int, step: float = 1.0) -> dict[str, torch.Tensor]:
    return {"exp_avg": torch.ones(rows, 2), "step": torch.tensor(step)}


THREE = {f"l.{n}": torch.ones(4, 2) for n in "qkv"}


@pytest.mark.parametrize(
    ("states", "groups", "reason"),
    [
        (
            {name: adam(4, step=2.0 if name == "l.k" else 1.0) for name in THREE},
            [{"lr": 0.1, "params": list(THREE)}],
            "whose 'step' differs",
        ),
        (
            {name: adam(4) for name in ("l.q", "l.k")},
            [{"lr": 0.1, "params": list(THREE)}],
            "the state of a tensor is missing: 'l.v'",
        ),
        (
            {name: adam(4) for name in THREE},
            [{"lr": 0.1, "params": ["l.q", "l.k"]}, {"lr": 0.2, "params": ["l.v"]}],
            "different options",
        ),
        (
            {name: adam(4) | {"row": torch.ones(4) * number} for number, name in enumerate(THREE)},
            [{"lr": 0.1, "params": list(THREE)}],
            r"its state 'row' has the shape \[4\]",
        ),
    ],
    ids=["step", "missing", "groups", "factored"],
)
def test_moments_that_cannot_be_joined_are_refused(
    states: dict[str, Any], groups: Any, reason: str, tmp_path: Path
) -> None:
    source = job(tmp_path / "j.pt", THREE, states, groups)
    arguments = {"to": "torch", "key_map": write_map(tmp_path, fuse=[FUSE])}
    with pytest.raises(PlanError, match=reason):
        ckpt_tools.convert(source, tmp_path / "o.pt", **arguments)
    ckpt_tools.convert(source, tmp_path / "o.pt", **arguments, model_only=True)
    assert [t.shape for t in whole(tmp_path / "o.pt").values()] == [(12, 2)]


def test_a_moment_of_another_shape_than_its_parameter_is_not_cut(tmp_path: Path) -> None:
    state = {"l.qkv": {"exp_avg": torch.ones(8, 2), "row": torch.ones(8)}}
    source = job(
        tmp_path / "j.pt", {"l.qkv": torch.ones(8, 2)}, state, [{"lr": 0.1, "params": ["l.qkv"]}]
    )
    with pytest.raises(PlanError, match=r"its state 'row' has the shape \[8\]"):
        ckpt_tools.convert(
            source, tmp_path / "o.pt", to="torch", key_map=write_map(tmp_path, split=[SPLIT])
        )


def test_a_map_may_fuse_the_moments_alone(tmp_path: Path) -> None:
    """As for a model whose state dict has separate tensors, and whose parameter is fused."""
    states = {name: {"exp_avg": torch.randn(4, 2), "step": torch.tensor(3.0)} for name in THREE}
    source = job(tmp_path / "j.pt", THREE, states, [{"lr": 0.1, "params": list(THREE)}])
    rules = write_map(tmp_path, fuse=[{**FUSE, "groups": 2, "of": "optimizer"}], keep=[".*"])
    result = ckpt_tools.convert(source, tmp_path / "o.pt", to="torch", key_map=rules)
    assert not result.left_out
    got = torch.load(tmp_path / "o.pt")
    assert got["model"].keys() == THREE.keys()
    assert got["optimizer"]["param_groups"][0]["params"] == ["l.qkv"]
    moments = torch.stack([states[n]["exp_avg"].view(2, 2, 2) for n in THREE], 1)
    assert torch.equal(got["optimizer"]["state"]["l.qkv"]["exp_avg"], moments.reshape(12, 2))
    back = write_map(
        tmp_path, split=[{**SPLIT, "parts": [1, 1, 1], "groups": 2}], keep=["l\\.[qkv]"]
    )
    ckpt_tools.convert(tmp_path / "o.pt", tmp_path / "b.pt", to="torch", key_map=back)
    got = torch.load(tmp_path / "b.pt")
    assert all(
        torch.equal(got["optimizer"]["state"][n]["exp_avg"], states[n]["exp_avg"]) for n in THREE
    )


def test_heads_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    save_file({n: v.clone() for n, v in llama().state_dict().items()}, tmp_path / "m.safetensors")
    with pytest.raises(PlanError, match="--set heads=8, but the config has 4"):
        ckpt_tools.convert(
            tmp_path / "m.safetensors",
            tmp_path / "titan",
            to="dcp",
            key_map="llama_hf_to_titan",
            base=base(llama(), tmp_path / "base"),
            settings={"heads": 8, "kv_heads": 2},
        )


# ---- names of the target -------------------------------------------------------------------------


def whole(path: Path) -> dict[str, torch.Tensor]:
    with ckpt_tools.open(path) as found:
        return {name: found[name][...].clone() for name in found.names()}


@pytest.mark.parametrize("to", ["safetensors", "hf", "torch", "dcp"])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_names_that_all_begin_with_model_stay_as_they_are(
    kind: str, to: str, tmp_path: Path
) -> None:
    """A transformers model without an output of its own: all its names begin with `model.`"""
    weights = {n: v for n, v in llama(tied=True).state_dict().items() if n != "lm_head.weight"}
    assert all(name.startswith("model.") for name in weights)
    source = tmp_path / f"m.{kind}"
    if kind == "pt":
        torch.save(weights, source)
    else:
        save_file(weights, source)
    out = tmp_path / {"safetensors": "out.safetensors", "torch": "out.pt"}.get(to, "out")
    ckpt_tools.convert(source, out, to=to)
    ckpt_tools.merge(source, tmp_path / "merged.safetensors")
    assert whole(out).keys() == whole(tmp_path / "merged.safetensors").keys() == weights.keys()


@pytest.mark.slow
def test_the_names_are_those_of_the_configs_model(tmp_path: Path, ckpt: Run) -> None:
    weights = {n: v.clone() for n, v in llama().state_dict().items()}
    weights["model.final_norm.weight"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "m.safetensors")
    folder = base(llama(), tmp_path / "base")
    (folder / "model.safetensors").unlink()
    words = ("convert", tmp_path / "m.safetensors", tmp_path / "hf", "--to", "hf", "--base", folder)
    done = ckpt(*words)
    assert done.returncode == 13 and "names of the config's model: model.norm" in done.stderr
    assert not (tmp_path / "hf").exists()
    done = ckpt(*words, "--partial")
    assert done.returncode == 0 and "model.final_norm.weight" in done.stdout
    done = ckpt(*words, "--overwrite", "--rename", "final_norm=norm")
    assert done.returncode == 0 and "names of the config's model" not in done.stdout


@pytest.mark.slow
def test_without_transformers_the_weights_of_the_base_tell_the_names(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "not known to transformers"}')
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    result = ckpt_tools.convert(
        tmp_path / "m.safetensors", tmp_path / "one", to="hf", base=tmp_path / "base"
    )
    assert any("names were not compared" in note for note in result.notes)
    save_file({"b": torch.ones(2)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(PlanError, match="have other names than the result: a"):
        ckpt_tools.convert(
            tmp_path / "m.safetensors", tmp_path / "two", to="hf", base=tmp_path / "base"
        )
    result = ckpt_tools.convert(
        tmp_path / "m.safetensors", tmp_path / "two", to="hf", base=tmp_path / "base", partial=True
    )
    assert any("lack: a" in note for note in result.notes)


@pytest.mark.parametrize("at", ["split", "fuse", "moment"])
def test_a_flipped_bit_in_a_tensor_that_is_cut_or_joined_is_found(at: str, tmp_path: Path) -> None:
    """The fingerprint of a sealed tensor is that of its parts, one after the other."""
    torch.manual_seed(0)
    tensors = {"l.qkv": torch.randn(16, 4), "l.other": torch.randn(4)}
    if at == "fuse":
        tensors = {name: torch.randn(4, 4) for name in THREE}
    moments = {n: {"exp_avg": torch.randn_like(v)} for n, v in tensors.items()}
    groups = [{"lr": 0.1, "params": list(tensors)}]
    source = job(tmp_path / "j.pt", tensors, moments, groups)
    sealed = tmp_path / "sealed"
    ckpt_tools.convert(source, sealed, to="dcp")
    rules = write_map(
        tmp_path, **{"fuse": [FUSE]} if at == "fuse" else {"split": [SPLIT]}, keep=[".*"]
    )
    ckpt_tools.convert(sealed, tmp_path / "good", to="dcp", key_map=rules)
    name = {"split": "l.qkv", "fuse": "l.k", "moment": "l.qkv"}[at]
    value = moments[name]["exp_avg"] if at == "moment" else tensors[name]
    (file,) = sealed.glob("*.distcp")
    data = bytearray(file.read_bytes())
    where = data.index(value.numpy().tobytes())
    data[where + 9] ^= 16
    file.write_bytes(data)
    with pytest.raises(IntegrityError):
        ckpt_tools.convert(sealed, tmp_path / "bad", to="dcp", key_map=rules)
    assert not (tmp_path / "bad").exists()


def convert(source: Path, target: Path, rules: Path, **how: Any) -> dict[str, Any]:
    ckpt_tools.convert(source, target, to="torch", key_map=rules, **how)
    found: dict[str, Any] = torch.load(target)
    return found


def test_experts_with_interleaved_columns_become_one_matrix_each(tmp_path: Path) -> None:
    """As from gpt-oss in memory to Megatron, and back: every kind of rule, with the moments."""
    torch.manual_seed(0)
    wide, moment = torch.randn(3, 4, 10), torch.randn(3, 4, 10)
    name = "layers.0.gate_up_proj"
    state = {name: {"exp_avg": moment, "step": torch.tensor(7.0)}}
    source = job(tmp_path / "j.pt", {name: wide}, state, [{"lr": 0.1, "params": [name]}])
    there = write_map(
        tmp_path,
        unstack=[{"match": "(.*)\\.gate_up_proj", "into": "\\1.e.{layer}.gate_up"}],
        split=[
            {
                "match": "(.*)\\.gate_up",
                "into": ["\\1.gate", "\\1.up"],
                "parts": [1, 1],
                "dim": 1,
                "interleaved": True,
            }
        ],
        transpose=[{"match": ".*\\.(gate|up)", "dims": [-1, -2]}],
        fuse=[{"match": "(.*)\\.gate", "from": ["\\1.gate", "\\1.up"], "into": "\\1.fc1"}],
    )
    got = convert(source, tmp_path / "there.pt", there)

    def expert(value: torch.Tensor, number: int) -> torch.Tensor:
        return torch.cat([value[number, :, 0::2].T, value[number, :, 1::2].T])

    assert list(got["model"]) == [f"layers.0.e.{n}.fc1" for n in range(3)]
    assert got["optimizer"]["param_groups"][0]["params"] == list(got["model"])
    for number in range(3):
        name = f"layers.0.e.{number}.fc1"
        assert torch.equal(got["model"][name], expert(wide, number))
        assert torch.equal(got["optimizer"]["state"][name]["exp_avg"], expert(moment, number))
        assert got["optimizer"]["state"][name]["step"] == 7
    back = write_map(
        tmp_path,
        split=[
            {"match": "(.*)\\.fc1", "into": ["\\1.gate", "\\1.up"], "parts": [1, 1]},
        ],
        transpose=[{"match": ".*\\.(gate|up)", "dims": [0, 1]}],
        fuse=[
            {
                "match": "(.*)\\.gate",
                "from": ["\\1.gate", "\\1.up"],
                "into": "\\1.gate_up",
                "dim": 1,
                "interleaved": True,
            }
        ],
        stack=[{"match": "(.*)\\.e\\.(\\d+)\\.gate_up", "into": "\\1.gate_up_proj", "by": 2}],
    )
    again = convert(tmp_path / "there.pt", tmp_path / "back.pt", back)
    (name,) = again["model"]
    assert name == "layers.0.gate_up_proj" and torch.equal(again["model"][name], wide)
    assert torch.equal(again["optimizer"]["state"][name]["exp_avg"], moment)


def test_groups_along_any_dim(tmp_path: Path) -> None:
    """Split and fuse along each dim, with and without groups, compared with torch."""
    torch.manual_seed(0)
    whole_one = torch.randn(8, 8, 8)
    save_file({"a.qkv": whole_one}, tmp_path / "m.safetensors")
    names = ["a.q", "a.k", "a.v"]
    for dim in range(3):
        for groups in (1, 2):
            split = {**SPLIT, "match": "a.qkv", "into": names, "parts": [2, 1, 1]}
            rules = write_map(tmp_path, split=[{**split, "dim": dim, "groups": groups}])
            parts = convert(tmp_path / "m.safetensors", tmp_path / "p.pt", rules, overwrite=True)
            grouped = whole_one.unflatten(dim, (groups, 8 // groups))
            want = grouped.split([4 // groups, 2 // groups, 2 // groups], dim + 1)
            for name, value in zip(names, want, strict=True):
                assert torch.equal(parts[name], value.flatten(dim, dim + 1)), (dim, groups)
            fuse = {"match": "a.q", "from": names, "into": "a.qkv", "dim": dim, "groups": groups}
            rules = write_map(tmp_path, fuse=[fuse])
            made = convert(tmp_path / "p.pt", tmp_path / "w.pt", rules, overwrite=True)
            assert torch.equal(made["a.qkv"], whole_one), (dim, groups)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"stack": [{"match": "e.(\\d+).w", "into": "e.w"}]}, "stack: expected by, into, match"),
        ({"stack": [{"match": "e.(\\d+).w", "into": "e.w", "by": 2}]}, "`by` is the number of a"),
        ({"stack": [{"match": "(e).\\d+.w", "into": "e.w", "by": 1}]}, "is no number in 'e.0.w'"),
        (
            {"stack": [{"match": "e.(\\d+).w", "into": "e.w", "by": 1}]},
            "number 1 of 'e.w' is missing",
        ),
        (
            {"stack": [{"match": "([eo]).([02]).w", "into": "w", "by": 2}]},
            "two tensors are number 0",
        ),
        (
            {"stack": [{"match": "[ox].(.).w", "into": "w", "by": 1}]},
            r"'o.0.w' \[3\], 'x.1.w' \[2\]",
        ),
        ({"transpose": [{"match": "e.0.w", "dims": [0]}]}, "`dims` is a list of two numbers"),
        (
            {"transpose": [{"match": "e.0.w", "dims": [0, 1]}]},
            r"no two dims \[0, 1\] in the shape \[2\]",
        ),
        ({"split": [{**SPLIT, "match": "e.0.w", "dim": -1}]}, "`dim` is a whole number"),
        ({"split": [{**SPLIT, "match": "(e).0.w", "dim": 1}]}, r"no dim 1 in the shape \[2\]"),
        (
            {"split": [{**SPLIT, "match": "e.0.w", "interleaved": True, "groups": 2}]},
            "`interleaved` is a number of groups of its own",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: Any, told: str, tmp_path: Path) -> None:
    tensors = {"e.0.w": torch.zeros(2), "e.2.w": torch.zeros(2)}
    tensors |= {"o.0.w": torch.zeros(3), "x.1.w": torch.zeros(2)}
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(PlanError, match=told):
        ckpt_tools.convert(
            tmp_path / "m.safetensors",
            tmp_path / "o.pt",
            to="torch",
            key_map=write_map(tmp_path, **rules, keep=[".*"]),
        )


def test_a_number_may_follow_a_group_and_state_may_have_no_moments(tmp_path: Path) -> None:
    """A step of a parameter that only the optimizer has is no moment of it."""
    tensors = {"layers.a": torch.randn(3, 2), "l.q": torch.randn(4, 2), "l.k": torch.randn(4, 2)}
    lone = ("l.lone.qkv", "e.0.w", "e.1.w")
    states = {name: {"step": torch.tensor(3.0)} for name in ("l.q", "l.k", *lone)}
    source = job(tmp_path / "j.pt", tensors, states, [{"lr": 0.1, "params": list(states)}])
    rules = write_map(
        tmp_path,
        unstack=[{"match": "(layers\\.)(a)", "into": "\\1{layer}.\\2"}],
        split=[
            {
                "match": "(.*)\\.lone\\.qkv",
                "into": ["\\1.lone.q", "\\1.lone.v"],
                "parts": [1, 1],
            }
        ],
        fuse=[{"match": "l\\.q", "from": ["l.q", "l.k"], "into": "l.qk"}],
        stack=[{"match": "e\\.(.)\\.w", "into": "e.w", "by": 1}],
    )
    got = convert(source, tmp_path / "o.pt", rules)
    assert sorted(got["model"]) == ["l.qk", *(f"layers.{n}.a" for n in range(3))]
    assert torch.equal(got["model"]["layers.1.a"], tensors["layers.a"][1])
    assert torch.equal(got["model"]["l.qk"], torch.cat([tensors["l.q"], tensors["l.k"]]))
    state = got["optimizer"]["state"]
    assert sorted(state) == ["e.w", "l.lone.q", "l.lone.v", "l.qk"]
    assert all(s["step"] == 3 for s in state.values())


def test_rotary_heads_are_few_pieces() -> None:
    """Of pairs to halves, two per head; back, one per pair of rows."""
    heads, size, width = 8, 16, 4
    shape = (heads * size, width)
    chunk = Chunk(Box((0, 0), shape), Extent("f", 0, heads * size * width * 4))
    entry = TensorEntry("q", BY_NAME["float32"], shape, ChunkList([chunk]))
    for to, number in (("halves", 2 * heads), ("pairs", heads * size // 2)):
        made = assemble("q", shape, [_rope("q", shape, heads, to)], {"q": entry})
        assert len(made.chunks) == number


def test_scalars_are_not_stacked_and_one_part_is_no_set(tmp_path: Path) -> None:
    save_file({"e.0.w": torch.tensor(1.0), "e.1.w": torch.tensor(2.0)}, tmp_path / "m.safetensors")
    for rules, told in (
        ({"stack": [{"match": "e.(.).w", "into": "e.w", "by": 1}]}, "a scalar cannot be stacked"),
        (
            {"fuse": [{"match": "e.0.w", "from": ["e.0.w"], "into": "e"}]},
            "one has no dims: 'e.0.w'",
        ),
    ):
        with pytest.raises(PlanError, match=told):
            ckpt_tools.convert(
                tmp_path / "m.safetensors",
                tmp_path / "o.pt",
                to="torch",
                key_map=write_map(tmp_path, **rules, keep=[".*"]),
            )


@pytest.mark.parametrize("prove", [True, False])
@pytest.mark.parametrize("part", ["wq", "wv"])
def test_a_flipped_bit_in_reordered_rows_is_found(part: str, prove: bool, tmp_path: Path) -> None:
    """No result has them in order, so without the proof by the inverse the tensor is read once more;
    also if one result has them.
    """
    torch.manual_seed(0)
    tensors = {"l.wq": torch.randn(8, 4), "l.wv": torch.randn(8, 4)}
    ckpt_tools.convert(job(tmp_path / "j.pt", tensors, {}, []), tmp_path / "s", to="dcp")
    rules = write_map(
        tmp_path,
        rope=[{"match": "l\\.wq", "heads": 2, "to": "halves"}],
        fuse=[{"match": "l\\.wq", "from": ["l.wq", "l.wv"], "into": "l.both"}],
    )
    how = {"to": "dcp", "key_map": rules, "prove": prove}
    result = ckpt_tools.convert(tmp_path / "s", tmp_path / "good", **how)
    assert any("2 tensors were read twice" in note for note in result.notes) != prove
    shutil.copytree(tmp_path / "s", tmp_path / "stock", ignore=shutil.ignore_patterns("ckpt.*"))
    once = ckpt_tools.convert(tmp_path / "stock", tmp_path / "once", **how)
    # the proof needs their fingerprints, and only the seal has them
    twice = (once, result) if prove else (result, once)
    assert twice[0].read_nbytes == twice[1].read_nbytes + 2 * 8 * 4 * 4
    (file,) = (tmp_path / "s").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(tensors[f"l.{part}"].numpy().tobytes()) + 70] ^= 4
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=f"l\\.{part}|CRC-32"):
        ckpt_tools.convert(tmp_path / "s", tmp_path / "bad", **how)
    assert not (tmp_path / "bad").exists()


def test_moments_of_two_optimizers_with_one_name_are_apart(tmp_path: Path) -> None:
    """After the first rule both have a moment `a.exp_avg`, and the second joins each."""
    values = {name: torch.randn(4, 3) for name in ("model", "x", "y")}
    state: dict[str, Any] = {"model": {"ab": values["model"]}}
    for name in "xy":
        state[name] = {
            "state": {"ab": {"exp_avg": values[name]}},
            "param_groups": [{"lr": 0.1, "params": ["ab"]}],
        }
    torch.save(state, tmp_path / "j.pt")
    rules = write_map(
        tmp_path,
        split=[{"match": "ab", "into": ["a", "b"], "parts": [1, 1]}],
        fuse=[{"match": "a", "from": ["b", "a"], "into": "ba"}],
    )
    got = convert(tmp_path / "j.pt", tmp_path / "o.pt", rules)
    turned = {name: value.roll(2, 0) for name, value in values.items()}
    assert torch.equal(got["model"]["ba"], turned["model"])
    for name in "xy":
        assert torch.equal(got[name]["state"]["ba"]["exp_avg"], turned[name]), name
