"""A store that refuses to read says nothing about a checkpoint: no verb takes it for damage."""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager, Outages, StorageError
from tests.command import run_command
from tests.jobs import LONG
from tests.loop.outages import Impatient, later
from tests.servers.faults import refusing, watched
from tests.servers.servers import Server
from tests.states import filled

REFUSALS = {
    "forbidden": "403 AccessDenied",
    "expired": "400 ExpiredToken",
    "archived": "403 InvalidObjectState",
    "broken": "500 InternalError",
    "reset": "reset",
}
NEWEST = "run/step-00000003/"
WORDS = {
    "ls": [],
    "ls --bytes": [],
    "check": [],
    "report": ["-o", "page.html"],
    "report --png": ["plot.png", "--select", "w"],
    "latest": [],
    "latest --best": ["loss"],
    "prune": ["--keep-last", "1", "--dry-run"],
    "thin": ["--keep-full", "1", "--dry-run"],
}
VERBS = tuple(WORDS)


@dataclass
class Run:
    """A run of three steps in a bucket."""

    server: Server
    root: str

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def behind(self, url: str) -> dict[str, Any]:
        return Impatient(self.server.name, url).options


@pytest.fixture
def run(server: Server) -> Run:
    server.bucket("refused")
    root = f"s3://refused/{uuid.uuid4()}/run"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, filled(step), metrics={"loss": 1.0 / step}, asynchronous=False)
    return Run(server, root)


def words(options: dict[str, Any]) -> list[str]:
    pairs = {
        "endpoint_url": options["endpoint_url"],
        "key": options["key"],
        "secret": options["secret"],
    }
    quick = {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 10}
    found = [f"--storage-option={name}={value}" for name, value in pairs.items()]
    return [*found, f"--storage-option=config_kwargs={json.dumps(quick)}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, ".metadata") for kind in REFUSALS.values()] + [("403 AccessDenied", "ckpt")],
)
def test_a_refused_read_of_the_newest_step_resumes_no_older_one(
    run: Run, kind: str, name: str
) -> None:
    with refusing(run.endpoint, "", kind) as (url, refuser):
        options = run.behind(url)
        with CheckpointManager(
            run.root, storage_options=options, outages=Outages(retry_s=1)
        ) as checkpoints:
            refuser.wanted = NEWEST + name
            into = filled(0)
            with pytest.raises(
                StorageError, match="step-00000003 cannot be read, so it is not known which"
            ):
                checkpoints.resume(into)
            with pytest.raises(StorageError):
                checkpoints.save(3, filled(9), asynchronous=False)
            assert into["w"].tolist() == [0] * 5 and refuser.log
            refuser.wanted = ""
            assert checkpoints.resume(into) == 3 and into["w"].tolist() == [3] * 5


@pytest.mark.slow
def test_a_read_that_is_refused_for_a_while_is_waited_for(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with refusing(run.endpoint, "", REFUSALS["broken"]) as (url, refuser):
        options = run.behind(url)
        with CheckpointManager(
            run.root, storage_options=options, outages=Outages(retry_s=60)
        ) as checkpoints:
            refuser.wanted = f"{NEWEST}.metadata"
            timer = later(4, lambda: setattr(refuser, "wanted", ""))
            into = filled(0)
            assert checkpoints.resume(into) == 3 and into["w"].tolist() == [3] * 5
            timer.join()
    assert "trying again for" in caplog.text and "passed over" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "kind"),
    [(verb, "403 AccessDenied") for verb in VERBS]
    + [("ls", "500 InternalError")]
    + [
        (verb, kind)
        for verb in VERBS
        for kind in REFUSALS.values()
        if LONG and kind != "403 AccessDenied" and (verb, kind) != ("ls", "500 InternalError")
    ],
)
def test_every_verb_of_a_run_says_that_it_could_not_read(
    run: Run, verb: str, kind: str, tmp_path: Path
) -> None:
    with refusing(run.endpoint, NEWEST, kind) as (url, _):
        done = run_verb(run, verb, url, tmp_path)
    assert done.returncode == 15, done.stdout + done.stderr
    text = done.stdout + done.stderr
    assert "step-00000003" in text or "step 3" in text, text
    assert kind == "reset" or kind.split()[1] in text, text
    assert "remove it" not in text and "incomplete" not in text, text
    assert "would remove" not in text or "step-00000003 " not in text.partition("stays")[0], text
    if verb == "report":
        assert (tmp_path / "page.html").stat().st_size > 10_000, "the page has the others"


