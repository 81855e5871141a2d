"""Which steps `prune` and the retention of a training remove, which they keep and why, and that
nothing foreign is ever removed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools import CheckpointManager, NotACheckpointError, StorageError
from ckpt_tools.loop.steps.retention import pin_step, prune_steps, removable
from ckpt_tools.publish.disk.attempt_mark import mark_name
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.step_names import step_name
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step
from ckpt_tools.run.steps import list_steps
from tests.command import run_ckpt
from tests.loop.values import flip_a_bit, save_values
from tests.servers.servers import Server

Run = Callable[..., subprocess.CompletedProcess[str]]


STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    with CheckpointManager(root, keep_last=None) as checkpoints:
        for step in STEPS:
            checkpoints.save(
                step,
                {"w": torch.arange(100.0), "b": torch.ones(3, 2), "note": "x"},
                asynchronous=False,
            )
    return root


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A run with those steps."""
    for number in STEPS:
        shutil.copytree(template / step_name(number), tmp_path / step_name(number))
    return tmp_path


def numbers(steps: list[Step]) -> list[int]:
    return [s.number for s in steps]


def left(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def flip(path: Path, at: int = 200) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_stock_checkpoint_is_a_step_and_never_removed(run: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=run / "step-2", no_dist=True)
    assert numbers(prune_steps(open_root(run), Retention(1)).removed) == [10, 20]
    assert numbers(list_steps(open_root(run))) == [2, 30]


def test_a_linked_step_is_never_removed(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept"
    os.rename(run / step_name(10), elsewhere)
    (run / step_name(10)).symlink_to(elsewhere)
    assert numbers(prune_steps(open_root(run), Retention(1)).removed) == [20]
    assert elsewhere.is_dir()


def test_prune_removes_what_the_rules_let_go_and_nothing_else(run: Path, ckpt: Run) -> None:
    dead, mine = run / ".tmp.step-00000011.abcdabcd", run / "notes"
    dead.mkdir()
    mine.mkdir()
    (dead / mark_name("abcdabcd")).touch()
    (dead / "__0_0.distcp").write_bytes(b"half")
    before = sorted(p.name for p in run.iterdir())
    dry = ckpt("prune", run, "--keep-last", 1, "--keep-every", 20, "--dry-run")
    assert sorted(p.name for p in run.iterdir()) == before
    assert (
        step_name(10) in dry.stdout
        and f"stays {run / step_name(20)}: a multiple of 20" in dry.stdout
        and str(dead) in dry.stdout
    )
    assert ckpt("prune", run, "--keep-last", 1, "--keep-every", 20).returncode == 0
    assert sorted(p.name for p in run.iterdir()) == ["notes", step_name(20), step_name(30)]
    assert ckpt("prune", run, "--keep-last", 1, "--keep-every", 20).stdout == "nothing to remove\n"
    assert ckpt("prune", run, "--keep-last", 0).returncode == 2
    assert ckpt("prune", run / "nothing", "--keep-last", 1).returncode == 10


def test_prune_leaves_the_staging_of_a_live_job(run: Path, ckpt: Run) -> None:
    import fcntl

    live = run / ".tmp.step-00000011.abcdabcd"
    live.mkdir()
    (live / mark_name("abcdabcd")).touch()
    fd = os.open(live, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    ckpt("prune", run, "--keep-last", 3)
    assert live.is_dir()
    os.close(fd)
    ckpt("prune", run, "--keep-last", 3)
    assert not live.exists()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), unique_by=lambda s: s[0]).map(sorted),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 10)),
)
def test_retention_never_takes_the_newest_complete_ones_nor_those_kept_by_rule(
    found, keep_last: int, keep_every: int | None
) -> None:
    sealed = Manifest.now("a", "save", "dcp", {}, world_size=1, files={}, index=None, tensors={})
    steps = [
        Step(n, Path(step_name(n)), 1, sealed, "" if is_complete else "broken")
        for n, is_complete in found
    ]
    gone = removable(steps, Retention(keep_last, keep_every))
    complete = [s for s in steps if not s.problem]
    assert not set(numbers(gone)) & set(numbers(complete[-keep_last:]))
    assert all(not s.problem and not (keep_every and s.number % keep_every == 0) for s in gone)
    assert len(complete) - len(gone) >= min(len(complete), keep_last)


