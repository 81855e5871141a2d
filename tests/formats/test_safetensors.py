from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import ckpt_tools
from ckpt_tools.errors import CatalogError, FormatError
from tests.conftest import torchrun


def write(path: Path, header: object, payload: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def entry(
    start: int = 0, stop: int = 8, shape: object = (2,), dtype: object = "F32"
) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [start, stop],
    }


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            "'a' occurs twice",
        ),
        (b'{"a":' * 5000, "not valid JSON"),
        ({"a": entry(dtype="F99")}, "unknown dtype"),
        ({"a": entry(dtype=["F32"])}, "unknown dtype"),
        ({"a": entry(shape=(3,))}, "do not fit the shape"),
        ({"a": entry(shape=(-2,))}, "not counts"),
        ({"a": entry(shape=[2.0])}, "not counts"),
        ({"a": entry(shape=[True, 2])}, "not counts"),
        ({"a": entry(shape=(1 << 60,))}, "not counts"),
        ({"a": entry(4, 12)}, "gap or overlap"),
        ({"a": entry(), "b": entry()}, "gap or overlap"),
        ({"a": entry(0, 8), "b": entry(8, 16)}, "wrong length"),
        ({}, "wrong length"),
        ({"a": {"dtype": "F32"}}, "expected dtype, shape"),
        ({"a": 5}, "expected dtype, shape"),
        ({"__metadata__": {"format": 1}, "a": entry()}, "expected strings"),
    ],
)
def test_a_header_that_breaks_the_rules_is_refused(
    header: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        ckpt_tools.inspect(write(tmp_path / "m.safetensors", header, bytes(8)))


@pytest.mark.parametrize(
    ("length", "message"), [(100_000_001, "too long"), (1 << 63, "too long"), (5000, "runs past")]
)
def test_a_header_length_is_checked_before_anything_is_read(
    length: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        ckpt_tools.inspect(write(tmp_path / "m.safetensors", {"a": entry()}, bytes(8), length))


def test_a_file_shorter_than_its_length_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"1234")
    with pytest.raises(FormatError, match="truncated"):
        ckpt_tools.inspect(tmp_path / "m.safetensors")


def sharded(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    root.mkdir()
    save_file({"a": torch.arange(6.0)}, root / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3, dtype=torch.bool)}, root / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 27}, "weight_map": weight_map})
    )
    return root


def test_shards_with_an_index_merge_into_one_file_and_back(tmp_path: Path) -> None:
    root = sharded(tmp_path)
    ckpt_tools.merge(root, tmp_path / "one.safetensors")
    assert {k: v.tolist() for k, v in load_file(tmp_path / "one.safetensors").items()} == {
        "a": [0, 1, 2, 3, 4, 5],
        "b": [True] * 3,
    }
    result = ckpt_tools.merge(tmp_path / "one.safetensors", tmp_path / "many", max_shard_bytes=24)
    assert sorted(result.files) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index == json.loads((root / "model.safetensors.index.json").read_text())
    assert load_file(tmp_path / "many" / "model-00001-of-00002.safetensors")["a"].tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../secret.safetensors"}, "outside the checkpoint"),
        ({"a": "/etc/passwd"}, "outside the checkpoint"),
        ({"a": "https://host/x.safetensors"}, "outside the checkpoint"),
        ({"a": "model-00003-of-00002.safetensors"}, "a data file is missing"),
        ({"a": "model-00002-of-00002.safetensors"}, "does not hold it"),
        ({"a": 5}, "expected file names"),
        ([], "expected file names"),
    ],
)
def test_an_index_that_points_astray_is_refused(
    weight_map: object, message: str, tmp_path: Path
) -> None:
    root = sharded(tmp_path)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ckpt_tools.CheckpointError, match=message):
        ckpt_tools.inspect(root)


