"""GGUF files as the package gguf writes them; it is the oracle too."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import CheckpointError, FormatError

SHAPES = {
    "token_embd.weight": (37, 24),
    "blk.0.attn_q.weight": (24, 24),
    "blk.0.norm.weight": (24,),
    "blk.0.conv.weight": (3, 5, 7),
}


def written(
    path: Path, kind: gguf.GGMLQuantizationType, alignment: int = 32
) -> dict[str, np.ndarray]:
    """Writes a model; returns its values, which bfloat16 has as numbers of 16 bits."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_name("small")
    writer.add_token_list([f"word{i}".encode() for i in range(5000)])
    writer.add_token_scores([0.5] * 5000)
    writer.add_bool("odd.flag", True)
    found = {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal(shape).astype("f4")
        if kind == gguf.GGMLQuantizationType.BF16:
            bits = (values.view("u4") >> 16).astype("u2")
            writer.add_tensor(name, bits.view("u1"), raw_dtype=kind)
            found[name] = bits
        else:
            found[name] = values.astype("f2") if kind == gguf.GGMLQuantizationType.F16 else values
            writer.add_tensor(name, found[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_every_verb_reads_them(kind: str, alignment: int, tmp_path: Path) -> None:
    want = written(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind], alignment)
    found = ckpt_tools.inspect(tmp_path / "m.gguf")
    assert (
        found.extras["architecture"] == "llama"
        and found.extras["name"] == "small"
        and found.extras["gguf"].startswith("version 3")
    )
    assert ckpt_tools.verify(tmp_path / "m.gguf").problems == []
    ckpt_tools.merge(tmp_path / "m.gguf", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert (
        got.keys()
        == SHAPES.keys()
        == {t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    )
    for name, values in want.items():
        assert tuple(got[name].shape) == SHAPES[name]
        assert np.array_equal(
            got[name].view(torch.uint16).numpy() if kind == "BF16" else got[name].numpy(), values
        )
    ckpt_tools.convert(tmp_path / "m.gguf", tmp_path / "dcp", to="dcp", ranks=2)
    assert ckpt_tools.diff(tmp_path / "m.gguf", tmp_path / "dcp").is_same


def test_quantised_tensors_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    for number in range(3):
        writer.add_tensor(
            f"blk.{number}", gguf.quants.quantize(np.ones((4, 64), "f4"), kind), raw_dtype=kind
        )
    writer.add_tensor("norm", np.ones(4, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"quantised tensors are not read: Q8_0 \(3\) of 4"):
        ckpt_tools.inspect(tmp_path / "q.gguf")


@pytest.mark.parametrize(
    "alignment", [(8, b"abc"), (8, b"32.0"), (7, True), (6, 32.0), (4, 0), (5, -32), (10, 1 << 40)]
)
def test_an_alignment_that_is_no_number_is_refused(
    alignment: tuple[int, object], tmp_path: Path
) -> None:
    kind, value = alignment
    forms = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
    data = (
        struct.pack(forms[kind], value) if kind in forms else struct.pack("<Q", len(value)) + value
    )  # type: ignore[arg-type]
    key = b"general.alignment"
    (tmp_path / "m.gguf").write_bytes(
        HEAD
        + struct.pack("<2Q", 0, 1)
        + struct.pack("<Q", len(key))
        + key
        + struct.pack("<I", kind)
        + data
    )
    with pytest.raises(FormatError, match="alignment of a GGUF file is not a number of bytes"):
        ckpt_tools.inspect(tmp_path / "m.gguf")


HEAD = b"GGUF" + struct.pack("<I", 3)
TEXT = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "version 50331648"),
        (HEAD + struct.pack("<2Q", 1 << 60, 0), "more than 4,000,000 items"),
        (
            HEAD + struct.pack("<2Q", 0, 1) + struct.pack("<Q", 1 << 62),
            "a string in a GGUF header is too long",
        ),
        (
            HEAD + struct.pack("<2Q", 0, 1) + TEXT + struct.pack("<2IQ", 9, 8, 1 << 40),
            "more than 4,000,000 items",
        ),
        (HEAD + struct.pack("<2Q", 0, 1) + TEXT + struct.pack("<2IQ", 9, 0, 1 << 63), "truncated"),
        (
            HEAD
            + struct.pack("<2Q", 0, 1)
            + TEXT
            + struct.pack("<I", 9)
            + struct.pack("<IQ", 9, 1) * 9,
            "unknown type: 9",
        ),
        (HEAD + struct.pack("<2Q", 0, 1) + TEXT + struct.pack("<I", 77), "unknown type: 77"),
        (
            HEAD + struct.pack("<2Q", 1, 0) + TEXT + struct.pack("<I2QIQ", 2, 4, 4, 0, 1 << 50),
            "runs past its file",
        ),
        (
            HEAD
            + struct.pack("<2Q", 1, 0)
            + TEXT
            + struct.pack("<I2QIQ", 2, 1 << 40, 1 << 40, 0, 0),
            "elements",
        ),
        (HEAD + struct.pack("<2Q", 1, 0) + TEXT + struct.pack("<I", 9), "9 dims"),
        (
            HEAD
            + struct.pack("<2Q", 2, 0)
            + (TEXT + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2
            + bytes(64),
            "one name",
        ),
    ],
)
def test_what_lies_is_told(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=says):
        ckpt_tools.inspect(tmp_path / "m.gguf")


def test_a_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
    data = (tmp_path / "m.gguf").read_bytes()
    for nbytes in (*range(0, 400, 7), 60_000, 90_000, len(data) - 3000):
        (tmp_path / "m.gguf").write_bytes(data[:nbytes])
        with pytest.raises(CheckpointError):
            ckpt_tools.inspect(tmp_path / "m.gguf")


def test_one_of_several_parts_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("norm", np.ones(4, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match="one of 2 parts"):
        ckpt_tools.inspect(tmp_path / "m-00001-of-00002.gguf")