def test_what_a_link_leads_to_stays(run: Path, ckpt: Run) -> None:
    """Whatever the link is called, and wherever in the run it stands; a dangling one is
    nobody's.
    """
    (run / "step-40").symlink_to(step_name(10))
    (run / "gone").symlink_to("step-5")
    done = ckpt("prune", run, "--keep-last", 1)
    assert (
        done.returncode == 0
        and f"kept {run / step_name(10)}: the link step-40 leads to it" in done.stdout
    ), done.stdout
    assert left(run) == ["gone", step_name(10), step_name(30), "step-40"]
    (run / "step-40").unlink()
    (run / step_name(20)).mkdir()
    (run / step_name(20) / "base").symlink_to(run / step_name(10) / "__0_0.distcp")
    assert prune_steps(open_root(run), Retention(1)).kept == {
        str(run / step_name(10)): f"the link {step_name(20)}/base leads to it"
    }


def test_retention_of_a_training_respects_links_pins_and_foreign_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {"w": torch.full((3,), float(step))}, asynchronous=False)
            if step == 1:
                (tmp_path / "best").symlink_to(step_name(1))
            if step == 2:
                assert pin_step(tmp_path / step_name(2))
            if step == 3:
                (tmp_path / step_name(3) / "eval.json").write_text("{}")
    assert left(tmp_path) == sorted(["best", *map(step_name, (1, 2, 3, 5))])
    assert caplog.text.count("eval.json") == 1  # not with every step
    for word in (
        "the link best leads to it",
        "it is pinned",
        "files that no save wrote: eval.json",
    ):
        assert word in caplog.text


def test_foreign_files_in_a_step_keep_it_and_are_named(run: Path, ckpt: Run) -> None:
    (run / step_name(10) / "eval.json").write_text("{}")
    (run / step_name(20) / "hf" / "deep").mkdir(parents=True)
    (run / step_name(20) / "hf" / "deep" / "model.safetensors").write_bytes(b"mine")
    for words in (["--dry-run"], []):
        done = ckpt("prune", run, "--keep-last", 1, *words)
        assert (
            done.returncode == 0
            and "no save wrote: eval.json;" in done.stdout
            and "hf/deep/model.safetensors;" in done.stdout
        )
    assert left(run) == [step_name(10), step_name(20), step_name(30)]
    (run / step_name(10) / "eval.json").unlink()
    got = json.loads(ckpt("prune", run, "--keep-last", 1, "--json").stdout)
    assert [s["step"] for s in got["steps"]] == [10] and list(got["kept"]) == [
        str(run / step_name(20))
    ]


def test_a_pin_keeps_a_step_and_is_shown(run: Path, ckpt: Run) -> None:
    assert ckpt("pin", run / step_name(10)).stdout == f"{run / step_name(10)} is pinned\n"
    assert "was pinned already" in ckpt("pin", f"{run / step_name(10)}/").stdout
    assert "complete, pinned" in ckpt("ls", run).stdout
    assert [s["is_pinned"] for s in json.loads(ckpt("ls", run, "--json").stdout)] == [
        True,
        False,
        False,
    ]
    assert numbers(prune_steps(open_root(run), Retention(1)).removed) == [20] and left(run) == [
        step_name(10),
        step_name(30),
    ]
    assert ckpt("verify", run / step_name(10)).returncode == 0
    refused = ckpt("reshard", run / step_name(30), run / step_name(10), "--to", 2, "--overwrite")
    assert refused.returncode == 15 and "ckpt.pin" in refused.stderr
    assert ckpt("pin", run / step_name(10), "--remove").returncode == 0
    assert "was not pinned" in ckpt("pin", run / step_name(10), "--remove").stdout
    assert numbers(prune_steps(open_root(run), Retention(1)).removed) == [10]
    assert ckpt("pin", run / step_name(10)).returncode == 10 and ckpt("pin", run).returncode == 10
    with pytest.raises(NotACheckpointError, match="no step of a run"):
        pin_step(run / "step-77")


