"""Several managers in a process, several models in a state, and groups of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tools import CheckpointManager, HuggingFace, PlanError, StorageError, steps
from tests.command import run_job
from tests.conftest import HERE
from tests.jobs import PYTHON_PATH, torchrun_command
from tests.servers.servers import Server

UNCLOSED = """
import sys, torch
from ckpt_tools import CheckpointManager
managers = [CheckpointManager(f"{sys.argv[1]}/{n}") for n in range(3)]
for manager in managers:
    manager.save(1, {"w": torch.ones(10_000_000)})
"""


@pytest.mark.slow
def test_every_unclosed_manager_finishes_its_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [[s.number for s in steps(tmp_path / str(n))] for n in range(3)] == [[1]] * 3


def pair(seed: int) -> dict[str, Any]:
    """Two models with the same names and other shapes, each with an optimizer of its own kind."""
    torch.manual_seed(seed)
    state: dict[str, Any] = {}
    kinds: tuple[Any, ...] = (torch.optim.AdamW, torch.optim.Adagrad)
    for name, width, kind in zip(("gen", "disc"), (4, 1), kinds, strict=True):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, width))
        state[name], state[f"opt_{name}"] = model, kind(model.parameters(), lr=0.1)
    return state


def step(state: dict[str, Any]) -> None:
    for name in ("gen", "disc"):
        state[name](torch.ones(2, 8)).square().mean().backward()
        state[f"opt_{name}"].step()


def test_two_models_with_equal_names_and_other_shapes(tmp_path: Path) -> None:
    saved, fresh, used = pair(0), pair(1), pair(2)
    step(saved)
    step(used)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        for state in (fresh, used):
            assert checkpoints.resume(state) == 1
            assert checkpoints.last_load is not None and not checkpoints.last_load.notes
    for state in (fresh, used):
        for name in ("gen", "disc"):
            pairs = zip(saved[name].parameters(), state[name].parameters(), strict=True)
            for ours, theirs in pairs:
                assert torch.equal(ours, theirs)
                mine = saved[f"opt_{name}"].state[ours]
                other = state[f"opt_{name}"].state[theirs]
                assert mine.keys() == other.keys()
                assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_two_groups_of_ranks_save_each_to_its_root(tmp_path: Path) -> None:
    done = run_job(torchrun_command(4, HERE / "dist" / "groups.py", tmp_path))
    assert done.returncode == 0, done.stderr
    assert [[s.number for s in steps(tmp_path / name)] for name in ("0", "1")] == [[1], [1]]


def test_a_refused_resume_begins_no_branch(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for number in (1, 5, 6):
            checkpoints.save(number, {"w": torch.ones(3)})
        with pytest.raises(PlanError):
            checkpoints.resume({"other": torch.ones(4)}, step=1)
        checkpoints.save(7, {"w": torch.ones(3)})
    assert [s.number for s in steps(tmp_path)] == [1, 5, 6, 7]


def test_a_mirror_keeps_what_the_disk_keeps(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1, mirror="memory://kept/run") as checkpoints:
        checkpoints.protected_steps.add(1)
        for number in (1, 2, 3):
            checkpoints.save(number, {"w": torch.ones(3)}, asynchronous=False)
            assert checkpoints._mirror is not None
            checkpoints._mirror.wait()
        assert [s.number for s in steps("memory://kept/run")] == [1, 3]
        checkpoints.keep_last = 2
        checkpoints.save(4, {"w": torch.ones(3)}, asynchronous=False)
    assert [s.number for s in steps("memory://kept/run")] == [1, 3, 4]
    assert [s.number for s in steps(tmp_path)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"dtype": "bfloat17"}, PlanError, "cannot cast to 'bfloat17'"),
        ({"base": "/nowhere"}, StorageError, "no such directory: /nowhere"),
        ({"options": {"selekt": ["*"]}}, PlanError, "convert has no option 'selekt'"),
    ],
)
def test_a_copy_that_could_never_be_made_is_refused_at_the_start(
    how: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        CheckpointManager(tmp_path, export=HuggingFace(**how))
    with CheckpointManager(tmp_path) as checkpoints:  # and the root is free again
        checkpoints.save(1, {"w": torch.ones(2)})


def test_files_that_fail_on_rank_0_fail_on_all(tmp_path: Path) -> None:
    def fail() -> dict[str, bytes]:
        raise OSError(5, "no config")

    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(OSError, match="no config"):
            checkpoints.save(1, {"w": torch.ones(2)}, files=fail)
        checkpoints.save(1, {"w": torch.ones(2)}, files=lambda: {"a.json": b"{}"})
    assert (tmp_path / "step-00000001" / "a.json").read_bytes() == b"{}"


def test_a_step_is_not_the_directory_of_a_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    with pytest.raises(StorageError, match="the directory of a run is itself a checkpoint"):
        CheckpointManager(tmp_path / "run" / "step-00000001")
    assert not (tmp_path / "run" / "step-00000001" / ".ckpt.lock").exists()


def test_a_checkpoint_in_a_bucket_is_no_run_either(server: Server) -> None:
    server.bucket("itself")
    options: dict[str, Any] = {"storage_options": server.options}
    with CheckpointManager("s3://itself/run", **options) as checkpoints:
        checkpoints.save(1, {"x": torch.ones(2)})
    with pytest.raises(StorageError, match="the directory of a run is itself a checkpoint"):
        CheckpointManager("s3://itself/run/step-00000001", **options)
    assert [s.problem for s in steps("s3://itself/run", **options)] == [""]
