"""`convert --to hf --quantize`: against transformers, and against each method's formula in torch."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError
from ckpt_tools.engine.quantize import METHODS, _to_fp4, _to_fp8
from tests.command import run_command, run_job
from tests.jobs import torchrun_command
from tests.operations.llamas import base, llama

transformers: Any = pytest.importorskip("transformers")
F8 = torch.float8_e4m3fn
SHARD = "model-00001-of-00001.safetensors"
GATE = "model.layers.0.mlp.gate_proj"
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def wide(hidden: int = 256, rows: int = 384, layers: int = 2) -> Any:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=rows,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def saved(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Returns a checkpoint of a model, and the directory of its config."""
    model = model.to(dtype)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "src", no_dist=True)
    model.save_pretrained(folder / "base")  # with its names: then nobody asks transformers for them
    return folder / "src", folder / "base"


def quantized(src: Path, base_dir: Path, method: str, **options: Any) -> dict[str, torch.Tensor]:
    out = src.parent / f"out {method}"
    ckpt_tools.convert(src, out, to="hf", base=base_dir, quantize=method, overwrite=True, **options)
    return loaded(out)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


# ---- formulas, one by one ------------------------------------------------------------------------


def every_number() -> torch.Tensor:
    """Returns numbers near all halves between codes, and of all sizes."""
    generator = torch.Generator().manual_seed(0)
    upper = (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32)
    upper = upper[upper.isfinite()]
    near = torch.cat([upper, torch.nextafter(upper, torch.tensor(torch.inf))])
    near = torch.cat([near, torch.nextafter(upper, torch.tensor(-torch.inf))])
    return torch.cat([near, torch.randn(100_000, generator=generator) * 100])


def test_numbers_are_rounded_to_fp8_as_torch_rounds_them() -> None:
    numbers = every_number().clamp(-448, 448).contiguous()
    codes, values = _to_fp8().of(numbers.numpy())
    want = numbers.to(F8)
    assert torch.equal(torch.from_numpy(codes), want.view(torch.uint8))
    got = torch.from_numpy(values)
    assert torch.equal(got.view(torch.int32), want.float().view(torch.int32))


