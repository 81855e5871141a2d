"""Statistics in manifests, steps that are not finite, metrics, and the rules of retention."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError, PlanError, Resuming, Retention
from ckpt_tools.loop.steps.retention import prune_steps, removable
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step
from ckpt_tools.run.steps import list_steps
from tests.conftest import torchrun
from tests.servers.servers import Server

Run = Callable[..., subprocess.CompletedProcess[str]]


def job(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 40)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def spoil(state: dict[str, Any], value: float = math.nan) -> None:
    with torch.no_grad():
        state["model"][1].bias[2] = value


def numbers(steps: list[Step]) -> list[int]:
    return [step.number for step in steps]


# ---- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_measures_what_ckpt_stats_measures(asynchronous: bool, tmp_path: Path) -> None:
    state, before = job(), {}
    with CheckpointManager(tmp_path, statistics=True, asynchronous=asynchronous) as checkpoints:
        for step in (1, 2):
            train(state)
            checkpoints.save(step, state)
            checkpoints.wait()
            if step == 1:
                before = {n: t.clone() for n, t in state["model"].state_dict().items()}
    stored = ckpt_tools.stats(tmp_path / "step-00000002")
    read = ckpt_tools.stats(tmp_path / "step-00000002", read_all=True)
    assert stored.nbytes == 0 < read.nbytes and "as their save measured them" in stored.notes[0]
    assert {n: one.packed()[:5] for n, one in stored.tensors.items()} == {
        n: one.packed()[:5] for n, one in read.tensors.items()
    }
    for name, tensor in state["model"].state_dict().items():
        change = (tensor - before[name]).double().square().mean().sqrt().item()
        assert stored.tensors[f"model.{name}"].change_rms == pytest.approx(change, rel=1e-5)


def test_a_reshard_keeps_the_statistics_and_a_cast_does_not(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "one", {"model": job()["model"]}, statistics=True)
    ckpt_tools.reshard(tmp_path / "one", tmp_path / "two", to_ranks=2)
    one, two = (ckpt_tools.stats(tmp_path / name) for name in ("one", "two"))
    assert one.tensors == two.tensors and two.nbytes == 0
    ckpt_tools.merge(tmp_path / "two", tmp_path / "m.safetensors", dtype="bf16")
    assert ckpt_tools.stats(tmp_path / "m.safetensors").nbytes > 0


@pytest.mark.slow
def test_every_number_of_ranks_has_the_same_digits(tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        torchrun(ranks, "save_statistics.py", str(tmp_path / str(ranks)))
    found = [
        next(iter((tmp_path / str(r) / "step-00000001").glob("ckpt.manifest*"))) for r in (1, 2, 3)
    ]
    tensors = [json.loads(path.read_text())["tensors"] for path in found]
    statistics = [{n: t["statistics"] for n, t in one.items()} for one in tensors]
    assert len(statistics[0]) > 4 and statistics[0] == statistics[1] == statistics[2]


# ---- steps that are not finite -------------------------------------------------------------------


def test_resume_passes_over_a_step_with_nan(tmp_path: Path, ckpt: Run) -> None:
    state = job()
    with CheckpointManager(tmp_path, statistics=True, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            if step == 3:
                spoil(state)
            checkpoints.save(step, state)
        checkpoints.wait()
        assert checkpoints.last_save is not None
        assert list(checkpoints.last_save.not_finite) == ["model.1.bias"]
    # one step more than asked for: the newest that is finite
    assert numbers(ckpt_tools.steps(tmp_path)) == [2, 3]
    listing = ckpt("ls", tmp_path).stdout
    assert "not finite: NaN or infinity in model.1.bias" in listing
    done = ckpt("latest", tmp_path)
    assert done.stdout.strip().endswith("step-00000002") and "model.1.bias" in done.stderr
    assert ckpt("latest", tmp_path, "--allow-not-finite").stdout.strip().endswith("3")
    for allows, want in ((False, 2), (True, 3)):
        with CheckpointManager(
            tmp_path, keep_last=None, resuming=Resuming(allow_not_finite=allows)
        ) as checkpoints:
            assert checkpoints.resume(job()) == want
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.resume(job(), 3) == 3  # asked for by number


def test_a_run_without_a_finite_step_is_an_error_and_no_new_run(tmp_path: Path) -> None:
    state = job()
    spoil(state, math.inf)
    with CheckpointManager(tmp_path, statistics=True) as checkpoints:
        checkpoints.save(1, state)
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(IntegrityError, match="no step is finite: step-00000001"),
    ):
        checkpoints.resume(job())


def test_a_bucket_with_a_step_that_is_not_finite(server: Server) -> None:
    server.bucket("health")
    options: dict[str, Any] = {"storage_options": server.options}
    state = job()
    with CheckpointManager("s3://health/run", statistics=True, keep_last=1, **options) as manager:
        manager.save(1, state, metrics={"loss": 2})
        spoil(state)
        manager.save(2, state, metrics={"loss": 1})
    with CheckpointManager("s3://health/run", **options) as manager:
        assert manager.resume(job()) == 1
    assert [s.is_finite for s in ckpt_tools.steps("s3://health/run", **options)] == [True, False]


# ---- metrics -------------------------------------------------------------------------------------


def test_metrics_stand_in_the_manifest_and_choose_the_best_step(tmp_path: Path, ckpt: Run) -> None:
    state, values = job(), {1: 3.0, 2: 1.0, 3: math.nan, 4: 1.0, 5: 2.0}
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step, loss in values.items():
            checkpoints.save(step, state, metrics={"loss": torch.tensor(loss), "n": step})
        checkpoints.save(6, state)
        for bad in ({"loss": "low"}, {"loss": torch.ones(2)}, {3: 1.0}, {"": 1.0}):
            with pytest.raises((TypeError, ValueError), match="metrics"):
                checkpoints.save(7, state, metrics=bad)  # type: ignore[arg-type]
    best = ckpt("latest", tmp_path, "--best", "loss")
    assert best.stdout.strip().endswith("step-00000004") and "loss = 1" in best.stderr
    assert "step-00000003, step-00000006" in best.stderr
    most = ckpt("latest", tmp_path, "--best", "loss", "--higher-is-better")
    assert most.stdout.strip().endswith("step-00000001") and "(the highest)" in most.stderr
    assert "(the lowest; --higher-is-better takes the highest)" in best.stderr
    none = ckpt("latest", tmp_path, "--best", "lass")
    assert none.returncode == 13 and "there are: loss, n" in none.stderr
    listing = ckpt("ls", tmp_path, "--metrics").stdout
    assert "not finite" in listing and "loss: █▁ ▁▅  3 → 2" in listing
    shown = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert shown[2]["metrics"] == {"loss": None, "n": 3.0} and shown[5]["metrics"] == {}
    merged = tmp_path / "m.safetensors"
    assert ckpt("merge", tmp_path / "step-00000004", merged).returncode == 0


def test_a_step_that_is_not_finite_is_never_the_best(tmp_path: Path, ckpt: Run) -> None:
    """The loss of a step is usually computed before the update that spoils the weights."""
    rules = Retention(1, best=1, metric="loss")
    with CheckpointManager(tmp_path, statistics=True, retention=rules) as checkpoints:
        losses = {1: 5.0, 2: 3.0, 3: 2.5, 4: 50.0, 5: 60.0}
        for step, loss in losses.items():
            weight = torch.full((3,), math.nan if step == 3 else float(step))
            checkpoints.save(step, {"w": weight}, metrics={"loss": loss})
    assert numbers(ckpt_tools.steps(tmp_path)) == [2, 5]
    assert ckpt("latest", tmp_path, "--best", "loss").stdout.strip().endswith("step-00000002")
    with CheckpointManager(tmp_path) as checkpoints:
        for bad in ([("a", 1)], {"a": 10**400}):
            with pytest.raises(TypeError, match="metrics"):
                checkpoints.save(9, {"w": torch.ones(1)}, metrics=bad)  # type: ignore[arg-type]


# ---- rules ---------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve steps with falling and then rising losses."""
    state = {"x": torch.ones(2)}
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for step in range(1, 13):
            checkpoints.save(step * 10, state, metrics={"loss": abs(step - 5.2)})
    return tmp_path / "run"


