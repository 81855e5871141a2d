"""Real signals, real limits, real full disks: afterwards the destination is absent, old or
complete, and a re-run succeeds.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpt_tools.publish.disk import staging as local
from tests.faults.leftovers import leftovers
from tests.jobs import EVERY, LONG, QUICK_STRACE, STRACE

VERBS = {
    "merge": ["merge", "src", "out.safetensors"],
    "reshard": ["reshard", "src", "out", "--to", "3"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    dcp.save(
        {"model": {f"w{i}": torch.randn(1024, 1024) for i in range(24)}, "step": 1},
        checkpoint_id=root / "src",
        no_dist=True,
    )
    return root / "src"


@pytest.fixture
def work(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "src").symlink_to(source)
    return tmp_path


def start(work: Path, *args: str, **kwargs: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckpt_tools", *args]
    return subprocess.Popen(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )  # type: ignore[call-overload]


def is_complete(work: Path, source: Path) -> bool:
    """Whether what is at the destination is whole, to stock readers; absence is not."""
    if (work / "out.safetensors").exists():
        got = load_file(work / "out.safetensors")
    elif (work / "out").exists():
        got = {f"w{i}": torch.empty(1024, 1024) for i in range(24)}
        dcp.load({"model": got}, checkpoint_id=work / "out", no_dist=True)
    else:
        return False
    torch.manual_seed(0)
    assert all(torch.equal(got[f"w{i}"], torch.randn(1024, 1024)) for i in range(24))
    return True


def staged(work: Path, process: subprocess.Popen[str]) -> bool:
    """Waits until a run has begun to write; False if it was done before that was seen."""
    while process.poll() is None:
        if leftovers(work):
            return True
        time.sleep(0.001)
    return False


def remove_results(folder: Path) -> None:
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def stopped_early(
    work: Path, folder: Path, args: list[str], is_early: Callable[[], bool]
) -> subprocess.Popen[str]:
    """Starts a command that writes into a folder, and stops it while it is early enough.

    A busy machine may show this too late; then it is done again.
    """
    for _ in range(40):
        process = start(work, *args)
        while staged(folder, process):
            process.send_signal(signal.SIGSTOP)
            while process.poll() is None and "(stopped)" not in status_of(process.pid):
                time.sleep(0.001)
            if is_early():
                return process
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
        remove_results(folder)
    pytest.fail("the command was never seen early enough in 40 attempts")


def status_of(pid: int) -> str:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/status").read_text()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing(
    verb: str, number: signal.Signals, code: int, work: Path, source: Path
) -> None:
    hits = 0
    for _ in range(40):
        if hits == 3:
            break
        process = start(work, *VERBS[verb])
        if staged(work, process):
            process.send_signal(signal.SIGSTOP)  # it cannot end before the signal comes
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
        assert process.returncode in (0, code)
        assert leftovers(work) == []
        if process.returncode == code:
            hits += 1
            assert not is_complete(work, source)
            assert sorted(p.name for p in work.iterdir()) == ["src"]
        remove_results(work)
    assert hits == 3


STUCK = """
import os, signal, threading
from ckpt_tools.cli import process

signal.signal(signal.SIGINT, process.interrupted)
signal.signal(signal.SIGTERM, process.terminated)
process._PATIENCE_S = 1
lock = threading.Lock()
lock.acquire()
try:
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
    lock.acquire()
finally:
    threading.Thread(target=lock.acquire).start()
    lock.acquire()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lock_that_a_signal_has_left_held_does_not_keep_the_process(number: int) -> None:
    environment = os.environ | {"NUMBER": str(int(number))}
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 128 + number and "did not end in time" in done.stderr


AFTER = """
import os, signal, sys
from ckpt_tools.cli.app import main

def trace(frame, event, _):
    if frame.f_code.co_name == "_confirm":  # it makes the new name durable, after the commit
        return trace
    if frame.f_code.co_name == "sync_directory" and frame.f_back.f_code.co_name == "_confirm":
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.settrace(trace)
main()
"""


