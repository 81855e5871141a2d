"""Attacks on what is removed: a step is judged again at the last instant, and a name proves
nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager, Retention, StorageError
from ckpt_tools.loop.steps.retention import pin_step, remove_step
from ckpt_tools.publish.disk.attempt_mark import mark_name
from ckpt_tools.publish.disk.staging import trash_path
from ckpt_tools.publish.step_names import step_name
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step
from ckpt_tools.run.steps import list_steps
from tests.attacks.hostile import GIB, Run, limited
from tests.servers.servers import Server
from tests.states import one_step

MINE = b"years of work"
NO_OVERRIDE = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50,), value), "step": int(value)}


def saved(root: Path | str, *steps: int, **options: Any) -> None:
    with CheckpointManager(root, keep_last=None, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), asynchronous=False)
            if checkpoints._mirror is not None:
                checkpoints._mirror.wait()  # else a newer step takes its place


def step_of(root: Path | str, number: int, options: dict[str, Any] | None = None) -> Step:
    return next(s for s in list_steps(open_root(root, options)) if s.number == number)


# ---- steps that change between the judgement and the removal -------------------------------------


def test_a_step_that_was_saved_anew_stays(tmp_path: Path) -> None:
    """A job goes back to step 100 while a prune reads step 300, and then removes step 200."""
    saved(tmp_path, 100, 200, 300)
    judged = step_of(tmp_path, 200)
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.resume(state(0), step=100) == 100
        checkpoints.save(200, state(777), asynchronous=False)
    with pytest.raises(StorageError, match="another save has taken its place"):
        remove_step(open_root(tmp_path), judged)
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        got = state(0)
        assert checkpoints.resume(got) == 200 and got["step"] == 777
    assert not list(tmp_path.glob(".trash.*"))


@pytest.mark.slow
def test_a_step_in_a_bucket_that_was_saved_anew_stays(server: Server) -> None:
    server.bucket("anew")
    options = server.options
    saved("s3://anew/run", 100, 200, 300, storage_options=options)
    judged = step_of("s3://anew/run", 200, options)
    with CheckpointManager("s3://anew/run", keep_last=None, storage_options=options) as again:
        assert again.resume(state(0), step=100) == 100
        again.save(200, state(777), asynchronous=False)
    with pytest.raises(StorageError, match="another save has taken its place"):
        remove_step(open_root("s3://anew/run", options), judged)
    assert ckpt_tools.verify("s3://anew/run/step-00000200", storage_options=options).problems == []


def a_file(step: Path) -> None:
    (step / "eval.json").write_bytes(MINE)


def a_link(step: Path) -> None:
    (step.parent / "best").symlink_to(step.name)


def a_pin(step: Path) -> None:
    pin_step(step)


@pytest.mark.parametrize("change", [a_file, a_link, a_pin])
def test_what_comes_after_the_judgement_keeps_a_step(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    saved(tmp_path, 1, 2)
    judged, step = step_of(tmp_path, 1), tmp_path / step_name(1)
    change(step)
    before = sorted(p.name for p in step.iterdir())
    with pytest.raises(StorageError, match="stays"):
        remove_step(open_root(tmp_path), judged)
    assert sorted(p.name for p in step.iterdir()) == before
    assert ckpt_tools.verify(step).problems == [] and not list(tmp_path.glob(".trash.*"))


def nothing(step: Path) -> None:
    del step


def saved_anew(step: Path) -> None:
    shutil.rmtree(step)
    with CheckpointManager(step.parent, keep_last=None) as checkpoints:
        checkpoints.branch_from(None)
        checkpoints.save(1, state(7), asynchronous=False)


@pytest.mark.parametrize(
    ("change", "is_back"),
    [(nothing, False), (saved_anew, True), (a_file, True), (a_pin, True), (a_link, True)],
)
def test_a_step_comes_back_if_its_judge_was_killed(
    change: Callable[[Path], None], is_back: bool, tmp_path: Path, ckpt: Run
) -> None:
    """The process died between the rename and the second look."""
    saved(tmp_path, 1)
    judged, step = step_of(tmp_path, 1), tmp_path / step_name(1)
    change(step)
    step.rename(trash_path(step, judged.attempt))
    done = ckpt("prune", tmp_path, "--keep-last", 1)
    assert step.exists() is is_back and not list(tmp_path.glob(".trash.*")), done
    assert (f"restored .trash.{step.name}" in done.stderr) is is_back
    if is_back:
        assert ckpt_tools.verify(step).problems == []


def test_a_step_that_is_gone_is_no_error(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    judged = step_of(tmp_path, 1)
    shutil.rmtree(tmp_path / step_name(1))
    remove_step(open_root(tmp_path), judged)


@needs_root
def test_a_folder_that_cannot_be_listed_keeps_a_result(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved(run, 1, 2)
    ckpt_tools.reshard(run / step_name(2), out, to_ranks=1)
    for folder in (run / step_name(1) / "eval", out / "eval"):
        folder.mkdir()
        (folder / "results.json").write_bytes(MINE)
        folder.chmod(0)
    words = [*NO_OVERRIDE, sys.executable, "-m", "ckpt_tools"]
    pruned = subprocess.run([*words, "prune", run, "--keep-last", "1"], capture_output=True)
    command = [*words, "reshard", run / step_name(2), out, "--to", "2", "--overwrite"]
    replaced = subprocess.run(command, capture_output=True)
    for folder in (run / step_name(1) / "eval", out / "eval"):
        folder.chmod(0o755)
        assert (folder / "results.json").read_bytes() == MINE
    assert pruned.returncode == 15 and replaced.returncode == 15, (pruned, replaced)
    assert not list(tmp_path.rglob(".t*"))


# ---- directories with the names of leftovers -----------------------------------------------------


def planted(root: Path) -> dict[Path, Path]:
    """Makes directories that look like leftovers; returns the user's file in each."""
    private, trash, copied = (
        root / ".tmp.notes.deadbeef",
        root / ".trash.x.deadbeef",
        root / ".tmp.a.0badcafe",
    )
    private.mkdir(mode=0o700)
    shutil.copytree(root / step_name(1), trash)
    shutil.copytree(root / step_name(1), copied)
    (copied / mark_name("deadbeef")).touch()  # the mark of another attempt
    files = {path: path / "thesis.tex" for path in (private, trash, copied)}
    for file in files.values():
        file.write_bytes(MINE)
    return files


