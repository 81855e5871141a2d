"""Runs whose steps have one value each."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_tools import CheckpointManager


def save_values(root: Path, values: dict[int, float], losses: dict[int, float]) -> None:
    with CheckpointManager(
        root, keep_last=None, statistics=True, asynchronous=False
    ) as checkpoints:
        for step, value in values.items():
            state = {"model": {"w": torch.full((40,), value)}, "optimizer": {"m": torch.ones(4)}}
            metrics = {"loss": losses[step]} if step in losses else None
            checkpoints.save(step, state, metrics=metrics)


def flip_a_bit(step: Path, value: float) -> None:
    file = step / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(torch.full((40,), value).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
