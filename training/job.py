"""The objects of a training job: model, optimizer, schedule and data, sharded over all ranks."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_tools import RngState
from training import config as configuration
from training import parallel, sharding
from training.checks import keeps_flat
from training.config import Config
from training.data import Reader, Sampler
from training.extras import factory, pretrained, weights, wrappers
from training.prove import Plan


@dataclass(slots=True)
class Job:
    """The objects that the training loop uses."""

    plan: Plan
    device: torch.device
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    sampler: Sampler
    reader: Reader
    about: dict[str, Any]  # what a checkpoint tells of data and model
    num_parameters: int
    num_trained: int
    loss: factory.Loss | None = None  # of a factory's module; None: cross-entropy of tokens
    loss_note: str | None = None  # a warning on `loss`; None before its first call
    num_targets: int = 1  # of the last step, over all ranks
    best: tuple[int, float] | None = None  # the saved step with the lowest validation loss

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.plan.config

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
            # a copy: a resume changes the containers of a state in place
            "train_state": copy.deepcopy({"step": step, "best": self.best, **self.about}),
            "config": configuration.to_toml(self.plan.given),
        }


def build(plan: Plan, device: torch.device) -> Job:
    """Returns model, optimizer, schedule and data, sharded over all ranks.

    It shards the plan's own model, which cannot be used again.

    Raises:
        ConfigError: the model does not fit the mesh, or the device.
    """
    config, data, model = plan.config, plan.config.data, plan.model
    counts, sizes = [(p.numel(), p.requires_grad) for p in model.parameters()], plan.sizes
    about = {
        "data": plan.rows.identity,
        "model": pretrained.description(model) if config.model.path else {},
        "validation": _validated_on(plan),
    }
    if config.lora.rank:
        about["base"] = weights.fingerprint(config.model.path)
    if source := factory.source_digest(config):
        about["source"] = source
    mesh = parallel.make_mesh(device, sizes.shard, sizes.replicate, sizes.tensor)
    decayed = parallel.decayed_names(model)
    if config.model.factory:
        remedy = "draw from torch, numpy or random, which have the same seed on all ranks"
        named = dict([*model.named_parameters(), *model.named_buffers()])
        factory.check_equal(named, "as the function has made it", remedy)
        del named  # `shard` looks for references to parameters
    # weights of model.path are loaded later: only adapters on them are drawn
    has_weights = config.model.path and config.model.weights
    draws = pretrained.is_of_adapter if has_weights else lambda _: True
    model = sharding.shard(model, config, mesh, device, draws)
    seed_generators(config.run.seed, mesh)  # after `shard`, which seeds them for each module
    optimizer = _adamw(model, config, decayed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, config))
    sampler = Sampler(
        len(plan.rows), config.run.seed, data.shuffle, data.drop_last, data.may_change
    )
    return Job(
        plan=plan,
        device=device,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        reader=Reader(plan.rows, sampler, data.batch_size, part_of(data.batch_size, mesh), device),
        about=about,
        num_parameters=sum(numel for numel, _ in counts),
        num_trained=sum(numel for numel, is_trained in counts if is_trained),
        loss=factory.loss_of(config) if config.model.factory else None,
    )


def _validated_on(plan: Plan) -> str:
    """Returns what the validation data is, and how many of its rows are used; "" if there is none.

    Losses on other rows cannot be compared.
    """
    if plan.validation is None:
        return ""
    num_rows = plan.config.data.batch_size * plan.config.metrics.validate_batches
    return f"{plan.validation.identity['fingerprint']}, {min(num_rows, len(plan.validation))} rows"


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
    optim, groups = config.optim, ([], [])
    decays_all = optim.decay == "all" or keeps_flat(config)
    for name, parameter in wrappers.unwrapped(model).named_parameters():
        if parameter.requires_grad:
            is_decayed = decays_all or wrappers.plain_name(name) in decayed
            groups[0 if is_decayed else 1].append(parameter)
    decays = zip(groups, (optim.weight_decay, 0.0), strict=True)
    is_auto = optim.implementation == "auto"
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays if group],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=None if is_auto else optim.implementation == "fused",
        foreach=None if is_auto else optim.implementation == "foreach",
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
    """Returns the number of ranks that see different rows."""
    return dist.get_world_size() // mesh["tensor"].size()