def test_a_directory_with_the_name_of_a_leftover_stays(tmp_path: Path, ckpt: Run) -> None:
    saved(tmp_path, 1, 2, 3)
    files = planted(tmp_path)
    assert ckpt("prune", tmp_path, "--keep-last", 3).stdout == "nothing to remove\n"
    saved(tmp_path, 4)
    ckpt_tools.thin(tmp_path, keep_full=1)
    assert all(file.read_bytes() == MINE for file in files.values())


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_directory_with_the_name_of_the_next_attempt_is_not_emptied(
    is_sealed: bool, tmp_path: Path
) -> None:
    """The id of a copy is that of its source, so it can be guessed."""
    saved(tmp_path / "run", 1)
    source = tmp_path / "run" / step_name(1)
    if not is_sealed:
        next(source.glob("ckpt.manifest.*")).unlink()
    ckpt_tools.copy(source, tmp_path / "first")
    attempt = next((tmp_path / "first").glob("ckpt.*"), None) if is_sealed else None
    names = [f".tmp.out.{attempt.name.split('.')[2]}"] if attempt else staged_names(source)
    for name in names:
        mine = tmp_path / name
        mine.mkdir(mode=0o700)
        (mine / "thesis.tex").write_bytes(MINE)
    with pytest.raises(StorageError, match="has the name of a staging directory"):
        ckpt_tools.copy(source, tmp_path / "out")
    assert all((tmp_path / name / "thesis.tex").read_bytes() == MINE for name in names)
    assert not (tmp_path / "out").exists()


