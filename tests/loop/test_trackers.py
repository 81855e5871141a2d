"""What experiment trackers get of a save. Real trackers are tried in `tests/peers`."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_tools import CheckpointManager
from ckpt_tools.integrations.trackers import tensorboard_scalars


class Writer:
    """The one method of a `SummaryWriter` that is used."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert step == 1 and name not in self.scalars
        self.scalars[name] = value


def test_a_metric_takes_no_number_of_the_tool_away(tmp_path: Path) -> None:
    writer = Writer()
    with CheckpointManager(tmp_path, on_commit=tensorboard_scalars(writer)) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, metrics={"stall_s": 5e9, "loss": 2.0})
    assert writer.scalars["checkpoint/metric_stall_s"] == 5e9
    assert writer.scalars["checkpoint/loss"] == 2.0 and writer.scalars["checkpoint/stall_s"] < 1e6
