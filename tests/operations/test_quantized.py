"""Quantized weights come to no harm: codes and scales are never cast alone, averaged or measured.

Each scheme has the names, types and shapes that its own writer gives them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError
from tests.command import run_command

F8, U8, I8, I32 = torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32
BNB4 = "weight.quant_state.bitsandbytes__nf4"


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    data = torch.arange(torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size())
    return (data % 120).to(U8).view(dtype).reshape(shape)


def floats(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 1.7, torch.Size(shape).numel()).reshape(shape) ** 3


# the parts of one weight of 64 rows and 128 columns; what `inspect` says; the method in the config
SCHEMES: dict[str, tuple[dict[str, torch.Tensor], str, str]] = {
    "nf4": (
        {
            "weight": codes(U8, 4096, 1),
            "weight.absmax": codes(U8, 128),
            "weight.quant_map": floats(16),
            "weight.nested_absmax": floats(1),
            "weight.nested_quant_map": floats(256),
            BNB4: codes(U8, 40),
        },
        "bitsandbytes 4-bit, 4 bits",
        "bitsandbytes",
    ),
    "nf4 stored as bf16": (
        {
            "weight": codes(torch.bfloat16, 2048, 1),
            "weight.absmax": floats(128),
            "weight.quant_map": floats(16),
            BNB4: codes(U8, 40),
        },
        "bitsandbytes 4-bit, 4 bits",
        "bitsandbytes",
    ),
    "int8": (
        {"weight": codes(I8, 64, 128), "SCB": floats(64), "weight_format": codes(U8)},
        "bitsandbytes 8-bit, 8 bits",
        "bitsandbytes",
    ),
    "fp8 blocks": (
        {"weight": codes(F8, 64, 128), "weight_scale_inv": floats(1, 1)},
        "fp8 with scales of blocks, 8 bits",
        "fp8",
    ),
    "fp8 blocks, DeepSeek's own names": (
        {"weight": codes(F8, 64, 128), "scale": floats(1, 1)},
        "fp8 with scales of blocks, 8 bits",
        "fp8",
    ),
    "aqlm": (
        {"codes": codes(I8, 64, 16, 1), "codebooks": floats(1, 16, 1, 8), "scales": floats(64, 1)},
        "AQLM",
        "aqlm",
    ),
    "fp8 scales": (
        {"weight": codes(F8, 64, 128), "weight_scale": floats(64, 1), "input_scale": floats(1)},
        "codes with scales, 8 bits",
        "compressed-tensors",
    ),
    "pack-quantized": (
        {
            "weight_packed": codes(I32, 64, 16),
            "weight_scale": floats(64, 1).bfloat16(),
            "weight_shape": torch.tensor([64, 128]),
            "weight_zero_point": codes(I32, 8, 1),
        },
        "compressed-tensors, packed",
        "compressed-tensors",
    ),
    "nvfp4": (
        {
            "weight_packed": codes(U8, 64, 64),
            "weight_scale": codes(F8, 64, 8),
            "weight_global_scale": floats(1),
            "input_global_scale": floats(1),
        },
        "compressed-tensors, packed, 4 bits",
        "compressed-tensors",
    ),
    "modelopt nvfp4": (
        {
            "weight": codes(U8, 64, 64),
            "weight_scale": codes(F8, 64, 8),
            "weight_scale_2": floats(1),
            "input_scale": floats(1),
        },
        "codes with scales, 4 bits",
        "modelopt",
    ),
    "gptq": (
        {
            "qweight": codes(I32, 16, 64),
            "qzeros": codes(I32, 1, 8),
            "scales": floats(1, 64).half(),
            "g_idx": torch.zeros(128, dtype=I32),
        },
        "GPTQ, 4 bits",
        "gptq",
    ),
    "awq": (
        {
            "qweight": codes(I32, 128, 8),
            "qzeros": codes(I32, 1, 8),
            "scales": floats(1, 64).half(),
        },
        "AWQ, 4 bits",
        "awq",
    ),
    "mxfp4": (
        {
            "gate_up_proj_blocks": codes(U8, 2, 64, 4, 16),
            "gate_up_proj_scales": codes(U8, 2, 64, 4),
        },
        "mxfp4, 4 bits",
        "mxfp4",
    ),
    "torchao int4, packed in tiles": (
        {
            "_weight_qdata": codes(I32, 8, 8, 32, 4),
            "_weight_scale_and_zero": floats(4, 64, 2).bfloat16(),
        },
        "torchao, 4 bits",
        "torchao",
    ),
    "torchao int4, shuffled": (
        {
            "_weight_qdata": codes(I8, 64, 64),
            "_weight_group_scale": floats(1, 64).bfloat16(),
            "_weight_group_zero": floats(1, 64).bfloat16(),
            "_weight_act_pre_scale": floats(1),
        },
        "torchao, 4 bits",
        "torchao",
    ),
    "fbgemm, with an upper bound": (
        {
            "weight": codes(F8, 64, 128),
            "weight_scale": floats(64, 1),
            "input_scale_ub": floats(1),
        },
        "codes with scales, 8 bits",
        "fbgemm_fp8",
    ),
    "quanto": (
        {
            "weight._data": codes(I8, 64, 128),
            "weight._scale": floats(64, 1),
            "input_scale": floats(1),
            "output_scale": floats(1),
        },
        "quanto",
        "quanto",
    ),
    "torchao": (
        {"_weight_qdata": codes(I8, 64, 128), "_weight_scale": floats(64, 1)},
        "torchao",
        "torchao",
    ),
}
ROOT = "model.layers.0.mlp.up_proj."


def state(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rest = {"model.embed.weight": floats(8, 4), "model.norm.weight": floats(4)}
    return rest | {ROOT + name: tensor for name, tensor in parts.items()}


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(scheme: str, tmp_path: Path) -> Path:
    """A directory as the scheme's writer leaves it: weights, and a config that names the method."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(state(SCHEMES[scheme][0]), folder / "model.safetensors")
    config = {"hidden_size": 4, "quantization_config": {"quant_method": SCHEMES[scheme][2]}}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"hidden_size": 4}))
    return folder


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(
        a.contiguous().flatten().view(U8), b.contiguous().flatten().view(U8)
    )


