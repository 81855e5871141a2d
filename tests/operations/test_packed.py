"""`--dtype` turns packed codes into numbers, by the formula of each scheme.

The oracles pack and compute element by element, as the schemes are described; `tests/peers` has
their own readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.engine.computed import numbers_file
from ckpt_tools.errors import FormatError, IntegrityError, PlanError
from ckpt_tools.formats.registry import open_source
from ckpt_tools.operations.dequantize import dequantize
from ckpt_tools.operations.quantization_config import _modules

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
F8, U8, I32 = torch.float8_e4m3fn, torch.uint8, torch.int32
CT = "compressed-tensors"


class Weight(NamedTuple):
    """The parts of one quantized weight, its config, its numbers, and their name."""

    parts: dict[str, torch.Tensor]
    said: dict[str, Any]
    want: torch.Tensor
    name: str = "weight"


def integers(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int) -> torch.Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(7)) + 0.1
    return values.bfloat16().float()


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns words of 32 bits for each row of codes, which follow each other, lowest bits first."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        data = number.to_bytes(-(-len(row) * bits // 32) * 4, "little")
        rows.append(np.frombuffer(data, "<i4").copy())
    return torch.from_numpy(np.stack(rows))


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    """Returns bytes of two codes of 4 bits each, the lower bits first."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(U8)


