"""`reshard --mesh` gives the chunks that stock torch saves on such a mesh, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_tools
from tests.conftest import torchrun
from tests.stock import assert_stock_torch_reads, chunks

BUFFER = "model.table"  # nothing tells it from a parameter where one rank has saved all
QUICK = {"fsdp=1": 1, "fsdp=2,tp=2,ep=2": 4, "fsdp=4": 4}
SLOW = {"fsdp=2,tp=2": 4, "tp=2": 2, "fsdp=8": 8, "fsdp=8,ep=2": 8, "fsdp=4,tp=2,ep=4": 8}
SLOW |= {"replicate=2,fsdp=2,tp=2,ep=2": 8, "replicate=2,fsdp=4": 8}

Job = Callable[[str], Path]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What stock torch has saved on a mesh."""
    folder = tmp_path_factory.mktemp("meshes")

    def saved(axes: str) -> Path:
        if not (folder / axes).exists():
            torchrun((QUICK | SLOW)[axes], "meshes.py", str(folder / axes), axes)
        return folder / axes

    return saved


def values(step: Path) -> dict[str, torch.Tensor]:
    found = assert_stock_torch_reads(step)
    state = found["optimizer"]["state"]
    moments = {f"{n}.{k}": v for n, values in state.items() for k, v in values.items()}
    return {**found["model"], **moments}


@pytest.mark.parametrize(
    ("source", "axes"),
    [("fsdp=1", "fsdp=2,tp=2,ep=2"), ("fsdp=4", "fsdp=2,tp=2,ep=2"), ("fsdp=2,tp=2,ep=2", "fsdp=4")]
    + [pytest.param("fsdp=1", axes, marks=pytest.mark.slow) for axes in SLOW]
    + [
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (("fsdp=4,tp=2,ep=4", "fsdp=1"), ("tp=2", "fsdp=4"))
    ],
)
def test_the_chunks_are_those_of_a_job(source: str, axes: str, job: Job, tmp_path: Path) -> None:
    done = ckpt_tools.reshard(job(source), tmp_path / "out", mesh=axes)
    assert done.notes[0] == f"split for {axes} by the plan torchtitan"
    got, want = chunks(tmp_path / "out"), chunks(job(axes))
    assert got.keys() == want.keys() and len(want) > 90
    differing = {n for n in want if got[n] != want[n]}
    assert differing <= ({BUFFER} if source == "fsdp=1" else set())
    assert not ckpt_tools.verify(tmp_path / "out").problems
    assert ckpt_tools.inspect(tmp_path / "out").catalog.world_size == (QUICK | SLOW)[axes]
    before, after = values(job(source)), values(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def test_each_rank_saves_a_fair_part(job: Job, tmp_path: Path) -> None:
    """Of ranks with the same box, the one with the fewest bytes saves it."""
    ckpt_tools.reshard(job("fsdp=1"), tmp_path / "out", mesh="replicate=2,fsdp=2")
    sizes = [p.stat().st_size for p in sorted((tmp_path / "out").glob("*.distcp"))]
    assert len(sizes) == 4 and max(sizes) < 1.3 * min(sizes)