def staged_names(source: Path) -> list[str]:
    """Returns the name of the staging directory that a copy leaves if it ends before its commit."""
    work = source.parent / "guess"
    work.mkdir()
    code = (
        "import sys, ckpt_tools, ckpt_tools.publish.disk.commit as local, os\n"
        "local.publish_directory = lambda staged, *_: os._exit(9)\n"
        "ckpt_tools.copy(sys.argv[1], sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, source, work / "out"], check=False)
    return [path.name for path in work.glob(".tmp.out.*")]


# ---- mirrors of two runs -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_does_not_use_the_mirror_of_a_newer_one(server: Server, tmp_path: Path) -> None:
    server.bucket("mirrors")
    url, options = "s3://mirrors/run", server.options
    saved(tmp_path / "old", 500, mirror=url, storage_options=options)
    job = CheckpointManager(tmp_path / "new", keep_last=3, mirror=url, storage_options=options)
    for step in (10, 20):
        job.save(step, state(step), asynchronous=False)
    with pytest.raises(StorageError, match="could not be mirrored") as told:
        job.close()
    assert "a newer step, 500, which this job has not resumed from" in str(told.value)
    assert [s.number for s in ckpt_tools.steps(url, storage_options=options)] == [500]
    assert [s.number for s in ckpt_tools.steps(tmp_path / "new")] == [10, 20]


def test_a_copy_that_another_job_removed_is_missed_at_the_end(
    server: Server, tmp_path: Path
) -> None:
    server.bucket("removed-copy")
    url, options = "s3://removed-copy/run", server.options
    job = CheckpointManager(tmp_path / "run", mirror=url, storage_options=options)
    job.save(10, state(10), asynchronous=False)
    job._mirror.wait()  # type: ignore[union-attr]
    remove_step(open_root(url, options), step_of(url, 10, options))
    with pytest.raises(StorageError, match="not in the mirror any more"):
        job.close()


# ---- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A run with two steps on a disk without room."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        saved(tmp_path / "run", 1, 2)
        with (tmp_path / "filler").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
        yield tmp_path / "run"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_leaves_no_lock_pin_or_note(full: Path, ckpt: Run) -> None:
    before = sorted(p.name for p in full.rglob("*"))
    with pytest.raises(StorageError, match="No space left"):
        CheckpointManager(full)
    thinned = ckpt("thin", full, "--keep-full", 1)
    assert thinned.returncode == 15 and "cannot write the report" not in thinned.stderr
    assert ckpt("pin", full / step_name(1)).returncode == 15
    assert sorted(p.name for p in full.rglob("*") if p.name != ".ckpt.lock") == before
    (full.parent / "filler").unlink()
    with CheckpointManager(full) as checkpoints:
        assert checkpoints.resume(state(0)) == 2


# ---- stores that answer without end --------------------------------------------------------------


class Endless(BaseHTTPRequestHandler):
    """Answers every GET of an object with bytes for ever, and every listing with the same page."""

    KEY = "run/step-00000001/.metadata"

    def log_message(self, *args: object) -> None:
        del args

    def do_HEAD(self) -> None:
        self._head(200, 1 << 40)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            number = self.server.count = getattr(self.server, "count", 0) + 1  # type: ignore[attr-defined]
            entry = f"<Contents><Key>{self.KEY}</Key><Size>9</Size><ETag>&quot;a&quot;</ETag>"
            entry += "<LastModified>2020-01-01T00:00:00.000Z</LastModified></Contents>"
            page = (
                "<?xml version='1.0'?><ListBucketResult><IsTruncated>true</IsTruncated>"
                f"<NextContinuationToken>t{number}</NextContinuationToken>"
                f"{entry if 'pages' not in self.path else ''}</ListBucketResult>"
            )
            self._head(200, len(page))
            self.wfile.write(page.encode())
            return
        self._head(206, 1 << 40)
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            pass

    def _head(self, status: int, nbytes: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("ETag", '"' + "a" * 32 + '"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.end_headers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "path", "message"),
    [
        ("inspect", "run/x.safetensors", "longer than what was asked for"),
        ("ls", "run", "a listing does not end"),
        ("ls", "pages", "a listing does not end"),
    ],
)
def test_an_answer_without_end_is_refused(verb: str, path: str, message: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        code = (
            "import sys; from ckpt_tools.cli.app import main;"
            f"sys.argv = ['ckpt', {verb!r}, 's3://b/{path}'] +"
            " ['--storage-option', 'key=k', '--storage-option', 'secret=s'] +"
            f" ['--storage-option', 'endpoint_url={endpoint}']; main()"
        )
        done = limited(code, seconds=60, memory=2 * GIB)
        assert done.returncode == 15 and message in done.stderr, (done.returncode, done.stderr)
        assert "Traceback" not in done.stderr
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_rollback_after_thinning_reaches_the_mirror(server: Server, tmp_path: Path) -> None:
    """Disk and mirror thin a step separately, so it has two ids."""
    server.bucket("thinned")
    url, options = "s3://thinned/run", server.options

    def job() -> CheckpointManager:
        retention = Retention(last=10, full=2)
        return CheckpointManager(
            tmp_path / "run", retention=retention, mirror=url, storage_options=options
        )

    def trained(value: float) -> dict[str, Any]:
        model = torch.nn.Linear(3, 3)
        optimizer = one_step(model, torch.ones(3))
        return {"model": model, "optimizer": optimizer, "value": value}

    for steps, back in (((1, 2), None), ((3, 4, 5, 6, 7), 2), ((3,), 2)):
        with job() as checkpoints:
            if back:
                assert checkpoints.resume(trained(0.0), step=back) == back
            for step in steps:
                checkpoints.save(step, trained(float(step)), asynchronous=False)
                checkpoints._mirror.wait()  # type: ignore[union-attr]
        if steps == (1, 2):
            pin_step(tmp_path / "run" / step_name(2))
    shutil.rmtree(tmp_path / "run")
    with job() as checkpoints:
        assert checkpoints.resume(trained(0.0)) == 3


def test_a_step_of_this_run_is_replaced_in_the_mirror(server: Server, tmp_path: Path) -> None:
    server.bucket("replaced-own")
    url, options = "s3://replaced-own/run", server.options
    saved(tmp_path / "run", 1, 2, 3, mirror=url, storage_options=options)
    with CheckpointManager(
        tmp_path / "run", keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        assert checkpoints.resume(state(0)) == 3
        checkpoints.save(2, state(7), asynchronous=False, overwrite=True)
    got = state(0)
    ckpt_tools.load(f"{url}/{step_name(2)}", got, storage_options=options)
    assert got["step"] == 7


def test_a_damaged_copy_in_the_mirror_gives_way(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("damaged-copy")
    url, options = "s3://damaged-copy/run", server.options
    saved(tmp_path / "run", 1, 2, mirror=url, storage_options=options)
    (data,) = fs.glob(f"damaged-copy/run/{step_name(2)}/*.distcp")
    content = bytearray(fs.cat_file(data))
    content[600:700] = bytes(100)
    fs.pipe_file(data, bytes(content))
    shutil.rmtree(tmp_path / "run")
    with CheckpointManager(
        tmp_path / "run", keep_last=None, mirror=url, storage_options=options
    ) as checkpoints:
        assert checkpoints.resume(state(0)) == 1
        checkpoints.save(2, state(7), asynchronous=False)
    got = state(0)
    ckpt_tools.load(f"{url}/{step_name(2)}", got, storage_options=options)
    assert got["step"] == 7


def test_a_mark_that_a_power_cut_left_in_a_result_is_ignored(tmp_path: Path, ckpt: Run) -> None:
    saved(tmp_path / "run", 1, 2)
    step = tmp_path / "run" / step_name(1)
    (step / mark_name("deadbeef")).touch()
    done = ckpt("verify", step)
    assert done.returncode == 0 and "deadbeef" not in done.stdout + done.stderr
    ckpt_tools.load(step, state(0))
    ckpt_tools.copy(step, tmp_path / "copied")
    assert not list((tmp_path / "copied").glob("ckpt.attempt.*"))
    ckpt_tools.reshard(tmp_path / "run" / step_name(2), step, to_ranks=2, overwrite=True)
    assert not list(step.glob("ckpt.attempt.*"))
    (step / mark_name("deadbeef")).touch()
    saved(tmp_path / "other", 1, 2)
    (tmp_path / "other" / step_name(1) / mark_name("deadbeef")).touch()
    assert [s.number for s in ckpt_tools.prune(tmp_path / "other", 1).removed] == [1]
