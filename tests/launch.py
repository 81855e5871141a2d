"""Runs a script on so many ranks of this machine, as `torchrun --standalone` does, forked from one
process that has imported what it imports.

python tests/launch.py NUM_RANKS SCRIPT ARG …        python tests/launch.py NUM_RANKS -m MODULE ARG
…

Most of a short job's time goes into importing torch. torchrun's own agent cannot fork safely: its
store has a thread, and a fork while that thread resolves a name leaves the child a lock that nobody
releases. So this process has no thread, and another one serves the store.
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, and before torch looks

from torch.distributed import TCPStore

GRACE_S = 30  # from SIGTERM to SIGKILL, as torchrun has it
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def load_imports(script: Path) -> None:
    """Imports the modules that a script imports."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            importlib.import_module(str(node.module))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


def serve_store() -> str:
    """Starts a process that serves the ranks' store until this one has ended; returns its port."""
    (port_reader, port_writer), (end_reader, _end_writer) = os.pipe(), os.pipe()
    if not os.fork():
        os.setsid()  # a signal for the job's process group is for the ranks
        os.close(_end_writer)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port_writer, str(store.port).encode())
        os.read(end_reader, 1)
        os._exit(0)
    return os.read(port_reader, 10).decode()


def first_path(words: list[str]) -> str:
    """Returns the folder where the interpreter of a script or a module looks first."""
    return os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.abspath(words[0]))


def run(words: list[str]) -> None:
    """Runs a script or a module as its own interpreter would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def run_and_exit(words: list[str]) -> None:
    """Runs a script and ends the process as its interpreter would, but does not take the memory
    apart that it shares with the others.
    """
    status = 0
    try:
        run(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fork_rank(rank: int, environment: dict[str, str]) -> int:
    """Returns the id of the new process, and 0 in it."""
    if pid := os.fork():
        return pid
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


def stop(pids: set[int]) -> None:
    """Ends the ranks that still run."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while pids and time.monotonic() < end:
        pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def watch(pids: set[int], stopped_by: list[int]) -> int:
    """Waits for all ranks, or stops the others after the first that fails; returns the status of
    the job.
    """
    while pids and not stopped_by:
        for pid in sorted(pids):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            pids.discard(pid)
            if status:
                print(
                    f"launch.py: process {pid} ended with status"
                    f" {os.waitstatus_to_exitcode(status)}",
                    file=sys.stderr,
                )
                stop(pids)
                return 1
        time.sleep(0.02)
    stop(pids)
    return 1 if stopped_by else 0


def main() -> None:
    """Launches the ranks."""
    num_ranks, *words = sys.argv[1:]
    sys.path[0] = first_path(words)
    spec = importlib.util.find_spec(f"{words[1]}.__main__") if words[0] == "-m" else None
    load_imports(Path(spec.origin if spec and spec.origin else words[0]))
    environment = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    environment |= {"MASTER_PORT": serve_store(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"TORCHELASTIC_RUN_ID": str(uuid.uuid4()), "TORCHELASTIC_RESTART_COUNT": "0"}
    stopped_by: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: stopped_by.append(number))
    pids: set[int] = set()
    for rank in range(int(num_ranks)):
        if not (pid := fork_rank(rank, environment)):
            run_and_exit(words)
        pids.add(pid)
    sys.exit(watch(pids, stopped_by))


if __name__ == "__main__":
    main()
