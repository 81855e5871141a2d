"""What a machine does to a run: reads that fail, files that shrink or go, too few descriptors, two
runs at one place.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import CheckpointError
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import list_steps
from tests.command import run_command
from tests.faults.leftovers import leftovers
from tests.jobs import EVERY, LONG, QUICK_STRACE, STRACE

VERBS = {
    "merge": ["merge", "src", "out.safetensors"],
    "reshard": ["reshard", "src", "out", "--to", "3"],
    "copy": ["copy", "src", "out"],
    "salvage": ["salvage", "src", "out"],
    "verify": ["verify", "src"],
    "diff": ["diff", "src", "twin", "--read-all"],
    "seal": ["seal", "src"],
    "inspect": ["inspect", "src"],
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    values = {"model": {f"w{i}": torch.randn(700, 700) for i in range(4)}, "step": 1}
    for name in ("src", "twin"):
        dcp.save(values, checkpoint_id=tmp_path / name, no_dist=True)
    return tmp_path


def ckpt(
    work: Path, *words: str, before: list[str] | None = None, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    if before is None and not kwargs:
        return run_command(*words, cwd=work)
    command = [*(before or []), sys.executable, "-m", "ckpt_tools", *words]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=600, **kwargs)  # type: ignore[call-overload]


SAVING = """
import sys, torch
from ckpt_tools import CheckpointManager
with CheckpointManager(sys.argv[1], keep_last=2) as checkpoints:
    for step in range(1, 400):
        checkpoints.save(step, {"model": {f"w{i}": torch.full((20000,), float(step)) for i in range(6)}}, asynchronous=step % 2 == 0)
