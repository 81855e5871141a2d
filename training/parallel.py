"""Sharding: mesh, units, FSDP2, FSDP1, DDP and tensor parallelism.

This is the only file with placements. It makes PyTorch's own calls, in this order:

- FSDP2: meta model, tensor parallelism, activation checkpointing, `fully_shard` from inner to outer
units, `to_empty`, first values, compile.
- FSDP1: meta model, activation checkpointing, `FullyShardedDataParallel`, compile.
`FullyShardedDataParallel` gives memory and first values unit by unit.

The module of a factory is not on the meta device: it already has memory and values.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import gc
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from training.checks import Degrees, is_hybrid
from training.config import Config, ConfigError
from training.initialize import FirstValues
from training.model import Decoder, tied
from training.units import blocks_of, units_of


def dtype_of(name: str) -> torch.dtype | None:
    """Returns a type by its name, or None for an empty name."""
    return getattr(torch, name) if name else None


# ---- sharding ------------------------------------------------------------------------------------


def make_mesh(sizes: Degrees, device: torch.device) -> DeviceMesh:
    """Returns the mesh of all ranks: replicate x shard x tensor."""
    return init_device_mesh(
        device.type,
        (sizes.replicate, sizes.shard, sizes.tensor),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )


def shard(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    draws: Callable[[str], bool] = lambda _: True,
) -> nn.Module:
    """Shards a model, and gives it memory and first values if it is on the meta device.

    The values are the same for every mesh and strategy.

    Args:
        model: as `training.model.make` returns it.
        config: of the run.
        mesh: from `make_mesh`.
        device: the device that computes.
        draws: tells by a module's name whether its parameters get values. Others will be loaded.

    Raises:
        ConfigError: the model does not fit the mesh or the requested units.
    """
    # the names are of the model before anything wraps its modules
    units, blocks = units_of(model, config), blocks_of(model, config)
    is_meta = next(model.parameters()).is_meta
    values = FirstValues(model, config.run.seed, device, draws) if is_meta else None
    before = {} if is_meta else {n: weakref.ref(p) for n, p in model.named_parameters()}
    split_and_checkpoint(model, config, mesh)
    if config.fsdp.api == "fsdp1":
        model = _fsdp1(model, units, config, mesh, device, values)
    elif config.fsdp.strategy == "NO_SHARD":
        if values:
            for module in model.modules():
                values.materialize(module, device)  # to_empty would untie tied weights
        model = _ddp(model.to(device), config, mesh)
    else:
        fsdp2(model, units, config, mesh)
        if values:
            # it unties weights, which FSDP2 ties again when it takes its shards from the modules
            model.to_empty(device="cpu" if config.fsdp.cpu_offload else device)
            values.all(model)
        _move_buffers(model, device)
        _check_references(before)
    if config.compute.compile:
        for name in blocks:
            find(model, name).compile(backend=config.compute.compile_backend)
    return model


def _check_references(before: dict[str, weakref.ref[nn.Parameter]]) -> None:
    """Refuses a model that refers to parameters other than by its modules.

    FSDP2 puts shards in the place of parameters. A list, an object or a closure that still holds
    the parameter itself would compute with its first values.

    Args:
        before: the parameters that the modules had.

    Raises:
        ConfigError: with the name of the first such parameter.
    """
    gc.collect()
    if held := [name for name, parameter in before.items() if parameter() is not None]:
        raise ConfigError(
            f"model.factory: something beside its module holds the parameter {held[0]}, such as a"
            " list or a closure, and would keep the first values: take it from the module in"
            " forward"
        )


def split_and_checkpoint(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism and activation checkpointing, which come before any FSDP."""
    if mesh["tensor"].size() > 1:
        _split_tensors(model, mesh["tensor"], config)
    every, blocks = config.compute.checkpoint_every, blocks_of(model, config)
    # from inner to outer: a wrapper does not take new children for the block in it
    for name in sorted(blocks[::every] if every else (), key=lambda n: -n.count(".")):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, checkpoint_wrapper(model.get_submodule(name)))


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


def fsdp2(model: nn.Module, units: dict[str, str], config: Config, mesh: DeviceMesh) -> None:
    """Makes FSDP2 units of a model, and tells them what to prefetch."""
    fsdp, precision = config.fsdp, config.precision
    offload = OffloadPolicy()
    if fsdp.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=fsdp.pin_memory and torch.cuda.is_available())
    data_mesh = mesh["replicate", "shard"] if is_hybrid(config) else mesh["shard"]
    reshard = fsdp.reshard_after_forward
    if reshard is None:
        reshard = fsdp.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    for name, dtype in units.items():
        # a unit with a type of its own returns the type that its neighbours compute in
        around = precision.param or config.model.dtype
        output = around if dtype else precision.output if not name else ""
        policy = MixedPrecisionPolicy(
            param_dtype=dtype_of(dtype or precision.param),
            reduce_dtype=dtype_of(precision.reduce),
            output_dtype=dtype_of(output),
            cast_forward_inputs=precision.cast_forward_inputs,
        )
        after = reshard
        if not name and reshard is not False:
            # None: PyTorch keeps the root gathered, because backward needs it first
            after = fsdp.reshard_after_forward
        fully_shard(
            model.get_submodule(name),
            mesh=data_mesh,
            reshard_after_forward=after,
            mp_policy=policy,
            offload_policy=offload,
        )
    _prefetch(model, units, config)