CASTS = {
    "merge": lambda src, out: ckpt_tools.merge(src, out / "m.safetensors", dtype="bf16"),
    "safetensors": lambda src, out: ckpt_tools.convert(
        src, out / "m.safetensors", to="safetensors", dtype="bf16"
    ),
    "renamed": lambda src, out: ckpt_tools.convert(
        src, out / "m.safetensors", to="safetensors", dtype="bf16", rename=["weight=w"]
    ),
    "hf": lambda src, out: ckpt_tools.convert(src, out / "m", to="hf", base=src, dtype="bf16"),
    "torch": lambda src, out: ckpt_tools.convert(src, out / "m.pt", to="torch", dtype="bf16"),
    "dcp": lambda src, out: ckpt_tools.convert(src, out / "m", to="dcp", dtype="bf16"),
}


# test_dequantize.py and test_packed.py have what a cast makes of these
NUMBERS = {
    "int8",
    "nvfp4",
    "modelopt nvfp4",
    "awq",
    "mxfp4",
    "fp8 blocks",
    "fp8 blocks, DeepSeek's own names",
    "fp8 scales",
    "fbgemm, with an upper bound",
}


def values(path: Path) -> dict[str, torch.Tensor]:
    with ckpt_tools.open(path) as found:
        return {name: found[name][...].clone() for name in found.names()}


@pytest.mark.parametrize("verb", CASTS)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in NUMBERS], indirect=True)
def test_a_cast_leaves_codes_and_scales_alone(
    verb: str, scheme: str, model: Path, tmp_path: Path
) -> None:
    parts = state(SCHEMES[scheme][0])
    done = CASTS[verb](model, tmp_path)
    assert any("codes and scales belong together" in note for note in done.notes), done.notes
    (path,) = [p for p in tmp_path.iterdir() if p.stem == "m"]
    found = values(path)
    for name, tensor in parts.items():
        new = name.replace("weight", "w") if verb == "renamed" else name
        (mine,) = [t for n, t in found.items() if n.endswith(new.removeprefix("model."))]
        if name.startswith(ROOT):
            assert same(mine, tensor), name
        else:
            assert same(mine, tensor.bfloat16()), name


