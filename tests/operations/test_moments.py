"""Moments of few bits, as a save stores those of torchao's optimizers: their numbers are measured,
compared and converted. NumPy and torch are the oracle here; torchao is in `tests/peers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import PlanError

KINDS = ("8bit", "4bit", "fp8")
NAMES = ("layers.0.weight", "layers.1.weight")


def moment(kind: str, shape: tuple[int, ...], seed: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Returns the parts of a moment, and its numbers."""
    rng = torch.Generator().manual_seed(seed)
    block = 128 if kind == "4bit" else 256
    scale = torch.rand((*shape[:-1], shape[-1] // block), generator=rng)
    wide = scale.repeat_interleave(block, dim=-1)
    if kind == "fp8":
        codes = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn)
        return {"codes": codes, "scale": scale}, codes.float() * wide
    table = torch.randn(16 if kind == "4bit" else 256, generator=rng)
    numbers = torch.randint(0, len(table), shape, generator=rng)
    codes = numbers.to(torch.uint8)
    if kind == "4bit":
        codes = codes[..., 0::2] << 4 | codes[..., 1::2]
    return {"codes": codes, "scale": scale, "qmap": table}, table[numbers] * wide


def step(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes what a save has of a job, and returns the moments' numbers."""
    model, state, want = {}, {}, {}
    for n, name in enumerate(NAMES):
        shape = (6, 512) if n else (2, 3, 256)
        model[name] = torch.randn(shape)
        state[name] = {"step": torch.tensor(3.0)}
        for k, key in enumerate(("exp_avg", "exp_avg_sq")):
            state[name][key], want[f"{name}.{key}"] = moment(kind, shape, 2 * n + k)
    groups = [{"lr": 0.1, "params": list(NAMES)}]
    whole = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=folder, no_dist=True)
    return folder, want


@pytest.mark.parametrize("kind", KINDS)
def test_stats_measure_the_numbers(kind: str, tmp_path: Path) -> None:
    path, want = step(tmp_path / "s", kind)
    result = ckpt_tools.stats(path)
    for name, numbers in want.items():
        found = result.tensors[f"optimizer.state.{name}"]
        assert found.rms == pytest.approx(numbers.square().mean().sqrt().item(), rel=1e-5)
        assert found.max_abs == numbers.abs().max().item()
    assert not any(name.endswith((".codes", ".qmap", ".scale")) for name in result.tensors)
    assert any("dequantized: 4 torchao optimizer" in note for note in result.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_diff_compares_the_numbers(kind: str, tmp_path: Path) -> None:
    """With codes of the same kind, and with float32."""
    path, want = step(tmp_path / "s", kind)
    plain = tmp_path / "plain"
    ckpt_tools.convert(path, plain, to="dcp", optimizer="groups")
    for pair in ((path, plain), (plain, path)):  # the types differ, and no value does
        result = ckpt_tools.diff(*pair)
        assert not result.differences and result.num_equal == 6 and len(result.changes) == 4
    other = {f"optimizer.state.{name}": v.clone() for name, v in want.items()}
    other["optimizer.state.layers.1.weight.exp_avg"][5, 511] += 0.5
    model = {
        name: torch.empty(entry.shape)
        for name, entry in ckpt_tools.inspect(plain).catalog.tensors.items()
    }
    dcp.load(model, checkpoint_id=plain, no_dist=True)
    save_file({**model, **other}, tmp_path / "o.safetensors")
    found = ckpt_tools.diff(path, tmp_path / "o.safetensors", select=["*exp_avg"])
    (one,) = found.differences
    assert one.fqn == "optimizer.state.layers.1.weight.exp_avg" and one.num_different == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["ids", "flat"])
def test_other_names_give_the_numbers(kind: str, optimizer: str, tmp_path: Path) -> None:
    path, want = step(tmp_path / "s", kind)
    out = tmp_path / "o.pt"
    result = ckpt_tools.convert(path, out, to="torch", optimizer=optimizer)
    assert any("dequantized: 4 torchao optimizer" in note for note in result.notes)
    got = torch.load(out)["optimizer"]
    for name, numbers in want.items():
        fqn, _, key = name.rpartition(".")
        value = got["state"][NAMES.index(fqn)][key] if optimizer == "ids" else got[f"state.{name}"]
        assert value.dtype == torch.float32 and torch.equal(value, numbers), name
    # nothing else has changed
    assert torch.equal(torch.load(out)["model"][NAMES[0]], _tensor(path, f"model.{NAMES[0]}"))


def _tensor(path: Path, name: str) -> torch.Tensor:
    state = {name: torch.empty(ckpt_tools.inspect(path).catalog.tensors[name].shape)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[name]


def test_a_key_map_cuts_the_numbers(tmp_path: Path) -> None:
    path, want = step(tmp_path / "s", "8bit")
    (tmp_path / "map.json").write_text(
        '{"split": [{"match": "(.*1)\\\\.weight", "into": ["\\\\1.a", "\\\\1.b"], "parts": [1, 2]}],'
        ' "keep": [".*0.weight"]}'
    )
    out = tmp_path / "o.pt"
    ckpt_tools.convert(path, out, to="torch", key_map=tmp_path / "map.json")
    got = torch.load(out)["optimizer"]["state"]
    assert torch.equal(got["layers.1.b"]["exp_avg_sq"], want["layers.1.weight.exp_avg_sq"][2:])
    assert torch.equal(got["layers.0.weight"]["exp_avg"], want["layers.0.weight.exp_avg"])


def test_a_copy_has_the_codes(tmp_path: Path) -> None:
    path, _ = step(tmp_path / "s", "8bit")
    result = ckpt_tools.convert(path, tmp_path / "o", to="dcp", ranks=2)
    assert not any("dequantized" in note for note in result.notes)
    before, after = (ckpt_tools.inspect(p).catalog.tensors for p in (path, tmp_path / "o"))
    assert before.keys() == after.keys()
    assert ckpt_tools.diff(path, tmp_path / "o").is_same


def test_parts_of_other_shapes_stay_codes(tmp_path: Path) -> None:
    path, _ = step(tmp_path / "s", "8bit")
    state = torch.zeros(6, 3)  # 512 columns are not three blocks
    name = "optimizer.state.layers.1.weight.exp_avg.scale"
    tensors = {
        fqn: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype.name))
        for fqn, entry in ckpt_tools.inspect(path).catalog.tensors.items()
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    save_file({**tensors, name: state}, tmp_path / "s.safetensors")
    result = ckpt_tools.stats(tmp_path / "s.safetensors")
    assert any("1 torchao optimizer stay codes: shapes" in note for note in result.notes)
    with pytest.raises(PlanError, match="stay codes are not named anew"):
        ckpt_tools.convert(
            tmp_path / "s.safetensors", tmp_path / "o.pt", to="torch", optimizer="flat"
        )


def test_a_quantized_model_keeps_what_belongs_to_its_codes(tmp_path: Path) -> None:
    """Scales of activations and of the cache go with the codes, which stay."""
    model = {
        "l.weight": torch.randn(256, 256).to(torch.float8_e4m3fn),
        "l.weight_scale": torch.tensor(2.0),
        "l.input_scale": torch.tensor(3.0),
        "l.k_scale": torch.tensor(4.0),
        "norm.weight": torch.randn(512),
    }
    state = {
        name: {"exp_avg": moment("8bit", tuple(model[name].shape), 1)[0]}
        for name in ("l.weight", "norm.weight")
    }
    groups = [{"lr": 0.1, "params": list(state)}]
    whole = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=tmp_path / "s", no_dist=True)
    ckpt_tools.convert(tmp_path / "s", tmp_path / "o", to="dcp", optimizer="flat")
    found = ckpt_tools.inspect(tmp_path / "o").catalog.tensors
    assert {f"model.{name}" for name in model} <= found.keys()
    assert found["optimizer.state.l.weight.exp_avg"].dtype.name == "float32"
    # a glob for weights of the model is none for their moments
    how = {"optimizer": "groups", "dtype": "bf16", "keep_dtype": ["*norm*"]}
    ckpt_tools.convert(tmp_path / "s", tmp_path / "b", to="dcp", **how)
    found = ckpt_tools.inspect(tmp_path / "b").catalog.tensors
    assert found["model.l.weight"].dtype.name == "bfloat16"
    assert found["model.norm.weight"].dtype.name == "float32"
    assert found["optimizer.state.norm.weight.exp_avg"].dtype.name == "float32"


