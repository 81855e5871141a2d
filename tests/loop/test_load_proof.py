"""A load compares whole tensors with their fingerprints: what a chunk's own checksum cannot find."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError
from tests.conftest import torchrun


def zeros() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(4), "b": torch.zeros(4)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of one layout with other values."""
    with CheckpointManager(tmp_path / "run", asynchronous=False) as checkpoints:
        for step in (1, 2):
            state = {"a": torch.full((4,), float(step)), "b": torch.full((4,), step + 0.5)}
            checkpoints.save(step, {"model": state})
    return tmp_path / "run"


def test_a_file_of_another_step_is_not_loaded(run: Path) -> None:
    shutil.copy(run / "step-00000001/__0_0.distcp", run / "step-00000002/__0_0.distcp")
    with pytest.raises(IntegrityError, match="a tensor is not what was sealed"):
        ckpt_tools.load(run / "step-00000002", {"model": zeros()})
    state = {"model": zeros()}
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.resume(state) == 1
    assert state["model"]["a"].tolist() == [1.0] * 4


def test_items_that_changed_places_are_not_loaded(run: Path) -> None:
    file = run / "step-00000002" / "__0_0.distcp"
    data = file.read_bytes()
    cuts = [at for at in range(len(data)) if data[at : at + 4] == b"PK\3\4"]
    size = data.index(b"PK\5\6") + 22
    assert data[size : size + 4] == b"PK\3\4" and cuts  # the second zip begins there
    second = data[size : 2 * size]
    file.write_bytes(second + data[:size] + data[2 * size :])
    with pytest.raises(IntegrityError, match="a tensor is not what was sealed"):
        ckpt_tools.load(run / "step-00000002", {"model": zeros()})


def test_a_flipped_bit_in_safetensors_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, path)
    ckpt_tools.seal(path)
    assert ckpt_tools.load(path, {"model": zeros()}).num_proved == 2
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"not what was sealed: .*'b'"):
        ckpt_tools.load(path, {"model": zeros()})
    with (
        CheckpointManager(tmp_path / "run") as checkpoints,
        pytest.raises(IntegrityError, match="not what was sealed"),
    ):
        checkpoints.resume({"model": zeros()}, path=path)
    state = {"model": {"a": torch.zeros(4)}}
    assert ckpt_tools.load(path, state, select=["model.a"], strict=False).num_proved == 1
    ckpt_tools.load(path, {"model": {k: v.double() for k, v in zeros().items()}}, cast=True)


@pytest.mark.parametrize("wrong", ["none", "rows", "columns", "same"])
def test_ranks_find_a_flipped_bit_together(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    names = ("rows", "columns", "same")
    save_file({n: torch.full((6, 3000), i + 1.0) for i, n in enumerate(names)}, path)
    ckpt_tools.seal(path)
    if wrong != "none":
        value = struct.pack("<f", names.index(wrong) + 1.0)
        data = bytearray(path.read_bytes())
        data[data.rindex(value * 10) + 5] ^= 1
        path.write_bytes(data)
    torchrun(3, "proof.py", str(path), wrong)
