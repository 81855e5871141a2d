"""`torch.save` files, with torch as writer and oracle."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointError, FormatError
from tests.command import run_ckpt
from tests.strategies import flip

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
]


def save(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 16), nn.Conv2d(3, 4, 3), nn.BatchNorm1d(7), nn.Linear(16, 9)
    ).to(memory_format=torch.channels_last)


def test_a_training_state_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    sum(p.sum() for p in net.parameters()).backward()
    optimizer.step()
    path = save(
        tmp_path / "state.pt",
        {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "on": torch.device("cuda", 1),
            "args": argparse.Namespace(lr=1),
        },
    )
    report = ckpt_tools.inspect(path)
    assert report.total.num_tensors == len(net.state_dict()) + 3 * len(
        optimizer.state_dict()["state"]
    )
    assert "argparse.Namespace (1)" in report.extras["other values"]
    ckpt_tools.merge(path, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == net.state_dict().keys() and all(
        torch.equal(got[n], v) for n, v in net.state_dict().items()
    )
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    ckpt_tools.load(path, {"model": other})
    assert all(torch.equal(v, net.state_dict()[n]) for n, v in other.state_dict().items())


def test_views_ties_and_every_type(tmp_path: Path) -> None:
    base = torch.arange(600.0).reshape(20, 30)
    tensors = {
        "all": base,
        "tied": base,
        "row": base[7],
        "rows": base[3:5],
        "t": base.t(),
        "every": base[::2, ::3],
        "spread": torch.ones(1).expand(50),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "parameter": nn.Parameter(torch.ones(3)),
        "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    } | {str(d): torch.arange(6).to(d) for d in DTYPES}
    path = save(tmp_path / "views.pth", OrderedDict(tensors))
    ckpt_tools.merge(path, tmp_path / "m.safetensors", keep_prefix=True, select=["*"])
    got = load_file(tmp_path / "m.safetensors")
    want = torch.load(path, weights_only=False)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape and torch.equal(
            got[name].contiguous().flatten().view(torch.uint8),
            value.detach().contiguous().flatten().view(torch.uint8),
        ), name
    assert ckpt_tools.diff(path, tmp_path / "m.safetensors").is_same


def test_lists_and_one_bare_tensor(tmp_path: Path) -> None:
    one = ckpt_tools.inspect(save(tmp_path / "bare.pt", torch.ones(3)))
    assert one.total.num_tensors == 1
    nested = ckpt_tools.inspect(
        save(tmp_path / "list.pt", {"a": [torch.ones(2), {"b": (torch.ones(3), 5)}]})
    )
    assert nested.total.num_tensors == 2
    with pytest.raises(FormatError, match="two entries have one name"):
        ckpt_tools.inspect(
            save(tmp_path / "clash.pt", {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
        )


def test_shards_with_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    out, tmp_path = tmp_path / "m.safetensors", tmp_path / "shards"
    tmp_path.mkdir()
    values = {f"layer.{i}.weight": torch.randn(40, 30) for i in range(4)}
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for number, name in enumerate(names):
        save(
            tmp_path / name, {k: v for k, v in values.items() if int(k.split(".")[1]) % 2 == number}
        )
    weight_map = {k: names[int(k.split(".")[1]) % 2] for k in values}
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    ckpt_tools.merge(tmp_path, out)
    got = load_file(out)
    assert got.keys() == values.keys() and all(torch.equal(got[n], v) for n, v in values.items())
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../etc/passwd"}})
    )
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        ckpt_tools.inspect(tmp_path)


def test_what_holds_no_tensor_of_a_known_type_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no tensors of a known type, but argparse\.Namespace"):
        ckpt_tools.inspect(save(tmp_path / "x.pt", {"args": argparse.Namespace(w=torch.ones(3))}))


def test_what_is_no_zip_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    done = run_ckpt("inspect", tmp_path / "old.pt")
    assert done.returncode == 11 and "torch before 1.6" in done.stderr, done.stderr
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    assert run_ckpt("inspect", tmp_path / "script.pt").returncode == 11
    (tmp_path / "text.pt").write_text("hello")
    done = run_ckpt("merge", tmp_path / "text.pt", tmp_path / "m.safetensors")
    assert done.returncode == 11 and "not a torch.save archive" in done.stderr, done.stderr
    assert not (tmp_path / "m.safetensors").exists()


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch canary",)


def test_code_in_it_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "evil.pt", {"w": torch.ones(3), "x": Attack()})
    report = ckpt_tools.inspect(tmp_path / "evil.pt")
    said = report.extras["other values"]
    assert report.total.num_tensors == 1 and "posix.system (1); torch.load(weights" in said
    assert "would run code" in ckpt_tools.verify(tmp_path / "evil.pt").notes[0]
    ckpt_tools.merge(tmp_path / "evil.pt", tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.ones(3))
    assert not (tmp_path / "canary").exists()


def archive(path: Path, data: bytes, storages: dict[str, bytes]) -> Path:
    """A zip as torch lays it out, with any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in {
            "data.pkl": data,
            **{f"data/{k}": v for k, v in storages.items()},
            "version": b"3\n",
        }.items():
            file.writestr(f"archive/{name}", content)
    path.write_bytes(buffer.getvalue())
    return path


