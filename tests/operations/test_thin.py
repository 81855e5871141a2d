"""Old steps lose their optimizers, and keep their models. Stock torch reads what is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import ckpt_tools
from ckpt_tools import CheckpointManager, NotACheckpointError, PlanError, StorageError
from ckpt_tools.operations.report.report import report_data
from ckpt_tools.publish.step_names import step_name
from ckpt_tools.run.roots import open_root
from tests.conftest import torchrun
from tests.jobs import EVERY, STRACE, open_files
from tests.loop.values import flip_a_bit, save_values
from tests.servers.servers import Server
from tests.states import one_step

Run = Callable[..., subprocess.CompletedProcess[str]]


def job() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "ema": {"w": torch.ones(4)}, "epoch": 3}


def save_run(root: Path | str, steps: int = 5, **more: Any) -> dict[int, dict[str, Tensor]]:
    """Trains and saves; returns the model of each step."""
    state, models = job(), {}
    with CheckpointManager(root, keep_last=None, **more) as checkpoints:
        for step in range(1, steps + 1):
            state["model"](torch.ones(2, 40)).square().mean().backward()
            state["optimizer"].step()
            models[step] = {n: t.clone() for n, t in state["model"].state_dict().items()}
            note = {"note.json": b'{"a": 1}'}
            checkpoints.save(step, state, metrics={"loss": step}, files=note)
    return models


def holds(step: Path, model: dict[str, Tensor]) -> None:
    """Stock torch loads the model of a step, bit for bit."""
    got = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load({"model": got}, checkpoint_id=step, no_dist=True)
    assert all(torch.equal(got[name], tensor) for name, tensor in model.items())


def test_old_steps_keep_the_model_and_lose_the_optimizer(tmp_path: Path, ckpt: Run) -> None:
    models = save_run(tmp_path, statistics=True)
    before = {s.number: s for s in ckpt_tools.steps(tmp_path)}
    dry = ckpt_tools.thin(tmp_path, 2, dry_run=True)
    assert [s.manifest for s in ckpt_tools.steps(tmp_path)] == [
        before[n].manifest for n in sorted(before)
    ]
    done = ckpt("thin", tmp_path, "--keep-full", 2, "--price", 1000)
    assert done.returncode == 0 and "optimizer" in done.stdout and "a month" in done.stdout
    after = {s.number: s for s in ckpt_tools.steps(tmp_path)}
    for number, step in after.items():
        holds(Path(step.path), models[number])
        assert ckpt_tools.verify(step.path).problems == []
        assert (Path(step.path) / "note.json").read_bytes() == b'{"a": 1}'
        old, new = before[number].manifest, step.manifest
        assert old is not None and new is not None
        assert (new.step, new.metrics, new.created) == (number, {"loss": number}, old.created)
        gone = set(old.tensors) - set(new.tensors)
        assert {name: new.tensors[name] for name in new.tensors}.items() <= old.tensors.items()
        assert list(step.thinned) == (["epoch", "optimizer"] if number < 4 else [])
        assert all(name.startswith("optimizer.") for name in gone) and bool(gone) == (number < 4)
    freed = sum(before[n].nbytes - after[n].nbytes for n in after)
    assert freed > 0 and abs(dry.freed_nbytes - freed) < 20_000  # without metadata
    assert "thinned: no epoch, optimizer" in ckpt("ls", tmp_path).stdout
    assert not list(tmp_path.glob(".tmp*")) and not list(tmp_path.glob(".trash*"))
    with ckpt_tools.open(after[1].path) as step:
        assert any(name.startswith("ema") for name in step)  # another model stays
    ckpt_tools.merge(after[1].path, tmp_path / "m.safetensors")
    assert ckpt_tools.thin(tmp_path, 2).thinned == []  # nothing is left to do


def test_a_resume_says_what_a_thinned_step_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = save_run(tmp_path)
    ckpt_tools.thin(tmp_path, 1)
    state = job()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.resume(state) == 5  # the newest is full
        with pytest.raises(PlanError):
            checkpoints.resume(state, 2)
        assert "step 2 was thinned, and has no epoch, optimizer" in caplog.text
        assert checkpoints.resume(state, 2, strict=False) == 2
    assert all(torch.equal(t, models[2][n]) for n, t in state["model"].state_dict().items())


class WithExtra(nn.Module):
    """A module whose state dict has values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 4), 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_values_of_a_model_are_a_part_of_it(tmp_path: Path) -> None:
    """A thinned model loads: the extra state of a module, and the count of an average, stay."""

    def make() -> dict[str, Any]:
        model = WithExtra()
        return {"net": model, "ema": ckpt_tools.Ema(model, decay=0.9)}

    state = make()
    optimizer = torch.optim.AdamW(state["net"].parameters())
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for step in (1, 2):
            state["net"].seen = 10 * step
            state["net"].inner(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            state["ema"].update()
            more = {"optimizer": optimizer, "config": {"lr": 1}, "note": "x"}
            checkpoints.save(step, {**state, **more}, asynchronous=False)
    (thinned,) = ckpt_tools.thin(tmp_path / "run", 1).thinned
    assert set(thinned.dropped) == {"optimizer", "config", "note"}
    got = make()
    ckpt_tools.load(tmp_path / "run" / "step-00000001", got)
    assert got["net"].seen == 10 and got["ema"].state_dict()["num_updates"] == 1
    flat = tmp_path / "flat"
    with CheckpointManager(flat, keep_last=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {**state["net"].state_dict(), "note": "x"}, asynchronous=False)
    ckpt_tools.thin(flat, 1)
    target = WithExtra().state_dict()
    ckpt_tools.load(flat / "step-00000001", target)
    assert target["_extra_state"] == {"seen": 20}


def test_globs_a_type_and_steps_that_stay_full(tmp_path: Path, ckpt: Run) -> None:
    models = save_run(tmp_path, 6)
    ckpt("pin", tmp_path / "step-00000002")
    (tmp_path / "step-00000003" / "mine.txt").write_text("mine")
    result = ckpt_tools.thin(
        tmp_path, 1, keep_every=4, drop=["optimizer.*exp_avg_sq"], dtype="bf16"
    )
    assert [s.number for s in result.thinned] == [1, 5] and not result.failed
    reasons = {Path(path).name[-1]: reason for path, reason in result.kept.items()}
    assert reasons.pop("2").startswith("it is pinned")
    assert "mine.txt" in reasons.pop("3")
    assert reasons == {"4": "a multiple of 4", "6": "the newest 1"}
    assert (tmp_path / "step-00000003" / "mine.txt").read_text() == "mine"
    with ckpt_tools.open(tmp_path / "step-00000001") as step:
        names = list(step)
        assert any(name.endswith(".exp_avg") for name in names)
        assert not any(name.endswith(".exp_avg_sq") for name in names)
        weight = step["model.0.weight"].torch()
    assert torch.equal(weight, models[1]["0.weight"].bfloat16())
    done = ckpt("thin", tmp_path, "--keep-full", 1, "--drop", "nothing*")
    assert done.returncode == 13 and "--drop" in done.stderr


def test_the_newest_finite_full_step_stays(tmp_path: Path) -> None:
    state = job()
    with CheckpointManager(tmp_path, keep_last=None, statistics=True) as checkpoints:
        for step in (1, 2, 3, 4):
            if step == 3:
                with torch.no_grad():
                    state["model"][0].weight[0, 0] = float("nan")
            checkpoints.save(step, state)
    assert [s.number for s in ckpt_tools.thin(tmp_path, 1).thinned] == [1, 3]
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(job()) == 2


def flip(step: Path) -> None:
    file = step / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[3000] ^= 1
    file.write_bytes(data)


def test_a_damaged_newest_step_does_not_count(tmp_path: Path, ckpt: Run) -> None:
    save_run(tmp_path, 4)
    flip(tmp_path / "step-00000004")
    done = ckpt("thin", tmp_path, "--keep-full", 1)
    assert done.returncode == 0 and "it is not counted: " in done.stdout
    assert [bool(s.thinned) for s in ckpt_tools.steps(tmp_path)] == [True, True, False, False]
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(job()) == 3


@pytest.mark.parametrize("num_bad", [1, 2])
def test_a_full_step_that_a_job_can_resume_from_stays(num_bad: int, tmp_path: Path) -> None:
    values = {1: 1.0, 2: 2.0} | dict.fromkeys(range(3, 3 + num_bad), float("nan"))
    save_values(tmp_path, values, {})
    flip_a_bit(tmp_path / step_name(2), 2.0)
    result = ckpt_tools.thin(tmp_path, 1)
    assert [step.number for step in result.thinned] == list(range(3, 2 + num_bad))
    with CheckpointManager(tmp_path) as checkpoints:
        state = {"model": {"w": torch.zeros(40)}, "optimizer": {"m": torch.zeros(4)}}
        assert checkpoints.resume(state) == 1


def test_a_cast_that_overflows_is_refused(tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"model": {"w": torch.full((5,), 1e6)}, "optim": {"m": 1}})
    before = {p.name: p.read_bytes() for p in (tmp_path / "step-00000001").iterdir()}
    done = ckpt("thin", tmp_path, "--keep-full", 1, "--dtype", "fp16")
    assert done.returncode == 13 and "5 values of model.w would become infinite" in done.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "step-00000001").iterdir()} == before
    assert ckpt("thin", tmp_path, "--keep-full", 1, "--dtype", "bf16").returncode == 0