def test_every_dtype_of_safetensors_is_taken_bit_for_bit(tmp_path: Path) -> None:
    names = (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 uint16 uint32"
        " uint64 float8_e4m3fn float8_e5m2".split()
    )
    tensors = {
        n: (
            torch.arange(6)
            .to(torch.uint8)
            .repeat(8)[: 6 * getattr(torch, n).itemsize]
            .view(getattr(torch, n))
        )
        for n in names
        if n != "bool"
    }
    tensors |= {
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
    }
    tensors = {k: v.clone() for k, v in tensors.items()}
    save_file(tensors, tmp_path / "in.safetensors")
    ckpt_tools.merge(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    assert all(got[k].dtype == v.dtype and got[k].shape == v.shape for k, v in tensors.items())
    for name, tensor in tensors.items():
        assert (
            got[name].flatten().view(torch.uint8).tolist()
            == tensor.flatten().contiguous().view(torch.uint8).tolist()
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_ranks_that_torch_wrote_are_one_checkpoint(ranks: int, tmp_path: Path) -> None:
    torchrun(ranks, "hf_shards.py", str(tmp_path))
    want = torch.load(tmp_path / "whole.pt")
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) == ranks
    report = ckpt_tools.inspect(tmp_path / "shards")
    assert (report.format, report.world_size, {f.rank for f in report.files}) == (
        "safetensors",
        ranks,
        set(range(ranks)),
    )
    ckpt_tools.merge(tmp_path / "shards", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[n], v) for n, v in want.items())
    ckpt_tools.convert(tmp_path / "shards", tmp_path / "dcp", to="dcp", ranks=2)
    assert ckpt_tools.diff(tmp_path / "dcp", tmp_path / "m.safetensors").is_same
    ckpt_tools.reshard(tmp_path / "shards", tmp_path / "resharded", to_ranks=4, from_ranks=ranks)
    assert ckpt_tools.diff(tmp_path / "resharded", tmp_path / "m.safetensors").is_same
    files[0].unlink()
    with pytest.raises(CatalogError, match="chunks leave a hole"):
        ckpt_tools.inspect(tmp_path / "shards")


@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("files", [{}, {"a.w": 1, "b": 2}])
def test_what_torch_wrote_without_saving_distributed_is_read(
    files: dict[str, int], is_renamed: bool, tmp_path: Path
) -> None:
    """Its files have offsets and an index; some releases call them `shard-…` while the index does
    not.
    """
    state = {"a.w": torch.randn(4, 3), "b": torch.arange(5.0)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), files or None)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    for file in list((tmp_path / "hf").glob("model-*.safetensors")) if is_renamed else ():
        file.rename(file.with_name(f"shard-00001-{file.name}"))
    ckpt_tools.merge(tmp_path / "hf", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == state.keys() and all(torch.equal(got[n], v) for n, v in state.items())
    assert ckpt_tools.verify(tmp_path / "hf").problems == []
    next((tmp_path / "hf").glob("*.safetensors")).unlink()
    with pytest.raises(CatalogError, match="a data file is missing"):
        ckpt_tools.inspect(tmp_path / "hf")


@pytest.mark.parametrize(
    "offsets", ["[0]", '["a", 0]', "[-1, 0]", "7", "[0, 99999999999999999999]"]
)
def test_offsets_that_are_none_are_refused(offsets: str, tmp_path: Path) -> None:
    save_file(
        {"w": torch.ones(2, 3)},
        tmp_path / "m.safetensors",
        {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": ' + offsets + "}}"},
    )
    with pytest.raises(FormatError, match="offsets"):
        ckpt_tools.inspect(tmp_path / "m.safetensors")


def test_a_tensor_that_is_whole_in_one_file_and_a_part_in_another_is_refused(
    tmp_path: Path,
) -> None:
    for number, note in enumerate(({"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0]}}'}, None)):
        save_file(
            {"w": torch.ones(2)},
            tmp_path / f"shard-0000{number + 1}-model-00001-of-00001.safetensors",
            note,
        )
    with pytest.raises(FormatError, match="a tensor is in two shards"):
        ckpt_tools.inspect(tmp_path)


def test_a_merge_says_which_floats_it_does_not_cast(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3),
        "b": torch.ones(3).to(torch.float8_e4m3fn),
        "n": torch.ones(2, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "src.safetensors")
    result = ckpt_tools.merge(
        tmp_path / "src.safetensors", tmp_path / "m.safetensors", dtype="bf16"
    )
    assert [n for n in result.notes if "not cast" in n] == [
        "1 tensors keep their types, which are not cast: float8_e4m3fn (b, …)"
    ]
    got = load_file(tmp_path / "m.safetensors")
    assert [got[n].dtype for n in "abn"] == [torch.bfloat16, torch.float8_e4m3fn, torch.int64]
    assert not any(
        "not cast" in n
        for n in ckpt_tools.merge(tmp_path / "src.safetensors", tmp_path / "n.safetensors").notes
    )
    result = ckpt_tools.convert(
        tmp_path / "src.safetensors", tmp_path / "m.pt", to="torch", dtype="bf16"
    )
    assert any("not cast: float8_e4m3fn" in n for n in result.notes)


def test_a_tensor_with_the_name_of_an_optimizer_is_none_of_its_states(tmp_path: Path) -> None:
    names = ("optim", "optim.param_groups.0.lr", "optim.state.a.exp_avg")
    save_file({name: torch.ones(3) for name in names}, tmp_path / "m.safetensors")
    found = ckpt_tools.inspect(tmp_path / "m.safetensors")
    assert {name: total.num_tensors for name, total in found.optimizer_states.items()} == {
        "exp_avg": 1
    }
