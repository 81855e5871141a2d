"""Sharding: mesh, units, FSDP2, FSDP1, DDP and tensor parallelism.

This is the only file with placements. It makes PyTorch's own calls, in this order:

- FSDP2: meta model, tensor parallelism, activation checkpointing, `fully_shard` from inner to outer
units, `to_empty`, first values, compile.
- FSDP1: meta model, activation checkpointing, `FullyShardedDataParallel`, compile.
`FullyShardedDataParallel` gives memory and first values unit by unit.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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

from training.config import Config, ConfigError, Degrees
from training.initialize import Drawn, Init, Values, every_module
from training.model import Decoder, block_classes, tied


def dtype_of(name: str) -> torch.dtype | None:
    """Returns a type by its name, or None for an empty name."""
    return getattr(torch, name) if name else None


# ---- units: modules that are sharded together ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are gathered and freed together.

    Parameters of inner units do not count.
    """

    name: str  # "" is the root
    dtype: str = ""  # the compute type, if it differs from the default


def blocks_of(model: nn.Module, config: Config) -> list[str]:
    """Returns the names of a model's layers, in order.

    If the model does not name their classes, they are those of `fsdp.wrap_classes`.
    """
    wrapped = config.fsdp.wrap_classes if config.fsdp.wrap == "classes" else []
    classes = block_classes(model) or set(wrapped)
    return [
        name for name, module in model.named_modules() if name and type(module).__name__ in classes
    ]


def check_blocks(model: nn.Module, config: Config) -> None:
    """Refuses settings that are for layers, if it is not known what a layer is.

    Raises:
        ConfigError: the message names the setting.
    """
    compute = config.compute
    for key in ("checkpoint_every", "compile"):
        if getattr(compute, key) and not blocks_of(model, config):
            raise ConfigError(
                f"compute.{key}: this model does not name its layers; give their classes in"
                ' fsdp.wrap_classes, with fsdp.wrap = "classes"'
            )


def units_of(model: nn.Module, config: Config) -> list[Unit]:
    """Returns the FSDP units of a model, children before parents, the root last.

    Raises:
        ConfigError: the model lacks a class, a layer or a module.
    """
    names = _chosen(model, config)
    if config.fsdp.wrap_embeddings:
        names |= set(embeddings_of(model))
    overrides = {
        name: dtype
        for glob, dtype in config.precision.overrides.items()
        for name in _matching(model, glob)
    }
    order = [
        name for name, _ in model.named_modules() if name and (name in names or name in overrides)
    ]
    for name in order:
        if isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(
                f"{name} is only a list of modules, which FSDP cannot shard as a unit: name the"
                " modules in it (fsdp.wrap_classes, precision.overrides)"
            )
    shared = _shared_outside(model, order)
    for name in overrides:
        if name in shared:
            raise ConfigError(
                f"precision.overrides: {name} shares a weight with another module, so it has the"
                " type of the root: leave it out"
            )
    order.sort(key=lambda name: -name.count("."))
    return [Unit(name, overrides.get(name, "")) for name in order if name not in shared] + [
        Unit("", overrides.get("", ""))
    ]


def _chosen(model: nn.Module, config: Config) -> set[str]:
    fsdp = config.fsdp
    if fsdp.strategy == "NO_SHARD" and config.model.factory:
        return set()  # DDP has no units
    if fsdp.wrap == "layers":
        if not (names := set(blocks_of(model, config))):
            raise ConfigError(
                'fsdp.wrap = "layers": this model does not name its layers; give their'
                " classes in fsdp.wrap_classes"
            )
        return names
    if fsdp.wrap == "classes":
        classes = {type(module).__name__ for module in model.modules()}
        if unknown := [name for name in fsdp.wrap_classes if name not in classes]:
            raise ConfigError(
                f"fsdp.wrap_classes: the model has no {unknown[0]!r}; it has"
                f" {', '.join(sorted(classes))}"
            )
        return {
            name
            for name, module in model.named_modules()
            if type(module).__name__ in fsdp.wrap_classes and name
        }
    return _by_size(model, fsdp.min_num_params) if fsdp.wrap == "size" else set()