def test_what_is_gone_has_its_own_name_and_a_step_can_be_thinned_again(tmp_path: Path) -> None:
    model = {"w": torch.ones(3), "n": 5}
    train = {"net": {"w": torch.ones(2)}, "opt": {"state": {"m": 1}, "param_groups": [1]}}
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in (1, 2):
            state = {"model": model, "train": train, "rng": torch.ones(8), "optimizer": {"a": 1}}
            checkpoints.save(step, state)

    def thinned(**how: Any) -> list[str]:
        ckpt_tools.thin(tmp_path, 1, **how)
        return list(ckpt_tools.steps(tmp_path)[0].thinned)

    assert thinned(drop=["optimizer*"]) == ["optimizer"]
    assert thinned() == ["optimizer", "rng", "train.opt"]
    assert thinned(dtype="bf16") == ["optimizer", "rng", "train.opt"]
    with ckpt_tools.open(tmp_path / "step-00000001") as step:
        assert {name: step[name].dtype for name in step} == {
            "model.w": "bfloat16",
            "train.net.w": "bfloat16",
        }
    assert ckpt_tools.thin(tmp_path, 1, dtype="bf16").thinned == []


def test_a_step_that_a_link_leads_to_stays_full(tmp_path: Path) -> None:
    save_run(tmp_path, 3)
    (tmp_path / "best").symlink_to("step-00000001")
    result = ckpt_tools.thin(tmp_path, 1)
    assert [s.number for s in result.thinned] == [2]
    assert "the link best leads to it" in result.kept[str(tmp_path / "step-00000001")]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="no steps"):
        ckpt_tools.thin(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    save_run(tmp_path, 3)
    for bad in (
        {"keep_full": 0},
        {"keep_full": 1, "keep_every": 0},
        {"keep_full": 1, "dtype": "x"},
    ):
        with pytest.raises(PlanError):
            ckpt_tools.thin(tmp_path, **bad)  # type: ignore[arg-type]
    lock = open_root(tmp_path).claim()
    try:
        with pytest.raises(StorageError, match="another"):
            ckpt_tools.thin(tmp_path, 1)
    finally:
        lock.release()


def test_a_damaged_step_stays_as_it_is(tmp_path: Path) -> None:
    save_run(tmp_path, 3)
    flip(tmp_path / "step-00000001")
    file = tmp_path / "step-00000001" / "__0_0.distcp"
    data = file.read_bytes()
    result = ckpt_tools.thin(tmp_path, 1)
    assert [s.number for s in result.thinned] == [2] and "damaged" in next(
        iter(result.failed.values())
    )
    assert file.read_bytes() == data and result.damaged == [str(file.parent)]


def test_the_command_tells_damage_by_its_status(tmp_path: Path, ckpt: Run) -> None:
    save_run(tmp_path, 3)
    flip(tmp_path / "step-00000001")
    done = ckpt("thin", tmp_path, "--keep-full", "1")
    assert done.returncode == 14 and "step-00000001: bytes were damaged" in done.stderr, done.stderr


def test_a_request_that_fits_no_step_has_its_own_status(tmp_path: Path, ckpt: Run) -> None:
    save_run(tmp_path / "run", 3)
    done = ckpt("thin", tmp_path / "run", "--keep-full", "1", "--drop", "*")
    assert done.returncode == 13 and done.stderr.count("no tensor would be left") == 2
    done = ckpt("thin", tmp_path / "run", "--keep-full", "1", "--drop", "model.0.weight")
    assert done.returncode == 0, done.stderr
    for more in (["--dry-run"], []):
        done = ckpt("merge", tmp_path / "run" / "step-00000001", tmp_path / "m.safetensors", *more)
        assert "the source was thinned: it lacks model.0.weight" in done.stdout, done.stdout


@pytest.mark.parametrize("drop", [(), ("optimizer*",)])
def test_steps_that_are_not_complete_are_named_and_the_others_are_thinned(
    drop: tuple[str, ...], tmp_path: Path
) -> None:
    save_run(tmp_path, 5)
    changed, short = (tmp_path / f"step-0000000{n}" / ".metadata" for n in (2, 3))
    changed.write_bytes(changed.read_bytes()[:-20] + bytes(20))
    short.write_bytes(short.read_bytes()[:-20])
    before = changed.read_bytes(), short.read_bytes()
    result = ckpt_tools.thin(tmp_path, 1, drop=drop)
    assert [s.number for s in result.thinned] == [1, 4] and not result.failed
    for index in (changed, short):
        assert "not complete" in result.kept[str(index.parent)]
    assert (changed.read_bytes(), short.read_bytes()) == before
    assert open_files(tmp_path) == []


def test_steps_of_several_ranks_keep_their_sharding(tmp_path: Path) -> None:
    torchrun(3, "save_statistics.py", str(tmp_path))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "old")
    state = {"model": {"x": torch.ones(2)}}
    with CheckpointManager(tmp_path, keep_last=None, statistics=True) as checkpoints:
        checkpoints.save(2, state)
    ckpt_tools.thin(tmp_path, 1, drop=["replicated"])
    thinned = ckpt_tools.inspect(tmp_path / "step-00000001")
    assert thinned.world_size == 3 and "replicated" not in thinned.catalog.tensors
    before = ckpt_tools.inspect(tmp_path / "old").catalog.tensors
    for name, entry in thinned.catalog.tensors.items():
        assert [c.box for c in entry.chunks] == [c.box for c in before[name].chunks]
    difference = ckpt_tools.diff(tmp_path / "old", tmp_path / "step-00000001", read_all=True)
    assert difference.only_a == ["replicated"] and not difference.differences


