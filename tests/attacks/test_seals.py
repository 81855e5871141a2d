"""Sealed checkpoints that lost a file, have another index, or have two manifests."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import CheckpointError, FormatError, IntegrityError
from tests.attacks.hostile import limited


@pytest.fixture
def step(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ckpt_tools.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    return tmp_path / "step"


def without_a_parameter(path: Path) -> None:
    os.remove(next(path.glob("zero/*/fp32.pt")))


def with_another_name(path: Path) -> None:
    folder = next((path / "zero").iterdir())
    folder.rename(folder.with_name("7.bias"))


@pytest.mark.parametrize("damage", [without_a_parameter, with_another_name])
def test_a_sealed_directory_that_lost_a_tensor_is_refused(
    damage: Callable[[Path], None], step: Path, tmp_path: Path
) -> None:
    path = tmp_path / "universal"
    ckpt_tools.convert(step, path, to="deepspeed-universal")
    ckpt_tools.copy(path, tmp_path / "copied")  # also files two folders down
    assert ckpt_tools.diff(path, tmp_path / "copied").is_same
    damage(path)
    for call in (
        lambda: ckpt_tools.merge(path, tmp_path / "m.safetensors"),
        lambda: ckpt_tools.convert(path, tmp_path / "x.pt", to="torch"),
        lambda: ckpt_tools.open(path),
        lambda: ckpt_tools.stats(path),
    ):
        with pytest.raises(
            CheckpointError, match="sealed tensors are not there|is missing|was not sealed|lacks"
        ):
            call()
    assert not (tmp_path / "m.safetensors").exists() and not (tmp_path / "x.pt").exists()


def test_a_sealed_directory_without_its_index_is_not_read_as_a_part_of_it(
    step: Path, tmp_path: Path
) -> None:
    path = tmp_path / "accelerate"
    ckpt_tools.convert(step, path, to="accelerate")
    (path / "pytorch_model_fsdp_0" / ".metadata").unlink()
    for call in (
        lambda: ckpt_tools.verify(path),
        lambda: ckpt_tools.convert(path, tmp_path / "x.pt", to="torch"),
    ):
        with pytest.raises(IntegrityError, match="a sealed checkpoint lacks the files"):
            call()


def test_of_two_manifests_the_one_that_fits_the_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"layers.0.w": torch.ones(2), "layers.1.w": torch.zeros(2)}, path)
    ckpt_tools.seal(path)
    (seal,) = tmp_path.glob("*.ckpt.manifest.*")
    shutil.copy(seal, seal.with_name("m.safetensors.ckpt.manifest.0123abcd.json"))
    assert ckpt_tools.verify(path).problems == []
    assert ckpt_tools.verify(path).is_sealed
    path.write_bytes(path.read_bytes().replace(b"layers.0.w", b"layers.2.w"))
    assert ckpt_tools.verify(path).problems
    for call in (
        lambda: ckpt_tools.merge(path, tmp_path / "x.safetensors"),
        lambda: ckpt_tools.open(path),
        lambda: ckpt_tools.load(path, {"model": {}}, strict=False),
    ):
        with pytest.raises(FormatError, match="2 manifests, of which 0 fit"):
            call()


def test_a_copy_of_a_changed_index_or_without_a_sealed_file_is_refused(
    step: Path, tmp_path: Path
) -> None:
    ckpt_tools.merge(step, tmp_path / "shards", max_shard_bytes=60)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["metadata"]["more"] = 1
    index.write_text(json.dumps(body))
    with pytest.raises(IntegrityError):
        ckpt_tools.copy(tmp_path / "shards", tmp_path / "out")
    ckpt_tools.convert(step, tmp_path / "ranks", to="per-rank")
    (tmp_path / "ranks" / "extra_state_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match="a sealed file is missing"):
        ckpt_tools.copy(tmp_path / "ranks", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_thousands_of_keys_take_no_minutes(tmp_path: Path) -> None:
    """The time was the square of the number of keys: minutes for this file of 14 MB."""
    header = {
        "a." * 4500 + str(i): {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i in range(1500)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * 1500))
    code = "import sys, ckpt_tools; ckpt_tools.merge(sys.argv[1], sys.argv[2])"
    done = limited(code, path, tmp_path / "out.safetensors", seconds=100)
    assert done.returncode == 0, done.stderr[-500:]