def _by_size(model: nn.Module, least: int) -> set[str]:
    """Returns the modules that FSDP1's size policy wraps.

    They have at least `least` parameters outside of wrapped modules. `units_of` then drops modules
    that share a parameter with an outside module, although FSDP1 would wrap them. Source: torch
    2.13 `torch/distributed/fsdp/wrap.py`, `_recursive_wrap` and `size_based_auto_wrap_policy`.
    """
    chosen: set[str] = set()

    def visit(name: str, module: nn.Module) -> int:
        """Returns the number of wrapped parameters in a module."""
        numel = sum(p.numel() for p in module.parameters())
        if numel < least or isinstance(module, nn.MultiheadAttention):
            return 0
        wrapped = sum(
            visit(f"{name}.{child}" if name else child, m) for child, m in module.named_children()
        )
        if (
            name
            and numel - wrapped >= least
            and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        ):
            chosen.add(name)
            return numel
        return wrapped

    visit("", model)
    return chosen


def embeddings_of(model: nn.Module) -> list[str]:
    """Returns the names of the embedding and the head; nothing for the module of a factory."""
    if isinstance(model, Decoder):
        return ["tok_embeddings", "output"]
    if not hasattr(model, "get_input_embeddings"):
        return []
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is one for one in both)]


def _matching(model: nn.Module, glob: str) -> list[str]:
    names = [
        n
        for n, m in model.named_modules()
        if fnmatch.fnmatchcase(n, glob) and any(True for _ in m.parameters())
    ]
    if not names:
        raise ConfigError(f"precision.overrides.{glob}: no module with parameters is called that")
    return names


def _shared_outside(model: nn.Module, names: list[str]) -> set[str]:
    """Returns the modules that share a parameter (tied weights) with an outside module.

    Such modules stay together, in the root.
    """
    inside = lambda path, unit: path == unit or path.startswith(f"{unit}.")  # noqa: E731
    return {
        unit
        for unit in names
        for uses in tied(model)
        if len({inside(use.path, unit) for use in uses}) == 2
    }


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
    values: Values | None = None,
    draws: Callable[[str], bool] = every_module,
) -> nn.Module:
    """Shards a model on the meta device, and gives it memory and first values.

    The values are the same for every mesh and strategy.

    Args:
        values: the first values; by default, the model's own initializer draws them.
        draws: tells by a module's name whether its parameters get values. Others will be loaded.

    Raises:
        ConfigError: the model does not fit the mesh or the requested units.
    """
    units, blocks = units_of(model, config), blocks_of(model, config)
    init = Init(model, values or Drawn(model, config.run.seed, device, draws), draws)
    if mesh["tensor"].size() > 1:
        _split_tensors(model, mesh["tensor"], config)
    _checkpoint_activations(model, blocks, config.compute.checkpoint_every)
    home = torch.device("cpu") if config.fsdp.cpu_offload else device
    if config.fsdp.api == "fsdp1":
        model = _fsdp1(model, units, config, mesh, device, init)
    elif config.fsdp.strategy == "NO_SHARD":
        for module in model.modules():
            init.materialize(module, device)  # to_empty would untie tied weights
        model = DistributedDataParallel(
            model,
            process_group=mesh["replicate"].get_group(),
            gradient_as_bucket_view=True,
            # another model may have parameters that a step does not use
            find_unused_parameters=bool(config.model.factory),
        )
        if config.precision.reduce == "bfloat16":
            model.register_comm_hook(mesh["replicate"].get_group(), _mean_in_bf16)
    else:
        _fsdp2(model, units, config, mesh)
        model.to_empty(device=home)
        init.all(model)
        _move_buffers(model, device)
        _prefetch(model, units, config)
    if config.compute.compile:
        for name in blocks:
            find(model, name).compile(backend=config.compute.compile_backend)
    return model


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
        config = replace(config, fsdp1=replace(config.fsdp1, sync_module_states=False))
        notes.append(
            "fsdp1.sync_module_states changes nothing on a CPU: all ranks draw, or load, the same"
            " values"
        )
    if config.fsdp.api == "fsdp1" and config.fsdp.cpu_offload:
        config = replace(config, fsdp=replace(config.fsdp, cpu_offload=False))
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


def find(model: nn.Module, name: str) -> nn.Module:
    """Returns a module by its name before anything was wrapped around it."""
    while isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        model = model.module
    return model.get_submodule(name)