CALLS = "renameat2,rename,renameat,unlink,unlinkat,rmdir,fsync,fdatasync,mkdir,pwrite64,ftruncate"


@pytest.mark.slow
def test_killed_at_every_system_call_each_step_is_full_or_thinned(tmp_path: Path) -> None:
    """Whole in any case; the next run finishes the work, and nothing is left behind."""
    models = save_run(tmp_path / "whole", 2)
    number = 1
    while True:
        run = tmp_path / f"at-{number}"
        shutil.copytree(tmp_path / "whole", run)
        names = ",".join(f"?{name}" for name in CALLS.split(","))
        inject = f"inject={names}:signal=KILL:when={number}"
        words = [sys.executable, "-m", "ckpt_tools", "thin", str(run), "--keep-full", "1"]
        done = subprocess.run([*STRACE, "-e", inject, *words], capture_output=True, text=True)
        steps = ckpt_tools.steps(run)
        assert [s.number for s in steps] == [1, 2] and not any(s.problem for s in steps)
        for step in steps:
            assert ckpt_tools.verify(step.path).problems == []
            holds(Path(step.path), models[step.number])
        if done.returncode == 0:
            assert number > 10
            break
        again = ckpt_tools.thin(run, 1)  # also if the step was thinned before the kill
        assert not again.failed and list(ckpt_tools.steps(run)[0].thinned)
        left = [p.name for p in run.iterdir() if p.name.startswith((".tmp.", ".trash.", ".aside."))]
        assert left == [], number
        shutil.rmtree(run)
        number += EVERY if number > 1 else 1


