"""Scales of blocks go the way of their codes. The oracle computes with numbers in torch."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import PlanError

BLOCK = 128
Weight = tuple[torch.Tensor, torch.Tensor]


def quantized(shape: tuple[int, ...], seed: int, per_row: bool = False) -> Weight:
    """Returns codes, and a scale for each block of 128 × 128, or for each row."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    counts = (*shape[:-2], shape[-2], 1)
    if not per_row:
        counts = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return codes, torch.rand(counts, generator=generator) + 0.5


def numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales
    for dim, size in enumerate(codes.shape):
        if wide.shape[dim] != size:
            each = size if wide.shape[dim] == 1 else BLOCK
            wide = wide.repeat_interleave(each, dim).narrow(dim, 0, size)
    return codes.float() * wide


def written(folder: Path, weights: dict[str, Weight], ending: str) -> Path:
    tensors = {}
    for name, (codes, scales) in weights.items():
        tensors |= {name: codes, f"{name}{ending}": scales}
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "m.safetensors")
    return folder / "m.safetensors"


def mapped(
    source: Path, folder: Path, rules: dict[str, Any], **how: Any
) -> dict[str, torch.Tensor]:
    (folder / "map.json").write_text(json.dumps(rules))
    out = folder / f"out-{len(list(folder.iterdir()))}.safetensors"
    ckpt_tools.convert(source, out, to="safetensors", key_map=folder / "map.json", **how)
    return load_file(out)


def rule_of(kind: str, dim: int, pick: random.Random) -> dict[str, Any]:
    if kind == "stack":
        return {"stack": [{"match": r"w\.(\d)\.weight", "into": "all.weight", "by": 1}]}
    if kind == "fuse":
        names = ["w.0.weight", "w.1.weight"]
        rest = {"keep": [r"w\.[2-9]\.weight"]}
        fuse = {"match": r"w\.0\.weight", "from": names, "into": "both.weight", "dim": dim}
        return {"fuse": [fuse | ({"groups": 2} if pick.random() < 0.3 else {})], **rest}
    if kind == "split":
        rule = {"match": r"w\.(\d)\.weight", "into": [r"a.\1.weight", r"b.\1.weight"]}
        parts = pick.choice([[1, 1], [1, 3], [3, 1]])
        return {"split": [{**rule, "parts": parts, "dim": dim}]}
    return {"transpose": [{"match": r"w\.\d\.weight", "dims": [-2, -1]}]}