def test_the_newest_is_read_before_all_others_go(run: Path, ckpt: Run) -> None:
    flip(run / step_name(30) / "__0_0.distcp")
    done = ckpt("prune", run, "--keep-last", 1)
    assert (
        "damaged" in done.stdout and f"not counted, and kept: {run / step_name(30)}" in done.stdout
    )
    assert left(run) == [step_name(20), step_name(30)]
    flip(run / step_name(20) / "__0_0.distcp")
    # nothing sound is left to stay
    assert prune_steps(open_root(run), Retention(1)).removed == [] and left(run) == [
        step_name(20),
        step_name(30),
    ]
    assert numbers(prune_steps(open_root(run), Retention(1), reads=False).removed) == [20]


@pytest.mark.parametrize("reads", [None, True])
@pytest.mark.parametrize("num_bad", [1, 2])
def test_what_a_job_can_resume_from_stays_though_newer_steps_are_damaged_or_not_finite(
    num_bad: int, reads: bool | None, tmp_path: Path
) -> None:
    values = {1: 1.0, 2: 2.0} | dict.fromkeys(range(3, 3 + num_bad), float("nan"))
    save_values(tmp_path, values, {})
    flip_a_bit(tmp_path / step_name(2), 2.0)
    result = prune_steps(open_root(tmp_path), Retention(last=1), reads=reads)
    assert list(result.damaged) == [str(tmp_path / step_name(2))]
    assert [step.number for step in result.removed] == list(range(3, 2 + num_bad))
    assert ckpt_tools.latest(tmp_path, verify=True).path == tmp_path / step_name(1)


def test_a_damaged_step_is_not_the_best_where_steps_are_read(tmp_path: Path) -> None:
    save_values(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.0, 2: 0.5, 3: 2.0})
    flip_a_bit(tmp_path / step_name(2), 2.0)
    rules = Retention(last=1, best=1, metric="loss")
    result = prune_steps(open_root(tmp_path), rules, reads=True)
    assert not result.removed and list(result.damaged) == [str(tmp_path / step_name(2))]


def test_every_step_that_is_counted_is_read_where_asked_for(run: Path) -> None:
    flip(run / step_name(20) / "__0_0.distcp")
    ckpt_tools.reshard(run / step_name(30), run / step_name(5), to_ranks=1)
    # step 5 is a copy without a number of its own: it is neither counted nor removed
    assert numbers(prune_steps(open_root(run), Retention(2), dry_run=True).removed) == [10]
    result = prune_steps(open_root(run), Retention(2), reads=True)
    assert not result.removed and list(result.damaged) == [str(run / step_name(20))]
    assert left(run) == [step_name(5), step_name(10), step_name(20), step_name(30)]
    assert numbers(prune_steps(open_root(run), Retention(1), reads=True).removed) == [10, 20]


FOREIGN = {
    "garbage": lambda step, _: (step.mkdir(), (step / ".metadata").write_bytes(b"garbage")),
    "no data": lambda step, _: (
        dcp.save({"w": torch.ones(3)}, checkpoint_id=step, no_dist=True),
        (step / "__0_0.distcp").unlink(),
    ),
    "stock": lambda step, _: dcp.save({"w": torch.arange(500.0)}, checkpoint_id=step, no_dist=True),
    "a copied step": lambda step, run: shutil.copytree(run / step_name(20), step),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_step_that_nobody_sealed_is_not_counted_and_not_removed(
    case: str, run: Path, ckpt: Run
) -> None:
    """However large its number: it could be planted, so that retention removes all real steps."""
    planted = run / step_name(99)
    FOREIGN[case](planted, run)
    assert numbers(prune_steps(open_root(run), Retention(1), dry_run=True).removed) == [10, 20]
    assert ckpt("prune", run, "--keep-last", 1).returncode == 0
    assert left(run) == [step_name(30), step_name(99)]
    with CheckpointManager(run, keep_last=1) as checkpoints:
        state = {
            "w": torch.zeros(500 if case == "stock" else 100),
            "b": torch.zeros(3, 2),
            "note": "",
        }
        if case == "stock":  # it is sound: the newest
            assert checkpoints.resume({"w": state["w"]}) == 99
            return
        assert checkpoints.resume(state) == 30 and state["note"] == "x"
        checkpoints.save(31, state, asynchronous=False)
        checkpoints._writer._background().submit(int).result()
    assert left(run)[-2:] == [step_name(31), step_name(99)]
    assert ckpt("latest", run).stdout.strip() == str(run / step_name(31))


def test_two_prunes_at_once_both_succeed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in range(1, 41):
            checkpoints.save(step, {"w": torch.arange(4.0)}, asynchronous=False)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: ckpt_tools.prune(tmp_path, 1), range(2)))
    assert not any(result.failed or result.damaged for result in results), results
    removed = {step.number for result in results for step in result.removed}
    assert removed == set(range(1, 40))
    assert [n for n in left(tmp_path) if n != ".ckpt.lock"] == [step_name(40)]


