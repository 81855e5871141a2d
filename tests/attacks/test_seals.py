"""Sealed checkpoints that lost a file, have another index, or have two manifests."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointError, FormatError, IntegrityError
from ckpt_tools.publish.find_manifest import read_manifest
from ckpt_tools.publish.manifest import SealedPickle
from ckpt_tools.storage import LocalStore
from tests.attacks.hostile import Run, limited
from tests.states import one_step


@pytest.fixture
def step(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = one_step(model, torch.ones(1, 4))
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


@pytest.mark.slow
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


# ---- plain values in pickles ---------------------------------------------------------------------


def job(lr: float = 0.5, epoch: int = 7) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = one_step(model, torch.ones(4), lr=lr)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}


def refuses_to_read(path: Path, where: Path) -> None:
    """Loads, converts and reshards: each is refused."""
    model = nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}
    with pytest.raises(IntegrityError):
        ckpt_tools.load(path, state)
    with pytest.raises(IntegrityError):
        ckpt_tools.convert(path, where / "x.pt", to="torch")
    with pytest.raises(IntegrityError):
        ckpt_tools.reshard(path, where / "y", to_ranks=2)
    assert not (where / "x.pt").exists() and not (where / "y").exists()
    assert ckpt_tools.verify(path).problems


def test_another_file_with_the_same_tensors_is_not_the_sealed_one(tmp_path: Path) -> None:
    state = job()
    torch.save(state, tmp_path / "q.pt")
    ckpt_tools.seal(tmp_path / "q.pt")
    state["optimizer"]["param_groups"][0].update(params=[1, 0], lr=99.0)
    torch.save(state | {"epoch": 8}, tmp_path / "q.pt")
    refuses_to_read(tmp_path / "q.pt", tmp_path)
    result = ckpt_tools.salvage(tmp_path / "q.pt", tmp_path / "s")
    assert {"epoch", "optimizer.param_groups.0.lr"} <= set(result.lost)
    assert not ckpt_tools.inspect(tmp_path / "s").total.num_objects


def test_a_flip_in_a_pickle_without_checksums_is_found(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(job(epoch=71077345), tmp_path / "q.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    ckpt_tools.seal(tmp_path / "q.pt")
    data = bytearray((tmp_path / "q.pt").read_bytes())
    data[data.index((71077345).to_bytes(4, "little"))] ^= 1
    (tmp_path / "q.pt").write_bytes(data)
    assert torch.load(tmp_path / "q.pt")["epoch"] == 71077344
    refuses_to_read(tmp_path / "q.pt", tmp_path)


@pytest.mark.parametrize(("to", "name"), [("torch", "out.pt"), ("per-rank", "out")])
def test_values_of_files_that_convert_wrote_are_sealed(to: str, name: str, tmp_path: Path) -> None:
    torch.save(job(), tmp_path / "q.pt")
    ckpt_tools.convert(tmp_path / "q.pt", tmp_path / name, to=to, param_order="model")
    files = [tmp_path / name] if to == "torch" else list((tmp_path / name).glob("optim_*.pt"))
    state = torch.load(files[0], weights_only=False)
    optimizer = state["optimizer"] if to == "torch" else state
    assert ckpt_tools.verify(tmp_path / name).problems == []
    optimizer["param_groups"][0]["lr"] = 77.0
    torch.save(state, files[0])
    (tmp_path / "new").mkdir()
    refuses_to_read(tmp_path / name, tmp_path / "new")


def test_values_beside_dcp_are_sealed_with_it(tmp_path: Path) -> None:
    dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "l", no_dist=True)
    torch.save({"epoch": 7}, tmp_path / "l" / "meta.pt")
    ckpt_tools.seal(tmp_path / "l")
    state = {"state_dict": {"w": torch.zeros(2)}, "epoch": 0}
    ckpt_tools.load(tmp_path / "l", state)
    assert state["epoch"] == 7
    torch.save({"epoch": 8}, tmp_path / "l" / "meta.pt")
    with pytest.raises(IntegrityError, match=r"pickle of a file is not the sealed one.*meta\.pt"):
        ckpt_tools.load(tmp_path / "l", state)


def test_a_sealed_adapter_and_side_files_are_compared(tmp_path: Path) -> None:
    (tmp_path / "cfg").mkdir()
    (tmp_path / "base").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
    (tmp_path / "cfg/adapter_config.json").write_text(json.dumps(config))
    weight = torch.randn(6, 4)
    save_file({"model.q.weight": weight}, tmp_path / "base/model.safetensors")
    matrices = {
        "base_model.model.model.q.base_layer.weight": weight,
        "base_model.model.model.q.lora_A.default.weight": torch.randn(2, 4),
        "base_model.model.model.q.lora_B.default.weight": torch.randn(6, 2),
    }
    torch.save(matrices, tmp_path / "full.pt")
    adapter = tmp_path / "adapter"
    ckpt_tools.convert(tmp_path / "full.pt", adapter, to="peft", base=tmp_path / "cfg")
    ckpt_tools.merge(tmp_path / "base", tmp_path / "m.safetensors", lora=adapter)
    for name, old, new in (
        ("adapter_model.safetensors", None, None),
        ("adapter_config.json", b'"lora_alpha": 4', b'"lora_alpha": 5'),
    ):
        sound = (adapter / name).read_bytes()
        flipped = sound[:-1] + bytes([sound[-1] ^ 0x40])
        (adapter / name).write_bytes(flipped if old is None else sound.replace(old, new))
        with pytest.raises(IntegrityError, match="sealed"):
            ckpt_tools.merge(tmp_path / "base", tmp_path / "n.safetensors", lora=adapter)
        if old is not None:
            with pytest.raises(IntegrityError, match="a file is not the sealed one"):
                ckpt_tools.convert(tmp_path / "full.pt", tmp_path / "b", to="peft", base=adapter)
        (adapter / name).write_bytes(sound)
    assert not (tmp_path / "n.safetensors").exists() and not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("to", "files"),
    [
        ("deepspeed-universal", ["zero/optimizer_state.pt", "mp_rank_00_model_states.pt"]),
        ("accelerate", ["scheduler.bin"]),
    ],
)
def test_exchanged_files_of_values_are_refused(to: str, files: list[str], tmp_path: Path) -> None:
    for number in (0, 1):
        model = nn.Linear(3, 2)
        optimizer = one_step(model, torch.ones(3), lr=0.1 + number)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": number}
        state["scheduler"] = {"last_epoch": number}
        torch.save(state, tmp_path / f"{number}.pt")
        out = tmp_path / f"out{number}"
        ckpt_tools.convert(tmp_path / f"{number}.pt", out, to=to, param_order="model")
    for file in files:
        sound = (tmp_path / "out0" / file).read_bytes()
        assert ckpt_tools.inspect(tmp_path / "out0").total.num_tensors
        shutil.copy(tmp_path / "out1" / file, tmp_path / "out0" / file)
        refused = (
            lambda: ckpt_tools.convert(tmp_path / "out0", tmp_path / "x.pt", to="torch"),
            lambda: ckpt_tools.load(tmp_path / "out0", {"epoch": 0}),
            lambda: ckpt_tools.reshard(tmp_path / "out0", tmp_path / "y", to_ranks=2),
        )
        for call in refused:
            with pytest.raises(IntegrityError, match="not the sealed one"):
                call()
        assert any(
            problem.file == file for problem in ckpt_tools.verify(tmp_path / "out0").problems
        )
        (tmp_path / "out0" / file).write_bytes(sound)


def test_a_copy_of_one_file_without_a_manifest_is_readable(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5)}, tmp_path / "m.safetensors")
    np.savez(tmp_path / "n.npz", a=np.arange(5.0))
    for name in ("m.safetensors", "n.npz"):
        ckpt_tools.copy(tmp_path / name, tmp_path / f"c{name}")
        ckpt_tools.merge(tmp_path / f"c{name}", tmp_path / f"{name}.safetensors")
        assert ckpt_tools.verify(tmp_path / f"c{name}").problems == []
    ckpt_tools.seal(tmp_path / "n.npz")
    assert ckpt_tools.inspect(tmp_path / "n.npz").total.num_tensors == 1


def test_what_a_universal_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "array": np.arange(3)}
    ckpt_tools.save(tmp_path / "s", state)
    result = ckpt_tools.convert(tmp_path / "s", tmp_path / "u", to="deepspeed-universal")
    said = " ".join(result.notes)
    assert "1.running_mean" in said and "array.data" in said


def test_a_manifest_with_a_huge_pickle_is_malformed(tmp_path: Path, ckpt: Run) -> None:
    torch.save(job(), tmp_path / "q.pt")
    ckpt_tools.seal(tmp_path / "q.pt")
    (path,) = tmp_path.glob("q.pt.ckpt.manifest.*")
    manifest = read_manifest(LocalStore(tmp_path), path.name)
    huge = {"q.pt": SealedPickle(0, 1 << 46, "0" * 16)}
    path.write_bytes(replace(manifest, pickles=huge).render())
    done = ckpt("convert", tmp_path / "q.pt", tmp_path / "o", "--to", "dcp")
    assert done.returncode == 11 and "Traceback" not in done.stderr, done.stderr
