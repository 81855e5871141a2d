"""Finds what contradicts itself in a configuration, or does not fit the number of ranks.

It runs before any process group exists, and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from training.config import FLOAT32_MAX, Config, ConfigError


@dataclass(frozen=True, slots=True)
class Degrees:
    """The sizes of the mesh; their product is the world size."""

    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """The number of ranks that see different sequences."""
        return self.replicate * self.shard


def degrees(config: Config, world_size: int, local_world_size: int) -> Degrees:
    """Returns the sizes of the mesh.

    Raises:
        ConfigError: the product of the sizes is not the world size.
    """
    fsdp, tensor = config.fsdp, config.fsdp.tensor_parallel
    if world_size % tensor:
        raise ConfigError(f"fsdp.tensor_parallel = {tensor} does not divide {world_size} ranks")
    data = world_size // tensor
    if fsdp.strategy == "NO_SHARD":
        return Degrees(data, 1, tensor)
    if not is_hybrid(config):
        return Degrees(1, data, tensor)
    shard = fsdp.shard_size or max(1, min(data, local_world_size // tensor))
    if data % shard:
        raise ConfigError(
            f"fsdp.shard_size = {shard} does not divide the {data} ranks that hold different data"
        )
    return Degrees(data // shard, shard, tensor)


def is_hybrid(config: Config) -> bool:
    """Tells whether groups of ranks hold copies of the sharded model."""
    return config.fsdp.strategy.startswith("HYBRID")


def keeps_flat(config: Config) -> bool:
    """Tells whether FSDP1 keeps the parameters of a unit as one flat parameter."""
    return config.fsdp.api == "fsdp1" and not config.fsdp1.use_orig_params


def check(config: Config, world_size: int = 1, local_world_size: int = 1) -> Degrees:
    """Proves that a configuration is consistent and fits the number of ranks.

    Returns the sizes of the mesh.

    Raises:
        ConfigError: it is not consistent, or does not fit.
    """
    found = chain(*(find(config) for find in (_idle, _of_model, _of_run, _of_types)))
    if problem := next(found, ""):
        raise ConfigError(problem)
    sizes = degrees(config, world_size, local_world_size)
    data = config.data
    if data.batch_size % (sizes.data * data.accumulation):
        raise ConfigError(
            f"data.batch_size = {data.batch_size} is not a multiple of {sizes.data} data-parallel"
            f" ranks x {data.accumulation} micro-batches (data.accumulation)"
        )
    partial = config.fsdp.reshard_after_forward
    if type(partial) is int and (partial < 2 or partial >= sizes.shard or sizes.shard % partial):
        raise ConfigError(
            f"fsdp.reshard_after_forward = {partial}: a number must divide the {sizes.shard} ranks"
            " that share the parameters, and be neither 1 nor all of them; for these, use true"
            " and false"
        )
    return sizes


# tables and keys, and what they need to have an effect
_SIZES = "dim num_layers num_heads num_kv_heads hidden_dim vocab_size max_seq_len tied_embeddings"
_FSDP2 = "reshard_after_forward tensor_parallel forward_prefetch backward_prefetch unshard_ahead"
_SHARDED = "sharded parameters, and fsdp.strategy is NO_SHARD"


def _idle(config: Config) -> Iterator[str]:
    """Yields keys that are set, and need something that is off."""
    fsdp, model, metrics = config.fsdp, config.model, config.metrics
    is_fsdp1, is_sharded = fsdp.api == "fsdp1", fsdp.strategy != "NO_SHARD"
    is_decoder, has_tokens = not (model.path or model.factory), not model.factory
    splits = fsdp.tensor_parallel > 1 and is_decoder
    needs: tuple[tuple[str, str, object, str], ...] = (
        ("model", f"name {_SIZES}", is_decoder, "the built-in decoder"),
        ("model", "weights may_change", model.path, "model.path"),
        ("model", "loss", model.factory, "model.factory"),
        ("lora", "alpha dropout targets", config.lora.rank, "lora.rank"),
        ("data", "check_tokenizer", model.path, "model.path"),
        ("data", "seq_len packing", has_tokens, "tokens, not rows of model.factory"),
        ("fsdp", _FSDP2, not is_fsdp1, 'fsdp.api = "fsdp2"'),
        ("fsdp", f"{_FSDP2} cpu_offload", is_sharded, _SHARDED),
        ("fsdp", "tensor_parallel", has_tokens, "a plan, which model.factory lacks"),
        ("fsdp", "sequence_parallel", splits, "fsdp.tensor_parallel and the built-in decoder"),
        ("fsdp", "loss_parallel", splits, "fsdp.tensor_parallel and the built-in decoder"),
        ("fsdp", "shard_size", is_hybrid(config), 'fsdp.strategy = "HYBRID_SHARD", or _ZERO2'),
        ("fsdp", "wrap_classes", fsdp.wrap == "classes", 'fsdp.wrap = "classes"'),
        ("fsdp", "min_num_params", fsdp.wrap == "size", 'fsdp.wrap = "size"'),
        ("fsdp", "wrap_embeddings", has_tokens, "embeddings, not model.factory"),
        ("fsdp", "wrap_embeddings", is_fsdp1 or is_sharded, _SHARDED),
        ("fsdp", "pin_memory", fsdp.cpu_offload and not is_fsdp1, "FSDP2 with fsdp.cpu_offload"),
        ("fsdp", "reduce_every", config.data.accumulation > 1, "data.accumulation above 1"),
        ("fsdp1", " ".join(type(config.fsdp1).model_fields), is_fsdp1, 'fsdp.api = "fsdp1"'),
        ("precision", "buffer", is_fsdp1, 'fsdp.api = "fsdp1": FSDP2 casts no buffers'),
        ("precision", "overrides", not is_fsdp1, 'fsdp.api = "fsdp2": FSDP1 casts no inputs'),
        ("precision", "overrides cast_forward_inputs", is_fsdp1 or is_sharded, _SHARDED),
        ("compute", "compile_backend", config.compute.compile, "compute.compile = true"),
        ("compute", "loss_chunk", has_tokens, "tokens, not rows of model.factory"),
        ("compute", "loss_chunk", not fsdp.loss_parallel, "fsdp.loss_parallel = false"),
        ("checkpoint", "mirror_every", config.checkpoint.mirror, "checkpoint.mirror"),
        ("metrics", "validate_batches", metrics.validate_every, "metrics.validate_every"),
    )
    for table, keys, is_on, need in needs:
        for key, value in getattr(config, table).changed().items():
            if not is_on and key in keys.split():
                yield f"{table}.{key} = {value!r} changes nothing without {need}"


def _of_model(config: Config) -> Iterator[str]:
    """Yields contradictions between the model, its adapters and its data."""
    model, data, fsdp = config.model, config.data, config.fsdp
    if model.path and model.factory:
        yield "model.path and model.factory: give one of them"
    if model.path and not data.train:
        yield "model.path needs data.train, whose tokens are of that model"
    if model.factory and not data.train:
        yield "model.factory needs data.train, a safetensors file of inputs and targets"
    if config.lora.rank and not (model.path and model.weights):
        yield "lora.rank needs model.path, with weights: adapters change a trained model"
    if config.lora.rank and (fsdp.api == "fsdp1" or fsdp.tensor_parallel > 1):
        yield 'lora.rank needs fsdp.api = "fsdp2" and fsdp.tensor_parallel = 1'
    if bool(config.metrics.validate_every) != bool(data.validation):
        yield "data.validation, a token file, and metrics.validate_every, steps, need each other"
    if fsdp.wrap == "classes" and not fsdp.wrap_classes:
        yield 'fsdp.wrap = "classes" needs fsdp.wrap_classes, the names of module classes'
    if fsdp.sequence_parallel and data.seq_len % fsdp.tensor_parallel:
        yield f"fsdp.sequence_parallel: {fsdp.tensor_parallel} ranks do not divide data.seq_len"


def _of_run(config: Config) -> Iterator[str]:
    """Yields contradictions between steps, saves and the optimizer."""
    run, optim, checkpoint = config.run, config.optim, config.checkpoint
    fsdp, validates = config.fsdp, config.metrics.validate_every
    if run.epochs and "steps" in run.changed():
        yield f"run.epochs = {run.epochs} and run.steps = {run.steps}: give one of them"
    if checkpoint.keep_best and (not validates or checkpoint.every % validates):
        yield "checkpoint.keep_best: checkpoint.every must be a multiple of metrics.validate_every"
    if checkpoint.mirror and ("://" in checkpoint.dir or "://" not in checkpoint.mirror):
        yield "checkpoint.mirror is a URL such as s3://bucket/run, beside steps on a disk"
    if max(optim.lr / (1 - optim.beta1), optim.lr * optim.weight_decay) >= FLOAT32_MAX:
        yield f"optim.lr = {optim.lr}: AdamW's first step is beyond a float32"
    if optim.decay == "matrices" and keeps_flat(config):
        yield 'optim.decay = "matrices" needs fsdp1.use_orig_params = true: flat parameters mix'
    if fsdp.api == "fsdp1" and fsdp.cpu_offload and fsdp.reduce_every:
        yield "fsdp.reduce_every: FSDP1 with fsdp.cpu_offload adds gradients up wrongly: use fsdp2"


def _of_types(config: Config) -> Iterator[str]:
    """Yields types that nothing would apply."""
    precision, fsdp = config.precision, config.fsdp
    types = (precision.param, precision.reduce, precision.output, precision.buffer)
    if "float16" in types:
        yield "precision float16 needs a scaled loss, which this program lacks: use bfloat16"
    is_ddp = fsdp.strategy == "NO_SHARD" and fsdp.api == "fsdp2"
    for key in ("param", "reduce"):
        if is_ddp and config.model.dtype == "bfloat16" and getattr(precision, key) == "float32":
            yield f"precision.{key}: with NO_SHARD, it is model.dtype, which is bfloat16"