def test_prune_goes_on_after_a_step_that_cannot_be_removed(run: Path, ckpt: Run) -> None:
    stuck = run / step_name(10)
    subprocess.run(["mount", "--bind", stuck, stuck], check=True)
    try:
        done = ckpt("prune", run, "--keep-last", 1)
        assert (
            done.returncode == 15
            and f"could not remove {stuck}" in done.stderr
            and "Traceback" not in done.stderr
        )
        assert (
            left(run) == [step_name(10), step_name(30)]
            and f"removed {run / step_name(20)}" in done.stdout
        )
        shown = ckpt("prune", run, "--keep-last", 1, "--json")
        assert shown.returncode == 15 and list(json.loads(shown.stdout)["failed"]) == [str(stuck)]
    finally:
        subprocess.run(["umount", stuck], check=True)


@pytest.mark.slow
def test_pins_and_foreign_objects_keep_a_step_in_a_bucket(server: Server) -> None:
    fs, url = server.bucket("pinned"), "s3://pinned/run"
    with CheckpointManager(url, keep_last=9, storage_options=server.options) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"w": torch.full((3,), float(step))}, asynchronous=False)
    fs.pipe_file(f"pinned/run/{step_name(2)}/eval.json", b"{}")
    assert run_ckpt("pin", f"{url}/{step_name(1)}", **server.environment).returncode == 0
    assert (
        "was pinned already"
        in run_ckpt("pin", f"{url}/{step_name(1)}", **server.environment).stdout
    )
    done = run_ckpt("prune", url, "--keep-last", 1, **server.environment)
    assert done.returncode == 0 and "eval.json" in done.stdout and "is pinned" in done.stdout, (
        done.stderr
    )
    assert [s.number for s in list_steps(open_root(url, server.options))] == [1, 2, 4]
    assert (
        run_ckpt("pin", f"{url}/{step_name(1)}", "--remove", **server.environment).returncode == 0
    )
    assert numbers(prune_steps(open_root(url, server.options), Retention(1)).removed) == [1]


def wait_for(mirror: str, step: int) -> None:
    """Waits until a mirror has a step."""
    end = time.monotonic() + 60
    while step not in numbers(list_steps(open_root(mirror))):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_mirror_keeps_what_is_pinned_on_the_disk(tmp_path: Path) -> None:
    run, mirror = tmp_path / "run", "memory://pinned/run"
    with CheckpointManager(run, keep_last=1, mirror=mirror) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
            wait_for(mirror, step)
            if step == 1:
                pin_step(run / step_name(1))
    assert numbers(list_steps(open_root(mirror))) == numbers(list_steps(open_root(run))) == [1, 3]


def test_a_job_that_has_not_resumed_cannot_begin_below_the_newest_step(
    run: Path, tmp_path: Path
) -> None:
    """Retention would take the old step for the newest, and remove the job's own."""
    state = {"w": torch.zeros(3)}
    with CheckpointManager(run, keep_last=2) as checkpoints:
        with pytest.raises(StorageError, match="older than the newest step of this run, 30") as e:
            checkpoints.save(5, state)
        assert "resume" in str(e.value.hint) and "branch_from" in str(e.value.hint)
        checkpoints.branch_from(None)
        for step in (5, 6):
            checkpoints.save(step, state)
    assert [s.number for s in list_steps(open_root(run)) if not s.superseded_by] == [5, 6]
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.resume(state) == 6
        checkpoints.save(7, state)


