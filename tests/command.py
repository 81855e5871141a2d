"""Runs `ckpt` in a process of its own, forked from one that has imported it.

Half of a short command's time goes into imports. The forked process has the given arguments,
environment, directory and streams, and runs what `python -m ckpt_tools` runs. Tests of start-up,
streams and signals start a new interpreter instead.
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
from collections.abc import Mapping
from pathlib import Path

_LENGTH = struct.Struct("<I")
_servers: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}


def run_command(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Runs `ckpt WORDS` and returns its exit status and output.

    Raises:
        TimeoutExpired: it did not end in time, and was killed.
    """
    args = [os.fspath(w) if isinstance(w, os.PathLike) else str(w) for w in words]
    request = {
        "args": args,
        "env": dict(os.environ if env is None else env),
        "cwd": os.getcwd() if cwd is None else os.fspath(cwd),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        line = _server()
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
            os.kill(pid, signal.SIGKILL)
            line.settimeout(None)
            line.recv(4)
            raise subprocess.TimeoutExpired(args, timeout) from None
        line.settimeout(None)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode().replace("\r\n", "\n").replace("\r", "\n"))
    return subprocess.CompletedProcess(["ckpt", *args], status, *texts)


def _server() -> socket.socket:
    """Returns the line to this process's server, and starts it if there is none."""
    if os.getpid() not in _servers:
        mine, theirs = socket.socketpair()
        root = str(Path(__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": root},
        )
        theirs.close()
        _servers[os.getpid()] = (mine, process)
        atexit.register(mine.close)
    return _servers[os.getpid()][0]


# ---- the server ----------------------------------------------------------------------------------


def serve(line: socket.socket) -> None:
    """Forks one process for each request, and answers with its id and its exit status."""
    _import_everything()
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
            _run(json.loads(body.decode("utf-8", "surrogateescape")), list(fds))
        for fd in fds:
            os.close(fd)
        line.sendall(_LENGTH.pack(pid))
        _, status = os.waitpid(pid, 0)
        line.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))


MODULES = (
    "s3fs tqdm rich.console ckpt_tools.cli.app ckpt_tools.cli.findings ckpt_tools.cli.render"
    " ckpt_tools.loop.retention ckpt_tools.operations.convert.convert ckpt_tools.operations.copy"
    " ckpt_tools.operations.diff ckpt_tools.operations.inspect ckpt_tools.operations.merge_reshard"
    " ckpt_tools.operations.salvage ckpt_tools.operations.seal ckpt_tools.operations.verify"
).split()


def _import_everything() -> None:
    """Imports what commands import, but not torch."""
    for name in MODULES:
        importlib.import_module(name)
    assert "torch" not in sys.modules
    assert threading.active_count() == 1, "a process with threads cannot be forked"


def _run(request: Mapping[str, object], fds: list[int]) -> None:
    """Becomes `ckpt` with these arguments, and ends the process."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        os.chdir(str(request["cwd"]))
        for number, fd in enumerate(fds, start=1):
            os.dup2(fd, number)
            os.close(fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["ckpt", *request["args"]]  # type: ignore[misc]
        random.seed()
        from ckpt_tools.cli.app import main

        main(may_share=True)
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])))