@pytest.mark.slow
def test_steps_in_a_bucket(server: Server, tmp_path: Path) -> None:
    server.bucket("thin")
    root, options = "s3://thin/run", {"storage_options": server.options}
    models = save_run(root, 3, **options)
    result = ckpt_tools.thin(root, 1, **options)
    assert [s.number for s in result.thinned] == [1, 2] and not result.failed
    for number in (1, 2):
        path = f"{root}/step-{number:08d}"
        assert ckpt_tools.verify(path, **options).problems == []
        ckpt_tools.copy(path, tmp_path / str(number), **options)
        holds(tmp_path / str(number), models[number])
    assert [list(s.thinned) for s in ckpt_tools.steps(root, **options)] == [
        ["epoch", "optimizer"],
        ["epoch", "optimizer"],
        [],
    ]


def test_the_manager_thins_its_own_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="full: expected"):
        ckpt_tools.Retention(5, full=0)
    models = save_run_by(tmp_path, ckpt_tools.Retention(5, full=2), 7)
    steps = ckpt_tools.steps(tmp_path)
    assert [s.number for s in steps] == [3, 4, 5, 6, 7]
    assert [bool(s.thinned) for s in steps] == [True, True, True, False, False]
    for step in steps:
        holds(Path(step.path), models[step.number])
        assert ckpt_tools.verify(step.path).problems == []
    state = job()
    with CheckpointManager(tmp_path, retention=ckpt_tools.Retention(5, full=2)) as checkpoints:
        assert checkpoints.resume(state) == 7


