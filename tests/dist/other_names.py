"""Saves states with other tensors on rank 1: refused on every rank, unless the call says so. Run by
torchrun with a directory, on 2 ranks.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager, Outages

root = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
told: list[str] = []


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        told.append(record.getMessage())


logging.getLogger("ckpt_tools").addHandler(Told(logging.WARNING))
more = {"b": torch.ones(2)} if rank else {}
for state in ({"a": torch.ones(2), **more}, {"m": torch.nn.Linear(2, 2, bias=not rank)}):
    try:
        ckpt_tools.save(root / "c", state)
    except CheckpointError as error:
        assert "differ: the tensor" in str(error), error
    else:
        raise AssertionError(state)
    assert not (root / "c").exists()
with CheckpointManager(root / "run", asynchronous=False) as checkpoints:
    checkpoints.save(1, {"a": torch.ones(2), **more}, names_differ=True)
    state = {"a": torch.zeros(2), **{name: torch.zeros(2) for name in more}}
    assert checkpoints.resume(state) == 1
    assert all(value.tolist() == [1.0, 1.0] for value in state.values())
    assert told == [], "rank 1 loads what rank 0 lacks"
    checkpoints.save(1, state)  # saved already
    assert checkpoints.resume({"a": torch.zeros(2)}) == 1
words = [["is saved already", "left out: b"], []][rank]
assert len(told) == len(words) and all(map(str.__contains__, told, words)), told
told.clear()
with CheckpointManager(root / "run", outages=Outages(max_failures=2)) as checkpoints:
    checkpoints.resume(state)
    state = {"a": torch.ones(200_000)}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    checkpoints.save(2, state)
    while checkpoints._writer.is_busy:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.save(3, state)
assert [text.startswith("a save failed, 1 of at most 1 in a row") for text in told] == [True][rank:]
dist.destroy_process_group()