def tensor(
    key: str, numel: int, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> bytes:
    def ints(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", v) for v in values) + b"t"

    pid = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00"
        + key.encode()
        + b"X\x03\x00\x00\x00cpu"
        + ints((numel,))[1:-1]
        + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + pid
        + ints((offset,))[1:-1]
        + ints(sizes)
        + ints(strides)
        + b"\x89NtR"
    )


def doubled(how_often: int) -> list[object]:
    """A list that holds one twice, which holds one twice."""
    value: list[object] = []
    for _ in range(how_often):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (tensor("0", 4, 0, (5,), (1,)), "exceeds its storage"),
        (tensor("0", 4, 3, (2,), (1,)), "exceeds its storage"),
        (tensor("0", 4, 0, (2, 2), (1 << 40, 1)), "exceeds its storage"),
        (tensor("0", 4, -1, (2,), (1,)), "malformed"),
        (tensor("0", 4, 0, (-2,), (1,)), "malformed"),
        (tensor("0", 4, 0, (2, 2), (1,)), "malformed"),
        (tensor("9", 4, 0, (2,), (1,)), "a storage is missing"),
        (pickle.dumps(doubled(60), 2)[2:-1], "too large or too deep"),
        (b"]q\x00(h\x00e", "too large or too deep"),
        (b"K\x05", "no tensor|0 tensors|nothing"),
    ],
)
def test_a_pickle_that_lies_is_refused(body: bytes, message: str, tmp_path: Path) -> None:
    path = archive(
        tmp_path / "x.pt", b"\x80\x02}X\x01\x00\x00\x00w" + body + b"s.", {"0": bytes(16)}
    )
    with pytest.raises(CheckpointError, match=message):
        ckpt_tools.merge(path, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_a_flip_is_found_by_the_zips_own_checksum(tmp_path: Path) -> None:
    path = save(tmp_path / "state.pt", {"a": torch.randn(900), "b": torch.randn(40, 50)})
    assert ckpt_tools.verify(path).problems == []
    flip(path, path.read_bytes().index(torch.load(path)["b"].numpy().tobytes()) + 77, 3)
    result = ckpt_tools.verify(path)
    assert list(result.lost) == ["b"] and result.problems[0].fqn == "b"
    ckpt_tools.salvage(path, tmp_path / "rest.safetensors")
    assert load_file(tmp_path / "rest.safetensors").keys() == {"a"}
    assert pickle.dumps(result.problems)
    ckpt_tools.seal(save(tmp_path / "sealed.pt", {"a": torch.randn(900)}))
    assert ckpt_tools.verify(tmp_path / "sealed.pt").is_sealed


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    save(tmp_path / "a.bin", {"w": torch.ones(3)})
    for weight_map, message in (
        ({"w": "b.bin"}, "a data file is missing"),
        ({"v": "a.bin"}, "does not hold it"),
        ({"w": 5}, "expected file names"),
    ):
        (tmp_path / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
        with pytest.raises(CheckpointError, match=message):
            ckpt_tools.inspect(tmp_path)


def test_a_list_at_the_top_comes_back_as_a_list(tmp_path: Path) -> None:
    value = [torch.ones(2), {"a": torch.zeros(1)}, 7]
    torch.save(value, tmp_path / "a.pt")
    ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    got = torch.load(tmp_path / "b.pt", weights_only=True)
    assert isinstance(got, list) and len(got) == 3 and got[2] == 7
    assert torch.equal(got[0], value[0]) and torch.equal(got[1]["a"], value[1]["a"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2), "one value without a name"),
        ({"": torch.ones(1), "b": torch.ones(1)}, "an entry with an empty name"),
        ([torch.ones(1), torch.ones(1)], "a list, whose items"),
    ],
)
def test_a_top_level_without_names_is_told(value: object, words: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    result = ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    assert any(words in note for note in result.notes)
