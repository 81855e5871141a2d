"""The older wrappers: `FullyShardedDataParallel` (FSDP1), and `DistributedDataParallel`.

The order of FSDP1's calls: meta model, activation checkpointing, `FullyShardedDataParallel`,
compile. It gives memory and first values unit by unit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from training.checks import is_hybrid
from training.config import Config
from training.initialize import FirstValues
from training.units import dtype_of


def fsdp1(
    model: nn.Module,
    units: Mapping[str, object],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    values: FirstValues | None,
) -> FullyShardedDataParallel:
    fsdp, only, precision = config.fsdp, config.fsdp1, config.precision
    wrapped = {id(model.get_submodule(name)) for name in units if name}
    strategy, before = fsdp.strategy, only.backward_prefetch
    name = "_HYBRID_SHARD_ZERO2" if strategy == "HYBRID_SHARD_ZERO2" else strategy
    whole = mesh["replicate"] if strategy == "NO_SHARD" else mesh["shard"]
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh["replicate", "shard"] if is_hybrid(config) else whole,
        sharding_strategy=ShardingStrategy[name],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
        cpu_offload=CPUOffload(offload_params=fsdp.cpu_offload),
        mixed_precision=MixedPrecision(
            param_dtype=dtype_of(precision.param),
            reduce_dtype=dtype_of(precision.reduce),
            buffer_dtype=dtype_of(precision.buffer),
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_forward_inputs,
        ),
        param_init_fn=functools.partial(values.materialize, device=device) if values else None,
        device_id=device,
        use_orig_params=only.use_orig_params,
        sync_module_states=only.sync_module_states,
        limit_all_gathers=only.limit_all_gathers,
        forward_prefetch=only.forward_prefetch,
        backward_prefetch=None if before == "NO_PREFETCH" else BackwardPrefetch[before],
    )


def ddp(model: nn.Module, config: Config, mesh: DeviceMesh) -> DistributedDataParallel:
    group = mesh["replicate"].get_group()
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        # another model may have parameters that a step does not use
        find_unused_parameters=bool(config.model.factory),
    )
    if config.precision.reduce == "bfloat16":
        wrapped.register_comm_hook(group, _mean_in_bf16)
    return wrapped


# no annotations: DDP would compare them with its own classes
def _mean_in_bf16(group, bucket):
    """Reduces one bucket of DDP's gradients in bfloat16, on any backend.

    torch's own hook supports only nccl.
    """
    half = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def without_gpu(config: Config) -> tuple[Config, list[str]]:
    """Returns the configuration for a CPU, without what FSDP1 does with GPUs only, and notes."""
    notes = []
    if config.fsdp.api == "fsdp1" and config.fsdp1.sync_module_states:
        config = config.having("fsdp1", sync_module_states=False)
        notes.append(
            "fsdp1.sync_module_states changes nothing on a CPU: all ranks draw, or load, the same"
            " values"
        )
    if config.fsdp.api == "fsdp1" and config.fsdp.cpu_offload:
        config = config.having("fsdp", cpu_offload=False)
        notes.append("fsdp.cpu_offload changes nothing with FSDP1 on a CPU: all is there already")
    return config, notes


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model below DDP and FSDP1."""
    while isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        model = model.module
    return model


def plain_name(name: str) -> str:
    """Returns a parameter's name before anything was wrapped around the modules in the model."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def find(model: nn.Module, name: str) -> nn.Module:
    """Returns a module by its name before anything was wrapped around it."""
    return unwrapped(model).get_submodule(name)
