"""Checkpoints that stock torch has compressed with zstd. The oracle is torch: it writes them, and
reads what is made of them.
"""

from __future__ import annotations

import pickle
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

import ckpt_tools
from ckpt_tools.errors import CheckpointError, FormatError, PlanError
from ckpt_tools.formats.dcp import format as dcp_format
from tests.servers.servers import Server

State = dict[str, Any]


def state() -> State:
    torch.manual_seed(0)
    return {
        "model": {
            "a": torch.randn(60, 57),
            "b": torch.arange(10_000).bfloat16().view(100, 100).T,
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4),
            "zeros": torch.zeros(700_000),
        },
        "step": 7,
        "note": "ünï",
        "optimizer": {"state": {"a": {"exp_avg": torch.randn(60, 57)}}},
    }


def write(folder: Path, *, extension: type = ZStandard, threads: int = 1) -> State:
    want = state()
    writer = FileSystemWriter(folder, thread_count=threads, _extensions=[extension()])
    dcp.save(want, storage_writer=writer, no_dist=True)
    return want


def zeros_like(want: State) -> State:
    return {
        k: zeros_like(v)
        if isinstance(v, dict)
        else torch.zeros_like(v)
        if isinstance(v, torch.Tensor)
        else type(v)()
        for k, v in want.items()
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_every_verb_reads_a_compressed_checkpoint(
    many: bool,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ckpt: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    if many:  # those with very many chunks are read in another way
        monkeypatch.setattr(dcp_format, "_MANY_BYTES", 1)
    path = tmp_path / "step"
    want = write(path, threads=threads)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    found = ckpt_tools.inspect(path)
    assert (found.total.num_tensors, found.total.num_objects) == (6, 2)
    assert "zstd" in found.extras["compression"]
    assert ckpt_tools.verify(path).problems == []
    ckpt_tools.merge(path, tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "model.safetensors"), dict(want["model"]))
    ckpt_tools.reshard(path, tmp_path / "three", to_ranks=3)
    loaded = zeros_like(want)
    dcp.load(loaded, checkpoint_id=tmp_path / "three", no_dist=True)
    assert same(loaded, want)
    ours = zeros_like(want)
    report = ckpt_tools.load(path, ours)
    assert same(ours, want) and report.num_tensors == 6
    with ckpt_tools.open(path) as opened:
        assert torch.equal(opened["model.a"][5:9, 3:], want["model"]["a"][5:9, 3:])
    assert ckpt_tools.diff(path, tmp_path / "three").num_equal == 8
    ckpt_tools.convert(path, tmp_path / "pt.pt", to="torch")
    assert same(torch.load(tmp_path / "pt.pt", weights_only=False)["model"], want["model"])
    copied = ckpt_tools.copy(path, tmp_path / "copy")
    assert any("not compressed" in note for note in copied.notes)
    dcp.load(loaded := zeros_like(want), checkpoint_id=tmp_path / "copy", no_dist=True)
    assert same(loaded, want)
    ckpt_tools.seal(tmp_path / "copy")
    with pytest.raises(PlanError, match="ckpt copy"):
        ckpt_tools.seal(path)
    done = ckpt("verify", path)
    assert done.returncode == 0 and "were decompressed" in done.stdout
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path, rng = tmp_path / "step", random.Random(1)
    want = write(path)
    (data,) = path.glob("*.distcp")
    whole, found = data.read_bytes(), 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        data.write_bytes(damaged)
        try:
            problems = ckpt_tools.verify(path).problems
        except CheckpointError:
            problems = [True]  # type: ignore[list-item]
        if problems:
            found += 1
            continue
        ckpt_tools.load(path, ours := zeros_like(want))
        assert same(ours, want)  # such as a bit that no decoder looks at
    assert found > 120
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for cut in (1, 9, 100, 300, len(whole) // 2):
        data.write_bytes(whole[:-cut])
        with pytest.raises(CheckpointError):
            ckpt_tools.verify(path)
    data.write_bytes(whole)
    for at in metadata.storage_data.values():  # streams that end early
        at.length -= 5
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"ends early|damaged"):
            ckpt_tools.load(path, zeros_like(want))
        at.length += 5


def test_hostile_items_are_refused_in_bounded_room(tmp_path: Path) -> None:
    write(path := tmp_path / "step")
    index = path / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    (data,) = path.glob("*.distcp")
    compressor = zstandard.ZstdCompressor(level=1)
    bomb = compressor.compress(bytes(200 << 20))
    at = next(i for k, i in metadata.storage_data.items() if k.fqn == "model.a")
    whole = data.read_bytes()
    data.write_bytes(whole + bomb)
    at.offset, at.length = len(whole), len(bomb)
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="longer than its tensor"):
        ckpt_tools.inspect(path)
    (problem,) = ckpt_tools.verify(path).problems
    assert "longer than its tensor" in problem.what
    length, at.length = at.length, -5
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="no place"):
        ckpt_tools.inspect(path)
    at.length, at.transform_descriptors = length, None
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="some items are compressed"):
        ckpt_tools.inspect(path)
    at.transform_descriptors = ["stream.rot13/1"]
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="rot13"):
        ckpt_tools.inspect(path)


def test_a_compressed_step_is_resumed_and_a_stray_file_is_left_alone(tmp_path: Path) -> None:
    ours = {"model": nn.Linear(3, 2), "step": 10}
    with ckpt_tools.CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(10, ours)
    later = {"model": {k: v + 1 for k, v in ours["model"].state_dict().items()}, "step": 20}
    path = tmp_path / "run" / "step-00000020"
    dcp.save(later, storage_writer=FileSystemWriter(path, _extensions=[ZStandard()]), no_dist=True)
    (path / "notes.metadata").write_text("mine")
    with ckpt_tools.CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume(ours) == 20
    assert ours["step"] == 20 and same(dict(ours["model"].state_dict()), later["model"])


def test_a_compressed_checkpoint_in_a_bucket(server: Server, tmp_path: Path) -> None:
    want = write(tmp_path / "step")
    fs = server.bucket("packed")
    fs.put(str(tmp_path / "step"), "packed/step", recursive=True)
    options = {"storage_options": server.options}
    ckpt_tools.load("s3://packed/step", ours := zeros_like(want), **options)  # type: ignore[arg-type]
    assert same(ours, want)
    assert ckpt_tools.verify("s3://packed/step", **options).problems == []  # type: ignore[arg-type]