def _fsdp1(
    model: nn.Module,
    units: dict[str, str],
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


def _ddp(model: nn.Module, config: Config, mesh: DeviceMesh) -> DistributedDataParallel:
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


def _prefetch(model: nn.Module, units: dict[str, str], config: Config) -> None:
    """Tells each unit which units to gather while it runs; units run in the order of the model."""
    names = dict.fromkeys(
        name.replace("._checkpoint_wrapped_module", "") for name, _ in model.named_modules()
    )
    running = [model.get_submodule(name) for name in names if name and name in units]
    for i, unit in enumerate(running):
        if depth := config.fsdp.forward_prefetch:
            unit.set_modules_to_forward_prefetch(running[i + 1 : i + 1 + depth])
        if depth := config.fsdp.backward_prefetch:
            unit.set_modules_to_backward_prefetch(running[max(0, i - depth) : i][::-1])


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


# ---- tensor parallelism --------------------------------------------------------------------------


def check_heads(model: nn.Module, num_ranks: int) -> None:
    """Refuses tensor parallelism that would split a head, or a hidden layer unevenly.

    Raises:
        ConfigError: the number of ranks does not divide a number of heads, or a width.
    """
    if num_ranks == 1:
        return
    config = getattr(model, "config", None)
    for key in (
        *("num_heads", "num_kv_heads", "num_attention_heads", "num_key_value_heads"),
        *("hidden_dim", "intermediate_size"),
    ):
        count = getattr(config, key, 0) or 0
        if count % num_ranks:
            raise ConfigError(
                f"fsdp.tensor_parallel = {num_ranks} does not divide the model's {key} = {count}"
            )


def _split_tensors(model: nn.Module, mesh: DeviceMesh, config: Config) -> None:
    """Splits the matrices of each layer over a mesh; heads stay whole."""
    check_heads(model, mesh.size())
    shared = tied(model)
    parallelize_module(model, mesh, _plan(model, config))
    for first, *others in shared:
        for other in others:
            other.module._parameters[other.name] = first.module._parameters[first.name]


def decoder_plan(splits_sequence: bool, splits_loss: bool) -> dict[str, ParallelStyle]:
    """Returns how the modules of a built-in decoder are split, by glob.

    Args:
        splits_sequence: between the matrices, each rank has a part of the sequence.
        splits_loss: each rank keeps the logits of its part of the vocabulary.
    """
    residual = Shard(1) if splits_sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "output": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if splits_loss else Replicate(),
            use_local_output=not splits_loss,
        ),
    }
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    plan["layers.*.feed_forward.w3"] = ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=residual)
    if splits_sequence:
        for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"):
            plan[name] = SequenceParallel()
        for name, others in (("attention", (None, None)), ("feed_forward", ())):
            plan[f"layers.*.{name}"] = PrepareModuleInput(
                input_layouts=(Shard(1), *others),
                desired_input_layouts=(Replicate(), *others),
            )
    return plan


def split_dims(model: nn.Module) -> dict[str, int]:
    """Returns which dimension of which parameter tensor parallelism splits, by name."""
    plan, found = _plan(model), {}
    for name, _ in model.named_parameters():
        path, _, key = name.rpartition(".")
        style = next((one for glob, one in plan.items() if fnmatch.fnmatchcase(path, glob)), None)
        is_row = isinstance(style, RowwiseParallel) and isinstance(
            model.get_submodule(path), nn.Linear
        )
        if isinstance(style, (ColwiseParallel, RowwiseParallel)) and not (is_row and key == "bias"):
            found[name] = 1 if is_row else 0
    return found


def _plan(model: nn.Module, config: Config | None = None) -> dict[str, ParallelStyle]:
    if not isinstance(model, Decoder):
        return _transformers_plan(model)
    fsdp = (config or Config()).fsdp
    return decoder_plan(fsdp.sequence_parallel, fsdp.loss_parallel)


def _transformers_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Returns the plan that transformers has for a model."""
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise ConfigError("fsdp.tensor_parallel: transformers has no plan for this model")
    if unknown := sorted(set(plan.values()) - set(styles)):
        raise ConfigError(
            f"fsdp.tensor_parallel: this model needs {unknown[0]!r}, which is not supported"
        )
    return {name: styles[style]() for name, style in plan.items()}


# ---- a step --------------------------------------------------------------------------------------


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
