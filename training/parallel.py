"""Sharding with FSDP2: a mesh, a policy, and the units of a model.

Copy this file into a project of your own, and `initialize.py` if the model is made on the meta
device. They import torch only.

The order of the calls matters: meta model, tensor parallelism, activation checkpointing,
`fully_shard` from inner to outer units, `to_empty`, first values, compile.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from training.initialize import FirstValues

# the units of a model by name, children before parents, and "" for the root last; the value is the
# type that a unit computes in, or None for the policy's
Units = Mapping[str, torch.dtype | None]


class HeldError(ValueError):
    """Something beside its module holds a parameter."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How FSDP2 shards a model, and in which types it computes.

    Attributes:
        reshard_after_forward: free a unit's parameters after its forward. A number keeps them
            sharded over that many ranks.
        reshard_root: the same of the root; None keeps it, because backward needs it first.
        param_dtype: in which units compute; None: the type of the parameters.
        reduce_dtype: in which gradients are reduced; None: `param_dtype`.
        output_dtype: of the root's result; None: as it comes.
        kept_dtype: the type of the parameters. A unit with a type of its own returns
            `param_dtype`, or this.
        cast_forward_inputs: cast the inputs of each unit to its type.
        cpu_offload: keep shards in the memory of the CPU.
        pin_memory: in page-locked memory, with `cpu_offload` and a GPU.
        forward_prefetch: the number of units to gather ahead of the running one; 0: torch's rule.
        backward_prefetch: the same for backward.
    """

    reshard_after_forward: bool | int = True
    reshard_root: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    kept_dtype: torch.dtype = torch.float32
    cast_forward_inputs: bool = True
    cpu_offload: bool = False
    pin_memory: bool = True
    forward_prefetch: int = 0
    backward_prefetch: int = 0


def make_mesh(device: torch.device, shard: int, replicate: int = 1, tensor: int = 1) -> DeviceMesh:
    """Returns the mesh of all ranks: replicate x shard x tensor.

    Args:
        device: the kind of device that computes.
        shard: the number of ranks that share one copy of the parameters.
        replicate: the number of such copies; above 1, the strategy is hybrid.
        tensor: the number of ranks that split each matrix.
    """
    return init_device_mesh(
        device.type,
        (replicate, shard, tensor),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: Policy,
    units: Units,
    device: torch.device,
    values: FirstValues | None = None,
) -> None:
    """Shards a model in place, and gives it memory and first values if it is on the meta device.

    Args:
        model: whole, on the CPU or on the meta device.
        mesh: from `make_mesh`, with the names of its dimensions.
        policy: of all units.
        units: modules whose parameters are gathered and freed together, inner ones first.
        device: the device that computes.
        values: fills a model that is on the meta device. They are the same for every mesh.

    Raises:
        HeldError: something beside the model's modules holds a parameter.
        ValueError: the model is on the meta device, and `values` is None.
    """
    if values is None and any(p.is_meta for p in model.parameters()):
        raise ValueError("values: a model on the meta device needs FirstValues")
    before = {} if values else {n: weakref.ref(p) for n, p in model.named_parameters()}
    apply_fsdp(model, mesh, policy, units)
    if values:
        # it unties weights, which FSDP2 ties again when it takes its shards from the modules
        model.to_empty(device="cpu" if policy.cpu_offload else device)
        values.all(model)
    _move_buffers(model, device)
    _check_references(before)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, policy: Policy, units: Units) -> None:
    """Makes FSDP2 units of a model, and tells them what to prefetch."""
    offload = OffloadPolicy()
    if policy.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=policy.pin_memory and torch.cuda.is_available())
    is_hybrid = mesh["replicate"].size() > 1
    for name, dtype in units.items():
        # a unit with a type of its own returns the type that its neighbours compute in
        around = policy.param_dtype or policy.kept_dtype
        is_root_kept = not name and policy.reshard_after_forward is not False
        fully_shard(
            model.get_submodule(name),
            mesh=mesh["replicate", "shard"] if is_hybrid else mesh["shard"],
            reshard_after_forward=(
                policy.reshard_root if is_root_kept else policy.reshard_after_forward
            ),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype or policy.param_dtype,
                reduce_dtype=policy.reduce_dtype,
                output_dtype=around if dtype else None if name else policy.output_dtype,
                cast_forward_inputs=policy.cast_forward_inputs,
            ),
            offload_policy=offload,
        )
    _prefetch(model, policy, units)


def checkpoint_activations(model: nn.Module, blocks: Sequence[str]) -> None:
    """Makes layers compute their activations again in backward; call it before `shard`.

    Args:
        model: whole.
        blocks: the names of the layers.
    """
    # from inner to outer: a wrapper does not take new children for the block in it
    for name in sorted(blocks, key=lambda n: -n.count(".")):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, checkpoint_wrapper(model.get_submodule(name)))


def _prefetch(model: nn.Module, policy: Policy, units: Units) -> None:
    """Tells each unit which units to gather while it runs; units run in the order of the model."""
    names = dict.fromkeys(
        name.replace("._checkpoint_wrapped_module", "") for name, _ in model.named_modules()
    )
    running = [model.get_submodule(name) for name in names if name and name in units]
    for i, unit in enumerate(running):
        if depth := policy.forward_prefetch:
            unit.set_modules_to_forward_prefetch(running[i + 1 : i + 1 + depth])
        if depth := policy.backward_prefetch:
            unit.set_modules_to_backward_prefetch(running[max(0, i - depth) : i][::-1])


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _check_references(before: dict[str, weakref.ref[nn.Parameter]]) -> None:
    """Refuses a model that refers to parameters other than by its modules.

    FSDP2 puts shards in the place of parameters. A list, an object or a closure that still holds
    the parameter itself would compute with its first values.

    Args:
        before: the parameters that the modules had.

    Raises:
        HeldError: with the name of the first such parameter.
    """
    gc.collect()
    if held := [name for name, parameter in before.items() if parameter() is not None]:
        raise HeldError(
            f"something beside its module holds the parameter {held[0]}, such as a"
            " list or a closure, and would keep the first values: take it from the module in"
            " forward"
        )


def decayed_names(model: nn.Module) -> set[str]:
    """Returns the names of the matrices: not of norms, biases and embeddings.

    Args:
        model: before anything wraps its modules, because FSDP1 flattens parameters.
    """
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
    }


# ---- a step --------------------------------------------------------------------------------------


def local(value: Tensor) -> Tensor:
    """Returns a value that every tensor rank has as a plain tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextlib.contextmanager
def reducing(model: nn.Module, is_last: bool, every: bool) -> Iterator[None]:
    """Makes only the last micro-batch of a step reduce gradients over ranks, or each if `every`.

    Otherwise earlier micro-batches add up their gradients on each rank.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or every)
        model.set_is_last_backward(is_last)
        yield
    else:
        with contextlib.nullcontext() if is_last or every else model.no_sync():
            yield


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients so that their norm over all ranks is at most `max_norm`.

    Returns the norm before scaling, 0-d. With a `max_norm` of 0, nothing is scaled. The ranks
    exchange their norms.
    """
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm or float("inf"))
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(
                parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None, []
            ).append(parameter)
    norms = []
    for parameters in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm:
        for parameters in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def data_rank(mesh: DeviceMesh) -> int:
    """Returns the number of this rank's part of a batch.

    Ranks that differ only in the tensor dimension have the same part.
    """
    return dist.get_rank() // mesh["tensor"].size()
