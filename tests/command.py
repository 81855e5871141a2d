"""Runs `ckpt`, or a job of several ranks, in a process that is forked from one with all imports.

Half of a short command's time goes into imports, and two thirds of a short job's. The forked
process has the given arguments, environment, directory and streams. It runs what
`python -m ckpt_tools` or `tests/launch.py` runs. Tests of start-up, streams, signals and kills start
a new interpreter instead.
"""

from __future__ import annotations

import array
import atexit
import importlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<I")
_servers: dict[tuple[int, str], tuple[socket.socket, subprocess.Popen[bytes]]] = {}
ROOT = str(Path(__file__).parents[1])


def run_command(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 400,
) -> subprocess.CompletedProcess[str]:
    """Runs `ckpt WORDS` and returns its exit status and output.

    Raises:
        TimeoutExpired: it did not end in time, and was killed.
    """
    return _ask("command", words, env, cwd, timeout)


def run_job(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 400,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line of this interpreter, such as `torchrun_command` gives.

    Raises:
        TimeoutExpired: it did not end in time, and all its processes were killed.
    """
    if words[1] == "-c" or os.environ.get("CKPT_DEVICE"):  # no process with a GPU can be forked
        return subprocess.run(
            words, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
    assert words[0] == sys.executable
    return _ask("job", words[1:], env, cwd, timeout)


def _ask(
    kind: str,
    words: Sequence[object],
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Lets the server of a kind run something; returns its exit status and output."""
    args = [os.fspath(w) if isinstance(w, os.PathLike) else str(w) for w in words]
    request = {
        "args": args,
        "env": dict(os.environ if env is None else env),
        "cwd": os.getcwd() if cwd is None else os.fspath(cwd),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        line = _server(kind)
        body = json.dumps(request).encode("utf-8", "surrogateescape")
        fds = array.array("i", [out.fileno(), errors.fileno()])
        line.sendmsg(
            [_LENGTH.pack(len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        )
        line.sendall(body)
        (pid,) = _LENGTH.unpack(line.recv(_LENGTH.size))
        line.settimeout(timeout)
        try:
            (status,) = struct.unpack("<i", line.recv(4))
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            line.settimeout(None)
            line.recv(4)
            raise subprocess.TimeoutExpired(args, timeout) from None
        line.settimeout(None)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode().replace("\r\n", "\n").replace("\r", "\n"))
    return subprocess.CompletedProcess([kind, *args], status, *texts)


def _server(kind: str) -> socket.socket:
    """Returns the line to this process's server of a kind, and starts it if there is none."""
    key = (os.getpid(), kind)
    if key not in _servers:
        mine, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, __file__, kind, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": ROOT},
        )
        theirs.close()
        _servers[key] = (mine, process)
        atexit.register(mine.close)
    return _servers[key][0]


# ---- the server ----------------------------------------------------------------------------------


def serve(kind: str, line: socket.socket) -> None:
    """Forks one process for each request, and answers with its id and its exit status."""
    _import_everything(kind)
    while True:
        head, ancillary, *_ = line.recvmsg(_LENGTH.size, socket.CMSG_SPACE(8))
        if not head:
            return
        fds = array.array("i")
        fds.frombytes(ancillary[0][2][:8])
        (nbytes,), body = _LENGTH.unpack(head), b""
        while len(body) < nbytes:
            body += line.recv(nbytes - len(body))
        pid = os.fork()
        if not pid:
            line.close()
            _run(kind, json.loads(body.decode("utf-8", "surrogateescape")), list(fds))
        for fd in fds:
            os.close(fd)
        line.sendall(_LENGTH.pack(pid))
        _, status = os.waitpid(pid, 0)
        line.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch looks once
_COMMAND = (
    "s3fs tqdm rich.console ckpt_tools.cli.app ckpt_tools.cli.findings ckpt_tools.cli.render"
    " ckpt_tools.loop.steps.retention ckpt_tools.operations.convert.convert ckpt_tools.operations.copy"
    " ckpt_tools.operations.diff ckpt_tools.operations.inspect ckpt_tools.operations.merge_reshard"
    " ckpt_tools.operations.salvage ckpt_tools.operations.seal ckpt_tools.operations.verify"
).split()


_JOB = (
    "torch torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.fsdp"
    " torch.distributed.tensor.parallel torch.testing._internal.distributed.fake_pg s3fs"
    " ckpt_tools.cli.app ckpt_tools.loop.manager training.command tests.launch"
    " transformers.models.llama.modeling_llama transformers.models.gpt2.modeling_gpt2"
).split()


def _import_everything(kind: str) -> None:
    """Imports what commands or jobs import. A command is started without torch."""
    for name in _COMMAND if kind == "command" else _JOB:
        importlib.import_module(name)
    assert (kind == "command") == ("torch" not in sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


def _run(kind: str, request: Mapping[str, Any], fds: list[int]) -> None:
    """Becomes a command or a job's launcher with these arguments, and ends the process."""
    status = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(str(request["cwd"]))
        for number, fd in enumerate(fds, start=1):
            os.dup2(fd, number)
            os.close(fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = [kind, *request["args"]]
        random.seed()
        _command() if kind == "command" else _job()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  # the interpreter would print it
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = 120  # as the interpreter has it
        os._exit(status)


def _command() -> None:
    from ckpt_tools.cli.app import main

    main(may_share=True)


def _job() -> None:
    """Launches ranks, or is the only one. They find what the caller's PYTHONPATH names."""
    from tests import launch

    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    if sys.argv[1].endswith("launch.py"):
        del sys.argv[0]
        launch.main()
    else:
        words = sys.argv[1:]
        sys.path[0] = launch.first_path(words)
        launch.run_and_exit(words)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))


def run_ckpt(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return run_command(*words, env=clean | {"HOME": "/nonexistent"} | environment)