def test_a_step_that_was_passed_over_is_no_newer_step(run: Path) -> None:
    """A trainer that loads by itself asks for the newest sound step only."""
    file = run / "step-00000030" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with CheckpointManager(run, asynchronous=False) as checkpoints:
        found = checkpoints.newest_sound()
        assert found is not None and found[0] == 20
        checkpoints.save(25, {"w": torch.zeros(3)})
    assert (run / "step-00000025").is_dir()


def test_copies_of_a_step_do_not_count_for_others(run: Path, tmp_path: Path) -> None:
    """A copy has the number of its step, in its name and in its manifest, and may be damaged."""
    for name in ("step_30", "step-030", "checkpoint-30"):
        shutil.copytree(run / "step-00000030", run / name)
        file = run / name / "__0_0.distcp"
        file.write_bytes(os.urandom(file.stat().st_size))
    everything = {p.name for p in run.iterdir()}
    result = prune_steps(open_root(run), Retention(last=3))
    assert not result.removed and {p.name for p in run.iterdir()} == everything
    assert "has the same number" in result.kept[str(run / "step-00000030")]
    assert {str(run / n) for n in ("step_30", "step-030", "checkpoint-30")} <= result.kept.keys()
    assert not ckpt_tools.thin(run, 2).thinned
    assert "not counted: " in run_ckpt("ls", run).stdout
    assert {p.kind for p in ckpt_tools.check_run(run) if p.step == 30} == {"twice"}
    assert Path(str(ckpt_tools.latest(run).path)).name == "step-00000030"
    state = {"w": torch.zeros(100), "b": torch.zeros(3, 2), "note": ""}
    with CheckpointManager(run, keep_last=3) as checkpoints:
        assert checkpoints.resume(state) == 30 and state["w"][5] == 5
        checkpoints.save(40, state)
    assert everything < {p.name for p in run.iterdir()}


def test_a_rule_that_fails_is_told_and_the_job_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Retention):
        def reasons(self, steps: Any, now: Any) -> dict[str, str]:
            raise KeyError("of a user")

    with CheckpointManager(tmp_path, retention=Broken(last=1)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
    assert "could not remove old steps" in caplog.text and "of a user" in caplog.text
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_what_is_no_retention_is_refused(tmp_path: Path) -> None:
    rules: Any = 2
    with pytest.raises(TypeError, match="expected a Retention"):
        CheckpointManager(tmp_path, retention=rules)
    with pytest.raises(TypeError, match="expected a Retention"):
        ckpt_tools.prune(tmp_path, retention=rules)
    with pytest.raises(ckpt_tools.PlanError, match=r"ckpt_tools\.thin|thinned"):
        ckpt_tools.prune(tmp_path, retention=Retention(4, full=1))


def test_a_misspelt_metric_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = Retention(1, best=2, metric="los")
    with CheckpointManager(tmp_path, retention=rules) as checkpoints:
        for step in (1, 2, 3, 4):
            metrics = {"loss": float(step)}
            checkpoints.save(step, {"w": torch.ones(3)}, metrics=metrics, asynchronous=False)
    assert caplog.text.count("no step has the metric 'los'") == 1
    assert len(list(tmp_path.glob("step-*"))) == 4
    with pytest.raises(ckpt_tools.PlanError, match="named 'los'"):
        ckpt_tools.prune(tmp_path, retention=rules)
    pruned = ckpt_tools.prune(tmp_path, retention=Retention(1, best=2, metric="loss"))
    assert [step.number for step in pruned.removed] == [3]


def test_an_optimizer_of_any_name_is_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path, asynchronous=False) as checkpoints:
        for step in (1, 2):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            checkpoints.save(step, {"net": model, "opt": optimizer})
    first, second = ckpt_tools.du(tmp_path)
    assert first.optimizer == second.optimizer and first.optimizer >= 2 * first.model > 0
    assert first.reclaimable and not second.reclaimable
    step = ckpt_tools.latest(tmp_path)
    assert step is not None
    assert {"exp_avg", "exp_avg_sq"} <= ckpt_tools.inspect(step).optimizer_states.keys()
    assert os.fspath(step).endswith("step-00000002")
