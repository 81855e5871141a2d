"""Runs of steps that other tools wrote, and steps that were salvaged: nothing passes as whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import CheckpointManager, NotACheckpointError
from tests.command import run_command
from tests.strategies import flip


def stock_run(root: Path) -> None:
    for number in (1, 2, 3):
        state = {"model": {"w": torch.randn(50, 40)}}
        dcp.save(state, checkpoint_id=root / f"step-{number}", no_dist=True)


def flip_payload(step: Path) -> None:
    (path,) = step.glob("*.distcp")
    flip(path, path.stat().st_size // 2, 3)


def test_verify_reads_steps_without_a_manifest(tmp_path: Path) -> None:
    stock_run(tmp_path)
    assert ckpt_tools.latest(tmp_path, verify=True).number == 3  # type: ignore[union-attr]
    flip_payload(tmp_path / "step-3")
    assert ckpt_tools.latest(tmp_path).number == 3  # type: ignore[union-attr]
    assert ckpt_tools.latest(tmp_path, verify=True).number == 2  # type: ignore[union-attr]
    done = run_command("latest", tmp_path, "--verify")
    assert done.stdout.strip().endswith("step-2") and "expected CRC-32" in done.stderr
    done = run_command("check", tmp_path, "--verify")
    assert done.returncode == 14 and "step 3: damaged: " in done.stdout
    assert "step 2: damaged" not in done.stdout
    assert run_command("check", tmp_path).returncode == 1  # unsealed, and nothing is read


def test_what_was_salvaged_says_so(tmp_path: Path) -> None:
    run, rescued = tmp_path / "run", tmp_path / "rescued" / "step-00000001"
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with CheckpointManager(run) as checkpoints:
        checkpoints.save(1, {"model": model}, asynchronous=False)
    flip_payload(run / "step-00000001")
    lost = ckpt_tools.salvage(run / "step-00000001", rescued).lost
    assert len(lost) == 1
    assert "salvaged: 1 entry lost" in run_command("ls", rescued.parent).stdout
    done = run_command("check", rescued.parent)
    assert done.returncode == 1 and "step 1: salvaged: 1 entry lost" in done.stdout
    assert "salvaged: 1 entry lost" in run_command("verify", rescued).stdout
    notes = ckpt_tools.merge(rescued, tmp_path / "m.safetensors").notes
    assert "the source is salvaged: 1 entry lost" in notes
    assert not ckpt_tools.salvage(rescued, tmp_path / "again").lost
    ckpt_tools.reshard(rescued, tmp_path / "more" / "step-00000001", to_ranks=2)
    for later in (tmp_path / "again", tmp_path / "more" / "step-00000001"):
        assert "salvaged: 1 entry lost" in run_command("verify", later).stdout


def test_prune_of_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    ckpt_tools.merge(tmp_path / "run" / "step-00000001", tmp_path / "hf" / "model.safetensors")
    for place in ("run/step-00000001", "hf"):
        done = run_command("prune", tmp_path / place, "--keep-last", 1, "--dry-run")
        assert done.returncode == 10 and "no steps in" in done.stderr
        with pytest.raises(NotACheckpointError, match="no steps in"):
            ckpt_tools.prune(tmp_path / place, keep_last=1)
    (tmp_path / "new").mkdir()
    assert run_command("prune", tmp_path / "new", "--keep-last", 1).returncode == 0


def test_the_hint_for_a_run_names_a_step_that_can_be_read(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(number, {"w": torch.ones(3)}, asynchronous=False)
    (tmp_path / "run" / "step-00000003" / ".metadata").unlink()
    (tmp_path / "run" / "step-9").touch()
    for verb in ("inspect", "verify"):
        done = run_command(verb, "run", cwd=tmp_path)
        assert "give a step, such as run/step-00000002;" in done.stderr, done.stderr
        done = run_command(verb, "run", "--json", cwd=tmp_path)
        assert "run/step-00000002;" in json.loads(done.stdout)["hint"]


def test_verify_says_what_else_is_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    step = tmp_path / "run" / "step-00000001"
    ckpt_tools.merge(step, tmp_path / "run" / "model.safetensors")
    done = run_command("verify", tmp_path / "run")
    assert done.returncode == 0 and "not looked at: step-00000001/" in done.stdout
    assert "not looked at" not in run_command("verify", step).stdout


def test_a_folder_without_an_adapter_is_no_adapter(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "src", {"w": torch.ones(3, 3)})
    ckpt_tools.merge(tmp_path / "src", tmp_path / "hf" / "model.safetensors")
    words = ("merge", tmp_path / "src", tmp_path / "m.safetensors", "--lora", tmp_path / "hf")
    done = run_command(*words)
    assert done.returncode == 13 and "not a PEFT adapter" in done.stderr
