"""The cases of `dist/save.py`, and what stock torch loads of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from tests.conftest import ALL_CASES

RESHARDED = [c for c in ALL_CASES.split() if c not in ("differ", "local")]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equality of bytes: NaN payloads and the sign of zero count."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(
        got.contiguous().flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8)
    )


def stock_load(path: Path, tmp_path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, tmp_path / "stock.pt")
    return torch.load(tmp_path / "stock.pt", weights_only=False)


def check_steps(root: Path, wanted: Mapping[int, Mapping[str, torch.Tensor]], tmp: Path) -> None:
    """Compares the model of each step that is there with that of its save; stock torch reads it."""
    for step, want in wanted.items():
        path = root / f"step-{step:08d}"
        if path.exists():
            assert ckpt_tools.verify(path).problems == []
            got = stock_load(path, tmp)["model"]
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want), step


def assert_same(got: Any, want: Any, path: str = "") -> None:
    if isinstance(want, dict):
        assert set(got) == set(want), path
        for key in want:
            assert_same(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, torch.Tensor):
        assert same_bits(got, want), path
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), path
        for number, value in enumerate(want):
            assert_same(got[number], value, f"{path}[{number}]")
    else:
        assert got == want, path
