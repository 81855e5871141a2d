"""Going back to an older step: the newer ones are left aside, never lost, and never resumed from by
mistake.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import CheckpointManager, Mirror, StorageError
from ckpt_tools.loop.steps.retention import prune_steps
from ckpt_tools.publish.step_names import step_name
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import RunListing, find_latest, list_steps
from tests.servers.servers import Server

Ckpt = Callable[..., Any]


def value(root: Path | str, **options: Any) -> tuple[int, float]:
    """Returns what a restarted job finds."""
    state = {"w": torch.zeros(3)}
    with CheckpointManager(root, keep_last=None, **options) as checkpoints:
        step = checkpoints.resume(state)
    return step, float(state["w"][0])


def save(checkpoints: CheckpointManager, step: int, w: float) -> None:
    checkpoints.save(step, {"w": torch.full((3,), float(w))}, asynchronous=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for step in (100, 200, 300):
            save(checkpoints, step, step)
    return tmp_path / "run"


def test_the_first_new_step_supersedes_the_newer_ones_which_stay_under_another_name(
    run: Path, ckpt: Ckpt, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        CheckpointManager(run, keep_last=None) as checkpoints,
        caplog.at_level(logging.WARNING, "ckpt_tools"),
    ):
        assert checkpoints.resume({"w": torch.zeros(3)}, step=100) == 100
        assert (
            "when a new step is committed, these are set aside: step-00000200, step-00000300"
            in caplog.text
        )
        assert find_latest(open_root(run)).step.number == 300  # nothing is superseded by a wish
        save(checkpoints, 150, 0.5)
        assert find_latest(open_root(run)).step.number == 150
        assert "step-00000150, which continues from step 100" in caplog.text
        save(checkpoints, 200, 0.7)
        save(checkpoints, 300, 0.9)
    assert [(s.number, damage(s)) for s in list_steps(open_root(run))] == [
        (100, ""),
        (150, ""),
        (200, ""),
        (300, ""),
    ]
    aside = [s for s in RunListing(open_root(run)).all_steps if s.superseded_by]
    assert [(s.number, damage(s)) for s in aside] == [(200, ""), (300, "")]
    attempt = next(
        s.manifest.attempt for s in list_steps(open_root(run)) if s.number == 150 and s.manifest
    )
    assert [s.name for s in aside] == [
        f"step-00000{n}.superseded-{attempt[:8]}" for n in (200, 300)
    ]
    state = {"w": torch.zeros(3)}
    with CheckpointManager(run, keep_last=None) as checkpoints:
        checkpoints.resume(state, path=aside[0].path)
    assert state["w"][0] == 200 and value(run) == (300, pytest.approx(0.9))
    # a mirror may come
    assert [
        (note.step, is_in_effect) for note, is_in_effect in RunListing(open_root(run)).rollbacks
    ] == [("step-00000150", True)]
    shown = ckpt("ls", run).stdout
    # state and name of each
    assert shown.count("superseded") == 4 and shown.count("complete") == 4, shown
    assert [s["superseded"] for s in json.loads(ckpt("ls", run, "--json").stdout)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    assert prune_steps(open_root(run), Retention(1)).removed and [
        s.superseded_by != "" for s in RunListing(open_root(run)).all_steps
    ] == [True, False, True]


def test_the_first_new_step_may_have_the_number_of_an_old_one(run: Path) -> None:
    with CheckpointManager(run, keep_last=None) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)}, step=100)
        save(checkpoints, 200, 0.5)
    assert value(run) == (200, 0.5)
    assert [
        (s.number, damage(s)) for s in RunListing(open_root(run)).all_steps if s.superseded_by
    ] == [(200, ""), (300, "")]


def test_a_save_that_fails_after_going_back_leaves_the_old_branch_as_it_was(run: Path) -> None:
    with CheckpointManager(run, keep_last=None) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)}, step=100)
        (run / "step-00000150").mkdir()
        (run / "step-00000150" / "notes.txt").write_text("mine")
        with pytest.raises(StorageError, match="step 150 is there already"):
            save(checkpoints, 150, 0.5)
    assert value(run) == (300, 300.0) and (run / "step-00000150" / "notes.txt").exists()


def test_going_back_and_back_again(run: Path) -> None:
    for number, w in ((200, 0.25), (100, 0.5), (100, 0.75)):
        with CheckpointManager(run, keep_last=None) as checkpoints:
            checkpoints.resume({"w": torch.zeros(3)}, step=number)
            save(checkpoints, number + 50, w)
        assert value(run) == (number + 50, w)
    aside = [s.number for s in RunListing(open_root(run)).all_steps if s.superseded_by]
    assert aside == [150, 200, 250, 300]


def test_the_newest_step_needs_no_rollback_and_an_unsealed_one_is_moved_too(run: Path) -> None:
    foreign = run / "step-00000400"
    foreign.mkdir()
    (foreign / "data.bin").write_bytes(b"x")
    with CheckpointManager(run, keep_last=None) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)}, step=300)
        save(checkpoints, 350, 0.5)
    (moved,) = run.glob("step-00000400.superseded-*")
    assert (moved / "data.bin").read_bytes() == b"x" and value(run) == (350, 0.5)


def test_a_note_that_was_planted_hides_nothing_but_what_it_names_exactly(run: Path) -> None:
    """Another attempt's id, a path, garbage: none of them is a step of this root."""
    victims = {"step-00000300": "0" * 8, "../run/step-00000200": "", "step-00000100": ""}
    body = {
        "ckpt_rollback": 1,
        "step": "x",
        "attempt": "12345678-" + "0" * 27,
        "resumed": 0,
        "is_committed": True,
        "victims": victims,
    }
    (run / ".ckpt.rollback.12345678.json").write_text(json.dumps(body))
    (run / ".ckpt.rollback.87654321.json").write_text("{")
    assert value(run) == (300, 300.0) and [s.number for s in list_steps(open_root(run))] == [
        100,
        200,
        300,
    ]