def test_diff_tells_kinds_of_moments_apart(tmp_path: Path) -> None:
    """Also where all numbers are the same."""
    paths = []
    for kind in ("8bit", "4bit"):
        parts, _ = moment(kind, (4, 256), 0)
        parts["scale"].zero_()
        parts["qmap"].abs_()
        state = {"w": {"exp_avg": parts}}
        whole = {
            "model": {"w": torch.ones(4, 256)},
            "optimizer": {"state": state, "param_groups": [{"params": ["w"]}]},
        }
        paths.append(tmp_path / kind)
        dcp.save(whole, checkpoint_id=paths[-1], no_dist=True)
    result = ckpt_tools.diff(*paths)
    (change,) = result.changes
    assert (change.a_dtype, change.b_dtype) == (
        "torchao optimizer, 8 bits, uint8",
        "torchao optimizer, 4 bits, uint8",
    )
    assert not result.differences


def test_an_optimizer_of_codes_does_not_keep_scales_of_a_model_of_numbers(tmp_path: Path) -> None:
    """8-bit states of bitsandbytes stay codes, and have no part in the model's scales."""
    state = {"state1": torch.zeros(256, 256, dtype=torch.uint8)}
    state |= {"qmap1": torch.zeros(256), "absmax1": torch.zeros(256), "step": torch.tensor(1.0)}
    model = {
        "l.weight": torch.randn(256, 256).to(torch.float8_e4m3fn),
        "l.weight_scale": torch.tensor(2.0),
        "l.k_scale": torch.tensor(3.0),
    }
    groups = [{"params": ["l.weight"]}]
    optimizer = {"state": {"l.weight": state}, "param_groups": groups}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "s.pt")
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "o.pt", to="torch", dtype="bf16")
    got = torch.load(tmp_path / "o.pt")
    assert got["model"].keys() == {"l.weight"}
    assert got["optimizer"]["state"]["l.weight"]["state1"].dtype == torch.uint8


