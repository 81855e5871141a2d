"""Statistics of values. The oracle is NumPy on whole tensors, in long doubles."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError, TensorStatistics
from tests.command import run_job
from tests.jobs import torchrun_command
from tests.servers.servers import Server

Run = Callable[..., subprocess.CompletedProcess[str]]
KINDS = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
    " complex64"
).split()


def values(kind: str, numel: int) -> Tensor:
    """Values of a type, with zeros, and NaN and infinity where the type has them."""
    torch.manual_seed(1)
    dtype = getattr(torch, kind)
    found = torch.randn(numel) * 5
    found[::7] = 0
    if kind.startswith(("float", "bfloat")):
        found[3::100] = math.nan
        if kind != "float8_e4m3fn":  # it has no infinity
            found[5::100] = -math.inf
    return found.to(dtype) if kind != "bool" else found > 0


def oracle(tensor: Tensor) -> TensorStatistics:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = plain.double().numpy().astype(np.longdouble).ravel()
    finite = numbers[np.isfinite(numbers)]
    rms = float(np.sqrt((finite**2).mean())) if len(finite) else 0.0
    return TensorStatistics(
        len(numbers),
        rms,
        float(np.abs(finite).max()) if len(finite) else 0.0,
        int((numbers == 0).sum()),
        int(np.isnan(numbers).sum()),
        int(np.isinf(numbers).sum()),
    )


def same(found: TensorStatistics, want: TensorStatistics) -> None:
    assert found.numel == want.numel and found[2:6] == want[2:6]
    assert found.rms == pytest.approx(want.rms, rel=1e-12)


@pytest.mark.parametrize("numel", [1, 50, 100_000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type(kind: str, numel: int, tmp_path: Path) -> None:
    tensor = values(kind, numel)
    torch.save({"x": tensor}, tmp_path / "a.pt")
    for memory in (None, 1 << 17):
        result = ckpt_tools.stats(tmp_path / "a.pt", memory_bytes=memory)
        same(result.tensors["x"], oracle(tensor))
    wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = wide.double().abs().flatten()
    numbers = numbers[torch.isfinite(numbers) & (numbers != 0)]
    want = dict(zip(*np.unique(np.frexp(numbers.numpy())[1] - 1, return_counts=True), strict=True))
    found = ckpt_tools.stats(tmp_path / "a.pt", histogram=True).histograms["x"]
    assert {int(k): int(v) for k, v in want.items()} == found


@pytest.mark.parametrize("numel", [5, 8191, 8192, 300_001])
def test_magnitudes_of_any_bits_of_a_float32(numel: int, tmp_path: Path) -> None:
    """Subnormal values are counted in another way, and so are long tensors."""
    rng = np.random.default_rng(numel)
    words = rng.integers(0, 1 << 32, numel, dtype=np.uint32)
    words[::3] &= 0x807FFFFF  # subnormal
    words[::7] &= 0x80000000  # zero
    torch.save({"x": torch.from_numpy(words.view(np.int32)).view(torch.float32)}, tmp_path / "a.pt")
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = np.abs(words.view(np.float32).astype(np.float64))
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    want = dict(zip(*np.unique(np.frexp(numbers)[1] - 1, return_counts=True), strict=True))
    found = ckpt_tools.stats(tmp_path / "a.pt", histogram=True).histograms["x"]
    assert found == {int(k): int(v) for k, v in want.items()}


def test_all_shardings_have_the_same_digits(tmp_path: Path, ckpt: Run) -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(1000, 301), "v": torch.randn(77).bfloat16(), "e": torch.zeros(0)}
    dcp.save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    found = [ckpt_tools.stats(tmp_path / "one").tensors]
    for ranks in (2, 3, 8):
        ckpt_tools.reshard(tmp_path / "one", tmp_path / str(ranks), to_ranks=ranks)
        found.append(ckpt_tools.stats(tmp_path / str(ranks), jobs=1, memory_bytes=1 << 18).tensors)
    packed = [{name: one.packed() for name, one in tensors.items()} for tensors in found]
    assert all(one == packed[0] for one in packed)
    words = ["-m", "ckpt_tools", "stats", str(tmp_path / "8"), "--json"]
    done = run_job(torchrun_command(2, *words), timeout=300)
    assert done.returncode == 0, done.stderr
    by_group = json.loads(done.stdout)["tensors"]
    assert by_group["w"]["rms"] == pytest.approx(found[0]["w"].rms, rel=1e-12)


def test_a_value_that_is_not_finite_is_exit_1_and_named(tmp_path: Path, ckpt: Run) -> None:
    state = {f"layers.{i}.w": torch.ones(3) for i in range(50)} | {"x": torch.tensor([math.nan])}
    save_file(state, tmp_path / "a.safetensors")
    done = ckpt("stats", tmp_path / "a.safetensors")
    assert done.returncode == 1 and "x: 1 NaN, 0 infinite" in done.stdout
    assert "layers.*.w" in done.stdout and "layers.7.w" not in done.stdout
    assert "--json lists each tensor" in done.stdout
    assert (
        "layers.7.w"
        in json.loads(ckpt("stats", tmp_path / "a.safetensors", "--json").stdout)["tensors"]
    )
    assert ckpt("stats", tmp_path / "a.safetensors", "--exclude", "x").returncode == 0
    done = ckpt("stats", tmp_path / "a.safetensors", "--select", "y*")
    assert done.returncode == 13 and "--select" in done.stderr
    done = ckpt("stats", tmp_path / "a.safetensors", "--histogram")
    assert "fp8 e4m3" in done.stdout and "magnitudes from 2^0 to 2^1" in done.stdout


def test_what_shorter_types_would_lose(tmp_path: Path, ckpt: Run) -> None:
    state = {"w": torch.tensor([1.0, 1e-9, 1e6, 3e38])}
    save_file(state, tmp_path / "a.safetensors")
    lines = ckpt("stats", tmp_path / "a.safetensors", "--histogram").stdout.splitlines()
    rows = {line.split("  ")[1]: line.split() for line in lines if line.startswith("  fp16")}
    assert rows["fp16"][1:] == ["25.0", "%", "50.0", "%"]
    half = state["w"].half()
    assert (half == 0).sum() == 1 and half.isinf().sum() == 2


EDGES = (2.0**-25, 2.0**-24, 65519.0, 65520.0, 2.0**-10, 2.0**-9, 464.0, 465.0, 61439.0, 61440.0)


def test_short_types_lose_what_torch_loses(tmp_path: Path) -> None:
    """Each edge of rounding, and the mask that many models have."""
    torch.manual_seed(0)
    many = torch.randn(5000) * torch.exp2(torch.randint(-40, 40, (5000,)).float())
    edges = torch.tensor([*EDGES, -1.0, 0.0, torch.finfo(torch.float32).min, 3.39e38, 2.0**-134])
    state = {"w": torch.cat([many, edges])}
    save_file(state, tmp_path / "a.safetensors")
    lost = ckpt_tools.stats(tmp_path / "a.safetensors", histogram=True).lost
    kinds = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8 e4m3": torch.float8_e4m3fn,
        "fp8 e5m2": torch.float8_e5m2,
    }
    assert list(lost) == list(kinds)
    for name, dtype in kinds.items():
        cast = state["w"].to(dtype).float()
        zeros = int(((cast == 0) & (state["w"] != 0)).sum())
        large = int((~torch.isfinite(cast)).sum())
        if name == "fp8 e4m3":  # torch clips to 448 what would round to a larger number
            large = int((state["w"].abs() > 464).sum())
            assert (cast.abs().max(), cast[state["w"].abs() > 464].abs().min()) == (448, 448)
        assert lost[name] == (zeros, large), name


def test_values_whose_squares_have_no_room(tmp_path: Path) -> None:
    largest = torch.finfo(torch.float64).max
    state = {
        "large": torch.full((4,), 1e300, dtype=torch.float64),
        "small": torch.full((4,), 1e-300, dtype=torch.float64),
        "most": torch.tensor([largest, -largest], dtype=torch.float64),
    }
    ckpt_tools.save(tmp_path / "a", state, statistics=True)
    stored = ckpt_tools.stats(tmp_path / "a")
    assert stored.nbytes == 0 and stored.not_finite == []
    assert stored.tensors["large"].rms == pytest.approx(1e300, rel=1e-5)
    assert stored.tensors["small"].rms == pytest.approx(1e-300, rel=1e-5)
    assert stored.tensors["most"].max_abs == pytest.approx(largest, rel=1e-5)
    assert math.isfinite(stored.tensors["most"].rms)
    assert "Infinity" not in next((tmp_path / "a").glob("ckpt.manifest*")).read_text()
    assert ckpt_tools.verify(tmp_path / "a").problems == []


def test_damage_is_found_on_the_way(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(50_000.0)}, checkpoint_id=tmp_path / "a", no_dist=True)
    file = tmp_path / "a" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[90_000] ^= 8
    file.write_bytes(data)
    with pytest.raises(IntegrityError):
        ckpt_tools.stats(tmp_path / "a")
    with pytest.raises(PlanError, match="no tensor to measure"):
        ckpt_tools.stats(tmp_path / "a", exclude=["*"])


def test_a_bucket(server: Server, tmp_path: Path) -> None:
    server.bucket("stats")
    state = {"w": values("float32", 100_000), "v": values("bfloat16", 50_000)}
    ckpt_tools.save("s3://stats/a", state, storage_options=server.options)
    result = ckpt_tools.stats("s3://stats/a", storage_options=server.options)
    for name, tensor in state.items():
        same(result.tensors[name], oracle(tensor))