def test_overwrite_replaces_a_step_and_saving_the_last_one_again_does_nothing(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        CheckpointManager(run, keep_last=None) as checkpoints,
        caplog.at_level(logging.WARNING, "ckpt_tools"),
    ):
        assert checkpoints.resume({"w": torch.zeros(3)}) == 300
        save(checkpoints, 300, 1.0)
        assert (
            "step 300 is saved already, and not saved again; overwrite=True replaces it"
            in caplog.text
        )
        assert value_of(run, 300) == 300
        checkpoints.save(300, {"w": torch.ones(3)}, overwrite=True)
        checkpoints.wait()
        assert value_of(run, 300) == 1
        with pytest.raises(StorageError, match="step 200 is there already") as caught:
            save(checkpoints, 200, 1.0)
        assert "overwrite=True" in (caught.value.hint or "")
        checkpoints.save(400, {"w": torch.ones(3)}, overwrite=True)
    assert [s.number for s in list_steps(open_root(run))] == [100, 200, 300, 400]


def value_of(run: Path, step: int) -> float:
    state = {"w": torch.zeros(3)}
    from ckpt_tools import load

    load(run / f"step-{step:08d}", state)
    return float(state["w"][0])


# ---- in a bucket, and beside a mirror ------------------------------------------------------------


def test_a_rollback_in_a_bucket(server: Server) -> None:
    server.bucket("rollback")
    root = "s3://rollback/run"
    with CheckpointManager(root, keep_last=None, storage_options=server.options) as checkpoints:
        for step in (100, 200, 300):
            save(checkpoints, step, step)
    with CheckpointManager(root, keep_last=None, storage_options=server.options) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)}, step=100)
        assert find_latest(open_root(root, server.options)).step.number == 300
        save(checkpoints, 200, 0.5)
        assert find_latest(open_root(root, server.options)).step.number == 200
    assert value(root, storage_options=server.options) == (200, 0.5)
    steps = RunListing(open_root(root, server.options)).all_steps
    assert [(s.number, bool(s.superseded_by), damage(s)) for s in steps] == [
        (100, False, ""),
        (200, False, ""),
        (200, True, ""),
        (300, True, ""),
    ]
    assert RunListing(open_root(root, server.options)).rollbacks == []