@pytest.mark.parametrize("verb", VERBS)
def test_a_signal_after_the_commit_says_that_the_result_is_there(
    verb: str, work: Path, source: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER, *VERBS[verb]], cwd=work, capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert "interrupted; the result is complete at the destination" in done.stderr
    assert is_complete(work, source)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_second_signal_in_the_middle_of_the_first_ones_work(
    verb: str, work: Path, source: Path
) -> None:
    for pause in (0, 0.0005, 0.002, 0.01):
        process = start(work, *VERBS[verb])
        staged(work, process)
        process.send_signal(signal.SIGTERM)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        if (work / "out").exists() or (work / "out.safetensors").exists():
            assert is_complete(work, source)
        assert (
            subprocess.run(
                [sys.executable, "-m", "ckpt_tools", *VERBS[verb], "--overwrite"],
                cwd=work,
                capture_output=True,
            ).returncode
            == 0
        )
        assert is_complete(work, source) and leftovers(work) == []
        remove_results(work)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_kill_9_at_any_moment_leaves_absent_or_complete_and_a_rerun_cleans_up(
    verb: str, work: Path, source: Path
) -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(8):
        process = start(work, *VERBS[verb])
        staged(work, process)
        time.sleep(rng.uniform(0, 0.12))
        process.kill()
        process.communicate(timeout=60)
        seen.add(is_complete(work, source))
        remove_results(work)
    assert False in seen
    assert (
        subprocess.run(
            [sys.executable, "-m", "ckpt_tools", *VERBS[verb]], cwd=work, capture_output=True
        ).returncode
        == 0
    )
    assert is_complete(work, source)
    assert leftovers(work) == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_kill_9_while_overwriting_leaves_the_old_or_the_new_whole(
    verb: str, work: Path, source: Path
) -> None:
    rng = random.Random(1)
    subprocess.run(
        [sys.executable, "-m", "ckpt_tools", *VERBS[verb]],
        cwd=work,
        check=True,
        capture_output=True,
    )
    for _ in range(6):
        process = start(work, *VERBS[verb], "--overwrite")
        staged(work, process)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        process.communicate(timeout=60)
        assert is_complete(work, source)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_run_leaves_the_staging_of_a_live_one_alone(verb: str, work: Path, source: Path) -> None:
    # it has locked what it has made
    first = stopped_early(work, work, VERBS[verb], lambda: bool(list(work.glob(".tmp.*/*"))))
    try:
        alive = leftovers(work)
        second = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", *VERBS[verb]],
            cwd=work,
            capture_output=True,
            text=True,
        )
        assert second.returncode == 0, second.stderr
        assert leftovers(work) == alive
    finally:
        first.send_signal(signal.SIGCONT)
    error = first.communicate(timeout=60)[1]
    assert first.returncode == 15
    assert "appeared while this was at work" in error
    assert is_complete(work, source)
    assert leftovers(work) == []