"""


@pytest.mark.slow
def test_who_reads_while_steps_come_and_go_reads_one_step_or_is_told(tmp_path: Path) -> None:
    """A job saves and removes steps as fast as it can; the newest is read all the while, by a load
    and by a merge.
    """
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", SAVING, tmp_path / "run"])
    read, gone = set(), 0
    while process.poll() is None:
        complete = [step for step in list_steps(open_root(tmp_path / "run")) if not step.problem]
        if not complete:
            continue
        values = {"model": {f"w{i}": torch.zeros(20000) for i in range(6)}}
        try:
            ckpt_tools.load(complete[-1].path, values)
            ckpt_tools.merge(complete[-1].path, tmp_path / "m.safetensors", overwrite=True)
        except CheckpointError:
            gone += 1  # it was let go meanwhile
            continue
        got = {
            float(v)
            for tensor in (
                *values["model"].values(),
                *load_file(tmp_path / "m.safetensors").values(),
            )
            for v in tensor.unique()
        }
        assert got == {float(complete[-1].number)}
        read |= got
    assert process.returncode == 0 and len(read) > 10
    assert [step.number for step in list_steps(open_root(tmp_path / "run"))] == [
        398,
        399,
    ] and gone < 400


def is_untouched(work: Path) -> bool:
    return (
        not list(work.glob("out*"))
        and not leftovers(work)
        and sorted(p.name for p in (work / "src").iterdir()) == [".metadata", "__0_0.distcp"]
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("verb", VERBS)
def test_a_read_that_fails_is_a_clear_error_and_the_next_run_succeeds(
    verb: str, work: Path
) -> None:
    faults = 0
    for when in (1, 2, 3):
        trace = work / "trace"
        strace = [
            *QUICK_STRACE,
            "-o",
            str(trace),
            "-P",
            str(work / "src" / "__0_0.distcp"),
            "-e",
            "trace=preadv2",
        ]
        done = ckpt(
            work, *VERBS[verb], before=[*strace, "-e", f"inject=preadv2:error=EIO:when={when}"]
        )
        if "INJECTED" not in trace.read_text():
            break
        faults += 1
        assert "Traceback" not in done.stderr, done.stderr
        if verb == "salvage" and done.returncode == 0:
            shutil.rmtree(work / "out")
            continue
        assert (
            done.returncode == 15
            and "Input/output error" in done.stderr
            and "__0_0.distcp" in done.stderr
        ), (
            done.returncode,
            done.stderr,
        )
        # a copy keeps what it has for the next
        assert not (work / "out").exists() if verb == "copy" else is_untouched(work)
    assert faults or verb == "inspect"
    # of a run that was over before the fault's turn
    for path in (work / "out", *(work / "src").glob("ckpt.manifest.*")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    (work / "out.safetensors").unlink(missing_ok=True)
    assert ckpt(work, *VERBS[verb]).returncode == 0


@contextmanager
def in_the_middle(action: Callable[[], object]) -> Iterator[Callable[[int], None]]:
    """A progress bar that does something when the first bytes are done."""
    done = []

    def advance(nbytes: int) -> None:
        if nbytes and not done:
            done.append(action())

    yield advance


@pytest.mark.parametrize("what", ["shrinks", "is removed", "its folder is removed"])
def test_what_goes_while_it_is_read_is_a_clear_error_or_a_whole_result(
    what: str, work: Path
) -> None:
    shard = work / "src" / "__0_0.distcp"

    def harm() -> None:
        if what == "shrinks":
            os.truncate(shard, 3_000_000)
        elif what == "is removed":
            shard.unlink()
        else:
            shutil.rmtree(work / "src")

    whole = work / "whole.safetensors"
    ckpt_tools.merge(work / "src", whole)

    def run() -> None:
        ckpt_tools.merge(
            work / "src",
            work / "out.safetensors",
            jobs=1,
            memory_bytes=1 << 18,
            progress=lambda *_: in_the_middle(harm),
        )

    if what == "shrinks":
        with pytest.raises(CheckpointError, match="ended early"):
            run()
        assert not list(work.glob("out*"))
    else:
        run()
        assert (work / "out.safetensors").read_bytes() == whole.read_bytes()  # it was open
    assert not leftovers(work)


def test_a_destination_that_is_removed_underneath_is_a_clear_error(work: Path) -> None:
    (work / "deep").mkdir()
    with pytest.raises(CheckpointError, match="No such file|got no file"):
        ckpt_tools.reshard(
            work / "src",
            work / "deep" / "out",
            to_ranks=2,
            progress=lambda *_: in_the_middle(
                lambda: shutil.rmtree(work / "deep", ignore_errors=True)
            ),
        )
    assert not (work / "deep" / "out").exists()
    ckpt_tools.reshard(work / "src", work / "deep" / "out", to_ranks=2)
    assert ckpt_tools.diff(work / "src", work / "deep" / "out").is_same


def test_too_few_descriptors_are_a_clear_error(work: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    done = ckpt(work, "reshard", "src", "out", "--to", "64", preexec_fn=limit)
    assert (
        done.returncode == 15
        and "Too many open files" in done.stderr
        and "ulimit -n" in done.stderr
    ), done.stderr
    assert is_untouched(work)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["merge", "reshard", "copy", "salvage"])
def test_of_two_runs_at_one_place_one_wins_and_the_other_says_so(verb: str, work: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-m", "ckpt_tools", *VERBS[verb]]
        both = [
            subprocess.Popen(
                command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        said = [process.communicate(timeout=60)[1] for process in both]
        codes = sorted(process.returncode for process in both)
        # a copy that is there already is fine
        assert codes == [0, 15] or (verb == "copy" and codes == [0, 0]), said
        out = work / VERBS[verb][2]
        assert not leftovers(work) and ckpt_tools.diff(work / "src", out).is_same
        assert ckpt_tools.verify(out).problems == []
        for path in work.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


ROUNDS = 20 if LONG else 10


@pytest.mark.slow
@pytest.mark.parametrize("is_sealed", [False, True])
def test_of_two_copies_that_start_at_the_same_instant_exactly_one_works(
    work: Path, is_sealed: bool
) -> None:
    if is_sealed:
        ckpt_tools.seal(work / "src")
    script = (
        "import os, sys, ckpt_tools\n"
        "for name in sys.argv[1:]:\n"
        "    for _ in range(2):\n"
        "        if os.fork() == 0:\n"
        "            try:\n"
        "                ckpt_tools.copy('src', name)\n"
        "            except ckpt_tools.StorageError:\n"
        "                os._exit(15)\n"
        "            os._exit(0)\n"
        "    print(*sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *(f"out{i}" for i in range(ROUNDS))],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    # the second may find a finished copy
    assert set(done.stdout.splitlines()) <= {"0 0", "0 15"}, done
    assert not leftovers(work)
    assert all(ckpt_tools.diff(work / "src", work / f"out{i}").is_same for i in range(ROUNDS))


@pytest.mark.slow
def test_modes_follow_the_umask_and_what_is_private_stays_private(work: Path) -> None:
    for mask, directory, file in (
        (0o022, 0o755, 0o644),
        (0o077, 0o700, 0o600),
        (0o002, 0o775, 0o664),
    ):
        for words in (VERBS["reshard"], VERBS["copy"], VERBS["merge"]):
            assert ckpt(work, *words, preexec_fn=lambda mask=mask: os.umask(mask)).returncode == 0
            for path in [p for top in work.glob("out*") for p in (top, *top.glob("*"))]:
                assert path.stat().st_mode & 0o777 == (directory if path.is_dir() else file), (
                    path,
                    mask,
                )
            for path in work.glob("out*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


MORE = (
    [("copy", "signal=SIGKILL"), ("seal", "signal=SIGKILL"), ("prune", "error=EIO")] if LONG else []
)


def prepare(verb: str, work: Path) -> list[str]:
    """Makes the place for one run anew; returns its words."""
    for path in work.glob("out*"):
        shutil.rmtree(path)
    for path in work.glob(".t*"):
        shutil.rmtree(path)
    for path in (work / "src").glob("ckpt.manifest.*"):
        path.unlink()
    if verb != "prune":
        return VERBS[verb]
    for step in (1, 2, 3):
        ckpt_tools.save(work / "out" / f"step-{step:08d}", {"w": torch.ones(300), "n": step})
    return ["prune", "out", "--keep-last", "1"]


def is_sound(verb: str, work: Path) -> bool:
    """Whether what is there is what was there before, or what was to be."""
    if verb == "prune":
        steps = list_steps(open_root(work / "out"))
        return steps[-1].number == 3 and all(damage(step) == "" for step in steps)
    if verb == "copy":
        return not (work / "out").exists() or ckpt_tools.diff(work / "src", work / "out").is_same
    return ckpt_tools.verify(work / "src").problems == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("verb", "fault"),
    [("copy", "error=EIO"), ("seal", "error=EIO"), ("prune", "signal=SIGKILL"), *MORE],
)
def test_a_fault_at_every_call_that_changes_the_disk(verb: str, fault: str, tmp_path: Path) -> None:
    dcp.save(
        {"model": {"w": torch.ones(300)}, "step": 1}, checkpoint_id=tmp_path / "src", no_dist=True
    )
    hits = 0
    for call in ("fsync", "renameat2", "rename", "pwrite64", "unlinkat,unlink", "mkdir", "rmdir"):
        for number in range(1, 12, EVERY):
            words, trace = prepare(verb, tmp_path), tmp_path / "trace"
            strace = [
                *(STRACE if "signal" in fault else QUICK_STRACE),
                "-o",
                str(trace),
                "-e",
                f"trace={call}",
                "-e",
                f"inject={call}:{fault}:when={number}",
            ]
            done = ckpt(tmp_path, *words, "-q", before=strace)
            if "INJECTED" not in trace.read_text() and "SIGKILL" not in trace.read_text():
                assert done.returncode == 0, (call, number, done.stderr)
                break
            hits += 1
            assert is_sound(verb, tmp_path) and "Traceback" not in done.stderr, (
                call,
                number,
                done.stderr,
            )
            again = ckpt(tmp_path, *words, "-q")
            assert (
                again.returncode == {"seal": 13, "copy": 15}.get(verb, 0) or again.returncode == 0
            ), (
                call,
                number,
                again.stderr,
            )  # it was done
            assert is_sound(verb, tmp_path) and (again.returncode == 15 or not leftovers(tmp_path))
    assert hits >= 4 // EVERY, hits
