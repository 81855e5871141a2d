"""Thousands of tensors, and many chunks: right, and with work that grows as they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.core.box import Box, BoxIndex
from ckpt_tools.core.placements import reshard_boxes
from ckpt_tools.core.plan import plan_overlaps
from tests.jobs import LONG

MANY = 20_000 if LONG else 4_000


@pytest.mark.slow
def test_thousands_of_tensors_merge_and_reshard(tmp_path: Path) -> None:
    values = torch.arange(MANY * 16, dtype=torch.float32).view(MANY, 4, 4)
    state = {"model": {f"layers.{i}.w": values[i].clone() for i in range(MANY)}}
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    ckpt_tools.reshard(tmp_path / "src", tmp_path / "r", to_ranks=2)
    ckpt_tools.merge(tmp_path / "r", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert len(got) == MANY
    assert all(torch.equal(got[f"layers.{i}.w"], values[i]) for i in range(MANY))


class Counted(Box):
    """A box that counts how often it is intersected."""

    count = 0

    def intersect(self, other: Box) -> Box | None:
        Counted.count += 1
        return super().intersect(other)


@pytest.mark.parametrize("dim", [0, 1])
def test_pairing_looks_at_neighbours_and_not_at_all_pairs(dim: int) -> None:
    shape = (8192, 8192)
    src = [
        Counted(*b)
        for b in reshard_boxes([Box((0, 0), (1, 8192) if dim == 0 else (8192, 1))], shape, 4096)
        if b
    ]
    dst = [
        b
        for b in reshard_boxes([Box((0, 0), (1, 8192) if dim == 0 else (8192, 1))], shape, 3000)
        if b
    ]
    Counted.count = 0
    copies = plan_overlaps(src, dst)
    assert len(copies) < len(src) + len(dst)
    assert Counted.count <= 4 * (len(src) + len(dst))


def test_the_index_of_one_box_or_none() -> None:
    assert list(BoxIndex([]).overlaps(Box((0,), (4,)))) == []
    assert list(BoxIndex([Box((), ())]).overlaps(Box((), ()))) == [(0, Box((), ()))]