@pytest.mark.slow
def test_a_mirror_that_has_not_heard_of_a_rollback_yet_is_not_resumed_from(
    server: Server, tmp_path: Path
) -> None:
    server.bucket("mirrored-rollback")
    root, url, options = tmp_path / "run", "s3://mirrored-rollback/run", server.options
    with CheckpointManager(
        root, keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        for step in (100, 200, 300):
            save(checkpoints, step, step)
            checkpoints._mirror.wait()
    assert [s.number for s in list_steps(open_root(url, options))] == [100, 200, 300]
    with CheckpointManager(
        root, keep_last=None, mirror=Mirror(url, every=1000), storage_options=options
    ) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)}, step=100)
        save(checkpoints, 150, 0.5)  # is not mirrored
        assert find_latest(open_root(root), open_root(url, options)).step.number == 150
        assert find_latest(open_root(url, options)).step.number == 300
    with CheckpointManager(
        root, keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        state = {"w": torch.zeros(3)}
        assert checkpoints.resume(state) == 150
        checkpoints._mirror.wait()
    assert [
        (s.number, bool(s.superseded_by)) for s in RunListing(open_root(url, options)).all_steps
    ] == [
        (100, False),
        (150, False),
        (200, True),
        (300, True),
    ]
    assert (
        RunListing(open_root(root)).rollbacks == RunListing(open_root(url, options)).rollbacks == []
    )


@pytest.mark.slow
def test_a_step_that_only_the_mirror_has_is_gone_back_to(server: Server, tmp_path: Path) -> None:
    server.bucket("far-rollback")
    root, url, options = tmp_path / "run", "s3://far-rollback/run", server.options
    with CheckpointManager(
        root, keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        for step in (100, 200, 300):
            save(checkpoints, step, step)
            checkpoints._mirror.wait()
    for step in (100, 200):
        shutil.rmtree(root / step_name(step))
    with CheckpointManager(
        root, keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        state = {"w": torch.zeros(3)}
        assert checkpoints.resume(state, step=100) == 100 and state["w"][0] == 100
        save(checkpoints, 150, 0.5)
    assert value(root, mirror=url, storage_options=options) == (150, 0.5)
    assert find_latest(open_root(url, options)).step.number == 150


@pytest.mark.slow
def test_a_rollback_without_the_mirror_is_known_to_the_next_job_that_has_it(
    server: Server, tmp_path: Path
) -> None:
    server.bucket("later-rollback")
    root, url, options = tmp_path / "run", "s3://later-rollback/run", server.options
    with CheckpointManager(
        root, keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        for step in (100, 200):
            save(checkpoints, step, step)
            checkpoints._mirror.wait()
    with CheckpointManager(root, keep_last=None) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)}, step=100)
        save(checkpoints, 150, 0.5)
    assert value(root, mirror=url, storage_options=options) == (150, 0.5)
    assert (
        RunListing(open_root(root)).rollbacks == []
        and find_latest(open_root(url, options)).step.number == 150
    )


@pytest.mark.slow
def test_a_step_that_is_replaced_is_replaced_in_the_mirror(server: Server, tmp_path: Path) -> None:
    server.bucket("replaced")
    root, url, options = tmp_path / "run", "s3://replaced/run", server.options
    with CheckpointManager(root, mirror=url, storage_options=options) as checkpoints:
        save(checkpoints, 2, 2.0)
    with CheckpointManager(root, mirror=url, storage_options=options) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)})
        checkpoints.save(2, {"w": torch.full((3,), 22.0)}, overwrite=True, asynchronous=False)
    shutil.rmtree(root)
    assert value(root, mirror=url, storage_options=options) == (2, 22.0)
