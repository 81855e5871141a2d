"""Handles changes between a checkpoint and the run that resumes from it.

Changed hyperparameters are applied, and other data is refused. A checkpoint contains the
configuration and the identity of the data. Every difference that matters is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager
from training import config as configuration
from training import model as models
from training.config import Config, ConfigError

_QUIET = (
    "run.dir",
    "run.resume_from",
    "run.export",
    "checkpoint.",
    "metrics.every",
    "metrics.progress",
    "data.train",
    "data.may_change",
    "model.may_change",
)
_FIXED = (
    "data.shuffle",  # this and the next change the meaning of a position in the data
    "data.drop_last",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "model.loss",
)


def differences(before: Config, now: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys in which two configurations differ, with both values."""
    for table in fields(before):
        old, new = getattr(before, table.name), getattr(now, table.name)
        for field in fields(old):
            a, b = getattr(old, field.name), getattr(new, field.name)
            if a != b:
                yield f"{table.name}.{field.name}", a, b


def notes_on(stored: str, now: Config) -> list[str]:
    """Returns a line for each key that changed since a checkpoint and matters to the training.

    Args:
        stored: the configuration in the checkpoint, as TOML.
        now: this run's configuration.

    Raises:
        ConfigError: a changed key must not change within a run.
    """
    notes, before = [], configuration.parse(stored, "the checkpoint's configuration")
    check_model(before, now)
    for key, a, b in differences(before, now):
        if key in _FIXED:
            raise ConfigError(
                f"{key} = {b!r}, and the run that is resumed has {a!r}: it cannot change within"
                " a run"
            )
        if not key.startswith(_QUIET):
            notes.append(f"changed since the checkpoint: {key} = {b!r}, was {a!r}")
    return notes


def check_model(before: Config, now: Config, hint: str = "") -> None:
    """Refuses another model.

    Only its sizes matter, not how they were given or in which directory the model lies.

    Raises:
        ConfigError: a size differs; the message names the first one.
    """
    for key in ("factory", "dtype"):
        old, new = getattr(before.model, key), getattr(now.model, key)
        if old != new:
            raise ConfigError(
                f"model.{key} = {new!r}, and the run that is resumed has {old!r}: it is another"
                f" model{hint}"
            )
    if bool(before.model.path) != bool(now.model.path):
        raise ConfigError(
            f"model.path = {now.model.path!r}, and the run that is resumed has"
            f" {before.model.path!r}: it is another model{hint}"
        )
    if now.model.path or now.model.factory:
        return
    a, b = asdict(models.sizes_of(before.model)), asdict(models.sizes_of(now.model))
    for key in (key for key in a if a[key] != b[key]):
        raise ConfigError(
            f"model.{key} = {b[key]!r}, and the run that is resumed has {a[key]!r}: it is another"
            f" model{hint}"
        )


def check_description(
    stored: Mapping[str, Any] | None, now: Mapping[str, Any], may_change: bool
) -> list[str]:
    """Compares the `config.json` of a checkpoint's model with this run's, and returns remarks.

    Args:
        stored: the checkpoint's values; None if an older program saved it.
        now: this run's values. A key that only one of both has is ignored, because each release of
            transformers has other keys.
        may_change: accept other values, with a remark.

    Raises:
        ConfigError: they differ. Shapes may be equal although the model computes something else.
    """
    if stored is None:
        return ["the checkpoint does not tell which config.json its model had"] if now else []
    changed = [key for key in now if key in stored and stored[key] != now[key]]
    texts = [
        f"{key} = {now[key]!r} in the config.json of model.path, and the checkpoint was trained"
        f" with {stored[key]!r}"
        for key in changed
    ]
    if texts and not may_change:
        raise ConfigError(f"{texts[0]}: give the same model, or set model.may_change = true")
    return texts


def check_base(stored: str, now: str, may_change: bool) -> list[str]:
    """Compares the weights below a checkpoint's adapters with this run's, and returns remarks.

    Args:
        stored, now: fingerprints; "" without adapters.
        may_change: accept other weights, with a remark.

    Raises:
        ConfigError: they differ.
    """
    if stored == now:
        return []
    text = f"the adapters were trained on other weights than those in model.path ({stored}, {now})"
    if not may_change:
        raise ConfigError(f"{text}: give the same model, or set model.may_change = true")
    return [text]


def tensor_parallel(stored: str) -> int:
    """Returns the number of ranks in a tensor group of the job that saved."""
    return configuration.parse(stored, "the checkpoint's configuration").fsdp.tensor_parallel


