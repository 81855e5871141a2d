"""`--quantize compressed-tensors` and `modelopt`: NVFP4 codes in the form of the other tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError
from tests.operations.llamas import llama

F8 = torch.float8_e4m3fn
MODULES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "model.layers.0.self_attn.k_proj"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama whose linear layers are NVFP4, as ModelOpt writes them."""
    folder, model = tmp_path / "modelopt", llama()
    model.save_pretrained(folder)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for number, module in enumerate(MODULES):
        name = f"model.layers.0.{module}"
        rows, columns = tensors[f"{name}.weight"].shape
        tensors[f"{name}.weight"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.rand(rows, columns // 16).mul(400).to(F8)
        tensors[f"{name}.weight_scale_2"] = torch.tensor(0.0003 * (number + 1))
        tensors[f"{name}.input_scale"] = torch.tensor(0.007 / (number + 1))
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": MODELOPT}))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def converted(source: Path, form: str, out: Path, **more: Any) -> Any:
    return ckpt_tools.convert(source, out, to="hf", base=source, quantize=form, **more)


def test_codes_and_scales_stay_and_factors_are_reciprocals(source: Path, tmp_path: Path) -> None:
    done = converted(source, "compressed-tensors", tmp_path / "ct")
    before, after = loaded(source), loaded(tmp_path / "ct")
    for module in MODULES:
        name = f"model.layers.0.{module}"
        assert torch.equal(after[f"{name}.weight_packed"], before[f"{name}.weight"])
        scales = (found[f"{name}.weight_scale"].view(torch.uint8) for found in (before, after))
        assert torch.equal(*scales)
        for new, old in (
            ("weight_global_scale", "weight_scale_2"),
            ("input_global_scale", "input_scale"),
        ):
            assert after[f"{name}.{new}"].shape == (1,)
            assert torch.equal(after[f"{name}.{new}"], 1 / before[f"{name}.{old}"].reshape(1))
        assert (
            not {f"{name}.weight", f"{name}.weight_scale_2", f"{name}.input_scale"} & after.keys()
        )
    plain = [n for n in before if not any(f".{m}." in n for m in MODULES)]
    assert len(plain) > 5 and all(torch.equal(after[n], before[n]) for n in plain)
    assert any(note.startswith("written anew: NVFP4 codes of 4 modules") for note in done.notes)
    assert any("scales of the cache keep their names" in note for note in done.notes)
    told = said(tmp_path / "ct")
    assert (told["quant_method"], told["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
    left = [f"model.layers.0.self_attn.{m}_proj" for m in ("k", "v", "o")]
    assert {"lm_head", "model.layers.1.mlp.up_proj", *left} <= set(told["ignore"])
    assert not {f"model.layers.0.{m}" for m in MODULES} & set(told["ignore"])
    assert told["kv_cache_scheme"]["num_bits"] == 8
    assert told["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert not (tmp_path / "ct" / "hf_quant_config.json").exists()
    assert (
        ckpt_tools.inspect(tmp_path / "ct").extras["quantized"].startswith("4 compressed-tensors")
    )
    assert not ckpt_tools.verify(tmp_path / "ct").problems


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_job_has_the_model_below_a_key(prefix: str, source: Path, tmp_path: Path) -> None:
    weights = {prefix + name: value for name, value in loaded(source).items()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "step", no_dist=True)
    how = {"to": "hf", "base": source, "quantize": "compressed-tensors"}
    ckpt_tools.convert(tmp_path / "step", tmp_path / "job", **how)
    ckpt_tools.convert(source, tmp_path / "files", **how)
    one, two = loaded(tmp_path / "job"), loaded(tmp_path / "files")
    assert one.keys() == two.keys()
    assert all(
        torch.equal(one[n].flatten().view(torch.uint8), two[n].flatten().view(torch.uint8))
        for n in one
    )


def test_the_numbers_are_the_same_but_for_a_rounding(source: Path, tmp_path: Path) -> None:
    converted(source, "compressed-tensors", tmp_path / "ct")
    for folder in (source, tmp_path / "ct"):
        ckpt_tools.merge(folder, tmp_path / f"{folder.name}.safetensors", dtype="fp32")
    one, two = (load_file(tmp_path / f"{name}.safetensors") for name in ("modelopt", "ct"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=3e-7, atol=0.0)


def test_back_again(source: Path, tmp_path: Path) -> None:
    converted(source, "compressed-tensors", tmp_path / "ct")
    converted(tmp_path / "ct", "modelopt", tmp_path / "back")
    before, after = loaded(source), loaded(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith(("weight_scale_2", "input_scale")):
            assert after[name].shape == () and after[name] == 1 / (1 / value)
        else:
            same = after[name].view(torch.uint8) if value.dim() else after[name]
            assert torch.equal(same, value.view(torch.uint8) if value.dim() else value), name
    told = said(tmp_path / "back")
    assert (told["quant_method"], told["quant_algo"]) == ("modelopt", "NVFP4")
    assert told["kv_cache_scheme"] == MODELOPT["kv_cache_scheme"]
    other = json.loads((tmp_path / "back" / "hf_quant_config.json").read_text())["quantization"]
    assert (other["quant_algo"], other["kv_cache_quant_algo"]) == ("NVFP4", "FP8")
    assert other["exclude_modules"] == told["ignore"] == said(tmp_path / "ct")["ignore"]


def test_what_the_config_names_stays_named(source: Path, tmp_path: Path) -> None:
    """An output layer that is tied has no tensor, and patterns have another form."""
    names = ["lm_head", "model.layers.1*", "proj_out"]
    configure(source, {**MODELOPT, "ignore": names})
    done = converted(source, "compressed-tensors", tmp_path / "ct")
    assert not done.left_out and not any("left out" in note for note in done.notes)
    ignored = said(tmp_path / "ct")["ignore"]
    assert {"lm_head", r"re:model\.layers\.1.*", "proj_out"} <= set(ignored)
    configure(tmp_path / "ct", {**said(tmp_path / "ct"), "ignore": [*ignored, "re:(a|b)"]})
    done = converted(tmp_path / "ct", "modelopt", tmp_path / "back")
    assert {*names} <= set(said(tmp_path / "back")["ignore"])
    assert any("are left out: re:(a|b)" in note for note in done.notes)


ONE = {"num_bits": 4, "type": "float", "group_size": 16}
GROUP = {"targets": ["Linear"], "weights": ONE, "input_activations": {**ONE, "num_bits": 8}}
CACHE = {"num_bits": 8, "type": "float", "dynamic": True}


@pytest.mark.parametrize(
    ("form", "told", "error"),
    [
        ("compressed-tensors", {"quant_algo": "W4A8_NVFP4_FP8"}, "W4A8_NVFP4_FP8"),
        ("compressed-tensors", {"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ("compressed-tensors", {"kv_cache_scheme": CACHE}, "a cache of keys and values"),
        ("modelopt", {"config_groups": {"g": GROUP}}, "input_activations: {'num_bits': 8"),
        ("modelopt", {"transform_config": {"R": {}}}, "weights are rotated"),
    ],
)
def test_a_config_that_says_something_else_is_refused(
    form: str, told: dict[str, Any], error: str, source: Path, tmp_path: Path
) -> None:
    if form == "modelopt":
        converted(source, "compressed-tensors", tmp_path / "ct")
        source = tmp_path / "ct"
    configure(source, {**said(source), **told})
    with pytest.raises(PlanError) as found:
        converted(source, form, tmp_path / "out")
    assert error in str(found.value) and not (tmp_path / "out").exists()


def test_a_cache_that_only_modelopts_own_file_tells(source: Path, tmp_path: Path) -> None:
    configure(source, {k: v for k, v in MODELOPT.items() if k != "kv_cache_scheme"})
    converted(source, "compressed-tensors", tmp_path / "ct")
    assert said(tmp_path / "ct")["kv_cache_scheme"]["num_bits"] == 8


def test_experts_that_are_one_tensor_are_refused(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    front = "model.layers.0.feed_forward.experts.gate_up_proj"
    tensors[front] = torch.zeros(2, 32, 16, dtype=torch.uint8)
    tensors[f"{front}_weight_scale"] = torch.ones(2, 32, 2).to(F8)
    tensors[f"{front}_weight_scale_2"] = torch.tensor(0.5)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"experts\.gate_up_proj may be codes, too"):
        converted(source, "compressed-tensors", tmp_path / "out", partial=True)


def test_activations_of_some_modules_alone_are_refused(source: Path, tmp_path: Path) -> None:
    change(source, drop="mlp.up_proj.input_scale")
    with pytest.raises(PlanError, match="only some modules have a factor of activations"):
        converted(source, "compressed-tensors", tmp_path / "out")


def test_options_without_a_meaning_are_refused(source: Path, tmp_path: Path) -> None:
    for more in ({"keep_dtype": ["*norm*"]}, {"resume": True}, {"check": True}):
        with pytest.raises(PlanError, match="--keep-dtype|--quantize is not resumed|--check"):
            converted(source, "compressed-tensors", tmp_path / "out", **more)


def configure(folder: Path, quantization: dict[str, Any]) -> None:
    for manifest in folder.glob("*ckpt.manifest*"):
        manifest.unlink()
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps({**config, "quantization_config": quantization})
    (folder / "config.json").write_text(text)


def change(folder: Path, drop: str = "", **parts: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not drop or not n.endswith(drop)}
    tensors |= {f"model.layers.0.mlp.gate_proj.{n}": t for n, t in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "is 0.0"), (-1.0, "is -1.0"), (float("nan"), "is nan"), (1e-45, "is 1.4")],
)
def test_a_factor_without_a_reciprocal_is_refused(
    value: float, told: str, source: Path, tmp_path: Path
) -> None:
    change(source, weight_scale_2=torch.tensor(value))
    with pytest.raises(
        PlanError, match="has no reciprocal: 'model.layers.0.mlp.gate_proj"
    ) as error:
        converted(source, "compressed-tensors", tmp_path / "out")
    assert told in str(error.value) and not (tmp_path / "out").exists()


def test_what_is_no_nvfp4_of_the_other_tool_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="rewrites NVFP4 codes of compressed-tensors, and"):
        converted(source, "modelopt", tmp_path / "out")
    plain = tmp_path / "plain"
    llama().save_pretrained(plain)
    with pytest.raises(PlanError, match="and no weight is: the weights are numbers"):
        converted(plain, "compressed-tensors", tmp_path / "out")
    with pytest.raises(PlanError, match=r"of NVFP4 codes, modelopt or compressed-tensors"):
        converted(source, "nothing", tmp_path / "out")
    change(source, pre_quant_scale=torch.ones(4))  # AWQ's, which compressed-tensors does not have
    with pytest.raises(PlanError, match="pre_quant_scale|rewrites NVFP4 codes"):
        converted(source, "compressed-tensors", tmp_path / "out")


def test_codes_for_weights_alone(source: Path, tmp_path: Path) -> None:
    change(source, drop=".input_scale")
    converted(source, "compressed-tensors", tmp_path / "ct")
    assert said(tmp_path / "ct")["config_groups"]["group_0"]["input_activations"] is None
    with pytest.raises(PlanError, match="no factors of activations"):
        converted(tmp_path / "ct", "modelopt", tmp_path / "back")


def test_another_cache_is_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 4, "type": "float"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="a cache of keys and values in a form that is not known"):
        converted(source, "compressed-tensors", tmp_path / "out")


def test_a_damaged_factor_is_found(source: Path, tmp_path: Path) -> None:
    ckpt_tools.convert(source, tmp_path / "sealed", to="hf", base=source)
    (path,) = (tmp_path / "sealed").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    factor = load_file(path)["model.layers.0.mlp.gate_proj.weight_scale_2"].numpy().tobytes()
    at = data.index(factor)
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="gate_proj.weight_scale_2"):
        converted(path.parent, "compressed-tensors", tmp_path / "out")
