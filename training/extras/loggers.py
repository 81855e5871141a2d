"""Sends the metrics of a run to TensorBoard and Weights & Biases, beside `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ckpt_tools import SaveReport
from ckpt_tools.integrations.trackers import tensorboard_scalars, wandb_scalars
from training.config import Config, ConfigError


class Logger(Protocol):
    """A receiver of metrics."""

    committed: Callable[[SaveReport], None]  # is told of each saved step

    def write(self, line: Mapping[str, Any]) -> None:
        """Takes one line of metrics."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


def check_loggers(config: Config) -> None:
    """Refuses a logger whose package is missing.

    Raises:
        ConfigError: the message names the key and the package.
    """
    for key, is_wanted in (
        ("tensorboard", config.metrics.tensorboard),
        ("wandb", bool(config.metrics.wandb)),
    ):
        if is_wanted and importlib.util.find_spec(key) is None:
            raise ConfigError(f"metrics.{key} needs the package {key}: pip install {key}")


def open_loggers(config: Config, directory: Path) -> list[Logger]:
    """Returns the loggers that the configuration asks for."""
    loggers: list[Logger] = []
    if config.metrics.tensorboard:
        loggers.append(TensorBoard(directory / "tensorboard"))
    if config.metrics.wandb:
        loggers.append(Wandb(config.metrics.wandb, directory))
    return loggers


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line, one for each rank where there is a list."""
    found: dict[str, float] = {}
    for key, value in line.items():
        for rank, number in enumerate(value if isinstance(value, list) else [value]):
            if key != "step" and number is not None and math.isfinite(number):
                found[f"{key}/rank-{rank}" if isinstance(value, list) else key] = float(number)
    return found


class TensorBoard:
    """Event files for TensorBoard. Lines of repeated steps replace the earlier ones."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = None
        self._open = lambda step: SummaryWriter(str(directory), purge_step=step)

    def write(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._open(line["step"])
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def committed(self, report: SaveReport) -> None:
        if self._writer is not None:
            tensorboard_scalars(self._writer)(report)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise."""

    def __init__(self, project: str, directory: Path) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=project, dir=str(directory), name=directory.absolute().name, mode=mode
        )
        self._run.define_metric("*", step_metric="step")
        self.committed = wandb_scalars(self._run)

    def write(self, line: Mapping[str, Any]) -> None:
        self._run.log({**scalars(line), "step": line["step"]})

    def close(self) -> None:
        self._run.finish()
