"""Statistics that an accelerator computes are those of the engine. Here the CPU stands for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.engine.statistics import measure
from ckpt_tools.loop.state.device_statistics import measure_on_device, moments_by_name
from ckpt_tools.loop.state.shards import as_bytes
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.storage import LocalStore


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_tools.loop.state.device_statistics.DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr("ckpt_tools.loop.state.device_statistics._PIECE_NUMEL", 100)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    plain = torch.randn(37, 41)
    return {
        "float32": plain,
        "float64": plain.double(),
        "float16": plain.half(),
        "bfloat16": plain.bfloat16(),
        "transposed": torch.randn(64, 33).t(),
        "zeros": torch.zeros(300),
        "negative": torch.tensor([-3.0, 0.0, -0.0, 2.0]),
        "scalar": torch.tensor(7.5),
        "fp8": plain.to(torch.float8_e4m3fn),
        "complex": torch.randn(20, 3, dtype=torch.complex64),
        "int64": torch.arange(-500, 700),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.arange(300) % 3 == 0,
    }


NOT_EXACT = {
    "nan": torch.tensor([1.0, float("nan"), 2.0]),
    "infinite": torch.tensor([1.0, float("-inf"), 2.0]),
    "huge": torch.full((5,), 1e300, dtype=torch.float64),
    "tiny": torch.full((5,), 1e-300, dtype=torch.float64),
}


def test_the_device_measures_what_the_engine_measures(on_device: None) -> None:
    given = {**tensors(), **NOT_EXACT, "empty": torch.zeros(0, 4)}
    pending = measure_on_device(list(given.values()))
    assert pending is not None
    found = pending.result()
    # the engine measures these: other values count, and float64 has no room for the squares
    assert {list(given)[n] for n in range(len(given)) if n not in found} == {*NOT_EXACT, "empty"}
    for number, moments in found.items():
        name, tensor = list(given.items())[number]
        data = bytearray(as_bytes(tensor.contiguous()))  # type: ignore[arg-type]
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        expected = measure(torch.frombuffer(data, dtype=torch.uint8).numpy(), dtype).result()
        assert moments.result().packed() == expected.packed(), name


def test_a_tensor_counts_only_if_all_of_its_shards_were_measured(on_device: None) -> None:
    shards = [torch.ones(4), torch.ones(2), torch.tensor([float("nan")]), torch.ones(3)]
    pending = measure_on_device(shards)
    assert pending is not None
    found = moments_by_name(["a", "a", "b", "b"], pending.result())
    assert list(found) == ["a"] and found["a"].result().numel == 6


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_has_the_same_statistics_with_and_without_a_device(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(root: Path) -> dict[str, Any]:
        torch.manual_seed(1)
        state = {"model": {**tensors(), **NOT_EXACT}}
        with CheckpointManager(root, statistics=True, asynchronous=asynchronous) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state)
                state["model"]["float32"] += 0.25
        manifest = find_manifest(LocalStore(root / "step-00000002"))
        assert manifest is not None
        return {n: t.statistics and t.statistics.packed() for n, t in manifest.tensors.items()}

    expected = saved(tmp_path / "engine")
    monkeypatch.setattr("ckpt_tools.loop.state.device_statistics.DEVICE_TYPES", ("cpu",))
    assert saved(tmp_path / "device") == expected
    assert expected["model.float32"][-1] == 0.25 and expected["model.nan"][3] == 1


def test_a_single_save_has_them_too(
    tmp_path: Path, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_tools.engine.statistics._BLOCK_NUMEL", 0)  # the engine cannot measure
    ckpt_tools.save(tmp_path / "one", {"w": torch.full((8,), 3.0)}, statistics=True)
    manifest = find_manifest(LocalStore(tmp_path / "one"))
    assert manifest is not None and manifest.tensors["w"].statistics is not None
    assert manifest.tensors["w"].statistics.rms == pytest.approx(3.0)
