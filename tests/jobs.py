"""How real jobs are started, and whether the long forms of tests are wanted: `CKPT_LONG=1 make
test`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
# so that scripts find `tests`
PYTHON_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
LONG = bool(os.environ.get("CKPT_LONG"))
STRACE = ("strace", "-f", "-qq")
QUICK_STRACE = (*STRACE, "--seccomp-bpf")  # stops at traced calls only, and injects no signals
EVERY = 1 if LONG else 10  # of the system calls that are made to fail, one by one


def torchrun_command(num_ranks: int, *words: object, is_forked: bool = True) -> list[str]:
    """Returns the command that runs a script on so many gloo processes of this machine.

    tests/launch.py forks them from one process, because most of a short job's time goes into
    importing torch. The command is torchrun's own where `is_forked` is false.
    """
    # nothing that has looked at a GPU can be forked
    is_forked = is_forked and not os.environ.get("CKPT_DEVICE")
    launcher = (
        [str(ROOT / "tests" / "launch.py")]
        if is_forked
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    )
    return [sys.executable, *launcher, str(num_ranks), *map(str, words)]


def children(pid: int) -> list[int]:
    """Returns the ids of a process's children, the oldest first."""
    return sorted(int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def open_files(folder: Path) -> list[str]:
    """Returns the files and folders beneath a folder that this process holds open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this very listing
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(str(folder)))


def kill_after_step(
    words: Sequence[str], root: Path, number: int, environment: Mapping[str, str]
) -> None:
    """Starts a job, and kills it with all its ranks once a step is there; removes later steps.

    The ranks hold the pipe, so its end says that none of them still runs.
    """
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as job:
        try:
            while not (root / f"step-{number:08d}").exists():
                assert job.poll() is None, job.communicate()[0].decode()
                time.sleep(0.002)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    for newer in root.glob("step-*"):
        if int(newer.name.split("-")[1]) > number:
            shutil.rmtree(newer)


@contextmanager
def _standing_still(pid: int) -> Iterator[None]:
    """Stops a process and its children; torchrun gives each of them a group of its own."""
    stopped = [pid]
    with suppress(OSError):  # it has ended
        stopped += children(pid)
    try:
        for process in stopped:
            with suppress(OSError):
                os.kill(process, signal.SIGSTOP)
        yield
    finally:
        for process in stopped:
            with suppress(OSError):
                os.kill(process, signal.SIGCONT)


def interrupt(
    words: Sequence[str],
    is_time: Callable[[], bool],
    number: int = signal.SIGKILL,
    member: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Starts a command and sends it, or one of its ranks, a signal once it is time; returns what it
    came to.

    Before a kill, the command and its children stand still while `is_time` looks. So the command
    cannot end between the look and the kill, however busy the machine is. Then they run for as long
    as the look took. Before another signal they are not stopped: a thread other than Python's main
    one may take the signal, and the main one sleeps on (seen with SIGINT). The first process that
    launch.py starts serves the store of the ranks.
    """
    stopping = _standing_still if number == signal.SIGKILL else nullcontext
    first = 1 if any(str(word).endswith("launch.py") for word in words) else 0
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as job:
        try:
            sent = False
            while job.poll() is None and not sent:
                begun = time.monotonic()
                with stopping(job.pid):
                    if sent := is_time():
                        with suppress(OSError, IndexError):  # it has ended
                            victim = job.pid
                            if member is not None:
                                victim = children(job.pid)[first + member]
                            os.kill(victim, number)
                if not sent:
                    time.sleep(max(0.001, time.monotonic() - begun))
            out, errors = job.communicate(timeout=300)
            return subprocess.CompletedProcess(words, job.returncode, out, errors)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
