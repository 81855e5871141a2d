"""Tells experiment trackers of each committed step: functions for `CheckpointManager(on_commit=…)`.

    CheckpointManager("s3://bucket/run", on_commit=[wandb_reference(run), wandb_scalars(run)])

A reference has the address and the digest of a step, and uploads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import redacted
from ckpt_tools.loop.saving.save import SaveReport
from ckpt_tools.storage import is_url

_REFUSED = re.compile(r"[^A-Za-z0-9_\-. :/]")  # by MLflow, in the name of a metric
_MAX_NAME = 250


def numbers(report: SaveReport) -> dict[str, float]:
    """Returns the numbers of a save: seconds, bytes, and steps that a mirror does not have yet.

    Its metrics lie beside them. One with the name of such a number gets the prefix `metric_`.
    """
    found = {
        "checkpoint/stall_s": report.stall_s,
        "checkpoint/seconds": report.seconds,
        "checkpoint/bytes": float(report.nbytes),
        "checkpoint/mirror_lag_steps": float(report.mirror_lag_steps),
    }
    for name, value in report.metrics.items():
        is_taken = f"checkpoint/{name}" in found
        found[f"checkpoint/metric_{name}" if is_taken else f"checkpoint/{name}"] = value
    return found


def facts(report: SaveReport) -> dict[str, Any]:
    """Returns what identifies a step: its address, digest, size and metrics."""
    uri = redacted(report.path) if is_url(report.path) else f"file://{report.path}"
    return {
        "uri": uri,
        "step": report.step,
        "bytes": report.nbytes,
        "digest": f"crc64nvme:{report.digest}",
        "metrics": dict(report.metrics),
    }


def tensorboard_scalars(writer: Any) -> Callable[[SaveReport], None]:
    """Writes the numbers of each save to a `SummaryWriter`."""

    def write(report: SaveReport) -> None:
        for name, value in numbers(report).items():
            writer.add_scalar(name, value, report.step)

    return write


def wandb_scalars(run: Any) -> Callable[[SaveReport], None]:
    """Logs the numbers of each save to a run of W&B, beside `checkpoint/step`."""
    return lambda report: run.log({**numbers(report), "checkpoint/step": report.step})


def mlflow_scalars(run_id: str | None = None) -> Callable[[SaveReport], None]:
    """Logs the numbers of each save to a run of MLflow; to the active run if None.

    MLflow refuses some characters in names: each becomes `_`, and a warning says so once.
    """
    import mlflow

    run_id = run_id or mlflow.active_run().info.run_id  # the writer has a thread of its own
    renamed: dict[str, str] = {}

    def write(report: SaveReport) -> None:
        found: dict[str, float] = {}
        for name, value in numbers(report).items():
            plain = _REFUSED.sub("_", name)[:_MAX_NAME]
            while plain in found:
                plain = f"{plain[: _MAX_NAME - 1]}_"
            found[plain] = value
            if plain != name and name not in renamed:
                renamed[name] = plain
                log.warning("MLflow takes no name such as %r: it is logged as %r", name, plain)
        mlflow.log_metrics(found, step=report.step, run_id=run_id)

    return write


def wandb_reference(run: Any, name: str = "checkpoint") -> Callable[[SaveReport], None]:
    """Logs each step as a reference artifact of W&B.

    Args:
        run: from `wandb.init`.
        name: of the artifact; each step is a version.
    """
    import wandb

    def write(report: SaveReport) -> None:
        found = facts(report)
        artifact = wandb.Artifact(name, "model", metadata=found)
        artifact.add_reference(found["uri"], checksum=False)
        run.log_artifact(artifact, aliases=["latest", f"step-{report.step}"])

    return write


def mlflow_reference(run_id: str | None = None) -> Callable[[SaveReport], None]:
    """Logs a small JSON file for each step to a run of MLflow, which has no reference artifacts."""
    import mlflow

    run_id = run_id or mlflow.active_run().info.run_id

    def write(report: SaveReport) -> None:
        mlflow.log_dict(facts(report), f"checkpoints/step-{report.step}.json", run_id=run_id)

    return write
