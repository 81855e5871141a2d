"""Handles changes between a checkpoint and the run that resumes from it.

Changed hyperparameters are applied, and other data is refused. A checkpoint contains the
configuration and the identity of the data. Every difference that matters is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager
from training import model as models
from training.config import Config, ConfigError, check_length, parse, resolve

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


def config_of(state: Mapping[str, Any]) -> Config:
    """Returns the configuration in the state of a checkpoint.

    Raises:
        ConfigError: it is none.
    """
    text, where = state["config"], "the checkpoint's configuration"
    if not isinstance(text, str):
        raise ConfigError(f"expected a text, got {text!r:.80} ({where})")
    check_length(text, where)
    return parse(text, where)


def check_train_state(stored: Mapping[str, Any], number: int) -> None:
    """Checks the numbers in the `train_state` of a checkpoint.

    Args:
        stored: the `train_state`.
        number: the step by the checkpoint's manifest or name; 0 if neither has one.

    Raises:
        ConfigError: one of them is not what this program stores.
    """
    step, best = stored.get("step"), stored.get("best")
    if type(step) is not int or not 0 <= step < 10**18 or number not in (0, step):
        raise ConfigError(f"the checkpoint of step {number} says that it is step {step!r:.80}")
    match best:
        case None | (int(), int() | float()):
            pass
        case _:
            raise ConfigError(
                f"the checkpoint's best step is no pair of a step and a loss: {best!r:.80}"
            )


def notes_on(before: Config, now: Config) -> list[str]:
    """Returns a line for each key that changed since a checkpoint and matters to the training.

    Raises:
        ConfigError: a changed key must not change within a run.
    """
    check_model(before, now)
    notes = []
    for table, values in now:
        old = getattr(before, table)
        for key, value in values:
            name, was = f"{table}.{key}", getattr(old, key)
            if value != was and name in _FIXED:
                raise ConfigError(_unlike(name, value, was, "it cannot change within a run"))
            if value != was and not name.startswith(_QUIET):
                notes.append(f"changed since the checkpoint: {name} = {value!r}, was {was!r}")
    if now.data.seq_len != before.data.seq_len and not now.data.may_change:
        text = "the rows are others: set it back, or set data.may_change = true"
        raise ConfigError(_unlike("data.seq_len", now.data.seq_len, before.data.seq_len, text))
    if now.run.epochs and now.data.batch_size != before.data.batch_size:
        raise ConfigError(
            "run.epochs with another data.batch_size than the checkpoint's: the steps so far saw"
            " another number of sequences; give run.steps"
        )
    return notes


def check_model(before: Config, now: Config, hint: str = "") -> None:
    """Refuses another model.

    Only its sizes matter, not how they were given or in which directory the model lies.

    Raises:
        ConfigError: a size differs; the message names the first one.
    """
    old, new = ({"factory": one.model.factory, "dtype": one.model.dtype} for one in (before, now))
    if bool(before.model.path) != bool(now.model.path):
        old["path"], new["path"] = before.model.path, now.model.path
    elif old == new and not (now.model.path or now.model.factory):
        old, new = asdict(models.sizes_of(before)), asdict(models.sizes_of(now))
    for key in (key for key in old if old[key] != new[key]):
        raise ConfigError(_unlike(f"model.{key}", new[key], old[key], f"it is another model{hint}"))


def _unlike(key: str, now: Any, was: Any, text: str) -> str:
    return f"{key} = {now!r}, and the run that is resumed has {was!r}: {text}"


def check_same(stored: Mapping[str, Any], now: Mapping[str, Any], config: Config) -> list[str]:
    """Compares the data and the model of a checkpoint with this run's, and returns remarks.

    Args:
        stored: the checkpoint's `train_state`. One of an older program has fewer keys.
        now: this run's.
        config: tells which of them may change, with a remark.

    Raises:
        ConfigError: they differ, and may not.
    """
    model, data = config.model.may_change, config.data.may_change
    notes = []
    if stored.get("source", now.get("source")) != now.get("source"):
        notes.append(f"the file of {config.model.factory} has changed since the checkpoint")
    weights = stored.get("base", ""), now.get("base", "")
    if weights[0] != weights[1]:
        text = f"the adapters were trained on other weights than those in model.path {weights}"
        notes += _if_allowed(text, "model.may_change", model)
    for text in _unlike_models(stored.get("model"), now["model"]):
        notes += _if_allowed(text, "model.may_change", model or "model" not in stored)
    if text := _unlike_data(stored.get("data"), now["data"]):
        notes += _if_allowed(text, "data.may_change", data or "data" not in stored)
        if config.run.epochs and "data" in stored:
            raise ConfigError(
                f"run.epochs: {text}, so the steps so far saw another number of sequences; give"
                " run.steps"
            )
    return notes


def _if_allowed(text: str, key: str, is_allowed: bool) -> list[str]:
    """Returns a change as a remark."""
    if not is_allowed:
        raise ConfigError(f"{text}: give the same {key.partition('.')[0]}, or set {key} = true")
    return [text]


def _unlike_models(stored: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Returns how the `config.json` of two models differ.

    Shapes may be equal although the models compute something else. A key that only one of both has
    is ignored, because each release of transformers has other keys.
    """
    if stored is None:
        return ["the checkpoint does not tell which config.json its model had"] if now else []
    return [
        f"{key} = {now[key]!r} in the config.json of model.path, and the checkpoint was trained"
        f" with {stored[key]!r}"
        for key in now
        if key in stored and stored[key] != now[key]
    ]


