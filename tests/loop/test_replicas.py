"""What several ranks saved must be equal: loads compare the copies, as `merge` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError
from tests.conftest import torchrun
from tests.loop.states import by_plugin


def saved(folder: Path, differs: bool) -> Path:
    """A file of each of two ranks, with a tensor that both have."""
    folder.mkdir()
    for rank in (0, 1):
        state = {"w": torch.full((4,), float(rank * differs)), "n": rank * differs}
        torch.save(state, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def by_load(path: Path) -> Any:
    state: dict[str, Any] = {"model": {"w": torch.ones(4)}}
    ckpt_tools.load(path, state)
    return state["model"]["w"]


def by_resume(path: Path) -> Any:
    state: dict[str, Any] = {"model": {"w": torch.ones(4)}}
    with CheckpointManager(path.parent / "run") as checkpoints:
        checkpoints.resume(state, path=path)
    return state["model"]["w"]


def by_average(path: Path) -> Any:
    out = path.parent / "mean.safetensors"
    ckpt_tools.average([path, path], out)
    return ckpt_tools.open(out)["w"].torch()


READS: dict[str, Callable[[Path], Any]] = {
    "load": by_load,
    "resume": by_resume,
    "plugin": by_plugin,
    "open": lambda path: ckpt_tools.open(path)["model.w"].torch(),
    "a slice": lambda path: torch.cat([ckpt_tools.open(path)["model.w"][:2], torch.zeros(2)]),
    "rows": lambda path: ckpt_tools.open(path).rows("model.w", [3, 0, 1, 2]),
    "average": by_average,
    "stats": lambda path: torch.full((4,), ckpt_tools.stats(path).tensors["model.w"].rms),
    "diff": lambda path: torch.full((4,), float(len(ckpt_tools.diff(path, path).differences))),
}


@pytest.mark.parametrize("how", READS)
def test_copies_of_ranks_that_differ_are_refused(how: str, tmp_path: Path) -> None:
    assert torch.equal(READS[how](saved(tmp_path / "equal", False)), torch.zeros(4))
    # torch wraps the plugin's errors
    kinds = (IntegrityError, CheckpointException)
    with pytest.raises(kinds, match=r"replicas differ: '(model\.)?w'.*rank 0 and .*rank 1"):
        READS[how](saved(tmp_path / "differs", True))


@pytest.mark.parametrize("name", ["", "a", "b", "c", "d"])
def test_ranks_with_other_names_compare_all_replicas(name: str, tmp_path: Path) -> None:
    """Each rank dealt out its own list, and some copies were compared by nobody."""
    folder = tmp_path / "x"
    folder.mkdir()
    for rank in (0, 1):
        state = {n: torch.full((2,), float(rank * (n == name))) for n in "abcd"}
        torch.save(state, folder / f"model_world_size_2_rank_{rank}.pt")
    torchrun(2, "replicas.py", str(folder), str(tmp_path / "out"))
    said = json.loads((tmp_path / "out").read_text())
    if name:
        assert "loaded" not in said
        assert any(f"replicas differ: 'model.{name}'" in line for line in said), said
    else:
        assert said == ["loaded", "loaded"]