@pytest.mark.parametrize("seed", range(24))
def test_a_map_of_codes_is_the_map_of_their_numbers(seed: int, tmp_path: Path) -> None:
    """Where blocks allow it; else it is refused, and nothing is written."""
    pick = random.Random(seed)
    kind, per_row = pick.choice(["stack", "fuse", "split", "transpose"]), pick.random() < 0.4
    dim = pick.choice([0, 1])
    shape = (pick.choice([256, 512, 200]), pick.choice([128, 256, 512, 300]))
    shape = tuple(4 * -(-size // 4) for size in shape)
    weights = {f"w.{n}.weight": quantized(shape, seed * 10 + n, per_row) for n in range(3)}
    ending = "_scale" if per_row else "_scale_inv"
    source, rules = written(tmp_path, weights, ending), rule_of(kind, dim, pick)
    plain = {name: numbers(*found) for name, found in weights.items()}
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "m.safetensors")
    want = mapped(tmp_path / "plain" / "m.safetensors", tmp_path / "plain", rules)
    got, refused = None, ""
    try:
        got = mapped(source, tmp_path, rules)
    except PlanError as error:
        refused = str(error)
    if got is None:
        assert "cannot be cut, joined" in refused
        assert not list(tmp_path.glob("out-*"))
        # it is refused where it has to be: blocks are cut, or are no whole ones
        is_even = all(size % BLOCK == 0 for size in shape)
        assert per_row or not is_even or kind in ("split", "fuse")
        assert not (kind == "stack" or (kind == "transpose" and is_even))
        assert not (per_row and dim == 0 and kind in ("split", "fuse"))
        return
    assert {n for n in got if not n.endswith(ending)} == want.keys()
    assert {n for n in got if n.endswith(ending)} == {f"{n}{ending}" for n in want}
    for name, value in want.items():
        assert got[name].dtype is torch.float8_e4m3fn
        assert torch.equal(numbers(got[name], got[f"{name}{ending}"]), value), name


def test_the_inverse_gives_the_file_back(tmp_path: Path) -> None:
    weights = {f"w.{n}.weight": quantized((256, 384), n) for n in range(4)}
    source = written(tmp_path, weights, "_scale_inv")
    stack = {"match": r"w\.(\d)\.weight", "into": "all.weight", "by": 1}
    unstack = {"match": r"all\.weight", "into": "w.{layer}.weight"}
    there = mapped(source, tmp_path, {"stack": [stack]})
    assert there["all.weight_scale_inv"].shape == (4, 2, 3)
    save_file(there, tmp_path / "there.safetensors")
    back = mapped(tmp_path / "there.safetensors", tmp_path, {"unstack": [unstack]})
    want = load_file(source)
    assert back.keys() == want.keys()
    assert all(torch.equal(back[name], value) for name, value in want.items())


def test_blocks_that_a_map_cuts_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path, {"w.weight": quantized((384, 256), 0)}, "_scale_inv")
    split = {"match": r"w\.weight", "into": ["a.weight", "b.weight"], "parts": [1, 1]}
    rope = {"match": r"w\.weight", "heads": 2, "to": "halves"}
    both = {"match": r"w\.weight", "into": ["a.weight", "b.weight"], "parts": [1, 2]}
    for rules in ({"split": [split]}, {"rope": [rope]}):
        with pytest.raises(PlanError, match="blocks do not allow it") as caught:
            mapped(source, tmp_path, rules)
        assert "--dtype" in str(caught.value.hint)
    got = mapped(source, tmp_path, {"split": [both]})
    assert got["b.weight_scale_inv"].shape == (2, 2)
    numbers_first = mapped(source, tmp_path, {"split": [split]}, dtype="fp32")
    assert numbers_first["a.weight"].dtype is torch.float32