def test_a_config_that_disagrees_with_the_weights_is_refused(
    scheme: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"are quantized .* does not say so"):
        ckpt_tools.convert(model, tmp_path / "out", to="hf", base=tmp_path / "plain")
    save_file({"model.norm.weight": floats(4)}, tmp_path / "plain.safetensors")
    with pytest.raises(PlanError, match="says that the weights are quantized .* they are not"):
        ckpt_tools.convert(tmp_path / "plain.safetensors", tmp_path / "out", to="hf", base=model)
    config = {"quantization_config": {"quant_method": "another"}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="names the method 'another'.*is quantized otherwise"):
        ckpt_tools.convert(model, tmp_path / "out", to="hf", base=model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("int8", {"load_in_4bit": True}),
        ("nf4", {"load_in_8bit": True}),
        ("gptq", {"bits": 8}),
    ],
    indirect=["scheme"],
)
def test_a_config_of_other_bits_is_refused(
    scheme: str, said: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    config = {"quantization_config": {"quant_method": SCHEMES[scheme][2], **said}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=r"config.json .* says \d bits, and .* has \d"):
        ckpt_tools.convert(model, tmp_path / "out", to="hf", base=model)


@pytest.mark.parametrize("scheme", ["fp8 blocks", "nf4"], indirect=True)
def test_codes_without_their_scales_are_refused(scheme: str, model: Path, tmp_path: Path) -> None:
    for glob in ("*scale_inv", "*quant_map"):
        if any(n.endswith(glob[1:]) for n in SCHEMES[scheme][0]):
            with pytest.raises(PlanError, match="a part of a quantized weight would be left out"):
                ckpt_tools.convert(
                    model, tmp_path / "out", to="hf", base=model, exclude=[glob], partial=True
                )


@pytest.mark.parametrize("where", ["hf_quant_config.json", "quantize_config.json", "text_config"])
def test_any_config_that_names_a_quantization_counts(where: str, tmp_path: Path) -> None:
    save_file({"model.norm.weight": floats(4)}, tmp_path / "plain.safetensors")
    base = tmp_path / "base"
    base.mkdir()
    said: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    config = {"hidden_size": 4} | ({"text_config": said} if where == "text_config" else {})
    (base / "config.json").write_text(json.dumps(config))
    if where != "text_config":
        (base / where).write_text(json.dumps({"bits": 4}))
    with pytest.raises(PlanError, match="says that the weights are quantized .* they are not"):
        ckpt_tools.convert(tmp_path / "plain.safetensors", tmp_path / "out", to="hf", base=base)


@pytest.mark.parametrize("number", ["1", "2"])
def test_codes_of_an_optimizer_are_no_magnitudes(number: str, tmp_path: Path) -> None:
    """bitsandbytes keeps moments in 8 bits: codes, a table, and a scale for each block. These have
    types that it does not write, so their numbers are not known.
    """
    moments = {
        f"state{number}": codes(U8, 64),
        f"qmap{number}": floats(256),
        f"absmax{number}": floats(1).double(),
    }
    torch.save({"optimizer": {"state": {"w": moments}}}, tmp_path / "a.pt")
    moments[f"state{number}"][3] ^= 1
    torch.save({"optimizer": {"state": {"w": moments}}}, tmp_path / "b.pt")
    assert not ckpt_tools.stats(tmp_path / "a.pt").tensors
    (one,) = ckpt_tools.diff(tmp_path / "a.pt", tmp_path / "b.pt").differences
    assert one.is_code and one.num_different == 1 and one.cosine is None


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_scales_of_a_model_are_no_parts_of_its_optimizer(kind: str, tmp_path: Path) -> None:
    """A norm may call its parameter a scale; it is cast, and measured."""
    moments = {
        "torchao": {"codes": codes(U8, 8, 256), "scale": floats(8, 1), "qmap": floats(256)},
        "bitsandbytes": {"state1": codes(U8, 8), "qmap1": floats(256), "absmax1": floats(1)},
    }[kind]
    state = {"exp_avg": moments} if kind == "torchao" else moments
    model = {"norm.scale": floats(8), "w": floats(8, 4)}
    torch.save({"model": model, "optimizer": {"state": {"w": state}}}, tmp_path / "a.pt")
    done = ckpt_tools.merge(tmp_path / "a.pt", tmp_path / "m.safetensors", dtype="bf16")
    assert not done.notes
    got = load_file(tmp_path / "m.safetensors")
    assert {name: t.dtype for name, t in got.items()} == dict.fromkeys(model, torch.bfloat16)
    assert {"model.norm.scale", "model.w"} <= {*ckpt_tools.stats(tmp_path / "a.pt").tensors}
    assert kind in ckpt_tools.inspect(tmp_path / "a.pt").extras["quantized"]


def test_there_is_no_mean_of_them(scheme: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no mean of quantized weights"):
        ckpt_tools.average([model, model], tmp_path / "mean.safetensors")


def test_they_are_named_and_not_measured(scheme: str, model: Path, tmp_path: Path) -> None:
    parts, said, _ = SCHEMES[scheme]
    assert f"1 {said}" in ckpt_tools.inspect(model).extras["quantized"]
    found = ckpt_tools.stats(model)
    plain = ["model.embed.weight", "model.norm.weight"]
    if scheme in NUMBERS:
        assert len(found.tensors) == 3 and {*plain} < {*found.tensors}
    else:
        assert sorted(found.tensors) == plain
        assert any(f"{len(parts)} tensors" in note for note in found.notes), found.notes
    other = tmp_path / "other.safetensors"
    name = next(iter(parts))
    changed = {n: t.clone() for n, t in state(parts).items()}
    changed[ROOT + name].flatten().view(U8)[-1] ^= 1
    save_file(changed, other)
    if (model / "config.json").exists():  # it may tell how codes are packed
        (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    if scheme in NUMBERS:  # they are compared, too; for fp8 and the like, under the same name
        assert ckpt_tools.diff(model, other, atol=1e9).is_same
        *more, one = ckpt_tools.diff(model, other).differences
        assert not one.is_code and one.num_different == 1 and len(more) <= 1
        assert all(found.is_code for found in more) and 0 < one.rel_norm < 1
    else:
        (one, *more) = ckpt_tools.diff(model, other, atol=1e9).differences
        assert one.fqn.endswith(name) and one.is_code and one.num_different == 1 and not more
        assert one.max_abs != one.max_abs and one.cosine is None
    done = run_command("diff", model, other)
    assert done.returncode == 1 and "compared for equality alone" in done.stdout
    shown = json.loads(run_command("report", model, "--json").stdout)["tensors"]
    measured = [t["rms"] for t in shown if t["name"].startswith(ROOT) and t["rms"] is not None]
    assert len(measured) == (scheme in NUMBERS)


def test_a_map_does_not_cut_them(scheme: str, model: Path, tmp_path: Path) -> None:
    name = next(iter(SCHEMES[scheme][0]))
    rule = {"match": re.escape(ROOT + name), "into": ["a", "b"], "parts": [1, 1]}
    (tmp_path / "map.json").write_text(json.dumps({"split": [rule], "keep": [".*"]}))
    if scheme == "fbgemm, with an upper bound":  # a scale for each row: see test_blocks.py
        return
    with pytest.raises(PlanError, match="cannot be cut, joined"):
        ckpt_tools.convert(
            model, tmp_path / "m.safetensors", to="safetensors", key_map=tmp_path / "map.json"
        )


def test_a_save_with_statistics_takes_no_code_for_a_number(tmp_path: Path) -> None:
    """Codes of 4 bits that are stored as bf16 look like NaN."""
    parts = dict(SCHEMES["nf4 stored as bf16"][0])
    parts["weight"] = torch.full((2048, 1), float("nan"), dtype=torch.bfloat16)
    saved: dict[str, Any] = state(parts)
    with CheckpointManager(tmp_path, statistics=True) as checkpoints:
        checkpoints.save(1, {"model": saved}, asynchronous=False)
        assert checkpoints.last_save is not None and not checkpoints.last_save.not_finite
        assert checkpoints.resume({"model": {n: t.clone() for n, t in saved.items()}}) == 1
    (step,) = ckpt_tools.steps(tmp_path)
    assert step.is_finite


def test_what_only_looks_alike_is_cast(tmp_path: Path) -> None:
    """Scales beside weights of a floating-point type are numbers, as in fake quantization."""
    plain = {"a.weight": floats(4, 4), "a.weight_scale": floats(4), "b.scales": floats(2)}
    save_file(plain, tmp_path / "m.safetensors")
    done = ckpt_tools.merge(tmp_path / "m.safetensors", tmp_path / "o.safetensors", dtype="bf16")
    assert not any("codes" in note for note in done.notes)
    found = load_file(tmp_path / "o.safetensors")
    assert all(t.dtype is torch.bfloat16 for t in found.values())


def test_nan_in_scales_and_in_codes_of_fp8_is_told(
    scheme: str, model: Path, tmp_path: Path
) -> None:
    assert ckpt_tools.stats(model).not_finite == []
    parts = SCHEMES[scheme][0]
    first = next(iter(parts))
    for name, tensor in parts.items():
        is_scale = tensor.is_floating_point() and name != first
        if not tensor.numel() or not (is_scale or "float8_e4m3" in str(tensor.dtype)):
            continue
        wrong = {n: t.clone() for n, t in state(parts).items()}
        wrong[ROOT + name].flatten()[-1:].view(U8).fill_(
            0x7F if "float8" in str(tensor.dtype) else 255
        )
        save_file(wrong, tmp_path / "wrong.safetensors")
        found = ckpt_tools.stats(tmp_path / "wrong.safetensors")
        done = run_command("stats", tmp_path / "wrong.safetensors")
        (broken,) = found.not_finite
        if broken in found.tensors:  # the numbers have it
            assert scheme in NUMBERS and not name.startswith("input_")
            assert found.tensors[broken].num_nan > 0
            assert done.returncode == 1 and broken in done.stdout
            continue
        assert found.not_finite == [ROOT + name] and found.broken_parts == {ROOT + name: (1, 0)}
        assert done.returncode == 1 and f"{name}: 1 NaN, 0 infinite" in done.stdout, done.stdout
        told = json.loads(run_command("report", tmp_path / "wrong.safetensors", "--json").stdout)
        assert told["not_finite"] == [ROOT + name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "method", "other"), [((16, 64), "gptq", "awq"), ((128, 8), "awq", "gptq")]
)
def test_gptq_and_awq_have_the_same_names_and_are_told_apart_by_shape(
    shape: tuple[int, int], method: str, other: str, tmp_path: Path
) -> None:
    """128 inputs and 64 outputs of 4 bits. GPTQ packs the inputs, AWQ the outputs."""
    parts = {"qweight": codes(torch.int32, *shape), "qzeros": codes(torch.int32, 4, 8)}
    parts["scales"] = floats(4, 64).half()
    save_file(state(parts), tmp_path / "model.safetensors")
    said = ckpt_tools.inspect(tmp_path / "model.safetensors").extras["quantized"]
    assert f"1 {method.upper()}, 4 bits" in said
    for name in (method, other):
        (tmp_path / name).mkdir()
        config = {"quantization_config": {"quant_method": name, "bits": 4}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    source = tmp_path / "model.safetensors"
    with pytest.raises(PlanError, match="is quantized otherwise"):
        ckpt_tools.convert(source, tmp_path / "out", to="hf", base=tmp_path / other)
    ckpt_tools.convert(source, tmp_path / "out", to="hf", base=tmp_path / method)
    # the weights beside the config are of another shape, and nothing else can tell
    save_file({n: t[:2] for n, t in state(parts).items()}, tmp_path / method / "model.safetensors")
    with pytest.raises(PlanError, match="have other shapes than the result"):
        ckpt_tools.convert(source, tmp_path / "out2", to="hf", base=tmp_path / method)


def test_codes_of_an_unknown_scheme_are_told_and_have_no_mean(tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        parts = {"codes": torch.randint(-99, 99, (8, 8), dtype=I8), "step_size": torch.rand(8)}
        save_file(state(parts), tmp_path / f"{seed}.safetensors")
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    told = ckpt_tools.merge(one, tmp_path / "bf16.safetensors", dtype="bf16").notes
    assert any("1 matrices of integers" in note and ROOT + "codes" in note for note in told), told
    cast = {n: t.dtype for n, t in load_file(tmp_path / "bf16.safetensors").items()}
    assert cast[ROOT + "step_size"] is torch.float32 and cast["model.norm.weight"] is torch.bfloat16
    measured = ckpt_tools.stats(one)
    assert ROOT + "codes" not in measured.tensors and ROOT + "step_size" in measured.tensors
    assert any("1 matrices of integers" in note for note in measured.notes)
    compared = ckpt_tools.diff(one, two)
    (found,) = [d for d in compared.differences if d.fqn == ROOT + "codes"]
    assert found.is_code and found.num_different and found.cosine is None
    assert any("unknown scheme: 1 matrices of integers" in note for note in compared.notes)
    with pytest.raises(PlanError, match="no mean of matrices of integers that differ"):
        ckpt_tools.average([one, two], tmp_path / "mean.safetensors")
    assert not (tmp_path / "mean.safetensors").exists()
    ckpt_tools.average([one, one], tmp_path / "mean.safetensors")


def test_scales_of_the_cache_belong_to_the_quantized_weights_of_the_model(tmp_path: Path) -> None:
    parts = SCHEMES["gptq"][0]  # no config tells how they are packed, so they stay codes
    own = {"model.layers.0.self_attn.k_scale": floats(1), "model.layers.1.v_scale": floats(1)}
    save_file(state(parts) | own, tmp_path / "model.safetensors")
    ckpt_tools.merge(tmp_path / "model.safetensors", tmp_path / "m.safetensors", dtype="bf16")
    got = load_file(tmp_path / "m.safetensors")
    assert all(same(got[name], tensor) for name, tensor in own.items())
    assert got["model.norm.weight"].dtype is torch.bfloat16
    # without quantized weights, it is a parameter like any other
    save_file({"logit_scale": floats(1)}, tmp_path / "plain.safetensors")
    ckpt_tools.merge(tmp_path / "plain.safetensors", tmp_path / "p.safetensors", dtype="bf16")
    assert load_file(tmp_path / "p.safetensors")["logit_scale"].dtype is torch.bfloat16