def of_bitsandbytes(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Writes what a save has of bitsandbytes' AdamW8bit, whose blocks run over the flat weight."""
    rng, model, state, want = torch.Generator().manual_seed(seed), {}, {}, {}
    for n, shape in enumerate(((64, 100), (5, 512), (3, 7, 300), (4099,))):
        name = f"{n}.weight"
        model[name], held = torch.zeros(shape), dict[str, torch.Tensor]()
        numel = model[name].numel()
        for key in "12":
            codes = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
            table, scales = (
                torch.randn(256, generator=rng),
                torch.rand(-(-numel // 256), generator=rng),
            )
            held |= {f"state{key}": codes, f"qmap{key}": table, f"absmax{key}": scales}
            wide = scales.repeat_interleave(256)[:numel].reshape(shape)
            want[f"{name}.__bnb_optimizer_quant_state__.state{key}"] = table[codes.long()] * wide
        state[name] = {"step": 3, "__bnb_optimizer_quant_state__": held}
    groups = [{"lr": 0.1, "params": [*model]}]
    whole = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=folder, no_dist=True)
    return want


def test_moments_of_bitsandbytes_are_measured_and_compared(tmp_path: Path) -> None:
    one, two = (of_bitsandbytes(tmp_path / str(seed), seed) for seed in (0, 1))
    result = ckpt_tools.stats(tmp_path / "0")
    for name, numbers in one.items():
        found = result.tensors[f"optimizer.state.{name}"]
        assert found.rms == pytest.approx(numbers.square().mean().sqrt().item(), rel=1e-5)
        assert found.max_abs == numbers.abs().max().item()
    assert any("dequantized: 8 bitsandbytes 8-bit optimizer" in note for note in result.notes)
    differences = {d.fqn: d for d in ckpt_tools.diff(tmp_path / "0", tmp_path / "1").differences}
    for name, numbers in one.items():
        found = differences[f"optimizer.state.{name}"]
        assert found.max_abs == pytest.approx((numbers - two[name]).abs().max().item(), rel=1e-6)
        assert not found.is_code
    # a conversion copies the codes
    ckpt_tools.convert(tmp_path / "0", tmp_path / "copy", to="dcp", ranks=2)
    assert ckpt_tools.diff(tmp_path / "0", tmp_path / "copy").is_same