def save_run_by(
    root: Path, rules: ckpt_tools.Retention, steps: int
) -> dict[int, dict[str, Tensor]]:
    """Trains and saves in the background by some rules; returns the model of each step."""
    state, models = job(), {}
    with CheckpointManager(root, retention=rules) as checkpoints:
        for step in range(1, steps + 1):
            state["model"](torch.ones(2, 40)).square().mean().backward()
            state["optimizer"].step()
            models[step] = {n: t.clone() for n, t in state["model"].state_dict().items()}
            checkpoints.save(step, state)
    return models


def test_a_step_that_a_job_resumed_from_stays_full_until_it_has_saved(tmp_path: Path) -> None:
    save_run(tmp_path, 4)
    rules = ckpt_tools.Retention(None, full=1)
    state = job()
    with CheckpointManager(tmp_path, retention=rules) as checkpoints:
        assert checkpoints.resume(state, 2) == 2
        checkpoints.save(5, state, asynchronous=False)
        checkpoints.wait()
    thinned = {s.number: bool(s.thinned) for s in ckpt_tools.steps(tmp_path)}
    assert thinned[5] is False and thinned[1] is True


class Tied(nn.Module):
    """An embedding and a head with one weight, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(1000, 16), nn.Linear(16, 1000, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("num_batches_tracked", torch.tensor(0))


def save_tied(root: Path, num_steps: int) -> Tied:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with CheckpointManager(root, keep_last=None, statistics=True) as checkpoints:
        for step in range(1, num_steps + 1):
            model.head(model.emb(torch.arange(8))).sum().backward()
            optimizer.step()
            model.num_batches_tracked += 500
            checkpoints.save(step, {"model": model, "optimizer": optimizer})
    return model


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    model = save_tied(tmp_path / "run", 3)
    before = {step.number: step.nbytes for step in ckpt_tools.steps(tmp_path / "run")}
    thinned = ckpt_tools.thin(tmp_path / "run", 1)
    assert [step.number for step in thinned.thinned] == [1, 2]
    assert thinned.freed_nbytes > 0
    for found in ckpt_tools.du(tmp_path / "run"):
        assert found.step.nbytes <= before[found.step.number]
        assert found.model == 1000 * 16 * 4 + 8
        assert found.model + found.optimizer + found.other == found.step.nbytes
    source = tmp_path / "run" / step_name(3)
    for ranks in (1, 2, 3):
        target = tmp_path / f"of{ranks}"
        done = ckpt_tools.reshard(source, target, to_ranks=ranks)
        assert done.num_tensors == 3
        report = ckpt_tools.inspect(target)
        assert report.total.nbytes == 1000 * 16 * 4 + 8 and "stored once" in report.extras
        assert ckpt_tools.verify(target).problems == []
        state = {f"model.{n}.weight": torch.zeros(1000, 16) for n in ("emb", "head")}
        dcp.load(state, checkpoint_id=target)
        assert all(torch.equal(value, model.emb.weight) for value in state.values())
        again = Tied()
        ckpt_tools.load(target, {"model": again})
        assert torch.equal(again.emb.weight, model.emb.weight)
        assert again.head.weight is again.emb.weight


def test_du_and_the_report_name_what_thin_frees_and_prune_keeps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_tied(run, 4)
    next((run / step_name(3)).glob("*.distcp")).unlink()  # incomplete: prune keeps it
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=run / step_name(2), no_dist=True)  # another's
    found = {one.step.number: one for one in ckpt_tools.du(run)}
    thinned = {t.number: t.freed_nbytes for t in ckpt_tools.thin(run, 1, dry_run=True).thinned}
    assert thinned.keys() == {1} and thinned[1] > 0
    assert {number: one.reclaimable for number, one in found.items()} == {
        1: thinned[1],
        2: 0,
        3: 0,
        4: 0,
    }
    assert found[3].why == "incomplete"
    assert report_data(run)["reclaimable"] == thinned[1]
    kept = {step.number for step in ckpt_tools.steps(run)}
    ckpt_tools.prune(run, keep_last=4)
    assert {step.number for step in ckpt_tools.steps(run)} == kept
    before = sum(one.step.nbytes for one in ckpt_tools.du(run))
    freed = ckpt_tools.thin(run, 1).freed_nbytes
    after = sum(one.step.nbytes for one in ckpt_tools.du(run))
    assert abs(before - after - freed) < 4096, "the manifest also gets shorter"
    assert not any(one.reclaimable for one in ckpt_tools.du(run))


def test_what_thin_would_free_is_told_for_each_kind_of_step(tmp_path: Path) -> None:
    """Steps of one size are looked at once, and a job may grow in the middle of a run."""
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in range(1, 10):
            model = torch.nn.Linear(100 if step % 4 else 300, 10)
            optimizer = one_step(model, torch.ones(model.in_features))
            more = {"note": "x" * (5000 if step % 3 == 0 else 1)}
            state = {"model": model, "optimizer": optimizer, **more}
            checkpoints.save(step, state, asynchronous=False)
    would = {one.number: one for one in ckpt_tools.thin(tmp_path, 1, dry_run=True).thinned}
    told = {one.step.number: one.reclaimable for one in ckpt_tools.du(tmp_path)}
    assert told == {9: 0} | {number: one.freed_nbytes for number, one in would.items()}
    assert len({told[number] for number in range(1, 9)}) == 3