def test_the_rules_combine_and_a_dry_run_tells_which(run: Path, ckpt: Run) -> None:
    words = ["--keep-last", 2, "--keep-every", 50, "--keep-best", 2, "--metric", "loss"]
    done = ckpt("prune", run, *words, "--dry-run")
    stays = {
        line.split()[1].rstrip(":")[-8:]: line.partition(": ")[2]
        for line in done.stdout.splitlines()
        if line.startswith("stays")
    }
    assert stays == {
        "00000120": "the newest 2",
        "00000110": "the newest 2",
        "00000050": "the best 2 by loss (0.2), a multiple of 50",
        "00000100": "a multiple of 50",
        "00000060": "the best 2 by loss (0.8)",
    }
    assert numbers(ckpt_tools.steps(run)) == [n * 10 for n in range(1, 13)]
    assert ckpt("prune", run, *words).returncode == 0
    assert numbers(ckpt_tools.steps(run)) == [50, 60, 100, 110, 120]
    for more in (["--keep-best", 2], ["--metric", "loss"], ["--higher-is-better"]):
        assert ckpt("prune", run, "--keep-last", 1, *more).returncode == 2
    unknown = ckpt("prune", run, "--keep-last", 1, "--keep-best", 1, "--metric", "x")
    assert unknown.returncode == 13 and "there are: loss" in unknown.stderr
    assert ckpt("prune", run, "--keep-last", 1, "--keep-spaced", "often").returncode == 2


