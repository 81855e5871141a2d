"""How real jobs are started, and whether the long forms of tests are wanted: `CKPT_LONG=1 make test`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LONG = bool(os.environ.get("CKPT_LONG"))
EVERY = 1 if LONG else 2  # of the system calls that are made to fail, one by one


def torchrun_command(num_ranks: int, *words: object) -> list[str]:
    """Returns the command that runs a script on so many gloo processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *map(str, words)]


def children(pid: int) -> list[int]:
    """Returns the ids of a process's children, the oldest first."""
    return sorted(int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
