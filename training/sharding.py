"""From the configuration to the calls that shard a model: FSDP2, FSDP1 or DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from training import parallel
from training.config import Config, ConfigError
from training.extras.tensor import split_tensors
from training.extras.wrappers import ddp, find, fsdp1
from training.initialize import FirstValues
from training.model import initializer
from training.parallel import Policy
from training.units import blocks_of, dtype_of, units_of


def shard(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    draws: Callable[[str], bool] = lambda _: True,
) -> nn.Module:
    """Shards a model as configured.

    The module of a factory is not on the meta device: it already has memory and values.

    Args:
        model: as `training.model.make` returns it.
        config: of the run.
        mesh: of `training.parallel.make_mesh`.
        device: the device that computes.
        draws: tells by a module's name whether its parameters get values. Others will be loaded.

    Returns:
        The model, or the wrapper of FSDP1 or DDP around it.

    Raises:
        ConfigError: the model does not fit the mesh or the requested units.
    """
    # the names are of the model before anything wraps its modules
    units, blocks = units_of(model, config), blocks_of(model, config)
    values = None
    if next(model.parameters()).is_meta:
        values = FirstValues(model, initializer(model), config.run.seed, device, draws)
    split_and_checkpoint(model, config, mesh)
    if config.fsdp.api == "fsdp1":
        model = fsdp1(model, units, config, mesh, device, values)
    elif config.fsdp.strategy == "NO_SHARD":
        if values:
            for module in model.modules():
                values.materialize(module, device)  # to_empty would untie tied weights
        model = ddp(model.to(device), config, mesh)
    else:
        try:
            parallel.shard(model, mesh, policy_of(config), units, device, values)
        except parallel.HeldError as error:
            raise ConfigError(f"model.factory: {error}") from error
    if config.compute.compile:
        for name in blocks:
            find(model, name).compile(backend=config.compute.compile_backend)
    return model


def policy_of(config: Config) -> Policy:
    """Returns the policy of FSDP2 that the configuration means."""
    fsdp, precision = config.fsdp, config.precision
    reshard = fsdp.reshard_after_forward
    return Policy(
        reshard_after_forward=(
            fsdp.strategy in ("FULL_SHARD", "HYBRID_SHARD") if reshard is None else reshard
        ),
        reshard_root=reshard,
        param_dtype=dtype_of(precision.param),
        reduce_dtype=dtype_of(precision.reduce),
        output_dtype=dtype_of(precision.output),
        kept_dtype=getattr(torch, config.model.dtype),
        cast_forward_inputs=precision.cast_forward_inputs,
        cpu_offload=fsdp.cpu_offload,
        pin_memory=fsdp.pin_memory,
        forward_prefetch=fsdp.forward_prefetch,
        backward_prefetch=fsdp.backward_prefetch,
    )


def split_and_checkpoint(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism and activation checkpointing, which come before any FSDP."""
    if mesh["tensor"].size() > 1:
        split_tensors(model, mesh["tensor"], config)
    if every := config.compute.checkpoint_every:
        parallel.checkpoint_activations(model, blocks_of(model, config)[::every])


def check_backend(config: Config) -> None:
    """Refuses a compiler that torch does not have.

    Raises:
        ConfigError: torch does not have it; the message lists those that it has.
    """
    if config.compute.compile:
        from torch._dynamo import list_backends, lookup_backend
        from torch._dynamo.exc import InvalidBackend

        try:
            lookup_backend(config.compute.compile_backend)
        except InvalidBackend:
            known = ", ".join(list_backends(exclude_tags=()))
            raise ConfigError(
                f"compute.compile_backend = {config.compute.compile_backend!r}: torch knows {known}"
            ) from None


def computing(config: Config, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns the context of a forward pass: autocast, if nothing is sharded.

    FSDP casts only sharded parameters.
    """
    if config.fsdp.strategy == "NO_SHARD" and config.fsdp.api == "fsdp2" and config.precision.param:
        return torch.autocast(device.type, dtype_of(config.precision.param))
    return contextlib.nullcontext()


def splitting_loss(config: Config) -> contextlib.AbstractContextManager[object]:
    """Returns the context of a loss and its backward pass, with the vocabulary split or not."""
    return loss_parallel() if config.fsdp.loss_parallel else contextlib.nullcontext()
