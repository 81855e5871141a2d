"""Finds contradictions between configuration, model, data and earlier runs, before ranks wait.

Every rank does this alone, so a mistake is one line, and not a rank that waits for others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from training import changes, factory, parallel, weights
from training import config as configuration
from training import model as models
from training.config import Config, ConfigError, Degrees
from training.data import Tokens, check_tokenizer, open_tokens
from training.examples import Examples
from training.factory import Rows
from training.loggers import check_loggers


@dataclass(slots=True)
class Plan:
    """The parts of a run that exist before any rank waits for another.

    They are the model on the meta device, the data, and the sizes of the mesh.
    """

    config: Config
    text: str  # the resolved configuration, as TOML
    sizes: Degrees
    model: nn.Module
    tokens: Tokens | Examples | Rows
    validation: Tokens | Examples | Rows | None
    notes: list[str]  # on what the configuration asks for and what is done instead
    converts: bool = False  # whether transformers converts the weights of `model.path`


def prove(config: Config, world_size: int, local_world_size: int) -> Plan:
    """Finds contradictions before any rank waits for another.

    Raises:
        ConfigError: mesh, units, data, sequence length or an earlier run do not fit.
    """
    sizes = configuration.check(config, world_size, local_world_size)
    notes: list[str] = []
    if not torch.cuda.is_available():
        config, notes = parallel.without_gpu(config)
    check_loggers(config)
    _check_places(config)
    changes.check_directory(config, Path(config.run.dir))
    text, config = configuration.to_toml(config), _of_rows(config)
    model, data = models.make(config), config.data
    parallel.units_of(model, config)
    parallel.check_blocks(model, config)
    parallel.check_heads(model, config.fsdp.tensor_parallel)
    if data.seq_len > models.max_seq_len(model):
        raise ConfigError(
            f"data.seq_len = {data.seq_len}, and the model takes sequences of at most"
            f" {models.max_seq_len(model)}"
        )
    has_weights = bool(config.model.path and config.model.weights)
    converts = has_weights and weights.check_weights(model, config)
    parallel.check_backend(config)
    if config.model.factory:
        factory.loss_of(config)
    tokens = open_data(config, model, "data.train")
    validation = None
    if config.metrics.validate_every:
        validation = open_data(config, model, "data.validation")
    notes += _notes_on(config, model, tokens, validation)
    if config.run.epochs:
        steps = steps_in(config, tokens.windows(data.seq_len))
        config = replace(config, run=replace(config.run, steps=steps))
        notes.append(f"run.epochs = {config.run.epochs} are {steps} steps")
    return Plan(config, text, sizes, model, tokens, validation, notes, converts)


def _check_places(config: Config) -> None:
    """Refuses places that cannot hold a run, or that lack what they should have.

    Raises:
        ConfigError: with the key.
    """
    for key, place in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        scheme, colon, rest = place.partition("://")
        if colon and key == "run.dir":
            raise ConfigError(
                f"run.dir = {place!r}: a local directory; give the URL in checkpoint.dir"
            )
        if colon and (not rest.strip("/") or scheme in _READ_ONLY):
            raise ConfigError(
                f"{key} = {place!r}: expected a store that can be written, s3://bucket/run"
            )
        if place and not colon and not _can_be_directory(Path(place)):
            raise ConfigError(f"{key} = {place!r}: no directory can be made there")
    start = config.run.resume_from
    if start and "://" not in start and not Path(start).exists():
        raise ConfigError(f"run.resume_from = {start!r}: there is no such checkpoint")


_READ_ONLY = ("http", "https", "data")


def _can_be_directory(path: Path) -> bool:
    path = path.absolute()
    while not path.exists() and not path.is_symlink():
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def _notes_on(
    config: Config,
    model: nn.Module,
    tokens: Tokens | Examples | Rows,
    validation: Tokens | Examples | Rows | None,
) -> list[str]:
    """Returns notes on data that is cut, and on types that round.

    Raises:
        ConfigError: packing does not fit the data, or the model.
    """
    notes = []
    for key, opened in (("data.train", tokens), ("data.validation", validation)):
        if opened is not None:
            notes += _notes_on_examples(opened, config.data, key)
    if config.data.packing:
        _check_packing(model)
    if validation is not None:
        notes += _notes_on_validation(config, validation)
    about = getattr(model, "config", None)
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


def _notes_on_validation(config: Config, validation: Tokens | Examples | Rows) -> list[str]:
    """Returns a note if a validation uses a part of its data only: it takes whole batches."""
    num_rows, size = validation.windows(config.data.seq_len), config.data.batch_size
    used = min(config.metrics.validate_batches, num_rows // size) * size
    if used == num_rows:
        return []
    text = (
        f"data.validation: a validation uses the first {used:,} of {num_rows:,} rows, whole batches"
        " of data.batch_size up to metrics.validate_batches"
    )
    return [text]


def _of_rows(config: Config) -> Config:
    """Returns the configuration of a factory's module with rows for sequences of one token."""
    if not config.model.factory:
        return config
    return replace(config, data=replace(config.data, seq_len=1))


