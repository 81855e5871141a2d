"""How real jobs are started."""

from __future__ import annotations

import sys


def torchrun_command(num_ranks: int, *words: object) -> list[str]:
    """Returns the command that runs a script on so many gloo processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *map(str, words)]