def at(steps: list[Step], minutes: dict[int, float]) -> list[Step]:
    """Steps as if saved so many minutes before now."""
    now = dt.datetime.now(dt.UTC)
    found = []
    for step in steps:
        assert step.manifest is not None
        created = (now - dt.timedelta(minutes=minutes[step.number])).isoformat()
        found.append(replace(step, manifest=replace(step.manifest, created=created)))
    return found


def test_steps_by_age(run: Path) -> None:
    steps = at(list_steps(open_root(run)), {n * 10: 130 - n * 10 for n in range(1, 13)})
    gone = removable(steps, Retention(1, younger_s=3600))
    assert numbers(gone) == [10, 20, 30, 40, 50, 60, 70]


def test_one_step_of_each_period_stays_whatever_was_removed_before(run: Path) -> None:
    """A run that prunes after each save ends with the steps that one prune at the end leaves."""
    minutes = {n * 10: (13 - n) * 17.0 for n in range(1, 13)}
    steps = at(list_steps(open_root(run)), minutes)
    rules = Retention(1, every_s=3600.0)
    at_once = {s.number for s in steps} - set(numbers(removable(steps, rules)))
    left: list[Step] = []
    for step in steps:
        left.append(step)
        gone = removable(left, rules)
        left = [s for s in left if s not in gone]
    assert set(numbers(left)) == at_once and 3 <= len(left) <= 6
    hours = {
        int(dt.datetime.fromisoformat(s.manifest.created).timestamp() // 3600)
        for s in steps
        if s.manifest
    }
    assert len(left) in (len(hours), len(hours) + 1)  # and the newest


def test_the_manager_takes_the_same_rules(tmp_path: Path) -> None:
    rules = Retention(1, best=1, metric="accuracy", higher_is_better=True)
    with CheckpointManager(tmp_path, retention=rules) as checkpoints:
        for step, accuracy in enumerate((0.1, 0.9, 0.5, 0.6), 1):
            checkpoints.save(step, {"x": torch.ones(2)}, metrics={"accuracy": accuracy})
    assert numbers(ckpt_tools.steps(tmp_path)) == [2, 4]
    ckpt_tools.prune(tmp_path, retention=Retention(1))
    assert numbers(ckpt_tools.steps(tmp_path)) == [4]
    with pytest.raises(ValueError, match="give only one"):
        CheckpointManager(tmp_path, retention=rules, keep_last=5)
    with pytest.raises(PlanError, match="expected keep_last, or retention"):
        ckpt_tools.prune(tmp_path)
    for bad in ({"last": 0}, {"best": 1}, {"every_s": 0}, {"younger_s": math.inf}, {"metric": "x"}):
        with pytest.raises(ValueError, match="expected"):
            Retention(**bad)  # type: ignore[arg-type]


def test_a_step_that_is_not_finite_never_pushes_out_the_last_good_one(tmp_path: Path) -> None:
    state = job()
    with CheckpointManager(tmp_path, statistics=True, keep_last=2) as checkpoints:
        checkpoints.save(1, state)
        spoil(state)
        for step in (2, 3, 4, 5):
            checkpoints.save(step, state)
    assert numbers(ckpt_tools.steps(tmp_path)) == [1, 4, 5]
    result = prune_steps(open_root(tmp_path), Retention(1), dry_run=True)
    reasons = {Path(path).name: reason for path, reason in result.policies.items()}
    assert reasons["step-00000001"] == "the newest without known NaN or infinity"


# ---- ckpt check ----------------------------------------------------------------------------------


def test_check_has_a_line_and_exit_1_for_each_problem(tmp_path: Path, ckpt: Run) -> None:
    state = job()
    with CheckpointManager(tmp_path, statistics=True, keep_last=None) as checkpoints:
        for step in range(1, 9):
            if step == 7:  # an update that is far too large
                with torch.no_grad():
                    state["model"][0].bias.add_(9.0)
            if step == 8:
                spoil(state)
            train(state)
            if step >= 6:  # no longer trained
                with torch.no_grad():
                    state["model"][1].weight.copy_(torch.ones(3, 50))
            checkpoints.save(step * 10, state)
    done = ckpt("check", tmp_path, "--every", 10)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any("step 70: jump: model.0.bias changed by 0.89" in line for line in lines)
    unchanged = "step 80: unchanged: model.1.weight has been the same in steps 60 to 80"
    assert unchanged in lines
    assert any(line.startswith("step 80: not finite: model.1.bias: ") for line in lines)
    shutil.rmtree(tmp_path / "step-00000030")
    (tmp_path / "step-00000020" / "ckpt.manifest.x").touch()
    next((tmp_path / "step-00000020").glob("ckpt.manifest.*.json")).unlink()
    file = tmp_path / "step-00000010" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:2000] + b"x" + file.read_bytes()[2001:])
    lines = ckpt("check", tmp_path, "--every", 10).stdout.splitlines()
    assert any(line.startswith("step 30: missing") for line in lines)
    assert any(line.startswith("step 20: unsealed") for line in lines)
    assert not any(line.startswith("step 10") for line in lines)
    found = json.loads(ckpt("check", tmp_path, "--verify", "--json").stdout)
    assert [p["kind"] for p in found if p["step"] == 10] == ["damaged"]
    (tmp_path / "step-00000040" / ".metadata").unlink()
    lines = ckpt("check", tmp_path).stdout.splitlines()
    assert any(line.startswith("step 40: incomplete") for line in lines)


