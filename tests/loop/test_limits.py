"""Limits of background saves: their threads, their priority, and the bytes per second."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import CheckpointManager, Writing
from ckpt_tools.loop.saving.limits import Throttle
from tests.stock import assert_stock_torch_reads

STATE = {"w": torch.arange(1 << 20, dtype=torch.float32)}  # 4 MiB


def test_a_limit_of_bytes_is_a_least_time(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, writing=Writing(max_mbps=20)) as checkpoints:
        checkpoints.save(1, STATE)
        while checkpoints.last_save is None:
            threading.Event().wait(0.01)
        assert checkpoints.last_save is not None
        assert checkpoints.last_save.timing["write"] >= (4 << 20) / 20e6
        checkpoints.save(2, STATE, asynchronous=False)
        assert "write" in checkpoints.last_save.timing
    found = assert_stock_torch_reads(tmp_path / "step-00000001")
    assert torch.equal(found["w"], STATE["w"])


def test_a_limit_ends_when_the_loop_waits_for_the_save(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path, writing=Writing(max_mbps=0.01)
    ) as checkpoints:  # 400 s for a step
        for step in (1, 2):  # the second save waits for the first
            checkpoints.save(step, STATE)
        checkpoints.wait()
        assert checkpoints.last_save is not None
        assert checkpoints.last_save.timing["write"] < 200
    assert torch.equal(assert_stock_torch_reads(tmp_path / "step-00000002")["w"], STATE["w"])


def test_threads_share_a_limit() -> None:
    throttle = Throttle(1e6, threading.Event())
    threads = [threading.Thread(target=throttle, args=(50_000,)) for _ in range(4)]
    began = os.times().elapsed
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.times().elapsed - began >= 0.19


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_mbps": 0}, "max_mbps: expected a number above 0, got 0"),
        ({"max_mbps": float("inf")}, "max_mbps: expected a number above 0, got inf"),
        ({"max_mbps": float("nan")}, "max_mbps: expected a number above 0, got nan"),
        ({"max_mbps": "10"}, "max_mbps: expected a number above 0, got '10'"),
        ({"background_jobs": 0}, "background_jobs: expected a whole number of at least 1, got 0"),
    ],
)
def test_limits_out_of_range_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CheckpointManager(tmp_path, writing=Writing(**given))
    assert not list(tmp_path.iterdir())