def _fsdp2(model: nn.Module, units: list[Unit], config: Config, mesh: DeviceMesh) -> None:
    fsdp, precision = config.fsdp, config.precision
    offload = (
        CPUOffloadPolicy(pin_memory=fsdp.pin_memory and torch.cuda.is_available())
        if fsdp.cpu_offload
        else OffloadPolicy()
    )
    data_mesh = mesh["replicate", "shard"] if fsdp.strategy.startswith("HYBRID") else mesh["shard"]
    reshard = fsdp.reshard_after_forward
    if reshard is None:
        reshard = fsdp.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    for unit in units:
        # a unit with a type of its own returns the type that its neighbours compute in
        around = precision.param or config.model.dtype
        output = around if unit.dtype else precision.output * (not unit.name)
        policy = MixedPrecisionPolicy(
            param_dtype=dtype_of(unit.dtype or precision.param),
            reduce_dtype=dtype_of(precision.reduce),
            output_dtype=dtype_of(output),
            cast_forward_inputs=precision.cast_forward_inputs,
        )
        # backward needs the root's parameters first, so PyTorch keeps them gathered by default
        after = reshard if unit.name or reshard is False else fsdp.reshard_after_forward
        fully_shard(
            model.get_submodule(unit.name),
            mesh=data_mesh,
            reshard_after_forward=after,
            mp_policy=policy,
            offload_policy=offload,
        )


def _fsdp1(
    model: nn.Module,
    units: list[Unit],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    init: Init,
) -> FullyShardedDataParallel:
    fsdp, only, precision = config.fsdp, config.fsdp1, config.precision
    wrapped = {id(model.get_submodule(unit.name)) for unit in units if unit.name}
    is_2d = fsdp.strategy.startswith("HYBRID")
    whole = mesh["replicate"] if fsdp.strategy == "NO_SHARD" else mesh["shard"]
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh["replicate", "shard"] if is_2d else whole,
        sharding_strategy=ShardingStrategy[
            "_HYBRID_SHARD_ZERO2" if fsdp.strategy == "HYBRID_SHARD_ZERO2" else fsdp.strategy
        ],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
        cpu_offload=CPUOffload(offload_params=fsdp.cpu_offload),
        mixed_precision=MixedPrecision(
            param_dtype=dtype_of(precision.param),
            reduce_dtype=dtype_of(precision.reduce),
            buffer_dtype=dtype_of(precision.buffer),
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_forward_inputs,
        ),
        param_init_fn=functools.partial(init.materialize, device=device),
        device_id=device,
        use_orig_params=only.use_orig_params,
        sync_module_states=only.sync_module_states,
        limit_all_gathers=only.limit_all_gathers,
        forward_prefetch=only.forward_prefetch,
        backward_prefetch=(
            None
            if only.backward_prefetch == "NO_PREFETCH"
            else BackwardPrefetch[only.backward_prefetch]
        ),
    )


# no annotations: DDP would compare them with its own classes
def _mean_in_bf16(group, bucket):
    """Reduces one bucket of DDP's gradients in bfloat16, on any backend.

    torch's own hook supports only nccl.
    """
    half = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _checkpoint_activations(model: nn.Module, blocks: list[str], every: int) -> None:
    # from inner to outer: a wrapper does not take new children for the block in it
    for name in sorted(blocks[::every] if every else (), key=lambda n: -n.count(".")):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, checkpoint_wrapper(model.get_submodule(name)))


def _prefetch(model: nn.Module, units: list[Unit], config: Config) -> None:
    """Tells each unit which units to gather while it runs; units run in the order of the model."""
    chosen = {unit.name for unit in units if unit.name}
    names = dict.fromkeys(
        name.replace("._checkpoint_wrapped_module", "") for name, _ in model.named_modules()
    )
    running = [model.get_submodule(name) for name in names if name in chosen]
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
    plan = (
        decoder_plan(config.fsdp.sequence_parallel, config.fsdp.loss_parallel)
        if isinstance(model, Decoder)
        else _transformers_plan(model)
    )
    parallelize_module(model, mesh, plan)
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


def split_globs(model: nn.Module) -> list[str]:
    """Returns globs of the modules whose matrices tensor parallelism splits."""
    plan = decoder_plan(False, False) if isinstance(model, Decoder) else _transformers_plan(model)
    return list(plan)


def _transformers_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Returns the plan that transformers has for a model.

    Raises:
        ConfigError: there is none, or it has a style that is not supported here.
    """
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