def batch_size(stored: str) -> int:
    """Returns the sequences of one step in the job that saved."""
    return configuration.parse(stored, "the checkpoint's configuration").data.batch_size


def apply_optim(
    now: Config, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> None:
    """Applies this run's hyperparameters to a loaded optimizer and its schedule."""
    optim = now.optim
    groups = optimizer.param_groups
    decays = [optim.weight_decay] if len(groups) == 1 else [optim.weight_decay, 0.0]
    for group, factor, decay in zip(groups, scheduler.lr_lambdas, decays, strict=True):
        group["initial_lr"], group["betas"] = optim.lr, (optim.beta1, optim.beta2)
        group["lr"] = optim.lr * factor(scheduler.last_epoch)
        group |= {"eps": optim.eps, "weight_decay": decay}
        is_auto = optim.implementation == "auto"
        group |= {
            kind: None if is_auto else optim.implementation == kind for kind in ("fused", "foreach")
        }
    scheduler.base_lrs = [optim.lr] * len(optimizer.param_groups)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


@contextlib.contextmanager
def explaining_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Names `optim.decay` where a checkpoint's optimizer has another number of groups.

    Raises:
        ConfigError: it has one group and this run's optimizer two, or the other way round.
    """
    try:
        yield
    except CheckpointError as error:
        if "optimizer.param_groups.1." not in str(error):
            raise
        raise ConfigError(
            "optim.decay, or fsdp1.use_orig_params, was changed: this run's optimizer has"
            f" {len(optimizer.param_groups)} groups of parameters, and the checkpoint's another"
            " number; set both as they were"
        ) from error


def check_data(
    stored: Mapping[str, Any] | None, now: Mapping[str, Any], may_change: bool
) -> list[str]:
    """Compares the data of a checkpoint with this run's, and returns remarks.

    Args:
        stored: the identity of the data; None if an older program saved it.
        now: the identity of this run's data.
        may_change: accept other data, with a remark.

    Raises:
        ConfigError: they differ.
    """
    if stored is None:
        return ["the checkpoint does not tell which data it was trained on"]
    if stored == now:
        return []
    was, is_now = (
        f"{data['name']} ({data['tokens']:,}"
        f" {'rows' if data.get('tokenizer') == 'rows' else 'tokens'}, fingerprint"
        f" {data['fingerprint']})"
        for data in (stored, now)
    )
    text = f"the checkpoint was trained on {was}, and data.train is {is_now}"
    if stored["fingerprint"] == now["fingerprint"]:
        return []  # the same tokens in another file
    if _digest_of(stored) == _digest_of(now):
        text = "data.seq_len or data.packing was changed, so the examples are in other rows"
    if not may_change:
        raise ConfigError(f"{text}: give the same data, or set data.may_change = true")
    return [text]


def _digest_of(data: Mapping[str, Any]) -> str:
    """Returns the part of a fingerprint that does not depend on the division into rows."""
    return str(data["fingerprint"]).partition("-")[0]


def start_of(config: Config, checkpoints: CheckpointManager) -> str | None:
    """Returns the checkpoint to resume from instead of the newest; None for the newest.

    It is None if this run began from `run.resume_from` and already has steps of its own.
    """
    newest = checkpoints.latest() if config.run.resume_from else None
    if newest is not None:
        stored: dict[str, Any] = {"config": ""}
        with contextlib.suppress(CheckpointError, ConfigError):  # a checkpoint of another program
            ckpt_tools.load(newest.path, stored)
            if (
                configuration.parse(stored["config"], str(newest.path)).run.resume_from
                == config.run.resume_from
            ):
                return None
    return config.run.resume_from or None


def check_directory(config: Config, directory: Path) -> None:
    """Refuses to continue in the directory of another model.

    Without this check, the user would only see a table of shapes.
    """
    steps = config.checkpoint.dir or directory  # of a URL, it is not known here
    if (
        config.run.resume_from
        or not list(Path(steps).glob("step-*"))
        or not (directory / "config.toml").exists()
    ):
        return
    before, hint = (
        configuration.resolve(directory / "config.toml"),
        f"; use {directory}/config.toml, or another run.dir",
    )
    check_model(before, config, hint)
    for key in ("rank", "targets"):  # they are shapes and names of the adapters
        old, new = getattr(before.lora, key), getattr(config.lora, key)
        if old != new:
            raise ConfigError(
                f"lora.{key} = {new!r}, and the run that is resumed has {old!r}: it cannot change"
                f" within a run{hint}"
            )
