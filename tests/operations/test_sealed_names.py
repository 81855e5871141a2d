"""A flipped bit in a name of a sealed checkpoint: no other checksum finds it, and the values would go
to another name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError

Damage = Callable[[Path], Path]
OTHER = {"layer_w": torch.ones(10), "layer_l": torch.zeros(5)}


def replaced(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    file.write_bytes(data.replace(old, new))


def saved(folder: Path) -> Path:
    with CheckpointManager(folder, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"layer_w": torch.arange(10.0), "layer_n": torch.arange(5.0)})
    return folder / "step-00000001"


def of_dcp(folder: Path) -> Path:
    step = saved(folder / "run")
    replaced(step / ".metadata", b"layer_n", b"layer_l")
    return step


def of_safetensors(folder: Path) -> Path:
    file = folder / "sealed.safetensors"
    ckpt_tools.merge(saved(folder / "run"), file)
    replaced(file, b'"layer_n"', b'"layer_l"')
    return file


def of_accelerate(folder: Path) -> Path:
    out = folder / "sealed"
    state = {"model": {"layer_w": torch.arange(10.0), "layer_n": torch.arange(5.0)}}
    ckpt_tools.save(folder / "plain", state)
    ckpt_tools.convert(folder / "plain", out, to="accelerate", ranks=2)
    metadata = out / "pytorch_model_fsdp_0" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"layer_n", b"layer_l"))
    return out


def of_npz(folder: Path) -> Path:
    file = folder / "sealed.npz"
    np.savez(file, layer_w=np.arange(10.0), layer_n=np.arange(5.0))
    ckpt_tools.seal(file)
    data = file.read_bytes()
    assert data.count(b"layer_n") == 2  # before the values, and in the directory at the end
    file.write_bytes(data.replace(b"layer_n", b"layer_l"))
    return file


def of_torch(folder: Path) -> Path:
    """The pickle in a .pt has a checksum of its own, which is compared."""
    file = folder / "sealed.pt"
    ckpt_tools.convert(saved(folder / "run"), file, to="torch")
    replaced(file, b"layer_n", b"layer_l")
    return file


def read_each(path: Path) -> None:
    with ckpt_tools.open(path) as checkpoint:
        checkpoint["layer_l"]


USES: dict[str, Callable[[Path, Path], Any]] = {
    "merge": lambda src, dst: ckpt_tools.merge(src, dst / "m.safetensors"),
    "to dcp": lambda src, dst: ckpt_tools.convert(src, dst / "r", to="dcp", ranks=2),
    "convert": lambda src, dst: ckpt_tools.convert(src, dst / "t.pt", to="torch"),
    "average": lambda src, dst: ckpt_tools.average([src, src], dst / "a.safetensors"),
    "copy": lambda src, dst: ckpt_tools.copy(src, dst / src.name),
    "diff": lambda src, dst: ckpt_tools.diff(src, src),
    "stats": lambda src, dst: ckpt_tools.stats(src),
    "load": lambda src, dst: ckpt_tools.load(src, OTHER),
    "open": lambda src, dst: read_each(src),
}


@pytest.mark.parametrize("damage", [of_dcp, of_safetensors, of_accelerate, of_npz, of_torch])
@pytest.mark.parametrize("use", USES)
def test_a_flipped_bit_in_a_name_is_refused(use: str, damage: Damage, tmp_path: Path) -> None:
    path, out = damage(tmp_path), tmp_path / "out"
    out.mkdir()
    with pytest.raises(IntegrityError, match=r"is not the sealed one|a pickle is damaged"):
        USES[use](path, out)
    assert not list(out.iterdir())


@pytest.mark.parametrize("damage", [of_dcp, of_safetensors, of_accelerate])
def test_such_a_checkpoint_can_be_salvaged_and_looked_at(damage: Damage, tmp_path: Path) -> None:
    path = damage(tmp_path)
    assert ckpt_tools.verify(path).problems
    assert ckpt_tools.inspect(path).total.num_tensors == 2
    ckpt_tools.salvage(path, tmp_path / "saved.safetensors")
    found = load_file(tmp_path / "saved.safetensors")
    (name,) = [name for name in found if name.endswith("layer_w")]
    assert torch.equal(found[name], torch.arange(10.0))