def open_data(config: Config, model: nn.Module, key: str) -> Tokens | Examples | Rows:
    """Maps training or validation data: tokens, examples, or rows for a factory's module.

    Raises:
        ConfigError: it cannot be opened, or does not fit the model.
    """
    data = config.data
    path = data.train if key == "data.train" else data.validation
    if config.model.factory:
        rows = factory.open_rows(path, key, data.batch_size)
        factory.check_rows(config, model, rows, key)
        return rows
    opened = open_tokens(
        path, data.seq_len, data.batch_size, models.vocab_size(model), key, data.packing
    )
    if config.model.path and data.check_tokenizer:
        check_tokenizer(opened, Path(config.model.path), key)
    return opened


_PACKS = ("llama", "opt")  # whose packed losses a test compares with those of single examples


def _check_packing(model: nn.Module) -> None:
    """Refuses packing for models that may look beyond an example, or not as far as they should.

    transformers drops the mask of a sliding window where it is given another one, and a convolution
    or a recurrent layer sees the neighbour.

    Raises:
        ConfigError: the model is not among those that a test has compared.
    """
    kind = getattr(model.config, "model_type", None)
    if not isinstance(model, models.Decoder) and kind not in _PACKS:
        raise ConfigError(
            f"data.packing: not for model_type {kind!r}, whose layers may see other examples of a"
            f" row; it is for the built-in decoder, {' and '.join(_PACKS)}"
        )


def _notes_on_examples(
    tokens: Tokens | Examples | Rows, data: configuration.Data, key: str
) -> list[str]:
    """Returns notes on examples that are cut.

    Raises:
        ConfigError: `data.packing` is set for tokens that are no examples, or the examples have
            nothing that is trained on.
    """
    if not isinstance(tokens, Examples):
        if data.packing and key == "data.train":
            raise ConfigError(
                f"data.packing is for examples of a JSONL file, and {tokens.name} is one stretch of"
                " tokens"
            )
        return []
    total, cut = len(tokens.starts) - 1, tokens.num_cut
    if tokens.num_idle == total:
        raise ConfigError(
            f"{key}: data.seq_len = {data.seq_len} cuts the completions of all {total:,} examples"
        )
    notes = [f"{key}: {total:,} examples in {tokens.windows(data.seq_len):,} rows"]
    if cut:
        notes.append(f"{cut:,} examples are longer than data.seq_len = {data.seq_len}: cut")
    if tokens.num_idle:
        notes.append(f"in {tokens.num_idle:,} of these nothing is left that is trained on")
    return notes


def steps_in(config: Config, num_sequences: int) -> int:
    """Returns the steps of `run.epochs` passes over so many sequences."""
    size, epochs = config.data.batch_size, config.run.epochs
    if config.data.drop_last:
        return epochs * (num_sequences // size)
    return -(-epochs * num_sequences // size)