def test_a_staging_directory_that_is_taken_for_a_dead_ones_is_made_again(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may come between the making of a directory and its locking."""
    opened = os.open
    removed = []

    def late(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path).name.startswith(".tmp.out") and not removed:
            removed.append(path)
            assert [*local.remove_dead(work)] == [Path(path)]
        return opened(path, *args, **kwargs)

    with local.staging(work / "out", "a" * 32) as place:
        assert place.path.is_dir()
    monkeypatch.setattr(local.os, "open", late)
    with local.staging(work / "out", "b" * 32) as place:
        assert removed == [place.path] and place.path.is_dir() and not local.remove_dead(work)
    assert leftovers(work) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_size_limit_in_the_middle_is_a_clear_error(verb: str, work: Path) -> None:
    process = start(
        work,
        *VERBS[verb],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20)),
    )
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 15
    assert "File too large" in error
    assert sorted(p.name for p in work.iterdir()) == ["src"]


@pytest.fixture
def small_disk(work: Path) -> Iterator[Callable[[int], Path]]:
    """A tmpfs of so many MiB at `disk`, where this user may mount one."""
    (work / "disk").mkdir()

    def mount(mib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(work / "disk")]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        return work / "disk"

    yield mount
    subprocess.run(["umount", str(work / "disk")], capture_output=True)


@pytest.mark.parametrize("verb", VERBS)
def test_too_small_a_disk_is_refused_before_anything_is_written(
    verb: str, work: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(16)
    args = [a.replace("out", "disk/out") for a in VERBS[verb]]
    result = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", *args], cwd=work, capture_output=True, text=True
    )
    assert result.returncode == 15
    assert "no room: expected" in result.stderr
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_fills_in_the_middle_is_a_clear_error_and_the_old_result_stays(
    verb: str, work: Path, source: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(130)
    args = [a.replace("out", "disk/out") for a in VERBS[verb]]
    process = stopped_early(
        work, disk, args, lambda: 4 << 20 < shutil.disk_usage(disk).used < 64 << 20
    )
    fill(disk / "filler")
    process.send_signal(signal.SIGCONT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 15
    assert "No space left on device" in error
    assert "hint: free some room" in error
    assert [p.name for p in disk.iterdir()] == ["filler"]


def fill(path: Path) -> None:
    """Takes all the room that is left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def test_a_destination_that_cannot_be_written_to_is_refused(work: Path, source: Path) -> None:
    if os.geteuid() == 0:
        (work / "ro").mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(work / "ro")], capture_output=True
        ).returncode:
            pytest.skip("root may write anywhere, and mounting is not allowed")
        try:
            result = subprocess.run(
                [sys.executable, "-m", "ckpt_tools", "merge", "src", "ro/m.safetensors"],
                cwd=work,
                capture_output=True,
                text=True,
            )
        finally:
            subprocess.run(["umount", str(work / "ro")], check=True)
    else:
        (work / "ro").mkdir(mode=0o500)
        result = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", "merge", "src", "ro/m.safetensors"],
            cwd=work,
            capture_output=True,
            text=True,
        )
    assert result.returncode == 15
    assert "cannot be written to" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("verb", "fault"),
    [
        ("merge", "error=EIO"),
        ("reshard", "signal=SIGKILL"),
        *((("merge", "signal=SIGKILL"), ("reshard", "error=EIO")) if LONG else ()),
    ],
)
def test_a_fault_at_every_call_that_changes_the_disk(verb: str, fault: str, tmp_path: Path) -> None:
    """Of each system call: faults the first, then the second (or third), …, until a run goes
    through untouched.
    """
    dcp.save(
        {"model": {"w": torch.ones(300)}, "step": 1}, checkpoint_id=tmp_path / "src", no_dist=True
    )
    hits = {
        call: fault_every(call, fault, verb, tmp_path)
        for call in ("fsync", "renameat2", "rename", "fchmod", "pwrite64", "ftruncate")
    }
    few = {"fsync": 4, "pwrite64": 2, "ftruncate": 1, "renameat2": 1}
    assert all(hits[call] >= count for call, count in few.items()), hits
    for path in tmp_path.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (
        subprocess.run(
            [sys.executable, "-m", "ckpt_tools", *VERBS[verb]], cwd=tmp_path, capture_output=True
        ).returncode
        == 0
    )
    assert leftovers(tmp_path) == []