def _unlike_data(stored: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Returns how two identities of data differ; "" for the same tokens, also in another file."""
    if stored is None:
        return "the checkpoint does not tell which data it was trained on"
    if stored["fingerprint"] == now["fingerprint"]:
        return ""
    # the part of a fingerprint that does not depend on the division into rows
    digests = {str(data["fingerprint"]).partition("-")[0] for data in (stored, now)}
    if len(digests) == 1:
        return "data.seq_len or data.packing was changed, so the examples are in other rows"
    was, is_now = (
        f"{data['name']} ({data['tokens']:,}"
        f" {'rows' if data.get('tokenizer') == 'rows' else 'tokens'}, fingerprint"
        f" {data['fingerprint']})"
        for data in (stored, now)
    )
    return f"the checkpoint was trained on {was}, and data.train is {is_now}"


@contextlib.contextmanager
def keeping_hyperparameters(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> Iterator[None]:
    """Applies this run's hyperparameters to what the block loads from a checkpoint.

    Raises:
        ConfigError: the checkpoint has another number of groups of parameters.
    """
    own = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        yield
    except CheckpointError as error:
        if "optimizer.param_groups.1." not in str(error):
            raise
        raise ConfigError(
            "optim.decay, or fsdp1.use_orig_params, was changed: this run's optimizer has"
            f" {len(own)} groups of parameters, and the checkpoint's another number; set both"
            " as they were"
        ) from error
    groups = optimizer.param_groups  # the load has made new ones
    for group, values, factor in zip(groups, own, scheduler.lr_lambdas, strict=True):
        group.update(values, lr=values["initial_lr"] * factor(scheduler.last_epoch))
    scheduler.base_lrs = [group["initial_lr"] for group in groups]
    scheduler._last_lr = [group["lr"] for group in groups]


def start_of(config: Config, checkpoints: CheckpointManager) -> str | None:
    """Returns the checkpoint to resume from instead of the newest; None for the newest.

    It is None if this run began from `run.resume_from` and already has steps of its own.
    """
    start = config.run.resume_from
    newest = checkpoints.latest() if start else None
    if newest is not None:
        stored: dict[str, Any] = {"config": ""}
        with contextlib.suppress(CheckpointError, ConfigError):  # a checkpoint of another program
            ckpt_tools.load(newest.path, stored)
            if config_of(stored).run.resume_from == start:
                return None
    return start or None


def check_directory(config: Config) -> None:
    """Refuses to continue in the directory of another model.

    Without this check, the user would only see a table of shapes.
    """
    file = Path(config.run.dir) / "config.toml"
    steps = config.checkpoint.dir or config.run.dir  # of a URL, it is not known here
    if config.run.resume_from or not list(Path(steps).glob("step-*")):
        return
    if not file.exists() or not file.read_bytes().strip():
        return
    before, hint = resolve(file), f"; use {file}, or another run.dir"
    check_model(before, config, hint)
    for key in ("rank", "targets"):  # they are shapes and names of the adapters
        old, new = getattr(before.lora, key), getattr(config.lora, key)
        if old != new:
            text = f"it cannot change within a run{hint}"
            raise ConfigError(_unlike(f"lora.{key}", new, old, text))
