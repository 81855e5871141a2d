"""Finds contradictions between configuration, model, data and earlier runs, before ranks wait.

Every rank does this alone, so a mistake is one line, and not a rank that waits for others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import fsspec
import torch
from torch import nn

import ckpt_tools
from training import changes, sharding
from training import model as models
from training.batch import DataSet
from training.checks import Degrees, check
from training.config import Config, ConfigError
from training.data import check_tokenizer, open_tokens
from training.extras import factory, tensor, weights, wrappers
from training.extras.examples import Examples
from training.extras.loggers import check_loggers
from training.units import check_blocks, left_out, units_of


@dataclass(slots=True)
class Plan:
    """The parts of a run that exist before any rank waits for another."""

    given: Config  # as checkpoints and config.toml have it
    config: Config  # as the loop uses it: with steps for epochs, and rows as sequences of one token
    sizes: Degrees
    model: nn.Module  # on the meta device, or with the values of a factory
    rows: DataSet
    validation: DataSet | None
    notes: list[str]  # on what the configuration asks for and what is done instead
    converts: bool  # whether transformers converts the weights of `model.path`


def prove(config: Config, world_size: int, local_world_size: int) -> Plan:
    """Finds contradictions before any rank waits for another.

    Raises:
        ConfigError: mesh, units, data, sequence length or an earlier run do not fit.
    """
    sizes, notes = check(config, world_size, local_world_size), list[str]()
    if not torch.cuda.is_available():
        config, notes = wrappers.without_gpu(config)
    given = config
    check_loggers(config)
    _check_places(config)
    changes.check_directory(config)
    if config.model.factory:
        config = config.having("data", seq_len=1)  # a row stands for a sequence of one token
    model, has_weights = make_model(config), bool(config.model.path and config.model.weights)
    converts = has_weights and weights.check_weights(model, config)
    sharding.check_backend(config)
    rows, validation = open_data(config, model, "data.train"), None
    if config.metrics.validate_every:
        validation = open_data(config, model, "data.validation")
    if config.model.factory:
        # the trial with two rows may have changed the first one
        tried, model = set(map(id, model.parameters())), models.make(config)
        if any(id(parameter) in tried for parameter in model.parameters()):
            raise ConfigError(
                f"model.factory: {config.model.factory} returned the same parameters twice: make a"
                " new module, with values, at each call"
            )
    notes += _notes_on(config, model, rows, validation)
    if config.run.epochs:
        config = config.having("run", steps=steps_in(config, len(rows)))
        notes.append(f"run.epochs = {config.run.epochs} are {config.run.steps} steps")
    return Plan(given, config, sizes, model, rows, validation, notes, converts)


def make_model(config: Config) -> nn.Module:
    """Returns the model after checks that need no data.

    Raises:
        ConfigError: it cannot be made, or does not fit units, mesh or sequence length.
    """
    model = models.make(config)
    units_of(model, config)
    check_blocks(model, config)
    if config.model.factory:
        return model
    tensor.check_heads(model, config.fsdp.tensor_parallel)
    if config.data.seq_len > models.max_seq_len(model):
        raise ConfigError(
            f"data.seq_len = {config.data.seq_len}, and the model takes sequences of at most"
            f" {models.max_seq_len(model)}"
        )
    return model


_READ_ONLY = ("http", "https", "data")  # stores that cannot be written


def _check_places(config: Config) -> None:
    """Refuses places that cannot hold a run, or that lack what they should have."""
    checkpoint, start = config.checkpoint, config.run.resume_from
    places = {"run.dir": config.run.dir, "checkpoint.dir": checkpoint.dir}
    for key, place in (places | {"checkpoint.mirror": checkpoint.mirror}).items():
        scheme, colon, rest = place.partition("://")
        if colon and key == "run.dir":
            raise ConfigError(
                f"run.dir = {place!r}: a local directory; give the URL in checkpoint.dir"
            )
        is_store = scheme in fsspec.available_protocols() and scheme not in _READ_ONLY
        if colon and not (rest.strip("/") and is_store):
            raise ConfigError(
                f"{key} = {place!r}: expected a store that can be written, s3://bucket/run"
            )
        if place and not colon and not _can_be_directory(place):
            raise ConfigError(f"{key} = {place!r}: no directory can be made there")
    if start and "://" not in start:
        try:
            ckpt_tools.inspect(start)
        except (ckpt_tools.CheckpointError, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"run.resume_from = {start!r}: {said}") from error


def _can_be_directory(place: str) -> bool:
    if "\0" in place:
        return False
    path = Path(place).absolute()
    while not path.exists() and not path.is_symlink():
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def _notes_on(
    config: Config, model: nn.Module, rows: DataSet, validation: DataSet | None
) -> list[str]:
    """Returns notes on data that is cut, and on what the model is trained without."""
    notes = _notes_on_rows(config, rows, "data.train")
    if config.data.packing:
        _check_packing(model, rows)
    if validation is not None:
        notes += _notes_on_rows(config, validation, "data.validation")
        size, batches = config.data.batch_size, config.metrics.validate_batches
        used = min(batches, len(validation) // size) * size
        if used < len(validation):
            notes.append(
                f"data.validation: a validation uses the first {used:,} of {len(validation):,}"
                " rows, whole batches of data.batch_size up to metrics.validate_batches"
            )
    if shared := left_out(model, config):
        notes.append(
            f"{', '.join(shared[:3])} share a weight with a module outside, so they are no units:"
            " the unit around them has their parameters"
        )
    about = getattr(model, "config", None) if config.model.path else None
    if getattr(about, "output_router_logits", False) and getattr(about, "router_aux_loss_coef", 0):
        notes.append(
            f"model.path: its config.json has router_aux_loss_coef = {about.router_aux_loss_coef}:"
            " this auxiliary loss is not added here, so nothing balances the experts"
        )
    if config.model.dtype == "bfloat16":
        notes.append(
            "model.dtype = bfloat16: AdamW's steps are rounded to it, so a low optim.lr may change"
            " nothing"
        )
    return notes


def open_data(config: Config, model: nn.Module, key: str) -> DataSet:
    """Maps training or validation data: tokens, examples, or rows for a factory's module.

    Raises:
        ConfigError: it cannot be opened, or does not fit the model.
    """
    data = config.data
    path = data.train if key == "data.train" else data.validation
    if config.model.factory:
        rows = factory.open_rows(path, key, data.batch_size)
        factory.try_rows(model, config, rows, key)
        return rows
    opened = open_tokens(
        path, data.seq_len, data.batch_size, models.vocab_size(model), key, data.packing
    )
    if config.model.path and data.check_tokenizer:
        check_tokenizer(opened, Path(config.model.path), key)
    return opened


_PACKS = ("llama", "opt")  # whose packed losses a test compares with those of single examples


def _check_packing(model: nn.Module, rows: DataSet) -> None:
    """Refuses packing for models that may look beyond an example, or not as far as they should.

    transformers drops the mask of a sliding window where it is given another one, and a convolution
    or a recurrent layer sees the neighbour.
    """
    if not isinstance(rows, Examples):
        raise ConfigError(
            f"data.packing is for examples of a JSONL file, and {rows.name} is one stretch of"
            " tokens"
        )
    kind = getattr(model.config, "model_type", None)
    if not isinstance(model, models.Decoder) and kind not in _PACKS:
        raise ConfigError(
            f"data.packing: not for model_type {kind!r}, whose layers may see other examples of a"
            f" row; it is for the built-in decoder, {' and '.join(_PACKS)}"
        )


def _notes_on_rows(config: Config, rows: DataSet, key: str) -> list[str]:
    """Returns notes on examples that are cut."""
    if not isinstance(rows, Examples):
        return []
    seq_len, total = config.data.seq_len, len(rows.starts) - 1
    if rows.num_idle == total:
        raise ConfigError(
            f"{key}: data.seq_len = {seq_len} cuts the completions of all {total:,} examples"
        )
    notes = [f"{key}: {total:,} examples in {len(rows):,} rows"]
    if cut := rows.num_cut:
        notes.append(f"{cut:,} examples are longer than data.seq_len = {seq_len}: cut")
    if rows.num_idle:
        notes.append(f"in {rows.num_idle:,} of these nothing is left that is trained on")
    return notes


def steps_in(config: Config, num_rows: int) -> int:
    """Returns the steps of `run.epochs` passes over so many rows."""
    size, epochs = config.data.batch_size, config.run.epochs
    if config.data.drop_last:
        return epochs * (num_rows // size)
    return -(-epochs * num_rows // size)
