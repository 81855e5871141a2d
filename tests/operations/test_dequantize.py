"""`--dtype` turns codes of fp8 into numbers: against torch, and against the formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import ckpt_tools
from ckpt_tools import IntegrityError
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.engine.kernels import Bytes, cast
from tests.command import run_command
from tests.operations.llamas import base, llama

F8, E5, E8, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8
BLOCK = 128


def expanded(scales: torch.Tensor, shape: tuple[int, ...], block: int = BLOCK) -> torch.Tensor:
    """Returns a scale for each element, by the formula of blocks."""
    pairs = zip(shape, scales.shape, strict=True)
    index = [torch.arange(n) // (n if g == 1 else 1 if g == n else block) for n, g in pairs]
    return scales.float()[torch.meshgrid(*index, indexing="ij")]


def codes_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Returns codes of every kind, without NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    return (values * 20).to(dtype) if dtype is I8 else values.to(dtype)


def merged(tensors: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    save_file(tensors, folder / "model.safetensors")
    options = {"dtype": "fp32"} | options
    done = ckpt_tools.merge(
        folder / "model.safetensors", folder / "out.safetensors", overwrite=True, **options
    )
    return load_file(folder / "out.safetensors"), done.notes


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_every_code_has_the_value_that_torch_gives_it(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(getattr(torch, name)).float()
    got = torch.empty(256)
    into: Bytes = got.view(torch.uint8).numpy()
    cast(codes.numpy(), BY_NAME[name], into, BY_NAME["float32"])
    assert torch.equal(got.isnan(), want.isnan())
    is_number = ~want.isnan()
    assert torch.equal(got[is_number].view(torch.int32), want[is_number].view(torch.int32))


@pytest.mark.parametrize("shape", [(128, 128), (130, 260), (1, 700), (513, 129), (384, 1)])
def test_blocks_are_what_torch_reads(shape: tuple[int, int], tmp_path: Path) -> None:
    counts = [-(-n // BLOCK) for n in shape]
    tensors = {
        "model.x.weight": codes_of(F8, *shape),
        "model.x.weight_scale_inv": torch.rand(counts) + 0.1,
        "model.norm.weight": torch.randn(5),
    }
    got, notes = merged(tensors, tmp_path)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    want = {"model.x.weight": torch.empty(shape), "model.norm.weight": torch.empty(5)}
    reader = QuantizedHuggingFaceStorageReader(
        path=str(tmp_path), target_dtype=torch.float32, block_size=BLOCK, thread_count=1
    )
    (tmp_path / "out.safetensors").rename(tmp_path / "out")
    dcp.load(want, storage_reader=reader, no_dist=True)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert any(note.startswith("dequantized: 1 fp8 with scales of blocks") for note in notes)


def test_the_worked_examples(tmp_path: Path) -> None:
    rows, columns = torch.arange(130)[:, None], torch.arange(260)
    codes = (((260 * rows + columns) % 7) - 3).float().to(F8)
    scales = torch.tensor([[0.5, 0.25, 2.0], [1.0, 4.0, 0.0625]])
    got, _ = merged({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path)
    assert got["a.weight"][0, 0] == -1.5 and got["a.weight"][129, 257] == -0.125
    codes = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(F8)
    got, _ = merged({"a.weight": codes, "a.weight_scale": torch.tensor([0.25])}, tmp_path)
    assert got["a.weight"].tolist() == [[0.25, -0.5], [0.125, 112.0]]


KINDS: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]] = {}


def add_kind(
    name: str, codes: torch.Tensor, scales: torch.Tensor, part: str = "_scale", block: int = BLOCK
) -> None:
    shape = scales.reshape(*scales.shape, *(1,) * (codes.dim() - scales.dim()))
    if scales.numel() == 1:
        shape = scales.reshape((1,) * codes.dim())
    KINDS[name] = (codes, {part: scales}, codes.float() * expanded(shape, codes.shape, block))


add_kind("one scale", codes_of(F8, 40, 300), torch.tensor(0.3))
add_kind("rows", codes_of(F8, 40, 300), torch.rand(40, 1) + 0.1)
add_kind("rows, flat", codes_of(F8, 40, 300), torch.rand(40) + 0.1)
add_kind("rows in bf16", codes_of(F8, 40, 300), (torch.rand(40, 1) + 0.1).bfloat16())
add_kind("e5m2", codes_of(E5, 40, 300), torch.rand(40, 1) + 0.1)
add_kind("experts", codes_of(F8, 3, 200, 300), torch.rand(3, 2, 3) + 0.1, "_scale_inv")
add_kind("powers of two", codes_of(F8, 200, 300), (torch.rand(2, 3) + 0.1).to(E8), "_scale_inv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_kind_in_each_layout(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    codes, scales, want = KINDS[kind]
    tensors = {"a.weight": codes} | {f"a.weight{part}": value for part, value in scales.items()}
    got, _ = merged(tensors, tmp_path, dtype=str(dtype))
    assert got.keys() == {"a.weight"} and got["a.weight"].dtype is dtype
    assert torch.equal(got["a.weight"], want.to(dtype))
    source = tmp_path / "model.safetensors"
    for to, name in (("dcp", "d"), ("torch", "t.pt"), ("safetensors", "s.safetensors")):
        ranks = {"ranks": 3} if to == "dcp" else {}
        ckpt_tools.convert(source, tmp_path / name, to=to, dtype=str(dtype), **ranks)
        with ckpt_tools.open(tmp_path / name) as found:
            assert list(found.names()) == ["a.weight"]
            assert torch.equal(torch.as_tensor(found["a.weight"][...]), want.to(dtype))


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    block=st.sampled_from([32, 64, 128]),
    ranks=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_on_any_number_of_ranks(
    rows: int, columns: int, block: int, ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shapes")
    counts = -(-rows // block), -(-columns // block)
    codes, scales = codes_of(F8, rows, columns), torch.rand(counts) + 0.1
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    (folder / "model").mkdir()
    save_file(tensors, folder / "model" / "model.safetensors")
    config = {"quantization_config": {"weight_block_size": [block, block]}}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    ckpt_tools.convert(folder / "model", folder / "out", to="dcp", ranks=ranks, dtype="fp32")
    with ckpt_tools.open(folder / "out") as found:
        got = torch.as_tensor(found["a.weight"][...])
    assert torch.equal(got, codes.float() * expanded(scales, (rows, columns), block))


UNCLEAR = (
    ((90, 300), (4, 11), "_scale_inv"),  # of no block that fits
    ((130, 320), (3, 5), "_scale_inv"),  # blocks of 64, and no config says so
    ((192, 192), (2, 2), "_scale"),  # blocks of unknown size
    ((192, 64), (2,), "_scale"),  # joined of two
    ((64, 192), (64, 2), "_scale"),  # groups
    ((3, 192, 64), (3, 2), "_scale"),
)


def test_shapes_that_do_not_tell_the_blocks_leave_the_codes(tmp_path: Path) -> None:
    for shape, scales, part in UNCLEAR:
        tensors = {"a.weight": codes_of(F8, *shape), f"a.weight{part}": torch.rand(scales)}
        got, notes = merged(tensors, tmp_path)
        assert got.keys() == tensors.keys() and got["a.weight"].dtype is F8
        assert any("codes and scales belong together" in note for note in notes)


@pytest.mark.parametrize("where", ["top", "text", "compressed-tensors"])
def test_a_config_tells_the_blocks(where: str, tmp_path: Path) -> None:
    said: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [96, 96]}
    if where == "compressed-tensors":
        said = {"config_groups": {"group_0": {"weights": {"block_structure": [96, 96]}}}}
    config = {"quantization_config": said}
    config = {"text_config": config} if where == "text" else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    codes, scales = codes_of(F8, 192, 200), torch.rand(2, 3) + 0.1
    got, _ = merged({"a.weight": codes, "a.weight_scale": scales}, tmp_path)
    assert torch.equal(got["a.weight"], codes.float() * expanded(scales, (192, 200), 96))
    # a config that contradicts the shapes
    codes, scales = codes_of(F8, 200, 150), torch.rand(2, 2) + 0.1
    got, _ = merged({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path)
    assert got["a.weight"].dtype is F8


@pytest.mark.parametrize(
    "other",
    "weight_zero_point zero_point weight_g_idx weight_offset pre_quant_scale weight_global_scale"
    " weight_scale_2".split(),
)
def test_weights_with_another_formula_stay_codes(other: str, tmp_path: Path) -> None:
    tensors = {
        "a.weight": codes_of(F8, 40, 30),
        "a.weight_scale": torch.rand(40, 1),
        f"a.{other}": torch.ones(40, 1),
    }
    got, _ = merged(tensors, tmp_path)
    assert got.keys() == tensors.keys() and got["a.weight"].dtype is F8


def test_int8_stays_codes(tmp_path: Path) -> None:
    """They may be two numbers of 4 bits each, as in ChatGLM-6B-int4."""
    tensors = {"a.weight": codes_of(I8, 64, 32), "a.weight_scale": torch.rand(64)}
    got, _ = merged(tensors, tmp_path)
    assert got.keys() == tensors.keys() and got["a.weight"].dtype is I8


@pytest.mark.parametrize("scales", [(64, 1), (64,), (1,), (64, 8)])
def test_int8_of_compressed_tensors_becomes_numbers(
    scales: tuple[int, ...], tmp_path: Path
) -> None:
    """Its config tells that a code is one symmetric number of 8 bits."""
    how = {"num_bits": 8, "type": "int", "symmetric": True}
    if scales[-1] == 8:
        how["group_size"] = 32
    group = {"targets": ["Linear"], "weights": how}
    said = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    codes = torch.arange(-128, 128).to(I8).repeat(64, 1)
    tensors = {"a.weight": codes, "a.weight_scale": torch.rand(scales) + 0.1}
    for dtype in (torch.float32, torch.bfloat16):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
        got, notes = merged(tensors, tmp_path, dtype=str(dtype))
        factor = tensors["a.weight_scale"].reshape(-1, scales[-1] if len(scales) > 1 else 1)
        factor = factor.repeat_interleave(256 // factor.shape[1], 1)
        assert torch.equal(got["a.weight"], (codes.float() * factor).to(dtype))
        assert any(note.startswith("dequantized: 1 codes with scales") for note in notes), notes
    for more in (
        {"ignore": ["re:.*a$"]},
        {"ignore": ["a"]},
        {"ignore": ["re:(x+x+)+y"]},  # takes long, so it is not asked
        {"transform_config": {"config_groups": {"R1": {}}}},
        {"config_groups": {"g": {**group, "targets": ["re:.*b$"]}}},
        {"config_groups": {"g": {**group, "weights": {**how, "actorder": "group"}}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said | more}))
        got, _ = merged(tensors, tmp_path)
        assert got["a.weight"].dtype is I8, more
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": said | {"ignore": ["lm_head", "re:.*gate$"]}})
    )
    assert merged(tensors, tmp_path)[0]["a.weight"].dtype is torch.float32
    for changed in ({"num_bits": 4}, {"symmetric": False}, {"type": "float"}):
        other = {**said, "config_groups": {"g": {**group, "weights": {**how, **changed}}}}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": other}))
        got, _ = merged(tensors, tmp_path)
        assert got["a.weight"].dtype is I8, changed


def test_a_parameter_that_is_called_scale_stays_and_is_cast(tmp_path: Path) -> None:
    own = {
        "logit_scale": torch.rand(()),
        "b.layer_scale": torch.rand(64),
        "n.query_norm.scale": torch.rand(16),
        "moe.router.per_expert_scale": torch.rand(8),
    }
    tensors = {"a.weight": codes_of(F8, 64, 32), "a.weight_scale": torch.rand(64, 1)}
    got, _ = merged(tensors | own | {"a.k_scale": torch.rand(1)}, tmp_path, dtype="bf16")
    assert got.keys() == {"a.weight", *own}
    assert all(torch.equal(got[name], own[name].bfloat16()) for name in own)


def test_scales_alone_make_no_model(tmp_path: Path) -> None:
    tensors = {"a.weight": codes_of(F8, 64, 32), "a.weight_scale": torch.rand(64, 1)}
    got, notes = merged(tensors, tmp_path, select=["*weight"])
    assert got.keys() == {"a.weight"} and any("dequantized: 1" in note for note in notes)
    got, notes = merged(tensors | {"b": torch.ones(2)}, tmp_path, exclude=["*.weight"])
    assert got.keys() == {"b"}
    other = {"c.weight": codes_of(F8, 4, 4), "c.weight_scale": torch.rand(4, 1)}
    got, notes = merged(tensors | other, tmp_path, exclude=["a.weight"], dtype="bf16")
    assert got.keys() == {"c.weight"} and got["c.weight"].dtype is torch.bfloat16
    with pytest.raises(ckpt_tools.PlanError, match="--select matches none"):
        merged(tensors, tmp_path, select=["*_scale"])


def test_ranks_shard_the_numbers_as_they_shard_others(tmp_path: Path) -> None:
    codes, scales = codes_of(F8, 256, 128), torch.rand(2, 1) + 0.1
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    ckpt_tools.convert(tmp_path / "model.safetensors", out, to="per-rank", ranks=2, dtype="bf16")
    sizes = [path.stat().st_size for path in out.rglob("*.pt")]
    assert sum(sizes) < 1.2 * 2 * codes.numel()


def test_a_row_beyond_reason_stays_codes(tmp_path: Path) -> None:
    """It would be computed as a whole for each part of it."""
    tensors = {
        "a.weight": torch.zeros((1 << 24) + 1, dtype=torch.uint8).view(F8),
        "a.weight_scale": torch.ones(1),
    }
    got, notes = merged(tensors, tmp_path, dtype="bf16")
    assert got["a.weight"].dtype is F8 and any("a row has more than" in n for n in notes)


def test_some_may_stay_codes_and_scales_of_inputs_go(tmp_path: Path) -> None:
    tensors = {
        "a.weight": codes_of(F8, 40, 30),
        "a.weight_scale": torch.rand(40, 1),
        "a.input_scale": torch.rand(1),
        "b.weight": codes_of(F8, 40, 30),
        "b.weight_scale": torch.rand(40, 1),
        "k_scale": torch.rand(1),
    }
    got, notes = merged(tensors, tmp_path, keep_dtype=["b.*"])
    assert got.keys() == {"a.weight", "b.weight", "b.weight_scale", "k_scale"}
    assert got["b.weight"].dtype is F8 and got["b.weight_scale"].dtype is torch.float32
    assert any("2 scales and the like are left out, such as 'a." in note for note in notes)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ckpt_tools.PlanError, match="no config says that"):
        ckpt_tools.convert(
            tmp_path / "model.safetensors",
            tmp_path / "hf",
            to="hf",
            base=tmp_path,
            dtype="bf16",
            keep_dtype=["b.*"],
        )
    got, _ = merged(tensors, tmp_path)
    assert got.keys() == {"a.weight", "b.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    words = ("merge", str(tmp_path / "model.safetensors"), str(tmp_path / "m.safetensors"))
    said = run_command(*words, "--dtype", "bf16")
    assert said.returncode == 0 and "dequantized: 2 codes with scales, 8 bits" in said.stdout


def test_names_with_the_key_of_the_model_are_kept(tmp_path: Path) -> None:
    layers = {name: codes_of(F8, 40, 30) for name in ("a.weight", "b.weight")}
    state = layers | {f"{name}_scale": torch.rand(40, 1) for name in layers}
    torch.save({"model": state}, tmp_path / "m.pt")
    ckpt_tools.convert(
        tmp_path / "m.pt", tmp_path / "d", to="dcp", dtype="bf16", keep_dtype=["model.b.*"]
    )
    with ckpt_tools.open(tmp_path / "d") as found:
        assert found["model.b.weight"][...].dtype is F8 and "model.b.weight_scale" in found.names()
        assert found["model.a.weight"][...].dtype is torch.bfloat16


def test_scales_that_changed_since_they_were_sealed_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": codes_of(F8, 40, 30), "a.weight_scale": torch.rand(40, 1)}
    torch.save(
        {"a.weight": tensors["a.weight"], "a.weight_scale": tensors["a.weight_scale"]},
        tmp_path / "m.pt",
    )
    ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "d", to="dcp", ranks=2)
    (path, *_) = sorted((tmp_path / "d").glob("__0_*.distcp"))
    data = path.read_bytes()
    needle = tensors["a.weight_scale"][:20].numpy().tobytes()
    assert data.count(needle) == 1
    path.write_bytes(data.replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))
    with pytest.raises(IntegrityError, match=r"bytes were damaged since.*a\.weight_scale"):
        ckpt_tools.merge(tmp_path / "d", tmp_path / "out.safetensors", dtype="bf16")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_key_map_moves_rows_of_the_numbers(tmp_path: Path) -> None:
    """It is the same as to write numbers first, and to convert these."""
    shape = {"q": 32, "k": 16, "v": 16}
    tensors: dict[str, torch.Tensor] = {}
    for part, rows in shape.items():
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        tensors |= {name: codes_of(F8, rows, 32), f"{name}_scale": torch.rand(rows, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    how: dict[str, Any] = {
        "key_map": "llama_hf_to_titan",
        "settings": {"heads": 4, "kv_heads": 2},
        "partial": True,
    }
    ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "rows", to="dcp", **how)
    ckpt_tools.merge(tmp_path / "rows", tmp_path / "rows.safetensors", dtype="bf16")
    for name, source in (("codes", "model"), ("again", "numbers")):
        path = tmp_path / f"{source}.safetensors"
        if name == "codes":
            ckpt_tools.merge(path, tmp_path / "numbers.safetensors", dtype="bf16")
            ckpt_tools.merge(path, tmp_path / "sealed.safetensors")
            path = tmp_path / "sealed.safetensors"
        ckpt_tools.convert(path, tmp_path / name, to="dcp", ranks=2, dtype="bf16", **how)
    moved = load_file(tmp_path / "rows.safetensors")  # codes and scales moved as such
    with ckpt_tools.open(tmp_path / "codes") as one, ckpt_tools.open(tmp_path / "again") as two:
        assert list(one.names()) == list(two.names()) and len(list(one.names())) == 3
        for name in one.names():
            assert name.startswith("layers.0.attention.")
            assert torch.equal(one[name][...], two[name][...])
            assert torch.equal(one[name][...], moved[name])


def test_an_adapter_is_added_to_the_numbers(tmp_path: Path) -> None:
    codes, scales = codes_of(F8, 40, 30), torch.rand(40, 1)
    save_file({"a.weight": codes, "a.weight_scale": scales}, tmp_path / "model.safetensors")
    lora, rank = tmp_path / "lora", 4
    lora.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["a"]}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    a, b = torch.randn(rank, 30), torch.randn(40, rank)
    front = "base_model.model.a.lora_"
    save_file({f"{front}A.weight": a, f"{front}B.weight": b}, lora / "adapter_model.safetensors")
    source = tmp_path / "model.safetensors"
    with pytest.raises(ckpt_tools.PlanError, match="quantized"):
        ckpt_tools.merge(source, tmp_path / "out.safetensors", lora=lora)
    ckpt_tools.merge(source, tmp_path / "out.safetensors", lora=lora, dtype="fp32")
    got = load_file(tmp_path / "out.safetensors")["a.weight"]
    want = codes.float() * scales + 2.0 * b.double().matmul(a.double()).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_transformers_loads_the_result_and_its_config_is_a_plain_one(
    where: str, tmp_path: Path
) -> None:
    model = llama()
    folder = base(model, tmp_path / "model")
    tensors: dict[str, torch.Tensor] = {}
    want = {}
    for name, value in model.state_dict().items():
        if name.endswith("proj.weight"):
            codes, scales = (value * 100).to(F8), torch.rand(1, 1) + 0.5
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            want[name] = (codes.float() * scales).bfloat16()
        else:
            tensors[name] = value.bfloat16()
            want[name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if where == "config.json":
        config = json.loads((folder / where).read_text()) | {"quantization_config": said}
        (folder / where).write_text(json.dumps(config))
    else:
        (folder / where).write_text(json.dumps(said))
    done = ckpt_tools.convert(
        folder, tmp_path / "out", to="hf", base=folder, dtype="bf16", check=True
    )
    assert any("transformers loads it" in note for note in done.notes)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    got = type(model).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
