"""A signal at the instant in which a `with` statement is entered: no context manager knows then
that it has to clean up.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

# Forks the command again and again. The profiler sees the return of the k-th context manager's
# first half, and sends the signal there. The handler runs before `__enter__` has returned.
PROGRAM = """
import json, os, shutil, sys
from pathlib import Path
from ckpt_tools.cli import write_verbs
from ckpt_tools.cli.app import main

number, args = int(sys.argv[1]), sys.argv[2:]

def run(k):
    def notice(frame, event, function):
        nonlocal k
        if event == "c_return" and function is next and frame.f_code.co_name == "__enter__":
            k -= 1
            if k == 0:
                sys.setprofile(None)
                Path("signalled").touch()
                os.kill(os.getpid(), number)
    sys.argv[1:] = args
    sys.setprofile(notice)
    try:
        main()
    except SystemExit as end:
        os._exit(end.code or 0)

for k in range(1, 1000):
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)
        run(k)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signalled = Path("signalled")
    print(json.dumps([code, signalled.exists(), sorted(os.listdir())]), flush=True)
    if not signalled.exists():
        break
    signalled.unlink()
    for path in Path().glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "number"),
    [
        (["merge", "src", "out.safetensors"], signal.SIGINT),
        (["reshard", "src", "out", "--to", "2"], signal.SIGTERM),
    ],
)
def test_a_signal_while_a_with_statement_is_entered_leaves_nothing(
    args: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    state = {f"w{i}": torch.full((8, 8), float(i)) for i in range(4)}
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), *args],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=300,
    )
    *signalled, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last[:2] == [0, False]  # the last run came to its end
    assert len(signalled) > 10
    for code, _, names in signalled:
        assert code in (0, 128 + number)
        assert not [name for name in names if name.startswith((".tmp.", ".trash.", ".aside."))]
