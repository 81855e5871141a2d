"""Tensor parallelism: which matrices are split over ranks, and how."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from training.config import Config, ConfigError
from training.initialize import tied
from training.model import Decoder


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


def split_tensors(model: nn.Module, mesh: DeviceMesh, config: Config) -> None:
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
