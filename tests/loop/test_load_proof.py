"""A load compares whole tensors with their fingerprints: what a chunk's own checksum cannot find."""

from __future__ import annotations

import shutil
import struct
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError
from ckpt_tools.distributed import StorageReader, StorageWriter
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


@pytest.mark.parametrize("wrong", ["none", "rows", "columns", "same", "narrow"])
def test_ranks_find_a_flipped_bit_together(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    names = ("rows", "columns", "same", "narrow")
    widths = (3000, 3000, 3000, 30)
    values = {
        n: torch.full((6, w), i + 1.0) for i, (n, w) in enumerate(zip(names, widths, strict=True))
    }
    save_file(values, path)
    ckpt_tools.seal(path)
    if wrong != "none":
        value = struct.pack("<f", names.index(wrong) + 1.0)
        data = bytearray(path.read_bytes())
        data[data.rindex(value * 10) + 5] ^= 1
        path.write_bytes(data)
    torchrun(3, "proof.py", str(path), wrong)


@pytest.mark.parametrize("damage", ["none", "flipped", "alone", "swapped"])
def test_a_tensor_that_ranks_read_in_parts_is_proved(damage: str, tmp_path: Path) -> None:
    torchrun(2, "proof_in_parts.py", str(tmp_path), damage)


@pytest.mark.parametrize(("dim", "damaged"), [(0, ""), (0, "B"), (0, "AB"), (1, "B")])
def test_ranks_with_copies_of_a_tensor_compare_what_they_read(
    dim: int, damaged: str, tmp_path: Path
) -> None:
    """A reviewer's: the copies differed, and the load took each rank's own."""
    torchrun(4, "proof_of_copies.py", str(tmp_path), str(dim), damaged)


def test_stock_dcp_with_our_reader_compares_whole_tensors(run: Path) -> None:
    step = run / "step-00000002"
    state = {"model": zeros()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=StorageReader(step), no_dist=True)
        assert state["model"]["b"].tolist() == [2.5] * 4
        shutil.copy(run / "step-00000001/__0_0.distcp", step / "__0_0.distcp")
        with pytest.raises(CheckpointException, match="a tensor is not what was sealed"):
            dcp.load(state, storage_reader=StorageReader(step), no_dist=True)


OBJECTS = {"best": 111, "last": 221}


def exchanged(folder: Path) -> None:
    """Exchanges the archives of two objects of one length in the only data file of a DCP."""
    from ckpt_tools.formats.registry import open_source

    source = open_source(folder)
    source.store.close()
    (first, second) = sorted(
        (source.catalog.objects[f"model.lr.{name}"].extent for name in OBJECTS),
        key=lambda extent: extent.start,
    )
    assert first.nbytes == second.nbytes
    file = folder / first.file
    data = bytearray(file.read_bytes())
    a, b = (slice(e.start, e.start + e.nbytes) for e in (first, second))
    data[a], data[b] = data[b], data[a]
    file.write_bytes(data)


@pytest.mark.parametrize("writer", ["save", "reshard", "seal", "plugin"])
def test_objects_that_changed_places_are_found(writer: str, tmp_path: Path) -> None:
    """Each has the right CRC-32 in its own archive."""
    state = {"model": {"w": torch.ones(3), "lr": dict(OBJECTS)}}
    path = tmp_path / "p"
    if writer == "plugin":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=StorageWriter(path), no_dist=True)
    else:
        ckpt_tools.save(tmp_path / "first", state)
        ckpt_tools.reshard(tmp_path / "first", path, to_ranks=1)
    if writer == "save":
        path = tmp_path / "first"
    if writer == "seal":
        next(path.glob("ckpt.manifest.*")).unlink()
        ckpt_tools.seal(path)
    loaded = {"model": {"w": torch.zeros(3), "lr": {"best": 0, "last": 0}}}
    ckpt_tools.load(path, loaded)
    assert loaded["model"]["lr"] == OBJECTS
    exchanged(path)
    with pytest.raises(IntegrityError, match="an object is not what was sealed"):
        ckpt_tools.load(path, loaded)
    with pytest.raises(IntegrityError, match=r"bytes were damaged .*'model\.lr\."):
        ckpt_tools.reshard(path, tmp_path / "two", to_ranks=2)
    with pytest.raises(IntegrityError, match="an object is not what was sealed"):
        ckpt_tools.convert(path, tmp_path / "x.pt", to="torch")
    assert not (tmp_path / "two").exists() and not (tmp_path / "x.pt").exists()
    names = {f"model.lr.{name}" for name in OBJECTS}
    assert names <= {problem.fqn for problem in ckpt_tools.verify(path).problems}
    assert set(ckpt_tools.salvage(path, tmp_path / "rescued").lost) == names
