"""The objects of a training job: model, optimizer, schedule and data, sharded over all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_tools import RngState
from ckpt_tools.core.naming import strip_wrappers
from training import config as configuration
from training import factory, parallel, pretrained, weights
from training import model as models
from training.config import Config
from training.data import Reader, Sampler, Tokens
from training.examples import Examples
from training.factory import Rows
from training.initialize import Copied, Values, every_module
from training.prove import Plan


@dataclass(slots=True)
class Job:
    """The objects that the training loop uses."""

    config: Config
    text: str
    device: torch.device
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: Sampler
    reader: Reader
    tokens: Tokens | Examples | Rows
    validation: Tokens | Examples | Rows | None
    num_parameters: int
    num_trained: int
    about: dict[str, Any]  # the model's config.json
    loss: factory.Loss | None = None  # of a factory's module; None: cross-entropy of tokens
    base: str = ""  # the fingerprint of the weights below adapters
    source: str = ""  # the digest of the factory's file
    loss_note: str | None = None  # a warning on `loss`; None before its first call
    num_targets: int = 1  # of the last step, over all ranks
    best: tuple[int, float] | None = None  # the saved step with the lowest validation loss

    @property
    def validated_on(self) -> str:
        """The fingerprint of the validation data; "" if there is none."""
        return "" if self.validation is None else str(self.validation.identity["fingerprint"])

    @property
    def saved_part(self) -> str | None:
        """The part of the model that is saved: with adapters, only these."""
        return "trainable" if self.config.lora.rank else None

    def state(self, step: int) -> dict[str, Any]:
        """Returns the state that a resumed run needs, with the configuration.

        The checkpoint manager saves it.
        """
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
            "rng": RngState(),
            "train_state": {
                "step": step,
                "data": self.tokens.identity,
                "model": self.about,
                "best": self.best,
                "validation": self.validated_on,
                **({"base": self.base} if self.base else {}),
                **({"source": self.source} if self.source else {}),
            },
            "config": self.text,
        }


def build(plan: Plan, device: torch.device) -> Job:
    """Returns model, optimizer, schedule and data, sharded over all ranks.

    It shards the plan's own model, which cannot be used again.

    Raises:
        ConfigError: the model does not fit the mesh, or the device.
    """
    config, data = plan.config, plan.config.data
    parameters, about = list(plan.model.parameters()), models.description(plan.model)
    num_parameters = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    mesh, decayed = parallel.make_mesh(plan.sizes, device), parallel.decayed_names(plan.model)
    model = parallel.shard(plan.model, config, mesh, device, *_first_values(config))
    seed_generators(config.run.seed, mesh)
    optimizer = _adamw(model, config, decayed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, config))
    sampler = Sampler(
        plan.tokens.windows(data.seq_len),
        config.run.seed,
        data.shuffle,
        data.drop_last,
        data.may_change,
    )
    return Job(
        config,
        plan.text,
        device,
        mesh,
        model,
        optimizer,
        scheduler,
        sampler,
        Reader(plan.tokens, sampler, data, part_of(data.batch_size, mesh), device),
        plan.tokens,
        plan.validation,
        num_parameters,
        num_trained,
        about,
        factory.loss_of(config) if config.model.factory else None,
        weights.fingerprint(config.model.path) if config.lora.rank else "",
        factory.source_digest(config),
    )


def _first_values(config: Config) -> tuple[Values | None, Callable[[str], bool]]:
    """Returns a factory's values, and which modules get first values at all.

    Weights of `model.path` are loaded later, so only adapters on them get values.
    """
    if config.model.factory:
        made = factory.call(config)
        remedy = "draw from torch, numpy or random, which have the same seed on all ranks"
        named = dict([*made.named_parameters(), *made.named_buffers()])
        factory.check_equal(named, "as the function has made it", remedy)
        return Copied(made), every_module
    has_weights = bool(config.model.path and config.model.weights)
    return None, lambda name: not has_weights or pretrained.is_of_adapter(name)


def seed_generators(seed: int, mesh: DeviceMesh) -> None:
    """Seeds the generators differently on each rank, but equally within a tensor group.

    All ranks of a tensor group hold the same activations, so they need the same dropout.
    """
    mine = (seed + parallel.data_rank(mesh)) % (1 << 32)
    torch.manual_seed(mine)
    random.seed(mine)
    np.random.seed(mine)


def _adamw(model: nn.Module, config: Config, decayed: set[str]) -> torch.optim.AdamW:
    """Returns the optimizer. Its first group decays; norms, biases and embeddings do not."""
    optim = config.optim
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if optim.decay == "all" or configuration.keeps_flat(config):
        decayed = {strip_wrappers(name) for name, _ in named}
    groups = [
        {
            "params": [p for name, p in named if (strip_wrappers(name) in decayed) == is_decayed],
            "weight_decay": optim.weight_decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]
    how = (
        {}
        if optim.implementation == "auto"
        else {k: optim.implementation == k for k in ("fused", "foreach")}
    )
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=betas,
        eps=optim.eps,
        **how,
    )


def schedule(step: int, config: Config) -> float:
    """Returns the factor of the learning rate in a step, counted from 0.

    It is a linear warm-up, then half a cosine down to `min_lr_ratio`.
    """
    optim, total = config.optim, config.run.steps
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, total - optim.warmup_steps))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def part_of(batch_size: int, mesh: DeviceMesh) -> slice:
    """Returns the rows of a batch that are this rank's."""
    part = batch_size // data_ranks(mesh)
    start = parallel.data_rank(mesh) * part
    return slice(start, start + part)


def data_ranks(mesh: DeviceMesh) -> int:
    return dist.get_world_size() // mesh["tensor"].size()