def groups_of(weights: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": CT, "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


def pack_quantized(
    rows: int, columns: int, bits: int = 4, group: int = 0, has_zeros: bool = False
) -> Weight:
    codes = integers(1, 1 << bits, rows, columns)
    count = columns // group if group else 1
    factor = scales(rows, count)
    zeros = integers(2, 1 << bits, rows, count) if has_zeros else None
    parts = {
        "weight_packed": packed(codes, bits),
        "weight_scale": factor,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zeros is not None:
        parts["weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
    half = 1 << (bits - 1)
    zero = zeros - half if zeros is not None else torch.zeros(rows, count, dtype=torch.int64)
    each = columns // count
    want = (codes - half - zero.repeat_interleave(each, 1)) * factor.repeat_interleave(each, 1)
    said: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": not has_zeros}
    return Weight(parts, groups_of(said | ({"group_size": group} if group else {})), want)


def nvfp4(rows: int, columns: int, is_modelopt: bool = False, lead: tuple[int, ...] = ()) -> Weight:
    codes = integers(3, 16, *lead, rows, columns)
    factor = (scales(*lead, rows, columns // 16) * 100).to(F8)
    one = torch.tensor([7.0])
    values = torch.tensor(E2M1)[codes]
    if is_modelopt:
        parts = {"weight": bytes_of(codes), "weight_scale": factor, "weight_scale_2": one}
        want = values * (factor.float() * one).repeat_interleave(16, -1)
        return Weight(parts, {"quant_method": "modelopt"}, want)
    parts = {"weight_packed": bytes_of(codes), "weight_scale": factor, "weight_global_scale": one}
    want = values * (factor.float() / one).repeat_interleave(16, -1)
    return Weight(parts, {"quant_method": CT}, want)


def microscaled(rows: int, columns: int) -> Weight:
    codes, factor = integers(4, 16, rows, columns), integers(5, 40, rows, columns // 32) + 100
    want = torch.tensor(E2M1)[codes] * 2.0 ** (factor - 127.0).repeat_interleave(32, 1)
    parts = {"weight_packed": bytes_of(codes), "weight_scale": factor.to(U8)}
    return Weight(parts, {"quant_method": CT}, want)


def gpt_oss(experts: int, rows: int, columns: int, is_original: bool = False) -> Weight:
    codes = integers(6, 16, experts, rows, columns)
    factor = integers(7, 40, experts, rows, columns // 32) + 100
    blocks = bytes_of(codes).reshape(experts, rows, columns // 32, 16)
    want = torch.tensor(E2M1)[codes] * 2.0 ** (factor - 127.0).repeat_interleave(32, 2)
    if is_original:
        parts = {"mlp1_weight.blocks": blocks, "mlp1_weight.scales": factor.to(U8)}
        return Weight(parts, {"quant_method": "mxfp4"}, want, "mlp1_weight")
    parts = {"down_proj_blocks": blocks, "down_proj_scales": factor.to(U8)}
    return Weight(parts, {"quant_method": "mxfp4"}, want.transpose(1, 2), "down_proj")


def gptq(
    outputs: int, inputs: int, bits: int = 4, group: int = 32, version: str = "gptq",
    is_sorted: bool = False,
) -> Weight:  # fmt: skip
    codes = integers(8, 1 << bits, inputs, outputs)
    count = -(-inputs // group)
    stored = integers(9, 1 << bits, count, outputs)
    factor = scales(count, outputs).half()
    index = torch.arange(inputs) // group
    if is_sorted:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
    parts = {
        "qweight": packed(codes.T, bits).T.contiguous(),
        "qzeros": packed(stored, bits),
        "scales": factor,
        "g_idx": index.to(I32),
    }
    zero = stored + (version == "gptq")
    want = ((codes - zero[index]) * factor.float()[index]).T.contiguous()
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    return Weight(parts, said | {"desc_act": is_sorted}, want)


def awq(outputs: int, inputs: int, group: int = 32) -> Weight:
    codes, stored = integers(10, 16, inputs, outputs), integers(11, 16, inputs // group, outputs)
    factor, order = scales(inputs // group, outputs).half(), [0, 2, 4, 6, 1, 3, 5, 7]

    def words(matrix: torch.Tensor) -> torch.Tensor:
        turned = matrix.reshape(len(matrix), -1, 8)[:, :, order]
        return packed(turned.reshape(len(matrix), -1), 4)

    index = torch.arange(inputs) // group
    want = ((codes - stored[index]) * factor.float()[index]).T.contiguous()
    parts = {"qweight": words(codes), "qzeros": words(stored), "scales": factor}
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Weight(parts, said, want)


def nf4(
    rows: int, columns: int, block: int = 64, nested: bool = False, wide: bool = False
) -> Weight:
    numel = rows * columns
    codes, table = integers(12, 16, numel + numel % 2), torch.linspace(-1, 1, 16) ** 3
    data = (codes[0::2] << 4 | codes[1::2]).to(U8)
    if wide:
        data = torch.cat([data, torch.zeros(len(data) % 2, dtype=U8)]).view(torch.bfloat16)
    count = -(-numel // block)
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": [rows, columns]}
    parts = {"weight": data[:, None].contiguous(), "weight.quant_map": table}
    if nested:
        which, nested_map = integers(13, 256, count), torch.linspace(-1, 1, 256)
        outer = scales(-(-count // 256))
        said |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
        each = nested_map[which] * outer.repeat_interleave(256)[:count] + 0.25
        parts |= {
            "weight.absmax": which.to(U8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": nested_map,
        }
    else:
        each = scales(count)
        parts["weight.absmax"] = each
    text = json.dumps(said).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=U8)
    want = (table[codes[:numel]] * each.repeat_interleave(block)[:numel]).reshape(rows, columns)
    return Weight(parts, {"quant_method": "bitsandbytes", "load_in_4bit": True}, want)


def by_127(rows: int, columns: int) -> Weight:
    codes, factor = (integers(14, 256, rows, columns) - 128).to(torch.int8), scales(rows)
    want = codes.float() * factor[:, None] * 7.874015718698502e-3
    parts = {"weight": codes, "SCB": factor, "weight_format": torch.zeros((), dtype=U8)}
    return Weight(parts, {"quant_method": "bitsandbytes", "load_in_8bit": True}, want)


def asymmetric_int8(rows: int, columns: int) -> Weight:
    codes, zeros = integers(15, 256, rows, columns) - 128, integers(16, 256, rows, 1) - 128
    factor = scales(rows, 1)
    parts = {
        "weight": codes.to(torch.int8),
        "weight_scale": factor,
        "weight_zero_point": zeros.to(torch.int8),
    }
    said = groups_of({"num_bits": 8, "type": "int", "symmetric": False})
    return Weight(parts, said, (codes - zeros) * factor)


KINDS: dict[str, Callable[[], Weight]] = {
    "4 bits, groups": lambda: pack_quantized(40, 256, group=64),
    "4 bits, a row": lambda: pack_quantized(40, 200),
    "4 bits, zero points": lambda: pack_quantized(40, 256, group=64, has_zeros=True),
    "8 bits": lambda: pack_quantized(40, 256, bits=8, group=64),
    "3 bits": lambda: pack_quantized(40, 96, bits=3),
    "3 bits, zero points": lambda: pack_quantized(70, 96, bits=3, group=32, has_zeros=True),
    "5 bits": lambda: pack_quantized(40, 96, bits=5, group=32),
    "odd columns": lambda: pack_quantized(7, 33),
    "nvfp4": lambda: nvfp4(40, 256),
    "nvfp4 of experts": lambda: nvfp4(24, 64, lead=(3,)),
    "modelopt nvfp4": lambda: nvfp4(40, 256, True),
    "mxfp4": lambda: microscaled(40, 256),
    "gpt-oss": lambda: gpt_oss(3, 40, 96),
    "gpt-oss, OpenAI's names": lambda: gpt_oss(3, 40, 96, True),
    "gptq": lambda: gptq(64, 128),
    "gptq v2": lambda: gptq(64, 128, version="gptq_v2"),
    "gptq, sorted": lambda: gptq(64, 128, is_sorted=True),
    "gptq, ragged": lambda: gptq(64, 72),
    "gptq, 8 bits": lambda: gptq(64, 128, bits=8),
    "gptq, 3 bits": lambda: gptq(64, 128, bits=3),
    "gptq, 2 bits": lambda: gptq(64, 128, bits=2),
    "awq": lambda: awq(64, 128),
    "nf4": lambda: nf4(40, 100),
    "nf4, odd": lambda: nf4(7, 33),
    "nf4, nested": lambda: nf4(200, 500, nested=True),
    "nf4, in bf16": lambda: nf4(40, 100, wide=True),
    "int8 of bitsandbytes": lambda: by_127(40, 100),
    "int8 with zero points": lambda: asymmetric_int8(40, 100),
}
FRONT = "model.layers.0.mlp.experts."


def folder_with(weight: Weight, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {FRONT + name: tensor for name, tensor in weight.parts.items()}
    save_file({"model.norm.weight": torch.ones(4)} | tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": weight.said}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_formula(kind: str, tmp_path: Path) -> None:
    weight = KINDS[kind]()
    folder = folder_with(weight, tmp_path / "m")
    names = {"model.norm.weight", FRONT + weight.name}
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / f"{dtype}.safetensors"
        done = ckpt_tools.merge(folder, out, dtype=str(dtype))
        got = load_file(out)
        assert got.keys() == names and any(n.startswith("dequantized: 1 ") for n in done.notes)
        assert torch.equal(got[FRONT + weight.name], weight.want.to(dtype)), dtype
    ckpt_tools.verify(tmp_path / "torch.float32.safetensors")
    ckpt_tools.convert(folder, tmp_path / "d", to="dcp", ranks=3, dtype="fp32")
    with ckpt_tools.open(tmp_path / "d") as found:
        assert {*found.names()} == names
        assert torch.equal(torch.as_tensor(found[FRONT + weight.name][...]), weight.want)
    # a sealed source, in which the codes are split between ranks
    ckpt_tools.convert(folder, tmp_path / "codes", to="dcp", ranks=3)
    (tmp_path / "codes" / "config.json").write_bytes((folder / "config.json").read_bytes())
    ckpt_tools.merge(tmp_path / "codes", tmp_path / "again.safetensors", dtype="fp32")
    got = load_file(tmp_path / "again.safetensors")
    assert torch.equal(got[FRONT + weight.name], weight.want)
    done = ckpt_tools.convert(folder, tmp_path / "hf", to="hf", base=folder, dtype="bf16")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


LARGE: dict[str, Callable[[], Weight]] = {
    "4 bits": lambda: pack_quantized(530, 4096, group=128, has_zeros=True),
    "gpt-oss": lambda: gpt_oss(2, 1100, 544),
    "gptq": lambda: gptq(1024, 1120, group=100, is_sorted=True),
    "awq": lambda: awq(1024, 1152, group=128),
    "nf4": lambda: nf4(1100, 1001, nested=True),
}


@pytest.mark.parametrize("kind", LARGE)
def test_any_range_of_the_numbers_is_a_part_of_them(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weight = LARGE[kind]()
    source = open_source(folder_with(weight, tmp_path_factory.mktemp("large")))
    found = dequantize(source, lambda name: False)
    store, file = found.stored.store, numbers_file(FRONT + weight.name)
    want = weight.want.contiguous().view(-1)
    assert store.size(file) == 4 * len(want)

    @given(start=st.integers(0, len(want) - 1), number=st.integers(1, len(want)))
    @settings(max_examples=60, deadline=None)
    def check(start: int, number: int) -> None:
        got = torch.empty(min(number, len(want) - start))
        store.read_into(file, 4 * start, memoryview(got.numpy()).cast("B"))
        assert torch.equal(got, want[start : start + len(got)])

    check()
    store.close()


@pytest.mark.parametrize("role", ["weight_packed", "weight_scale"])
def test_a_flipped_bit_in_any_part_is_found(role: str, tmp_path: Path) -> None:
    weight = pack_quantized(40, 256, group=64)
    ckpt_tools.merge(folder_with(weight, tmp_path / "m"), tmp_path / "s.safetensors")
    (tmp_path / "config.json").write_bytes((tmp_path / "m" / "config.json").read_bytes())
    data = (tmp_path / "s.safetensors").read_bytes()
    needle = weight.parts[role].numpy().tobytes()[:64]
    assert data.count(needle) == 1
    (tmp_path / "s.safetensors").write_bytes(
        data.replace(needle, needle[:-1] + bytes([needle[-1] ^ 16]))
    )
    with pytest.raises(IntegrityError, match=role):
        ckpt_tools.merge(tmp_path / "s.safetensors", tmp_path / "out.safetensors", dtype="bf16")
    assert not (tmp_path / "out.safetensors").exists()


def changed(
    weight: Weight, said: dict[str, Any] | None = None, /, **parts: torch.Tensor | None
) -> Weight:
    found = {n: t for n, t in (weight.parts | parts).items() if t is not None}
    return weight._replace(parts=found, said=weight.said if said is None else said)


UNSURE: dict[str, tuple[Callable[[], Weight], str]] = {
    "no config": (lambda: changed(gptq(64, 128), {}), "no config beside it says"),
    "no format": (
        lambda: changed(
            gptq(64, 128), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "x"}
        ),
        "does not tell bits and format",
    ),
    "other bits": (
        lambda: changed(gptq(64, 128), {"quant_method": "gptq", "bits": 8}),
        "shapes are not those",
    ),
    "other groups": (
        lambda: changed(gptq(64, 128), {"quant_method": "gptq", "bits": 4, "group_size": 100}),
        "groups are not those of its config",
    ),
    "another layout of AWQ": (
        lambda: changed(awq(64, 128), {"quant_method": "awq", "bits": 4, "version": "marlin"}),
        "something else than 4 bits, version gemm",
    ),
    "groups in another order": (
        lambda: changed(
            pack_quantized(40, 256, group=64), weight_g_idx=torch.zeros(256, dtype=I32)
        ),
        "not columns side by side",
    ),
    "zero points unasked": (
        lambda: changed(
            pack_quantized(40, 256, group=64), weight_zero_point=torch.zeros(5, 4, dtype=I32)
        ),
        "says otherwise about zero points",
    ),
    "rotated": (
        lambda: changed(nvfp4(40, 256), {"quant_method": CT, "transform_config": {"R": {}}}),
        "rotated",
    ),
    "smoothed": (
        lambda: changed(nvfp4(40, 256, True), pre_quant_scale=torch.ones(256)),
        "beside it",
    ),
    "no shape": (
        lambda: changed(nf4(40, 100), **{"weight.quant_state.bitsandbytes__nf4": None}),
        "its shape is not known",
    ),
    "another shape": (
        lambda: changed(
            nf4(40, 100),
            **{
                "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
                    bytearray(b'{"blocksize": 64, "shape": [40, 1000]}'), dtype=U8
                )
            },
        ),
        "not those of its quant_state",
    ),
    "a hostile shape": (
        lambda: changed(
            nf4(40, 100),
            **{
                "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
                    bytearray(b'{"blocksize": 64, "shape": [1e400, -1, [[]]]}'), dtype=U8
                )
            },
        ),
        "tells no shape",
    ),
    "rows in another order": (
        lambda: changed(by_127(40, 100), weight_format=torch.ones((), dtype=U8)),
        "weight_format",
    ),
    "a config that is not understood": (
        lambda: changed(nvfp4(40, 256), {"quant_method": CT, "config_groups": [1]}),
        "not understood",
    ),
    "bits that are no number": (
        lambda: changed(
            pack_quantized(40, 8, bits=4),
            groups_of({"num_bits": [4], "type": "int", "group_size": {}}),
        ),
        "bits of a code are not known",
    ),
    "bits of a float": (
        lambda: changed(gptq(64, 128), {"quant_method": "gptq", "bits": 4.0}),
        "does not tell bits and format",
    ),
    "a format that is a list": (
        lambda: changed(
            gptq(64, 128), {"quant_method": "gptq", "bits": 4, "checkpoint_format": ["gptq"]}
        ),
        "does not tell bits and format",
    ),
    "rules for single modules": (
        lambda: changed(gptq(64, 128), {**gptq(64, 128).said, "dynamic": {"+:a": {"bits": 8}}}),
        "rules for single modules",
    ),
    "an order that is missing": (
        lambda: changed(gptq(64, 128), {**gptq(64, 128).said, "desc_act": True}, g_idx=None),
        "groups are in another order",
    ),
    "an order that a config tells": (
        lambda: changed(
            pack_quantized(40, 256, group=64),
            groups_of({"num_bits": 4, "type": "int", "group_size": 64, "actorder": "group"}),
        ),
        "not columns side by side",
    ),
    "a group that does not divide the columns, untold": (
        lambda: changed(pack_quantized(8, 1000, group=125), {}),
        "scales are",
    ),
    "an older layout": (lambda: pack_quantized(40, 20, bits=3), "an older layout"),
    "another scale": (
        lambda: changed(by_127(40, 100), weight_scale_1=torch.ones(40)),
        "beside it",
    ),
    "an offset beyond reason": (
        lambda: changed(
            nf4(200, 500, nested=True),
            **{
                "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
                    bytearray(
                        b'{"blocksize": 64, "shape": [200, 500], "nested_blocksize": 256,'
                        b' "nested_offset": 1' + b"0" * 400 + b"}"
                    ),
                    dtype=U8,
                )
            },
        ),
        "stay codes",
    ),
    "no inputs": (
        lambda: changed(
            gptq(32, 32),
            {"quant_method": "gptq", "bits": 4},
            qweight=torch.zeros(0, 32, dtype=I32),
            g_idx=torch.zeros(0, dtype=I32),
        ),
        "no elements",
    ),
    "a name that is taken": (lambda: changed(awq(64, 128), weight=torch.ones(2)), "another tensor"),
}


@pytest.mark.parametrize("kind", UNSURE)
def test_what_is_not_known_for_sure_stays_codes_with_a_reason(kind: str, tmp_path: Path) -> None:
    make, why = UNSURE[kind]
    weight = make()
    folder = folder_with(weight, tmp_path / "m")
    done = ckpt_tools.merge(folder, tmp_path / "out.safetensors", dtype="bf16")
    got = load_file(tmp_path / "out.safetensors")
    assert got.keys() == {"model.norm.weight", *(FRONT + name for name in weight.parts)}
    for name, tensor in weight.parts.items():
        if tensor.dtype not in (torch.float32, torch.float16):
            assert torch.equal(got[FRONT + name].view(U8), tensor.view(U8)), name
    assert any("stay codes" in note and why in note for note in done.notes), done.notes


def test_the_last_group_may_be_short_and_the_last_columns_padding(tmp_path: Path) -> None:
    """Its config tells the size of a group, and `weight_shape` the columns."""
    codes, factor = integers(1, 16, 8, 60), scales(8, 2)
    parts = {
        "weight_packed": packed(torch.nn.functional.pad(codes, (0, 4)), 4),
        "weight_scale": factor,
        "weight_shape": torch.tensor([8, 60]),
    }
    said = groups_of({"num_bits": 4, "type": "int", "group_size": 32})
    want = (codes - 8) * factor.repeat_interleave(32, 1)[:, :60]
    folder = folder_with(Weight(parts, said, want), tmp_path / "m")
    ckpt_tools.merge(folder, tmp_path / "out.safetensors", dtype="fp32")
    assert torch.equal(load_file(tmp_path / "out.safetensors")[FRONT + "weight"], want)


def test_groups_without_weights_do_not_hide_the_rest_of_a_config(tmp_path: Path) -> None:
    weight = pack_quantized(40, 256, group=64)
    more = {"targets": ["Attention"], "weights": None, "input_activations": {"num_bits": 8}}
    said = {**weight.said, "config_groups": {**weight.said["config_groups"], "kv": more}}
    folder = folder_with(weight._replace(said=said), tmp_path / "m")
    ckpt_tools.merge(folder, tmp_path / "out.safetensors", dtype="fp32")
    assert torch.equal(load_file(tmp_path / "out.safetensors")[FRONT + "weight"], weight.want)
    said["transform_config"] = {"R1": {}}
    folder = folder_with(weight._replace(said=said), tmp_path / "n")
    done = ckpt_tools.merge(folder, tmp_path / "rotated.safetensors", dtype="fp32")
    assert any("rotated" in note for note in done.notes)


def test_patterns_of_modules_are_matched_in_bounded_time() -> None:
    """As `re.match` does it, where that ends."""
    names = ["a", "lm_head", "model.layers.3.mlp.gate", "model.gate.up", "x" * 3000 + ".gate"]
    patterns = [".*gate$", "lm_head", ".*layers.*mlp.*", "model.*gate", "a.*", ".*a.*t.*e", "x.*?g"]
    for pattern in patterns:
        modules = _modules(f"re:{pattern}")
        assert modules is not None
        for name in names:
            assert modules.have(name) == (re.match(pattern, name) is not None), (pattern, name)
    slow = _modules("re:" + ".*a" * 20 + ".*x$")
    assert slow is not None and not slow.have("a" * 5000)
    plain = _modules("gate")
    assert plain is not None and plain.have("model.gate") and not plain.have("model.agate")


def test_a_resume_is_refused(tmp_path: Path) -> None:
    """What an earlier attempt has read of the codes cannot be proved any more."""
    folder = folder_with(nvfp4(40, 256), tmp_path / "m")
    for verb in (ckpt_tools.merge, ckpt_tools.convert):
        how = {"to": "safetensors"} if verb is ckpt_tools.convert else {}
        with pytest.raises(PlanError, match="are not resumed"):
            verb(folder, tmp_path / "out.safetensors", dtype="bf16", resume=True, **how)
    ckpt_tools.merge(folder, tmp_path / "out.safetensors", resume=True)


def test_configs_that_differ_make_other_numbers_of_the_same_codes(tmp_path: Path) -> None:
    one, two = gptq(64, 128), gptq(64, 128, version="gptq_v2")
    folders = [folder_with(w, tmp_path / n) for w, n in ((one, "one"), (two, "two"))]
    (found,) = ckpt_tools.diff(*folders).differences
    assert found.fqn == FRONT + "weight" and found.num_different == one.want.numel()
    assert ckpt_tools.diff(folders[0], folders[0]).is_same


def test_groups_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for wrong in (4, -1):
        weight = gptq(64, 128)
        weight.parts["g_idx"][5] = wrong
        folder = folder_with(weight, tmp_path / f"m{wrong}")
        with pytest.raises(FormatError, match="g_idx"):
            ckpt_tools.merge(folder, tmp_path / "out.safetensors", dtype="bf16")
        assert not (tmp_path / "out.safetensors").exists()


def test_the_worked_examples() -> None:
    """Those of the descriptions of the schemes."""
    assert packed(torch.tensor([[0, 8, 9, 10, 11, 12, 15, 15]]), 4)[0, 0] == 0xFFCBA980 - (1 << 32)
    assert packed(torch.arange(8)[None], 4)[0, 0] == 0x76543210
    turned = torch.arange(8)[None][:, [0, 2, 4, 6, 1, 3, 5, 7]]
    assert packed(turned, 4)[0, 0] == 0x75316420
    assert bytes_of(torch.arange(8)).tolist() == [0x10, 0x32, 0x54, 0x76]


def test_a_mean_takes_the_numbers(tmp_path: Path) -> None:
    """Of weights that are quantized otherwise, or not at all."""
    one, two = pack_quantized(40, 256, group=64), nvfp4(40, 256)
    plain = scales(40, 256)
    folders = [folder_with(w, tmp_path / n) for w, n in ((one, "one"), (two, "two"))]
    save_file(
        {"model.norm.weight": torch.ones(4), FRONT + "weight": plain},
        tmp_path / "plain.safetensors",
    )
    sources = [*folders, tmp_path / "plain.safetensors"]
    with pytest.raises(PlanError, match="no mean of quantized weights"):
        ckpt_tools.average(sources, tmp_path / "mean.safetensors")
    done = ckpt_tools.average(sources, tmp_path / "mean.safetensors", dtype="fp32")
    assert sum(note.startswith("dequantized: 1 ") for note in done.notes) == 2
    got = load_file(tmp_path / "mean.safetensors")[FRONT + "weight"]
    want = (one.want.double() + two.want.double() + plain.double()) / 3
    assert torch.equal(got, want.float())


@pytest.mark.parametrize("kind", ["4 bits, groups", "gpt-oss", "awq", "nf4, nested"])
def test_numbers_are_compared_and_measured(kind: str, tmp_path: Path) -> None:
    weight = KINDS[kind]()
    folder, name = folder_with(weight, tmp_path / "m"), FRONT + weight.name
    plain = {"model.norm.weight": torch.ones(4), name: weight.want.contiguous()}
    save_file(plain, tmp_path / "same.safetensors")
    found = ckpt_tools.diff(folder, tmp_path / "same.safetensors")
    assert not found.differences and not found.only_a and not found.only_b
    (change,) = found.changes  # the types differ
    assert change.fqn == name and change.a_dtype != change.b_dtype == "float32"
    noise = 0.01 * torch.randn(plain[name].shape)
    save_file(plain | {name: plain[name] + noise}, tmp_path / "other.safetensors")
    (one,) = ckpt_tools.diff(folder, tmp_path / "other.safetensors").differences
    want = (noise.double().norm() / plain[name].double().norm()).item()
    assert one.rel_norm == pytest.approx(want, rel=1e-3)
    told = ckpt_tools.stats(folder)
    assert told.tensors[name].numel == weight.want.numel() and told.dtypes[name] == change.a_dtype
    rms = weight.want.double().square().mean().sqrt().item()
    assert told.tensors[name].rms == pytest.approx(rms)
    copied = ckpt_tools.copy(folder, tmp_path / "copy")
    assert copied and ckpt_tools.diff(folder, tmp_path / "copy").is_same


@pytest.mark.parametrize("role", ["q.weight", "p.weight", "p.weight_scale"])
def test_a_flipped_bit_is_found_where_numbers_are_joined_with_a_plain_tensor(
    role: str, tmp_path: Path
) -> None:
    codes, factor = integers(20, 100, 8, 16).to(U8).view(F8), scales(8, 1)
    plain = torch.linspace(-1, 1, 128).reshape(8, 16)
    tensors = {"p.weight": codes, "p.weight_scale": factor, "q.weight": plain}
    save_file(tensors, tmp_path / "m.safetensors")
    sealed = tmp_path / "sealed.safetensors"
    ckpt_tools.merge(tmp_path / "m.safetensors", sealed)
    rule = {"match": r"q\.weight", "from": ["q.weight", "p.weight"], "into": "f.weight"}
    (tmp_path / "map.json").write_text(json.dumps({"fuse": [rule]}))
    how: dict[str, Any] = {"to": "safetensors", "dtype": "fp32", "partial": True}
    how["key_map"] = tmp_path / "map.json"
    ckpt_tools.convert(sealed, tmp_path / "out.safetensors", **how)
    got = load_file(tmp_path / "out.safetensors")
    assert torch.equal(got["f.weight"], torch.cat([plain, codes.float() * factor]))
    data = sealed.read_bytes()
    needle = tensors[role].view(U8).numpy().tobytes()
    assert data.count(needle) == 1
    sealed.write_bytes(data.replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))
    with pytest.raises(IntegrityError, match=re.escape(role)):
        ckpt_tools.convert(sealed, tmp_path / "wrong.safetensors", **how)
    assert not (tmp_path / "wrong.safetensors").exists()


def test_every_weight_that_stays_codes_is_counted(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for number in range(5):  # each has another reason
        weight = by_127(8, 8)
        tensors |= {f"m{number}.{name}": part for name, part in weight.parts.items()}
        tensors[f"m{number}.other_{number}"] = torch.ones(2)
    save_file(tensors, tmp_path / "m.safetensors")
    done = ckpt_tools.merge(tmp_path / "m.safetensors", tmp_path / "o.safetensors", dtype="bf16")
    assert sum("stay codes: beside it lies" in note for note in done.notes) == 3
    assert any("2 quantized weights stay codes for other reasons" in note for note in done.notes)