SAVE = """
import sys, torch
from ckpt_tools import CheckpointManager
with CheckpointManager(sys.argv[1], keep_last=1) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.ones(300) * step}, asynchronous=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK"])
def test_a_file_system_without_locks(error: str, tmp_path: Path) -> None:
    """As Lustre is often mounted, and NFS without its lock daemon: all works, and what cannot be
    promised is said.
    """
    dcp.save(
        {"model": {"w": torch.ones(300)}, "step": 1}, checkpoint_id=tmp_path / "src", no_dist=True
    )
    strace = [
        *QUICK_STRACE,
        "-o",
        str(tmp_path / "trace"),
        "-e",
        "trace=flock",
        "-e",
        f"inject=flock:error={error}",
        sys.executable,
    ]

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*strace, *map(str, words)], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0 and "INJECTED" in (tmp_path / "trace").read_text(), done.stderr
        return done

    (tmp_path / ".tmp.out.abcdef12").mkdir()  # another's, alive or dead: nobody knows
    for _ in range(2):
        run("-m", "ckpt_tools", *VERBS["reshard"], "--overwrite")
        run("-m", "ckpt_tools", *VERBS["merge"], "--overwrite")
    assert (
        whole(tmp_path / "out")
        and whole(tmp_path / "out.safetensors")
        and leftovers(tmp_path) == [".tmp.out.abcdef12"]
    )
    told = run("-c", SAVE, tmp_path / "run").stderr
    assert "no file locks here; a second job would not be refused" in told
    assert [p.name for p in (tmp_path / "run").glob("step-*")] == ["step-00000002"]


NO_FLAGS = ["-e", "inject=renameat2:error=EINVAL"]  # as NFS answers


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("fault", ["signal=SIGKILL", "error=EIO"])
@pytest.mark.parametrize(("verb", "call"), [("reshard", "rename"), ("merge", "linkat")])
def test_where_names_cannot_be_exchanged_in_one_step(
    verb: str, call: str, fault: str, tmp_path: Path
) -> None:
    """An old result that is to be replaced is there, or stands aside and is brought back; a new one
    is never in part.
    """
    dcp.save(
        {"model": {"w": torch.ones(300)}, "step": 1}, checkpoint_id=tmp_path / "src", no_dist=True
    )
    words, out, trace = (
        [sys.executable, "-m", "ckpt_tools", *VERBS[verb], "-q"],
        tmp_path / VERBS[verb][2],
        tmp_path / "trace",
    )
    traced = STRACE if "signal" in fault else QUICK_STRACE
    strace = [*traced, "-o", str(trace), "-e", f"trace=renameat2,{call}", *NO_FLAGS]
    is_over, aside = call == "rename", 0

    def run(command: list[str], *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)

    for number in range(1, 10):
        if is_over:
            assert run([*words, "--overwrite"]).returncode == 0
        else:
            out.unlink(missing_ok=True)
        before = out.stat().st_ino if is_over else 0
        done = run(
            [*strace, "-e", f"inject={call}:{fault}:when={number}", *words],
            *(["--overwrite"] if is_over else []),
        )
        if done.returncode == 0:
            break
        assert "Traceback" not in done.stderr
        if is_over and not out.exists():
            # what was to be, and what was
            assert "signal" in fault and len(leftovers(tmp_path)) == 2
            aside += 1
            told = run([sys.executable, "-m", "ckpt_tools", "inspect", str(out)])
            assert told.returncode and "a killed --overwrite left it as" in told.stderr
            refused = run(words)
            assert (
                refused.returncode == 15
                and "the destination exists" in refused.stderr
                and out.stat().st_ino == before
            )
        assert whole(out) if is_over else not out.exists() or whole(out)
        assert leftovers(tmp_path) == [] or "signal" in fault
    assert (
        "EINVAL" in trace.read_text()
        and number > 1
        and whole(out)
        and (aside == 1 or (verb, fault) != ("reshard", "signal=SIGKILL"))
    )
    assert run(words, "--overwrite").returncode == 0 and leftovers(tmp_path) == []


def fault_every(call: str, fault: str, verb: str, work: Path) -> int:
    """Returns up to which call a fault was injected; after each, the destination was absent or
    whole.
    """
    out = work / VERBS[verb][2]
    for number in range(1, 30, EVERY):
        remove_results(work)
        trace = work / "trace"
        command = [
            *(STRACE if "signal" in fault else QUICK_STRACE),
            "-o",
            str(trace),
            "-e",
            f"trace={call}",
            "-e",
            f"inject={call}:{fault}:when={number}",
        ]
        result = subprocess.run(
            [*command, sys.executable, "-m", "ckpt_tools", *VERBS[verb], "-q"],
            cwd=work,
            capture_output=True,
            text=True,
        )
        if "INJECTED" not in trace.read_text() and "SIGKILL" not in trace.read_text():
            assert result.returncode == 0, (number, result.stderr, sorted(work.iterdir()))
            return number - 1
        if "signal" not in fault:
            assert "Traceback" not in result.stderr
            assert leftovers(work) == []
        if result.returncode == 0 or out.exists():
            assert whole(out)
        elif "signal" not in fault:
            assert not list(work.glob("out*"))
    raise AssertionError(f"{call} never ended")


def whole(out: Path) -> bool:
    if out.is_file():
        return bool((load_file(out)["w"] == 1).all())
    got = {"w": torch.zeros(300)}
    dcp.load({"model": got}, checkpoint_id=out, no_dist=True)
    return bool((got["w"] == 1).all())
