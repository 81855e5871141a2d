"""What differs between two checkpoints, with torch as the oracle."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import PlanError
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.engine.kernels import to_float64
from tests.command import run_ckpt

Saved = Callable[[int], Path]


def test_a_checkpoint_is_the_same_however_it_is_laid_out(saved: Saved, tmp_path: Path) -> None:
    source = saved(4) / "adamw"
    ckpt_tools.reshard(source, tmp_path / "three", to_ranks=3)
    ckpt_tools.reshard(source, tmp_path / "one", to_ranks=1)
    ckpt_tools.merge(source, tmp_path / "m.safetensors")
    entries = ckpt_tools.inspect(source).total
    read = ckpt_tools.diff(source, tmp_path / "three")
    assert read.is_same and (read.num_equal, read.num_by_fingerprint) == (
        entries.num_tensors + entries.num_objects,
        0,
    )
    known = ckpt_tools.diff(tmp_path / "one", tmp_path / "three")
    assert known.is_same and known.num_by_fingerprint == entries.num_tensors
    again = ckpt_tools.diff(tmp_path / "one", tmp_path / "three", read_all=True)
    assert (
        again.is_same
        and again.num_by_fingerprint == 0
        and again.compared_nbytes - known.compared_nbytes == entries.nbytes
    )
    merged = ckpt_tools.diff(source, tmp_path / "m.safetensors")
    assert merged.is_same and "the names that merge gives" in merged.notes[0]
    assert run_ckpt("diff", source, tmp_path / "three").returncode == 0


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
    ids=str,
)
def test_differences_are_those_that_torch_finds(dtype: torch.dtype, tmp_path: Path) -> None:
    generator, rng = torch.Generator().manual_seed(1), random.Random(4)
    one = {
        n: (torch.randn(shape, generator=generator) * 9).to(dtype)
        for n, shape in {"x": (90, 700), "y": (3, 5, 7), "z": (66_000,)}.items()
    }
    two = {n: t.clone() for n, t in one.items()}
    for tensor, count in ((two["x"], 4), (two["z"], 900)):
        flat = tensor.view(-1)
        for _ in range(count):
            at = rng.randrange(flat.numel())
            flat[at] = (
                flat[at].to(torch.complex64 if dtype.is_complex else torch.float32)
                + rng.choice((8.0, -16.0))
            ).to(dtype)
    dcp.save(one, checkpoint_id=tmp_path / "a", no_dist=True)
    (
        save_file(two, tmp_path / "b.safetensors")
        if dtype != torch.complex64
        else dcp.save(two, checkpoint_id=tmp_path / "b.safetensors", no_dist=True)
    )
    result = ckpt_tools.diff(tmp_path / "a", tmp_path / "b.safetensors", memory_bytes=1 << 20)
    assert [d.fqn for d in result.differences] == ["x", "z"] and result.num_equal == 1
    for found in result.differences:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        a, b = (t[found.fqn].to(wide).view(-1) for t in (one, two))
        gap = (a - b).abs()
        assert found.num_different == int((a != b).sum()) and found.numel == a.numel()
        first = int((a != b).nonzero()[0])
        assert found.first == tuple(
            int(i) for i in torch.unravel_index(torch.tensor(first), one[found.fqn].shape)
        )
        assert found.max_abs == pytest.approx(float(gap.max())) and found.max_rel == pytest.approx(
            float((gap / torch.maximum(a.abs(), b.abs())).nan_to_num(0).max())
        )
        assert found.cosine == pytest.approx(
            float((torch.vdot(a, b)).real / (a.norm() * b.norm())), abs=1e-12
        )
        assert found.rel_norm == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-9)


def test_tolerance_nan_and_minus_zero(tmp_path: Path) -> None:
    nan = float("nan")
    a = {"t": torch.tensor([1.0, 2.0, nan, 0.0, math.inf, 5.0]), "same": torch.tensor([nan, 1.0])}
    b = {"t": torch.tensor([1.0, 2.02, nan, -0.0, math.inf, 5.0]), "same": torch.tensor([nan, 1.0])}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    (bits,) = ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differences
    assert (bits.num_different, bits.first) == (2, (1,)) and bits.max_abs == pytest.approx(0.02)
    assert ckpt_tools.diff(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=0.02
    ).is_same
    assert not ckpt_tools.diff(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=0.001
    ).is_same
    b["t"][0] = nan
    save_file(b, tmp_path / "b.safetensors")
    (lost,) = ckpt_tools.diff(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=0.5
    ).differences
    assert (lost.num_different, lost.first) == (1, (0,)) and math.isnan(lost.max_abs)
    done = run_ckpt("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["differences"][0]["max_abs"] is None


def test_names_shapes_types_and_objects_are_compared(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    layers = {f"layers.{i}.w": torch.randn(20, 30, generator=generator) for i in range(30)}
    dcp.save(
        {**layers, "gone": torch.ones(2), "wide": torch.ones(3, 4), "step": 7, "rng": b"x" * 90},
        checkpoint_id=tmp_path / "a",
        no_dist=True,
    )
    other = {
        n: t.bfloat16() if n == "layers.3.w" else t + (n == "layers.7.w") for n, t in layers.items()
    }
    dcp.save(
        {**other, "new": torch.ones(2), "wide": torch.ones(4, 3), "step": 8, "rng": b"x" * 90},
        checkpoint_id=tmp_path / "b",
        no_dist=True,
    )
    result = ckpt_tools.diff(tmp_path / "a", tmp_path / "b")
    assert (result.only_a, result.only_b) == (["gone"], ["new"])
    assert [(c.fqn, c.a_shape, c.b_shape, c.b_dtype) for c in result.changes] == [
        ("layers.3.w", (20, 30), (20, 30), "bfloat16"),
        ("wide", (3, 4), (4, 3), "float32"),
    ]
    assert [(d.fqn, d.is_object) for d in result.differences] == [
        ("layers.3.w", False),
        ("layers.7.w", False),
        ("step", True),
    ]
    assert result.differences[1].num_different == 600 and 0 < result.differences[0].max_rel < 0.01
    # no tolerance for bytes
    assert [
        d.fqn for d in ckpt_tools.diff(tmp_path / "a", tmp_path / "b", atol=1000.0).differences
    ] == ["step"]
    done = run_ckpt("diff", tmp_path / "a", tmp_path / "b")
    assert (
        done.returncode == 1
        and "layers.*.w" in done.stdout
        and "only in" in done.stdout
        and len(done.stdout.splitlines()) < 20
    ), done.stdout
    assert ckpt_tools.diff(tmp_path / "a", tmp_path / "b", select=["layers.1*"]).is_same
    with pytest.raises(PlanError, match="--select matches none of"):
        ckpt_tools.diff(tmp_path / "a", tmp_path / "b", select=["nothing"])
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "nowhere").returncode == 10


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_every_code_of_a_small_float_has_torchs_value(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(getattr(torch, name)).to(torch.float32).to(torch.float64)
    got = torch.from_numpy(to_float64(codes.numpy(), BY_NAME[name]))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num(0), want.nan_to_num(0)
    )


def test_a_transposed_and_a_column_sharded_tensor_are_compared(
    saved: Saved, tmp_path: Path
) -> None:
    base = torch.arange(600.0).reshape(20, 30)
    dcp.save(
        {
            "t": base.t(),
            "c": torch.arange(240.0).reshape(2, 3, 5, 8).to(memory_format=torch.channels_last),
        },
        checkpoint_id=tmp_path / "a",
        no_dist=True,
    )
    save_file(
        {"t": base.t().contiguous(), "c": torch.arange(240.0).reshape(2, 3, 5, 8)},
        tmp_path / "b.safetensors",
    )
    assert ckpt_tools.diff(tmp_path / "a", tmp_path / "b.safetensors").is_same
    assert ckpt_tools.diff(tmp_path / "b.safetensors", tmp_path / "a").is_same


def test_an_object_of_another_length_and_one_that_became_a_tensor_are_told(tmp_path: Path) -> None:
    for name, rng, kind in (("a", b"x" * 90, torch.ones(3)), ("b", b"x" * 9000, 5)):
        dcp.save(
            {"rng": rng, "kind": kind, "w": torch.ones(4)},
            checkpoint_id=tmp_path / name,
            no_dist=True,
        )
    result = ckpt_tools.diff(tmp_path / "a", tmp_path / "b")
    told = {c.fqn: (c.a_dtype, c.b_dtype) for c in result.changes}
    assert (
        told == {"rng": ("bytes", "bytes"), "kind": ("float32", "bytes")}
        and not result.differences
        and result.num_equal == 1
    )


def test_thousands_of_layers_are_told_in_a_page(tmp_path: Path) -> None:
    layers = {f"layers.{i}.{n}": torch.ones(2, 2) for i in range(700) for n in ("w", "b")}
    save_file(layers, tmp_path / "a.safetensors")
    save_file(
        {n: t.bfloat16() if n.endswith("w") else t * 2 for n, t in layers.items()}
        | {f"new.{i}.x": torch.ones(1) for i in range(90)},
        tmp_path / "b.safetensors",
    )
    done = run_ckpt("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert (
        ["layers.*.w", "700"] in [r[:2] for r in rows]
        and ["layers.*.b", "(700)"] in [r[:2] for r in rows]
        and ["new.*.x", "(90)"] in rows
    )
    assert len(rows) < 10, done.stdout


VALUES = [0.0, -0.0, 1.0, 1.0 + 1e-6, -1.0, 1e30, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(("atol", "rtol"), [(0.0, 1e-3), (1e-3, 0.0), (1e-8, 1e-5), (1e30, 10.0)])
def test_a_tolerance_is_that_of_torch_isclose(atol: float, rtol: float, tmp_path: Path) -> None:
    """Every pair of values, infinity and NaN among them."""
    a, b = (
        t.flatten()
        for t in torch.meshgrid(torch.tensor(VALUES), torch.tensor(VALUES), indexing="ij")
    )
    want = int((~torch.isclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)).sum())
    save_file({"x": a.contiguous()}, tmp_path / "a.safetensors")
    save_file({"x": b.contiguous()}, tmp_path / "b.safetensors")
    (found,) = ckpt_tools.diff(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=atol, rtol=rtol
    ).differences
    assert found.num_different == want > 0


@pytest.mark.parametrize(
    ("x", "y", "gap"),
    [(2**62, 2**62 + 1, 1.0), (-(2**63), 2**63 - 1, float(2**64 - 1)), (-5, 7, 12.0)],
)
def test_long_integers_are_not_rounded_before_they_are_compared(
    x: int, y: int, gap: float, tmp_path: Path
) -> None:
    save_file({"x": torch.tensor([0, x])}, tmp_path / "a.safetensors")
    save_file({"x": torch.tensor([0, y])}, tmp_path / "b.safetensors")
    (found,) = ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differences
    assert (found.num_different, found.max_abs) == (1, gap)
    assert not ckpt_tools.diff(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=0.5
    ).is_same
    assert ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=gap).is_same


def test_the_relative_norm_is_none_where_it_means_nothing(tmp_path: Path) -> None:
    inf, cases = float("inf"), {}
    for name, one, two, want, size in (
        ("infinite", [1.0, inf], [2.0, inf], None, inf),
        ("signs", [0.0, 1.0], [-0.0, 1.0], 0.0, 0.0),
        ("zeros", [0.0], [-0.0], 0.0, 0.0),
        ("from nothing", [0.0], [1.0], None, inf),
        ("half", [2.0], [1.0], 0.5, 0.5),
    ):
        cases[name] = torch.tensor(one), torch.tensor(two), want, size
    save_file({n: c[0] for n, c in cases.items()}, tmp_path / "a.safetensors")
    save_file({n: c[1] for n, c in cases.items()}, tmp_path / "b.safetensors")
    for found in ckpt_tools.diff(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ).differences:
        assert (found.rel_norm, found.size) == cases.pop(found.fqn)[2:], found
    assert not cases
    ckpt_tools.save(tmp_path / "a", {"n": 1})
    ckpt_tools.save(tmp_path / "b", {"n": 2})
    (one,) = ckpt_tools.diff(tmp_path / "a", tmp_path / "b").differences
    assert one.is_object and one.rel_norm is None and one.cosine is None and one.size == 0.0