def nearest_fp4(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the code that is nearest; of two, the even one."""
    distances = (numbers.abs().double()[..., None] - FP4[:8].double()).abs()
    best = distances.min(-1, keepdim=True).values
    is_best = distances == best
    even = torch.tensor([True, False] * 4)
    found = torch.where((is_best & even).any(-1), (is_best & even).int().argmax(-1), 0)
    found = torch.where((is_best & even).any(-1), found, is_best.int().argmax(-1))
    return (found + 8 * torch.signbit(numbers)).to(torch.uint8)


def test_numbers_are_rounded_to_the_nearest_code_of_fp4() -> None:
    numbers = every_number().clamp(-6, 6).contiguous()
    codes, values = _to_fp4().of(numbers.numpy())
    want = nearest_fp4(numbers)
    assert torch.equal(torch.from_numpy(codes), want)
    got = torch.from_numpy(values)
    assert torch.equal(got.view(torch.int32), FP4[want.long()].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_fp8_are_those_that_transformers_makes(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        class quantization_config:
            weight_block_size = (128, 128)
            scale_fmt = None

    model = wide()
    model.lm_head.weight.data[:] = 0
    model.model.layers[0].mlp.gate_proj.weight.data[:128, :128] = 0
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e30
    model.model.layers[1].mlp.up_proj.weight.data[:] *= 1e-38
    src, base_dir = saved(model, tmp_path, dtype)
    got = quantized(src, base_dir, "fp8-block")
    state, seen = model.state_dict(), 0
    for name, tensor in state.items():
        is_linear = "_proj" in name
        if not is_linear:
            assert torch.equal(got.pop(name), tensor), name
            continue
        want = Fp8Quantize(Quantizer())._quantize_one(name, tensor)
        scale = got.pop(f"{name}_scale_inv")
        is_finite = (448 / tensor.float().abs().max()).isfinite()
        if is_finite:  # theirs is NaN times 0 for smaller numbers
            assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name
            assert torch.equal(scale, want[f"{name}_scale_inv"]), name
        else:
            assert not got[name].float().any()
        del got[name]
        seen += 1
    assert seen == 14
    assert not got
    said = json.loads((tmp_path / "out fp8-block" / "config.json").read_text())
    assert said["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize("shape", [(96, 160), (130, 260), (1, 700), (257, 128)])
def test_blocks_at_the_end_have_scales_of_their_own(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(shape, generator=generator)
    found = METHODS["fp8-block"].compute(numbers.numpy(), ckpt_tools.core.dtypes.BY_NAME["float32"])
    codes = torch.from_numpy(found.codes).view(F8).reshape(shape).float()
    scales = torch.from_numpy(found.scales).view(torch.float32)
    rows, columns = (-(-n // 128) for n in shape)
    scales = scales.reshape(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            most = numbers[at].abs().max()
            torch.testing.assert_close(scales[row, column], most / 448)
            want = (numbers[at] / scales[row, column]).to(F8).float()
            assert (codes[at] - want).abs().max() <= want.abs().max() / 8  # the next code at most
            assert ((codes[at] - want) != 0).float().mean() < 0.01
    numbers64 = numbers.double()
    wide_scales = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)
    error = (codes * wide_scales[:, : shape[1]]).double() - numbers64
    assert found.error == pytest.approx(float(error.square().sum()), rel=1e-4)
    assert found.norm == pytest.approx(float(numbers64.square().sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("fp8-channel", torch.bfloat16),
        ("fp8-channel", torch.float16),
        ("int8-channel", torch.bfloat16),
        ("int8-channel", torch.float32),
    ],
)
def test_channels_have_one_scale_each(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = wide()
    model.model.layers[0].mlp.gate_proj.weight.data[3] = 0
    src, base_dir = saved(model, tmp_path, dtype)
    got = quantized(src, base_dir, method)
    for name, tensor in model.state_dict().items():
        if "_proj" not in name:
            continue
        most, half = tensor.float().abs().amax(1, keepdim=True), 448 if "fp8" in method else 127.5
        scale = (most / half).to(dtype)
        scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
        assert got[f"{name}_scale"].dtype == dtype
        assert torch.equal(got[f"{name}_scale"], scale)
        ratio = tensor.float() / scale.float()
        if "fp8" in method:
            want = ratio.clamp(-448, 448).to(F8).view(torch.uint8)
        else:
            want = ratio.round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
        assert torch.equal(got[name].view(torch.uint8), want), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_has_a_power_of_two_for_each_32_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    model = wide()
    gate = model.model.layers[0].mlp.gate_proj.weight.data
    gate[0] = 0
    gate[1, :32] = torch.linspace(0, 7, 32)
    gate[2, :32] = 1e-38
    src, base_dir = saved(model, tmp_path, dtype)
    got = quantized(src, base_dir, "mxfp4")
    for name, tensor in model.state_dict().items():
        if "_proj" not in name:
            continue
        groups = tensor.float().reshape(len(tensor), -1, 32)
        most = groups.abs().amax(-1).double()
        power = torch.where(most > 0, torch.floor(torch.log2(most.clamp_min(1e-300))), -200.0)
        power += (most >= 1.75 * 2.0**power).double()
        scale = (power - 2 + 127).clamp(0, 254)
        front = name.removesuffix(".weight")
        assert torch.equal(got[f"{front}.weight_scale"], scale.to(torch.uint8)), name
        ratio = (groups.double() * 2.0 ** (127 - scale)[..., None]).clamp(-6, 6).float()
        codes = nearest_fp4(ratio).reshape(len(tensor), -1)
        assert torch.equal(got[f"{front}.weight_packed"], codes[:, ::2] | codes[:, 1::2] << 4), name
        assert name not in got


# ---- what goes along, and what does not ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_the_numbers_come_back_within_the_error_that_is_told(method: str, tmp_path: Path) -> None:
    model = wide()
    src, base_dir = saved(model, tmp_path)
    out = tmp_path / "out"
    told = ckpt_tools.convert(src, out, to="hf", base=base_dir, quantize=method)
    ckpt_tools.merge(out, tmp_path / "back.safetensors", dtype="fp32")
    back, state = load_file(tmp_path / "back.safetensors"), model.state_dict()
    assert back.keys() == state.keys()
    assert set(told.quantization_errors) == {name for name in state if "_proj" in name}
    for name, error in told.quantization_errors.items():
        own = (back[name].double() - state[name].double()).norm() / state[name].double().norm()
        assert error == pytest.approx(float(own), rel=1e-4)
        assert 0.001 < error < 0.2
    assert run_command("verify", str(out)).returncode == 0
    again = tmp_path / "again"
    ckpt_tools.convert(src, again, to="hf", base=base_dir, quantize=method)
    assert (again / SHARD).read_bytes() == (out / SHARD).read_bytes()


@pytest.mark.slow
def test_transformers_loads_blocks_of_fp8(tmp_path: Path) -> None:
    model = wide()
    src, base_dir = saved(model, tmp_path)
    quantized(src, base_dir, "fp8-block")
    kind = type(model)
    got, info = kind.from_pretrained(
        tmp_path / "out fp8-block", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    plain = tmp_path / "plain"
    ckpt_tools.convert(
        tmp_path / "out fp8-block", plain, to="hf", base=tmp_path / "out fp8-block", dtype="bf16"
    )
    want = kind.from_pretrained(plain, dtype=torch.bfloat16).state_dict()
    state = got.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(state[name], want[name]) for name in want)


@pytest.mark.slow
def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        moe_intermediate_size=128,
        intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    src, base_dir = saved(model, tmp_path)
    sealed = tmp_path / "sealed"
    ckpt_tools.reshard(src, sealed, to_ranks=2)
    got = quantized(sealed, base_dir, "fp8-block")
    experts = {n for n in got if ".experts." in n and n.endswith(".weight")}
    assert len(experts) == 12
    assert all(got[name].dtype == F8 for name in experts)
    assert got["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    said = json.loads((tmp_path / "out fp8-block" / "config.json").read_text())
    left = said["quantization_config"]["modules_to_not_convert"]
    assert left == ["lm_head", "model.layers.0.mlp.gate"]  # the output layer is tied, so not there
    again, info = type(model).from_pretrained(
        tmp_path / "out fp8-block", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    own, theirs = model.state_dict()[name].float(), again.state_dict()[name].float()
    assert 0.01 < (own - theirs).norm() / own.norm() < 0.04
    # each bit flip is found, also in tensors that are cut into experts
    for file in sorted(sealed.glob("*.distcp")):
        data = bytearray(file.read_bytes())
        for at in (len(data) // 3, len(data) // 2):
            data[at] ^= 4
            file.write_bytes(data)
            with pytest.raises(IntegrityError):
                quantized(sealed, base_dir, "fp8-block")
            data[at] ^= 4
        file.write_bytes(data)
    quantized(sealed, base_dir, "fp8-block")


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_flipped_bit_is_found(is_sealed: bool, tmp_path: Path) -> None:
    model = wide()
    src, base_dir = saved(model, tmp_path)
    if is_sealed:
        ckpt_tools.reshard(src, tmp_path / "sealed", to_ranks=1)
        src = tmp_path / "sealed"
    (file,) = src.glob("*.distcp")
    weight = model.model.layers[1].mlp.down_proj.weight.data
    data = bytearray(file.read_bytes())
    at = data.find(weight.view(torch.uint8).numpy().tobytes())
    assert at > 0
    data[at + 1000] ^= 1
    file.write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(IntegrityError):
        quantized(src, base_dir, "fp8-block")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.slow
def test_ranks_share_the_work(tmp_path: Path) -> None:
    src, base_dir = saved(wide(hidden=512, rows=2048), tmp_path)
    for method in ("fp8-block", "mxfp4"):
        alone, shared = tmp_path / f"alone {method}", tmp_path / f"shared {method}"
        words = ("--to", "hf", "--base", str(base_dir), "--quantize", method, "--json")
        told = json.loads(run_command("convert", str(src), str(alone), *words).stdout)
        command = torchrun_command(
            2, "-m", "ckpt_tools", "convert", src, shared, *words, is_forked=False
        )
        done = run_job(command, timeout=300)
        for name in (SHARD, "config.json"):
            assert (alone / name).read_bytes() == (shared / name).read_bytes()
        errors = json.loads(done.stdout)["quantization_errors"]
        assert errors == pytest.approx(told["quantization_errors"])
        assert len(errors) == 14


@pytest.mark.slow
def test_codes_become_other_codes(tmp_path: Path) -> None:
    src, base_dir = saved(wide(), tmp_path)
    quantized(src, base_dir, "fp8-block")
    first = tmp_path / "out fp8-block"
    with pytest.raises(PlanError, match="these weights are codes"):
        quantized(first, first, "int8-channel")
    second = quantized(first, first, "int8-channel", dtype="bf16")
    ckpt_tools.merge(first, tmp_path / "numbers.safetensors", dtype="fp32")
    numbers = load_file(tmp_path / "numbers.safetensors")[f"{GATE}.weight"]
    scale = (numbers.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    want = (numbers / scale.float()).round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(second[f"{GATE}.weight_scale"], scale)
    assert torch.equal(second[f"{GATE}.weight"], want)
    data = bytearray((first / SHARD).read_bytes())
    data[-100_000] ^= 1
    (first / SHARD).write_bytes(data)
    with pytest.raises(IntegrityError):
        quantized(first, first, "int8-channel", dtype="bf16")


@pytest.mark.slow
def test_a_mean_is_quantized(tmp_path: Path) -> None:
    model, other = wide(), wide()
    for value in other.parameters():
        value.data *= 3
    first, base_dir = saved(model, tmp_path / "a", torch.float32)
    second, _ = saved(other, tmp_path / "b", torch.float32)
    out = tmp_path / "out"
    options: dict[str, Any] = {"to": "hf", "base": base_dir, "quantize": "int8-channel"}
    ckpt_tools.average([first, second], out, **options)
    weight = 2 * model.state_dict()[f"{GATE}.weight"]
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    got = loaded(out)
    torch.testing.assert_close(got[f"{GATE}.weight_scale"], scale)
    want = (weight / got[f"{GATE}.weight_scale"]).round().clamp(-128, 127)
    assert (got[f"{GATE}.weight"].float() - want).abs().max() <= 1


def test_weights_can_stay_as_they_are(tmp_path: Path) -> None:
    src, base_dir = saved(wide(), tmp_path, torch.float32)
    out = tmp_path / "out"
    words = ("--to", "hf", "--base", str(base_dir), "--quantize", "fp8-channel", "--dtype", "bf16")
    done = run_command("convert", str(src), str(out), *words, "--keep-dtype", "*.o_proj.weight")
    got = loaded(out)
    assert got["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float32
    assert got["model.norm.weight"].dtype == torch.bfloat16
    assert got[f"{GATE}.weight_scale"].dtype == torch.bfloat16
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in (0, 1))]
    assert "quantized: 12 weights of linear layers (fp8-channel)" in done.stdout
    assert "not quantized: lm_head, model.layers.0.self_attn.o_proj" in done.stdout
    assert "largest errors of codes" in done.stdout


@pytest.mark.slow
def test_what_does_not_fill_blocks_stays_and_is_told(tmp_path: Path) -> None:
    src, base_dir = saved(wide(hidden=256, rows=208), tmp_path)
    for method, why in (("fp8-block", "128 rows or columns"), ("mxfp4", "32 columns")):
        out = tmp_path / method
        told = ckpt_tools.convert(src, out, to="hf", base=base_dir, quantize=method)
        note = next(note for note in told.notes if "do not fill them" in note)
        assert why in note
        assert "model.layers.0.mlp.down_proj.weight" in note
        assert loaded(out)["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
        said = json.loads((out / "config.json").read_text())["quantization_config"]
        left = said.get("ignore", said.get("modules_to_not_convert"))
        assert "model.layers.1.mlp.down_proj" in left
    # one block that is not full is one scale
    src, base_dir = saved(wide(hidden=64, rows=48), tmp_path)
    got = quantized(src, base_dir, "fp8-block")
    assert got[f"{GATE}.weight_scale_inv"].shape == (1, 1)
    src, base_dir = saved(wide(hidden=80, rows=48), tmp_path)
    with pytest.raises(PlanError, match="no weight of a linear layer") as caught:
        ckpt_tools.convert(src, tmp_path / "b", to="hf", base=base_dir, quantize="mxfp4")
    assert "32 columns do not fill them: model.layers.0" in str(caught.value.hint)


class Flipping(MemoryFileSystem):
    """A store of which each part comes with a flipped bit when it is first read."""

    protocol, store, pseudo_dirs = "flipping", {}, [""]
    wrong: ClassVar[dict[tuple[str, int], int]] = {}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        data = bytearray(super().cat_file(path, start=start, end=end, **more))
        key = path, start or 0
        if len(data) > 30_000 and key not in self.wrong:
            data[len(data) // 3] ^= 0x40
            self.wrong[key] = len(data)
        return bytes(data)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("flipping://").strip("/")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp8-channel", "mxfp4"])
def test_a_second_attempt_computes_everything_anew(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = wide(hidden=4096, rows=2080, layers=1)  # units and parts of files end apart
    _, base_dir = saved(model, tmp_path)
    ckpt_tools.convert(base_dir, tmp_path / "sealed", to="hf", base=base_dir)
    want = quantized(tmp_path / "sealed", base_dir, method, jobs=1)
    fsspec.register_implementation("flipping", Flipping, clobber=True)
    fs = fsspec.filesystem("flipping")
    for file in (tmp_path / "sealed").iterdir():
        fs.pipe(f"/{method}/{file.name}", file.read_bytes())
    Flipping.wrong.clear()
    out = tmp_path / "out"
    ckpt_tools.convert(f"flipping://{method}", out, to="hf", base=base_dir, quantize=method, jobs=1)
    assert Flipping.wrong, "no bit was flipped"
    assert "right when read again" in caplog.text
    got = loaded(out)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def config_of(kind: str) -> Any:
    small: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "image_size": 32,
        "patch_size": 16,
        "num_labels": 3,
        "pad_token_id": 0,
        "num_experts": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "state_size": 16,
    }
    return getattr(transformers, f"{kind}Config")(**small)


# what is quantized and what stays, in files; one regular expression each
FAMILIES = {
    "LlamaForSequenceClassification": ("Llama", r"model\.layers\.0\..*_proj", r"score"),
    "ViTForImageClassification": (
        "ViT",
        r"vit\.encoder\.layer\.0\..*(dense|query|key|value)",
        r"classifier",
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2Moe",
        r"model\.layers\.0\..*_proj",
        r"lm_head|.*\.mlp\.(gate|shared_expert_gate)",
    ),
    "MambaForCausalLM": (
        "Mamba",
        r"backbone\.layers\.0\.mixer\.(in|x|dt|out)_proj",
        r"lm_head|.*mixer\.conv1d",
    ),
    "BertForMaskedLM": ("Bert", r"bert\.encoder\.layer\.0\..*(dense|query|key|value)", r"cls\..*"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_linear_layers_are_found_under_the_names_of_files(kind: str, tmp_path: Path) -> None:
    of, inside, outside = FAMILIES[kind]
    torch.manual_seed(5)
    model = getattr(transformers, kind)(config_of(of)).eval()
    _, base_dir = saved(model, tmp_path)
    got = quantized(base_dir, base_dir, "fp8-channel")
    state = loaded(base_dir)
    seen = [n.removesuffix(".weight_scale") for n in got if n.endswith(".weight_scale")]
    assert seen
    assert {n for n in seen if re.fullmatch(inside, n)} == set(seen)
    linear = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    apart = [n for n in linear if re.fullmatch(outside, n)]
    assert len([n for n in seen if ".experts." not in n]) + len(apart) == len(linear)
    assert all(got[f"{n}.weight"].dtype == F8 for n in seen)
    assert all(
        got[n].dtype == state[n].dtype for n in state if n.removesuffix(".weight") not in seen
    )
    said = json.loads((base_dir.parent / "out fp8-channel" / "config.json").read_text())
    ignored = said["quantization_config"]["ignore"]
    assert set(apart) <= {*ignored}
    names = {*seen, *linear} - {*apart}
    assert not [n for n in names for i in ignored if n == i or n.startswith(f"{i}.")]


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("fp8-block", torch.nan, "numbers that are infinite or NaN"),
        ("mxfp4", torch.inf, "numbers that are infinite or NaN"),
        ("int8-channel", 1e9, "scales that are too large for float16"),
    ],
)
def test_numbers_that_have_no_codes_are_refused(
    method: str, value: float, message: str, tmp_path: Path
) -> None:
    model = wide()
    model.model.layers[1].mlp.down_proj.weight.data[200, 100] = value
    src, base_dir = saved(model, tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(PlanError, match=f"{message}: 'model.layers.1.mlp.down_proj.weight'"):
        quantized(src, base_dir, method, dtype="fp16")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "gptq"}, "needs calibration"),
        ({"quantize": "int4"}, "expected one of fp8-block, fp8-channel, int8-channel, mxfp4"),
        ({"quantize": "mxfp4", "base": None}, "needs --base"),
        ({"quantize": "mxfp4", "check": True}, "--check compares"),
        ({"quantize": "mxfp4", "resume": True}, "not resumed"),
        ({"quantize": "mxfp4", "to": "safetensors", "base": None}, "--quantize is for --to hf"),
        ({"quantize": "mxfp4", "keep_dtype": ["nothing*"]}, "nothing"),
        ({"quantize": "mxfp4", "keep_dtype": ["*_proj.weight"]}, "no weight of a linear layer"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    src, base_dir = saved(llama(), tmp_path)
    options = {"to": "hf", "base": base_dir} | options
    dst = tmp_path / ("out.safetensors" if options["to"] == "safetensors" else "out")
    with pytest.raises(PlanError, match=message.replace("*", r"\*")):
        ckpt_tools.convert(src, dst, **options)
    assert not dst.exists()


@pytest.mark.slow
def test_nothing_says_which_layers_are_linear(tmp_path: Path) -> None:
    model = llama()
    src, _ = saved(model, tmp_path)
    shutil.rmtree(tmp_path / "base")
    folder = base(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Unknown"]}))
    with pytest.raises(PlanError, match="cannot say which layers"):
        ckpt_tools.convert(
            src, tmp_path / "out", to="hf", base=folder, quantize="mxfp4", partial=True
        )