@pytest.mark.slow
def test_healthy_runs_raise_no_alarm(tmp_path: Path) -> None:
    """Second moments jump, distances differ, and the learning rate changes; that is no problem."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        root = tmp_path / str(seed)
        with CheckpointManager(root, statistics=True, keep_last=None) as checkpoints:
            for step in range(1, 301):
                x = torch.randn(64, 16)
                loss = (model(x) - torch.sin(3 * x[:, :4])).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 20 == 0 or step < 4:
                    checkpoints.save(step, {"model": model, "optimizer": optimizer})
        assert ckpt_tools.check_run(root) == []


def test_metrics_of_any_size_are_shown(tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step, value in enumerate((1e308, -1e308, 1.0, 1e308)):
            checkpoints.save(step, {"x": torch.ones(1)}, metrics={"loss": value})
    done = ckpt("ls", tmp_path, "--metrics")
    assert done.returncode == 0 and "loss: █▁▄█" in done.stdout.replace("▅", "▄"), done.stderr


def test_a_sound_run_has_no_problems(tmp_path: Path, ckpt: Run) -> None:
    state = job()
    with CheckpointManager(tmp_path, statistics=True) as checkpoints:
        for step in (1, 2, 3):
            train(state)
            checkpoints.save(step, state)
    done = ckpt("check", tmp_path, "--verify", "--every", 1)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: no problems\n")
    assert ckpt("check", tmp_path / "nothing").returncode == 10


# ---- timing --------------------------------------------------------------------------------------


def test_saves_and_loads_tell_the_time_of_each_phase(tmp_path: Path, ckpt: Run) -> None:
    state = job()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state, asynchronous=False)
        report = checkpoints.last_save
        assert report is not None
        phases = ["wait", "collect", "agree", "compare", "copy", "write", "fsync", "commit"]
        assert list(report.timing) == phases and all(v >= 0 for v in report.timing.values())
        checkpoints.resume(state)
        assert checkpoints.last_load is not None
        assert list(checkpoints.last_load.timing) == ["open", "share", "read", "restore"]
    listing = ckpt("ls", tmp_path, "--timing").stdout
    assert "collect s" in listing and "fsync s" in listing
    shown = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert list(shown[1]["timing"]) == phases[:-1]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda step: (step / "__0_0.distcp").unlink(),
    "its index is cut": lambda step: os.truncate(step / ".metadata", 100),
    "it was renamed": lambda step: step.rename(step.with_name("step-00000007")),
    "its manifest is cut": lambda step: os.truncate(next(step.glob("ckpt.manifest.*")), 60),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_run_whose_only_step_is_damaged_does_not_begin_again(how: str, tmp_path: Path) -> None:
    """A job that takes None for a new run would train from the beginning."""
    state = {"model": {"w": torch.ones(3)}}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(5, state, asynchronous=False)
    DAMAGE[how](tmp_path / "step-00000005")
    text = "no step can be resumed.*step-0000000[57]: "
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(IntegrityError, match=text):
        checkpoints.resume(state)


def test_a_step_that_was_never_complete_begins_a_run(tmp_path: Path) -> None:
    step = tmp_path / "step-00000005"
    step.mkdir()
    (step / "__0_0.distcp").write_bytes(b"\0" * 100)  # a save of torch that was killed
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume({"model": {"w": torch.ones(3)}}) is None


@contextmanager
def saving(root: Path, keep_last: int) -> Iterator[subprocess.Popen[bytes]]:
    """A job that saves 500 steps without pause. It has saved the first one."""
    job = (
        "import sys, torch; from ckpt_tools import CheckpointManager\n"
        "with CheckpointManager(sys.argv[1], keep_last=int(sys.argv[2])) as c:\n"
        "    c.save(1, {'w': torch.ones(2)}, asynchronous=False); print(flush=True)\n"
        "    for step in range(2, 500): c.save(step, {'w': torch.ones(2)}, asynchronous=False)"
    )
    words = [sys.executable, "-c", job, root, str(keep_last)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline()
        yield running
    assert running.returncode == 0


@pytest.mark.slow
def test_steps_that_go_while_they_are_listed_are_not_incomplete(tmp_path: Path) -> None:
    """A check in cron runs beside a job whose retention removes steps."""
    numbers, looks = set[int](), 0
    with saving(tmp_path, 3) as running:
        while running.poll() is None:
            found = ckpt_tools.steps(tmp_path)
            numbers |= {step.number for step in found}
            looks += 1
            assert not [step for step in found if step.problem]
    assert looks > 20 and len(numbers) > 20


@pytest.mark.slow
def test_a_run_that_replaces_its_only_step_is_never_without_one(tmp_path: Path) -> None:
    looks = 0
    with saving(tmp_path, 1) as running:
        while running.poll() is None:
            assert ckpt_tools.latest(tmp_path, verify=bool(looks % 2)) is not None
            assert not ckpt_tools.check_run(tmp_path, verify=True)
            looks += 1
    assert looks > 20


@pytest.mark.parametrize("what", ["shard", "ranks"])
def test_a_step_that_another_writer_left_unfinished_begins_a_run(what: str, tmp_path: Path) -> None:
    """Trainers do not write at once: a killed one leaves such files."""
    step = tmp_path / "checkpoint-5"
    if what == "shard":
        step.mkdir()
        (step / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    else:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=step, no_dist=True, use_collectives=False)
        (step / "__1_0.distcp").write_bytes(b"\0" * 100)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume({"model": {"w": torch.ones(3)}}) is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weights_that_stand_still_are_found_with_any_optimizer(
    momentum: float, tmp_path: Path, ckpt: Run
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in range(1, 7):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 if step < 4 else 0.0
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            checkpoints.save(step, {"model": model, "optimizer": optimizer})
            if step == 3:
                checkpoints.wait()
                assert not ckpt_tools.check_run(tmp_path)
                said = ckpt("check", str(tmp_path)).stdout
                assert "no problems; 3 steps without statistics" in said
    kinds = [problem.kind for problem in ckpt_tools.check_run(tmp_path)]
    assert kinds and set(kinds) == {"unchanged"}


def test_buffers_of_norms_are_no_weights_that_jump(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with CheckpointManager(tmp_path, keep_last=None, statistics=True) as checkpoints:
        for step in range(1, 9):
            model(torch.randn(8, 4) * (1000.0 if step == 8 else 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, {"model": model, "optimizer": optimizer})
    names = {problem.text.split()[0] for problem in ckpt_tools.check_run(tmp_path)}
    assert not {"model.running_mean", "model.running_var"} & names


def test_a_change_of_tiny_numbers_is_measured(tmp_path: Path) -> None:
    values = torch.full((100,), 1e-200, dtype=torch.float64)
    with CheckpointManager(tmp_path, keep_last=None, statistics=True) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": values}, asynchronous=False)
            if step == 1:
                values.mul_(1.5)
    found = []
    for step in ckpt_tools.steps(tmp_path):
        assert step.manifest is not None
        statistics = step.manifest.tensors["w"].statistics
        assert statistics is not None
        found.append(statistics.change_rms)
    assert found == [None, pytest.approx(5e-201, rel=1e-5), 0.0]