def run_verb(run: Run, verb: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    name, *option = verb.split()
    given = [*option, *WORDS[verb], *words(run.behind(url))]
    return run_command(name, run.root, *given, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_says_anything_of_a_run_of_which_no_step_can_be_read(
    run: Run, verb: str, tmp_path: Path
) -> None:
    with refusing(run.endpoint, "run/step-", REFUSALS["forbidden"]) as (url, _):
        done = run_verb(run, verb, url, tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 15 and "AccessDenied" in text, text
    assert "remove it" not in text and "was saved with" not in text, text


@pytest.mark.slow
def test_one_old_step_that_cannot_be_read_stops_neither_a_job_nor_a_prune(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with refusing(run.endpoint, "run/step-00000001/", REFUSALS["forbidden"]) as (url, _):
        options = run.behind(url)
        found = ckpt_tools.prune(run.root, 1, storage_options=options)
        assert [step.number for step in found.removed] == [2]
        assert list(found.unreadable) == [f"{run.root}/step-00000001"]
        with CheckpointManager(run.root, storage_options=options, keep_last=1) as checkpoints:
            into = filled(0)
            assert checkpoints.resume(into) == 3
            checkpoints.save(4, filled(4), asynchronous=False)
    assert "step-00000001 is not counted, since it cannot be read" in caplog.text
    left = ckpt_tools.steps(run.root, storage_options=run.server.options)
    assert [step.number for step in left if not step.problem] == [1, 3, 4], (
        "the step of the resume stays until the next retention"
    )


def test_a_disk_that_fails_is_no_damage_either(tmp_path: Path) -> None:
    """A manifest that may not be read, as root may read all: a directory in its place is damage."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, filled(step), asynchronous=False)
    step = tmp_path / "run" / "step-00000002"
    (manifest,) = [p for p in step.iterdir() if "manifest" in p.name]
    manifest.write_bytes(manifest.read_bytes()[:-40])  # damage: cut short
    with CheckpointManager(tmp_path / "run") as checkpoints:
        into = filled(0)
        assert checkpoints.resume(into) == 1


def test_a_start_asks_for_no_single_object_of_complete_steps(run: Run) -> None:
    with watched(run.endpoint) as (url, passed):
        options = run.behind(url)
        with CheckpointManager(run.root, storage_options=options, keep_last=1):
            pass
    heads = [
        request.path
        for request, _ in passed
        if request.method == "HEAD" and "step-" in request.path
    ]
    assert not heads
    lists = [
        request for request, _ in passed if request.method == "GET" and "list-type" in request.query
    ]
    assert len(lists) < 8


def test_a_step_whose_disk_is_away_is_not_forgotten(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    with CheckpointManager(run, keep_last=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, filled(step), asynchronous=False)
    (run / "step-00000003").rename(away)
    (run / "step-00000003").symlink_to(away)
    away.rename(tmp_path / "unmounted")
    with (
        CheckpointManager(run, keep_last=None) as checkpoints,
        pytest.raises(StorageError, match="nothing can be"),
    ):
        checkpoints.resume(filled(0))
    for words in (["ls"], ["latest"], ["check"], ["prune", "--keep-last", "1"]):
        done = run_command(words[0], run, *words[1:])
        text = done.stdout + done.stderr
        assert done.returncode == 15 and ("step-00000003" in text or "step 3" in text), text
    (tmp_path / "unmounted").rename(away)
    with CheckpointManager(run, keep_last=None) as checkpoints:
        assert checkpoints.resume(into := filled(0)) == 3 and into["w"].tolist() == [3] * 5


@pytest.mark.slow
def test_the_pin_of_a_step_that_cannot_be_read_is_not_denied(run: Run) -> None:
    step = f"{run.root}/step-00000001"
    assert run_command("pin", step, *words(run.server.options)).returncode == 0
    with refusing(run.endpoint, "step-00000001/.metadata", REFUSALS["forbidden"]) as (url, _):
        done = run_command("pin", "--remove", step, *words(run.behind(url)))
    assert done.returncode == 15 and "whether it is pinned" in done.stderr, done.stdout


def kinds(passed: list[Any]) -> dict[str, int]:
    """Counts the requests that a proxy has passed: listings, reads and questions."""
    found = {"LIST": 0, "GET": 0, "HEAD": 0}
    for request, _ in passed:
        is_list = "list-type" in request.query or "uploads" in request.query
        kind = "LIST" if is_list else request.method
        found[kind] = found.get(kind, 0) + 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("disk", [2, 4])
def test_a_newer_step_of_the_mirror_that_cannot_be_read_is_not_replaced(
    server: Server, tmp_path: Path, disk: int
) -> None:
    """A disk with an older step was resumed from, and the next save took the mirror's place."""
    server.bucket("refused")
    mirror = f"s3://refused/{uuid.uuid4()}/run"
    settings: dict[str, Any] = {"mirror": mirror, "storage_options": server.options}
    with CheckpointManager(tmp_path / "run", keep_last=None, **settings) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, filled(step), asynchronous=False)
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    if disk == 4:  # the disk has the newest one: the mirror's does not matter
        with CheckpointManager(tmp_path / "other") as checkpoints:
            checkpoints.save(4, filled(4), asynchronous=False)
        shutil.copytree(tmp_path / "other/step-00000004", tmp_path / "run/step-00000004")
    with refusing(server.endpoint, "run/step-00000003/", "403 AccessDenied") as (url, refuser):
        settings["storage_options"] = Impatient(server.name, url).options
        checkpoints = CheckpointManager(tmp_path / "run", **settings, outages=Outages(retry_s=1))
        into = filled(0)
        if disk == 2:
            with pytest.raises(StorageError, match="step-00000003 cannot be read"):
                checkpoints.resume(into)
            with pytest.raises(StorageError, match="which steps a new branch supersedes"):
                checkpoints.resume(into, step=2)
        else:
            assert checkpoints.resume(into) == 4 and into["w"].tolist() == [4] * 5
        refuser.wanted = ""
        assert checkpoints.resume(into) == max(3, disk)
        with suppress(StorageError):  # what could not be mirrored at the start
            checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "more", "extra"),
    [
        ("ls", (), 0),
        ("check", (), 0),
        ("prune", ("--keep-last", "2", "--dry-run"), 3),  # data and index of the newest; the lease
        ("thin", ("--keep-full", "2", "--dry-run"), 4),  # data of two steps; the lease
        ("ls", ("--bytes",), 0),
        ("report", ("--json",), 0),
    ],
)
def test_each_index_and_manifest_is_read_once(
    run: Run, verb: str, more: tuple[str, ...], extra: int
) -> None:
    model = torch.nn.Linear(2, 2)
    full = {"model": model, "optimizer": torch.optim.Adagrad(model.parameters())}
    with CheckpointManager(run.root, storage_options=run.server.options) as checkpoints:
        for step in (1, 2, 3):  # `thin` has something to remove
            torch.nn.init.constant_(model.weight, step)
            torch.nn.init.constant_(model.bias, step)
            checkpoints.save(step, full, overwrite=True, asynchronous=False)
    with watched(run.endpoint) as (url, passed):
        done = run_command(verb, run.root, *more, *words(run.behind(url)))
    assert done.returncode == 0, done.stderr
    found = kinds(passed)
    assert found["GET"] <= 2 * 3 + extra and found["LIST"] <= 4 and found["HEAD"] <= 1, found


@pytest.mark.slow
def test_a_job_looks_once_at_the_steps_of_its_run(run: Run) -> None:
    """Each save asks retention, which has seen all steps but the new one."""
    with watched(run.endpoint) as (url, passed):
        options = run.behind(url)
        with CheckpointManager(run.root, storage_options=options, keep_last=2) as checkpoints:
            checkpoints.resume(filled(0))
            checkpoints.save(4, filled(4), asynchronous=False)
            checkpoints.wait()
        paths = [r.path for r, _ in passed if r.method == "GET" and "step-00000002/" in r.path]
    reads = [path for path in paths if path.endswith((".metadata", ".json"))]
    assert len(reads) == len(set(reads)) <= 2, reads


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_whose_disk_is_away_is_not_missing(
    name: str, is_there: bool, tmp_path: Path
) -> None:
    """The file is a link to a volume, which is not mounted, or which no reader follows."""
    root = tmp_path / "run"
    with CheckpointManager(root, keep_last=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, filled(step), asynchronous=False)
    (tmp_path / "volume").mkdir()
    away = tmp_path / "volume" / "x"
    file = root / "step-00000002" / name
    file.rename(away if is_there else tmp_path / "y")
    file.symlink_to(away)
    for words_ in (("ls",), ("latest",), ("check",), ("prune", "--keep-last", "1")):
        done = run_command(words_[0], root, *words_[1:])
        text = done.stdout + done.stderr
        assert done.returncode == 15 and "link" in text and "missing" not in text, text
    with CheckpointManager(root, outages=Outages(retry_s=0.1)) as checkpoints:
        with pytest.raises(StorageError, match="step-00000002 cannot be read"):
            checkpoints.resume(filled(0))
        file.unlink()
        (away if is_there else tmp_path / "y").rename(file)
        into = filled(0)
        assert checkpoints.resume(into) == 2 and into["w"].tolist() == [2] * 5


def test_a_file_in_the_place_of_a_coming_step_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(4, filled(4), asynchronous=False)
    for name in ("step-00000003", "step-00000007", "epoch7", "checkpoint-9"):
        (tmp_path / name).touch()
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(filled(0)) == 4
    assert "saves of these steps will fail: checkpoint-9, step-00000007 (" in caplog.text
