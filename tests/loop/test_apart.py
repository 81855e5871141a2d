"""Payloads that are not row-major are compared with their CRC-32 by every reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import IntegrityError
from tests.loop.states import by_plugin

WANTED = torch.arange(6000, dtype=torch.float32).reshape(60, 100)


def stock(path: Path) -> Path:
    dcp.save({"model": {"w": WANTED.t().contiguous().t()}}, checkpoint_id=path, no_dist=True)
    return path / "__0_0.distcp"


def one_file(path: Path) -> Path:
    torch.save({"model": {"w": WANTED.t().contiguous().t()}}, path)
    return path


def by_load(path: Path) -> torch.Tensor:
    state: dict[str, Any] = {"model": {"w": torch.zeros(60, 100)}}
    ckpt_tools.load(path, state)
    return state["model"]["w"]  # type: ignore[no-any-return]


def by_merge(path: Path, dtype: str | None = None) -> torch.Tensor:
    out = path.parent / "out.safetensors"
    ckpt_tools.merge(path, out, dtype=dtype, overwrite=True)
    return ckpt_tools.open(out)["w"].torch().float()


def by_convert(path: Path) -> torch.Tensor:
    ckpt_tools.convert(path, path.parent / "dcp", to="dcp", overwrite=True)
    return ckpt_tools.open(path.parent / "dcp")["model.w"].torch()


def by_average(path: Path) -> torch.Tensor:
    ckpt_tools.average([path, path], path.parent / "mean.safetensors", overwrite=True)
    return ckpt_tools.open(path.parent / "mean.safetensors")["w"].torch()


READS: dict[str, Callable[[Path], torch.Tensor]] = {
    "load": by_load,
    "open": lambda path: ckpt_tools.open(path)["model.w"].torch(),
    "merge": by_merge,
    "merge with a cast": lambda path: by_merge(path, "fp64"),
    "convert": by_convert,
    "average": by_average,
    "stats": lambda path: WANTED * bool(ckpt_tools.stats(path).tensors),
    "plugin": lambda path: by_plugin(path, (60, 100)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("write", [stock, one_file])
def test_a_flipped_bit_in_a_transposed_tensor_is_found(
    write: Callable[[Path], Path], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    file = write(path)
    assert torch.equal(READS[name](path), WANTED)
    data = bytearray(file.read_bytes())
    data[data.find(WANTED.t().contiguous().numpy().tobytes()) + 1234] ^= 0x10
    file.write_bytes(data)
    with pytest.raises((IntegrityError, dcp.CheckpointException), match="CRC-32"):
        READS[name](path)


@pytest.mark.parametrize("key", [slice(None), ..., slice(0, 60)])
def test_a_whole_slice_of_a_sealed_tensor_is_compared_with_its_fingerprint(
    key: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    stock(tmp_path / "x")
    ckpt_tools.merge(tmp_path / "x", path)
    assert torch.equal(ckpt_tools.open(path)["w"][key], WANTED)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="not what was sealed"):
        ckpt_tools.open(path)["w"][key]
