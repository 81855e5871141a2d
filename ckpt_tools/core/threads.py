"""The number of threads that read and write."""

from __future__ import annotations

import os

_MOST = 8  # more gain nothing: the disk or the memory is the limit
_MOST_BESIDE_TRAINING = 4  # the data loader and the training need the other processors


MAX_THREADS = 256  # that a user may ask for, per process


def num_threads(jobs: int | None, ranks_here: int = 1, is_beside_training: bool = False) -> int:
    """Returns the number of threads of one process, at least 1.

    Args:
        jobs: the number that the user asked for; None for the default.
        ranks_here: processes that share this machine's processors.
        is_beside_training: leave processors to a training loop.
    """
    most = _MOST_BESIDE_TRAINING if is_beside_training else _MOST
    return jobs or max(1, min(most, (os.cpu_count() or 1) // ranks_here))


def ranks_on_host() -> int:
    """Returns the number of this job's processes on this machine, as torchrun sets it; else 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