def test_an_fp8_model_in_memory_becomes_the_files_of_the_hub(tmp_path: Path) -> None:
    """The experts of transformers' `FP8Experts`, in a job's checkpoint, and back."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=4,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    memory, hub = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for number, (name, value) in enumerate(model.state_dict().items()):
        is_quantized = "experts." in name or name.endswith(("q_proj.weight", "o_proj.weight"))
        if not is_quantized:
            memory[name] = hub[name] = torch.rand(value.shape)
            continue
        codes, scales = quantized(tuple(value.shape), number)
        memory |= {name: codes, f"{name}_scale_inv": scales}
        front, _, last = name.rpartition(".")
        if "experts." not in name:
            hub |= {name: codes, f"{name}_scale_inv": scales}
        for expert in range(4) if "experts." in name else ():
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for part, c, s in zip(
                parts,
                codes[expert].chunk(len(parts)),
                scales[expert].chunk(len(parts)),
                strict=True,
            ):
                at = f"{front}.{expert}.{part}.weight"
                hub |= {at: c.contiguous(), f"{at}_scale_inv": s.contiguous()}
    dcp.save({"model": memory}, checkpoint_id=tmp_path / "step", no_dist=True)
    base = tmp_path / "base"
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(base)
    told = json.loads((base / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    (base / "config.json").write_text(json.dumps({**told, "quantization_config": method}))
    out = tmp_path / "hf"
    ckpt_tools.convert(tmp_path / "step", out, to="hf", base=base)
    (file,) = out.glob("*.safetensors")
    got = load_file(file)
    assert got.keys() == hub.keys(), got.keys() ^ hub.keys()
    for name, value in hub.items():
        assert torch.equal(got[name].float(), value.float()), name
    assert json.loads((out / "config.json").read_text())["quantization_config"] == method
    ckpt_tools.convert(out, tmp_path / "back", to="dcp", base=base, names="transformers")
    back: dict[str, Any] = {n: torch.empty_like(v) for n, v in memory.items()}
    dcp.load(back, checkpoint_id=tmp_path / "back", no_dist=True)
    for name, value in memory.items():
        assert torch.equal(back[name].float(), value.float()), name
    assert not ckpt_tools.verify(out).problems


@pytest.mark.parametrize("size", [96, 160, 192])
def test_a_config_tells_the_size_of_blocks(size: int, tmp_path: Path) -> None:
    """Counts of scales alone may be those of 128."""
    codes = torch.randn(384, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-384 // size), -(-256 // size)) + 0.5
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w.weight": codes, "w.weight_scale_inv": scales}, folder / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    rule = {"match": r"w\.weight", "into": ["a.weight", "b.weight"], "parts": [1, 1]}
    want = mapped(folder, tmp_path, {"split": [rule]}, dtype="fp32")
    if 192 % size:
        with pytest.raises(PlanError, match="blocks do not allow it"):
            mapped(folder, tmp_path, {"split": [rule]})
        return
    got = mapped(folder, tmp_path, {"split": [rule]})
    for name in ("a.weight", "b.weight"):
        wide = got[f"{name}_scale_inv"].repeat_interleave(size, 0).repeat_interleave(size, 1)
        assert torch.equal(got[name].float() * wide[:192, :256], want[name])


@pytest.mark.parametrize("beside", ["weight_scale_2", "weight_g_idx", "weight_zero_point", "weird"])
def test_weights_of_unknown_meaning_are_not_cut(beside: str, tmp_path: Path) -> None:
    codes, scales = quantized((256, 256), 0)
    tensors = {"w.weight": codes, "w.weight_scale_inv": scales, f"w.{beside}": torch.ones(256)}
    save_file(tensors, tmp_path / "m.safetensors")
    rule = {"match": r"w\.weight", "into": ["a.weight", "b.weight"], "parts": [1, 1]}
    with pytest.raises(PlanError, match="cannot be cut"):
        mapped(tmp_path / "m.safetensors", tmp_path, {"split": [rule], "keep": [".*"]})


def test_rules_for_scales_are_followed(tmp_path: Path) -> None:
    weights = {f"w.{n}.weight": quantized((256, 128), n) for n in range(2)}
    source = written(tmp_path, weights, "_scale_inv")
    rename = [[r"\.weight_scale_inv$", ".factor"]]
    got = mapped(source, tmp_path, {"rename": rename, "keep": [".*"]})
    assert {*got} == {"w.0.weight", "w.1.weight", "w.0.factor", "w.1.factor"}
    got = mapped(
        source, tmp_path, {"drop": [".*_scale_inv"], "keep": [".*"], "rename": [["^w", "v"]]}
    )
    assert {*got} == {"v.0.weight", "v.1.weight"}
    both = [[r"\.weight$", ".W"], [r"\.weight_scale_inv$", ".S"]]
    assert {*mapped(source, tmp_path, {"rename": both})} == {"w.0.W", "w.1.W", "w.0.S", "w.1.S"}
    got = mapped(source, tmp_path, {"rename": [[r"^w\.", "v."]]})
    assert {*got} == {n.replace("w.", "v.", 1) for n in load_file(source)}


def test_a_quantized_weight_is_joined_with_no_plain_one(tmp_path: Path) -> None:
    codes, scales = quantized((256, 256), 0)
    tensors = {"a.weight": codes, "b.weight": codes.clone(), "b.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "m.safetensors")
    for names in (["a.weight", "b.weight"], ["b.weight", "a.weight"]):
        rule = {"match": re.escape(names[0]), "from": names, "into": "c.weight"}
        with pytest.raises(PlanError, match="would consist of a quantized weight, and of another"):
            mapped(tmp_path / "m.safetensors", tmp_path, {"fuse": [rule], "keep": [".*"]})


def test_the_state_of_scales_stays_with_them(tmp_path: Path) -> None:
    codes, scales = quantized((256, 128), 0)
    model = {"w.weight": codes, "w.weight_scale_inv": scales}
    state = {"w.weight_scale_inv": {"exp_avg": torch.rand(scales.shape)}}
    groups = [{"lr": 0.1, "params": ["w.weight_scale_inv"]}]
    job = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(job, checkpoint_id=tmp_path / "step", no_dist=True)
    (tmp_path / "map.json").write_text(json.dumps({"rename": [["^w", "v"]]}))
    ckpt_tools.convert(tmp_path / "step", tmp_path / "x", to="dcp", key_map=tmp_path / "map.json")
    names = ckpt_tools.inspect(tmp_path / "x").catalog.tensors
    assert "model.v.weight_scale_inv" in names
    assert "optimizer.state.v.weight_scale_inv.exp_avg" in names
