"""The configuration of a run: one TOML file, and `--set table.key=value` to override it.

Every key is typed and checked. This module does not import torch. `resolve` reads the
configuration. `check` proves that it is consistent and fits the number of ranks, before any process
group exists.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Dtype = Literal["", "float32", "bfloat16", "float16"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
_FLOAT32_MAX = 3.4e38
_LARGEST_SIZE = 1 << 24  # of a built-in decoder: larger ones are mistakes, and take hours to make


class ConfigError(Exception):
    """The configuration cannot be run; exit status 2.

    The text names the key, its value and the allowed values.
    """


@dataclass(frozen=True, slots=True)
class Run:
    """The run as a whole."""

    dir: str = "run"  # checkpoints, metrics.jsonl, config.toml, export/, profile/
    steps: int = 100  # last step, counted from the start of training
    epochs: int = 0  # instead of `steps`: how often the data is seen; 0: `steps` counts
    seed: int = 0
    resume_from: str = ""  # A checkpoint to start from, instead of the newest in `dir`.
    export: bool = False  # At the end, merge to dir/export: safetensors and the model's config.
    # Exit with status 3 if a loss is not finite, and do not save that step.
    stop_at_nan: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """A built-in decoder by name, a transformers model by path, or any module by a factory."""

    name: Literal["tiny", "small", "medium", "1b", "8b"] = "tiny"
    # instead of `name`: a directory with config.json, and with safetensors if `weights` is true
    path: str = ""
    weights: bool = True
    # instead of `name`: "package.module:function", which returns an nn.Module
    factory: str = ""
    loss: str = ""  # with `factory`: of outputs and targets; "": cross-entropy
    dtype: Literal["float32", "bfloat16"] = "float32"  # in which parameters are kept
    dim: int = 0  # 0 here and below: the size that belongs to `name`
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0  # heads of keys and values; each serves a group of query heads
    hidden_dim: int = 0
    vocab_size: int = 0
    max_seq_len: int = 0
    tied_embeddings: bool = False
    # allow another config.json in `path` than the checkpoint's when a run resumes
    may_change: bool = False


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of PEFT on the model in `model.path`: only they are trained and saved."""

    rank: int = 0  # 0: no adapters, the whole model is trained
    alpha: int = 16  # an adapter is scaled by alpha / rank
    dropout: float = 0.0
    # names of linear modules, such as q_proj; empty: PEFT's choice for the kind of model
    targets: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Data:
    """Token files, and the tokens of one step."""

    # made by `python -m training.data prepare`; if empty, the sources of the standard library
    train: str = ""
    validation: str = ""  # used every `metrics.validate_every` steps
    seq_len: int = 128
    batch_size: int = 16  # sequences of one step, over all ranks and micro-batches
    accumulation: int = 1  # micro-batches of a step
    shuffle: bool = True
    # examples of prompts and answers: as many to a row as fit, instead of one and padding
    packing: bool = False
    drop_last: bool = True  # False: the last batch of an epoch continues in the next one.
    may_change: bool = False  # Allow other data than the checkpoint's when a run resumes.
    # Refuse tokens of another tokenizer than the one beside `model.path`.
    check_tokenizer: bool = True


@dataclass(frozen=True, slots=True)
class Optim:
    """AdamW with warm-up and cosine schedule."""

    lr: float = 3e-3
    min_lr_ratio: float = 0.1  # the cosine ends at this fraction of `lr`
    warmup_steps: int = 0
    weight_decay: float = 0.01
    # "matrices": not norms, biases and embeddings; "": that, or all if FSDP1 keeps flat parameters
    decay: Literal["", "matrices", "all"] = ""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 0.0  # 0: gradients are not clipped
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"


@dataclass(frozen=True, slots=True)
class Fsdp:
    """Sharding of the model."""

    api: Literal["fsdp2", "fsdp1"] = "fsdp2"
    strategy: Strategy = "FULL_SHARD"
    # overrides the strategy; a number: FSDP2 reshards to that number of ranks
    reshard_after_forward: bool | int | None = None
    shard_size: int = 0  # HYBRID_*: ranks that share one copy; 0: the ranks of a node
    tensor_parallel: int = 1
    # with tensor_parallel: norms and residuals also split the sequence over the tensor ranks
    sequence_parallel: bool = False
    # with tensor_parallel: the loss of a vocabulary that stays split; no rank has all logits
    loss_parallel: bool = False
    wrap: Literal["layers", "classes", "size", "none"] = "layers"
    wrap_classes: list[str] = field(default_factory=list)
    min_num_params: int = 100_000_000  # wrap = "size"
    # make embedding and head separate units, instead of parts of the root
    wrap_embeddings: bool = False
    cpu_offload: bool = False
    pin_memory: bool = True
    # FSDP2: number of units gathered ahead of the running one; 0: PyTorch's default
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    unshard_ahead: bool = False  # FSDP2: gather the root unit before the forward begins
    # reduce gradients at every micro-batch, instead of the last one only: less memory, more traffic
    reduce_every: bool = False


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """Options of FullyShardedDataParallel only."""

    use_orig_params: bool = True
    sync_module_states: bool = False
    limit_all_gathers: bool = True
    forward_prefetch: bool = False
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"


@dataclass(frozen=True, slots=True)
class Precision:
    """Types for computing and reducing; "" means the type of the parameters, `model.dtype`.

    FSDP reduces in `param` by default.
    """

    param: Dtype = ""
    reduce: Dtype = ""
    output: Dtype = ""
    buffer: Dtype = ""  # FSDP1
    cast_forward_inputs: bool = True
    # glob of module names -> compute type
    overrides: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compute:
    """Options that trade memory for time, or time for memory."""

    checkpoint_every: int = 0  # activation checkpointing of every k-th block; 1: all, 0: none
    compile: bool = False  # each block
    compile_backend: str = "inductor"
    # tokens whose logits are in float32 at one time; 0: all of a micro-batch
    loss_chunk: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Schedule and retention of checkpoints."""

    every: int = 0  # steps; the last step is always saved
    keep_last: int = 3
    keep_every: int = 0
    # the saved step with the lowest validation loss is never removed
    keep_best: bool = False
    asynchronous: bool = True
    statistics: bool = False  # measure each tensor of a save; see `ckpt stats`
    dir: str = ""  # path or URL of the steps, such as s3://bucket/run; `run.dir` if empty
    mirror: str = ""  # URL for background copies of steps, to survive the loss of this machine
    mirror_every: int = 0  # steps; 0: every saved step


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics, validation and progress."""

    every: int = 1  # steps between lines of metrics.jsonl
    validate_every: int = 0  # steps; needs data.validation
    validate_batches: int = 8
    # a bar if standard error is a terminal, else a line every ten steps
    progress: bool = True
    tensorboard: bool = False  # also to run.dir/tensorboard
    # a project of Weights & Biases: also to run.dir/wandb, offline unless WANDB_MODE is set
    wandb: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """All tables of the configuration file."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    fsdp: Fsdp = field(default_factory=Fsdp)
    fsdp1: Fsdp1 = field(default_factory=Fsdp1)
    precision: Precision = field(default_factory=Precision)
    compute: Compute = field(default_factory=Compute)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)


# ---- reading -------------------------------------------------------------------------------------


def resolve(
    file: str | Path | None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """Returns the configuration: a TOML file, then `table.key=value` overrides.

    They apply on top of a base from a configuration file of Accelerate.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is not allowed.
    """
    config = merge(Config(), base or {})
    if file is not None:
        try:
            config = parse(Path(file).read_text(encoding="utf-8"), str(file), config)
        except OSError as error:
            raise ConfigError(
                f"cannot read the configuration: {error.strerror} ({file})"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"not a TOML file: {error} ({file})") from error
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes table.key=value, got {text!r}")
        nested: Any = _value_of(value.strip())
        for part in reversed(key.strip().split(".", 2)):
            nested = {part.strip('"'): nested}
        config = merge(config, nested)
    return config


def parse(text: str, where: str, over: Config | None = None) -> Config:
    """Returns the configuration from a TOML text, on top of another configuration.

    Raises:
        ConfigError: the text is not TOML, a key is unknown, or a value is not allowed.
    """
    try:
        return merge(over or Config(), tomllib.loads(text))  # type: ignore[no-any-return]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not a TOML file: {error} ({where})") from error


def _value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text  # a string that was typed without quotes


def merge(config: Any, given: Mapping[str, Any], prefix: str = "") -> Any:
    """Returns a dataclass with the given keys set, including its inner tables.

    Raises:
        ConfigError: the dataclass does not have a key, or a key does not accept the value.
    """
    hints, known = get_type_hints(type(config)), [f.name for f in fields(config)]
    changed: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in known:
            near = get_close_matches(key, known, 1)
            meant = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ConfigError(f"unknown key {name}: {meant}known are {', '.join(known)}")
        old = getattr(config, key)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is a table, got {value!r}")
            changed[key] = merge(old, value, f"{name}.")
        elif isinstance(old, dict) and isinstance(value, Mapping):
            changed[key] = {**old, **_convert(value, hints[key], name)}
        else:
            changed[key] = _convert(value, hints[key], name)
    return replace(config, **changed)


def _convert(value: Any, kind: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        raise ConfigError(
            f"{name} = {value!r}: allowed are {', '.join(repr(a) for a in arguments)}"
        )
    if origin in (Union, UnionType):
        return _one_of(value, arguments, name)
    if origin is list and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return value
    if origin is list and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if (
        origin is dict
        and isinstance(value, Mapping)
        and all(isinstance(v, str) for v in value.values())
    ):
        return dict(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise ConfigError(f"{name} = {value!r}: expected {_say(kind)}")


def _one_of(value: Any, kinds: Sequence[Any], name: str) -> Any:
    if type(value) in kinds:
        return value
    if value == "default" and NoneType in kinds:
        return None
    raise ConfigError(
        f"{name} = {value!r}: expected"
        f" {' or '.join(_say(kind) for kind in kinds if kind is not NoneType)}"
    )


def _say(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    return names.get(kind) or (
        "a list of texts" if get_origin(kind) is list else "a table of texts"
    )


def to_toml(config: Config) -> str:
    """Returns the resolved configuration as a TOML file, which is itself a valid input."""
    import tomli_w

    tables: dict[str, dict[str, Any]] = asdict(config)
    return tomli_w.dumps(
        {
            name: {key: value for key, value in table.items() if value is not None}
            for name, table in tables.items()
        }
    )


# ---- proving -------------------------------------------------------------------------------------


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
    fsdp = config.fsdp
    if fsdp.tensor_parallel < 1 or world_size % fsdp.tensor_parallel:
        raise ConfigError(
            f"fsdp.tensor_parallel = {fsdp.tensor_parallel} does not divide {world_size} ranks"
        )
    data = world_size // fsdp.tensor_parallel
    if fsdp.strategy == "NO_SHARD":
        return Degrees(data, 1, fsdp.tensor_parallel)
    if not fsdp.strategy.startswith("HYBRID"):
        return Degrees(1, data, fsdp.tensor_parallel)
    shard = fsdp.shard_size or max(1, min(data, local_world_size // fsdp.tensor_parallel))
    if shard < 1 or data % shard:
        raise ConfigError(
            f"fsdp.shard_size = {shard} does not divide the {data} ranks that hold different data"
        )
    return Degrees(data // shard, shard, fsdp.tensor_parallel)


def check(config: Config, world_size: int = 1, local_world_size: int = 1) -> Degrees:
    """Proves that a configuration is consistent and fits the number of ranks.

    Returns the sizes of the mesh.

    Raises:
        ConfigError: it is not consistent, or does not fit.
    """
    for problem in _problems(config):
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


def _problems(config: Config) -> list[str]:
    """Returns the contradictions that do not depend on the number of ranks."""
    at_least_one = {
        "data.seq_len": config.data.seq_len,
        "data.batch_size": config.data.batch_size,
        "data.accumulation": config.data.accumulation,
        "metrics.every": config.metrics.every,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "run.steps": config.run.steps,
    }
    found = [
        f"{key} = {value}: must be at least 1" for key, value in at_least_one.items() if value < 1
    ]
    found += _range_problems(config)
    if config.model.path and not config.data.train:
        found.append(
            "model.path needs data.train: without it, the tokens would be the bytes of Python's"
            " standard library"
        )
    found += _model_problems(config) + _idle_problems(config)
    if bool(config.metrics.validate_every) != bool(config.data.validation):
        found.append(
            "data.validation, a token file, and metrics.validate_every, the steps between"
            " validations, need each other"
        )
    if config.run.epochs and config.run.steps != Run().steps:
        found.append(
            f"run.epochs = {config.run.epochs} and run.steps = {config.run.steps}: give one of them"
        )
    if config.checkpoint.keep_best and (
        not config.metrics.validate_every or config.checkpoint.every % config.metrics.validate_every
    ):
        found.append(
            "checkpoint.keep_best needs a validation of each saved step: checkpoint.every must be a"
            " multiple of metrics.validate_every, which is above 0"
        )
    if config.optim.decay == "matrices" and keeps_flat(config):
        found.append(
            'optim.decay = "matrices" needs fsdp1.use_orig_params = true: flat parameters mix'
            " matrices and norms"
        )
    if config.checkpoint.mirror and (
        "://" in config.checkpoint.dir or "://" not in config.checkpoint.mirror
    ):
        found.append("checkpoint.mirror is a URL such as s3://bucket/run, beside steps on a disk")
    found += _tensor_problems(config) + _sharding_problems(config)
    return found + _precision_problems(config)


def _idle_problems(config: Config) -> list[str]:
    """Returns keys that are set, and belong to something that is off."""
    fsdp, default = config.fsdp, Config()
    belongs = (
        ("compute.compile_backend", config.compute.compile, "compute.compile = true"),
        ("fsdp.min_num_params", fsdp.wrap == "size", 'fsdp.wrap = "size"'),
        ("fsdp.pin_memory", fsdp.cpu_offload, "fsdp.cpu_offload = true"),
        ("fsdp.reduce_every", config.data.accumulation > 1, "data.accumulation above 1"),
        ("checkpoint.mirror_every", config.checkpoint.mirror, "checkpoint.mirror"),
        ("metrics.validate_batches", config.metrics.validate_every, "metrics.validate_every"),
        ("data.check_tokenizer", config.model.path or config.model.factory, "model.path"),
        ("model.may_change", config.model.path, "model.path"),
    )
    found = []
    for key, is_on, need in belongs:
        table, _, name = key.partition(".")
        value = getattr(getattr(config, table), name)
        if not is_on and value != getattr(getattr(default, table), name):
            found.append(f"{key} = {value!r} changes nothing without {need}: leave it out")
    return found


def _model_problems(config: Config) -> list[str]:
    """Returns keys of one kind of model that are set for another kind."""
    model, lora, found = config.model, config.lora, []
    key = "path" if model.path else "factory" if model.factory else ""
    if model.path and model.factory:
        found.append("model.path and model.factory: give one of them")
    allowed = {"path": ("path", "weights"), "factory": ("factory", "loss")}.get(key, ())
    changed = _changed(model, (*allowed, "dtype", "may_change"))
    of_decoder = [name for name in changed if name not in ("path", "weights", "factory", "loss")]
    if key and of_decoder:
        found.append(
            f"model.{of_decoder[0]} belongs to the built-in decoder, and model.{key} ="
            f" {getattr(model, key)!r} is set"
        )
    if model.loss and not model.factory:
        found.append("model.loss belongs to model.factory, which is not set")
    if not model.weights and not model.path:
        found.append("model.weights belongs to model.path, which is not set")
    if model.factory:
        found += _factory_problems(config)
    if not lora.rank and (changed := _changed(lora, ("rank",))):
        found.append(f"lora.{changed[0]} belongs to lora.rank, which is 0")
    if lora.rank and not (model.path and model.weights):
        found.append("lora.rank needs model.path, with weights: adapters change a trained model")
    if lora.rank and (config.fsdp.api == "fsdp1" or config.fsdp.tensor_parallel > 1):
        found.append('lora.rank needs fsdp.api = "fsdp2" and fsdp.tensor_parallel = 1')
    if not 0 <= lora.dropout < 1 or lora.rank < 0 or lora.alpha < 1:
        found.append(
            "lora: rank is at least 0, alpha at least 1, and dropout at least 0 and below 1"
        )
    return found


def _factory_problems(config: Config) -> list[str]:
    """Returns keys of language models that are set for a factory."""
    data, found = config.data, []
    if not data.train:
        found.append("model.factory needs data.train, a safetensors file of inputs and targets")
    for key in ("seq_len", "packing", "check_tokenizer"):
        if key in _changed(data, ()):
            found.append(f"data.{key} is for tokens, and model.factory is trained on rows")
    if config.compute.loss_chunk:
        found.append("compute.loss_chunk is for logits of tokens, and model.factory has its loss")
    if config.fsdp.wrap_embeddings:
        found.append("fsdp.wrap_embeddings: the module of a factory does not name its embeddings")
    if config.fsdp.tensor_parallel > 1:
        found.append("fsdp.tensor_parallel: there is no plan for the module of a factory")
    return found


def _range_problems(config: Config) -> list[str]:
    """Returns the numbers that AdamW, the schedule or the loop cannot use."""
    optim, metrics, checkpoint = config.optim, config.metrics, config.checkpoint
    above, at_least = (
        {"optim.lr": optim.lr},
        {
            "optim.warmup_steps": optim.warmup_steps,
            "optim.weight_decay": optim.weight_decay,
            "optim.eps": optim.eps,
            "optim.max_grad_norm": optim.max_grad_norm,
            "metrics.validate_every": metrics.validate_every,
            "checkpoint.every": checkpoint.every,
            "checkpoint.keep_every": checkpoint.keep_every,
            "checkpoint.mirror_every": checkpoint.mirror_every,
            "fsdp.forward_prefetch": config.fsdp.forward_prefetch,
            "fsdp.backward_prefetch": config.fsdp.backward_prefetch,
            "fsdp.min_num_params": config.fsdp.min_num_params,
            **{
                f"model.{f.name}": size
                for f in fields(Model)
                if type(size := getattr(config.model, f.name)) is int
            },
            "compute.checkpoint_every": config.compute.checkpoint_every,
            "compute.loss_chunk": config.compute.loss_chunk,
            "run.epochs": config.run.epochs,
            "run.seed": config.run.seed,
        },
    )
    found = [
        f"{key} = {value}: must be above 0, and a float32"
        for key, value in above.items()
        if not 0 < value < _FLOAT32_MAX
    ]
    found += [f"run.seed = {config.run.seed}: must be below 2**32"] * (config.run.seed >= 1 << 32)
    found += ["run.dir is empty: name a directory"] * (not config.run.dir)
    found += [
        f"model.{f.name} = {size}: must be at most {_LARGEST_SIZE:,}"
        for f in fields(Model)
        if type(size := getattr(config.model, f.name)) is int and size > _LARGEST_SIZE
    ]
    found += [
        f"{key} = {value}: must be at least 0{', and a float32' * (type(value) is float)}"
        for key, value in at_least.items()
        if not 0 <= value < _FLOAT32_MAX
    ]
    found += [
        f"{key} = {value}: must be at least 0 and below 1"
        for key, value in _betas(optim).items()
        if not 0 <= value < 1
    ]
    if (
        not found
        and max(optim.lr / (1 - optim.beta1), optim.lr * optim.weight_decay) >= _FLOAT32_MAX
    ):
        found.append(
            f"optim.lr = {optim.lr}: AdamW's first step, lr / (1 - beta1) and lr * weight_decay, is"
            " beyond a float32"
        )
    if not 0 <= optim.min_lr_ratio <= 1:
        found.append(f"optim.min_lr_ratio = {optim.min_lr_ratio}: must be from 0 to 1")
    if metrics.validate_every and metrics.validate_batches < 1:
        found.append(f"metrics.validate_batches = {metrics.validate_batches}: must be at least 1")
    return found


def _betas(optim: Optim) -> dict[str, float]:
    return {"optim.beta1": optim.beta1, "optim.beta2": optim.beta2}


def keeps_flat(config: Config) -> bool:
    """Tells whether FSDP1 keeps the parameters of a unit as one flat parameter."""
    return config.fsdp.api == "fsdp1" and not config.fsdp1.use_orig_params


def _tensor_problems(config: Config) -> list[str]:
    fsdp, found = config.fsdp, []
    for key in ("sequence_parallel", "loss_parallel"):
        if getattr(fsdp, key) and (fsdp.tensor_parallel == 1 or config.model.path):
            found.append(
                f"fsdp.{key} needs fsdp.tensor_parallel above 1 and a built-in model (model.name)"
            )
    if fsdp.sequence_parallel and config.data.seq_len % max(1, fsdp.tensor_parallel):
        found.append(
            f"fsdp.sequence_parallel: data.seq_len = {config.data.seq_len} is not a multiple of"
            f" fsdp.tensor_parallel = {fsdp.tensor_parallel}"
        )
    if fsdp.loss_parallel and config.compute.loss_chunk:
        found.append("compute.loss_chunk and fsdp.loss_parallel: give one of them")
    return found


def _sharding_problems(config: Config) -> list[str]:
    fsdp, found = config.fsdp, []
    if fsdp.wrap == "classes" and not fsdp.wrap_classes:
        found.append('fsdp.wrap = "classes" needs fsdp.wrap_classes, the names of module classes')
    if fsdp.wrap != "classes" and fsdp.wrap_classes:
        found.append(
            f'fsdp.wrap_classes is set, and fsdp.wrap = "{fsdp.wrap}" does not use it: set'
            ' fsdp.wrap = "classes"'
        )
    if fsdp.shard_size and not fsdp.strategy.startswith("HYBRID"):
        found.append(
            "fsdp.shard_size belongs to HYBRID_SHARD and HYBRID_SHARD_ZERO2, and fsdp.strategy is"
            f" {fsdp.strategy}"
        )
    if fsdp.strategy == "NO_SHARD":
        unmet = _needs_fsdp2(fsdp) + (["fsdp.cpu_offload"] if fsdp.cpu_offload else [])
        found += [f"{key} needs sharded parameters, and fsdp.strategy is NO_SHARD" for key in unmet]
        found += _autocast_problems(config)
    if fsdp.api == "fsdp1":
        found += [f'{key} needs fsdp.api = "fsdp2"' for key in _needs_fsdp2(fsdp)]
        if fsdp.cpu_offload and fsdp.reduce_every and config.data.accumulation > 1:
            found.append(
                "fsdp.reduce_every: with fsdp.cpu_offload, FSDP1 adds gradients up wrongly"
                ' (PyTorch says so): set fsdp.api = "fsdp2"'
            )
    elif changed := _changed(config.fsdp1, ()):
        found.append(f'fsdp1.{changed[0]} needs fsdp.api = "fsdp1"')
    return found


def _autocast_problems(config: Config) -> list[str]:
    """Returns types that nothing applies where nothing is sharded: autocast computes then."""
    precision, dtype = config.precision, config.model.dtype
    if config.fsdp.api == "fsdp1":
        return []
    found = []
    if dtype == "bfloat16" and precision.param == "float32":
        found.append(
            'precision.param = "float32": with NO_SHARD, parameters in bfloat16 (model.dtype) are'
            " computed with in bfloat16"
        )
    if dtype == "bfloat16" and precision.reduce == "float32":
        found.append(
            'precision.reduce = "float32": with NO_SHARD, gradients are reduced in model.dtype,'
            " which is bfloat16"
        )
    if not precision.cast_forward_inputs:
        found.append("precision.cast_forward_inputs needs sharded parameters: autocast casts")
    return found


def _precision_problems(config: Config) -> list[str]:
    precision, fsdp, allowed = config.precision, config.fsdp, get_args(Dtype)[1:]
    found = [
        f"precision.overrides.{glob} = {dtype!r}: allowed are {', '.join(repr(a) for a in allowed)}"
        for glob, dtype in precision.overrides.items()
        if dtype not in allowed
    ]
    if precision.overrides and fsdp.api == "fsdp1":
        found.append(
            'precision.overrides needs fsdp.api = "fsdp2": FSDP1 does not cast between units of'
            " different types"
        )
    elif precision.overrides and fsdp.strategy == "NO_SHARD":
        found.append(
            "precision.overrides needs sharded parameters: with NO_SHARD, autocast chooses the"
            " types"
        )
    used = (precision.param, precision.reduce, precision.output, *precision.overrides.values())
    if "float16" in used:
        found.append(
            "precision float16 needs a scaled loss, which this program does not do: use bfloat16"
        )
    if precision.buffer and fsdp.api == "fsdp2":
        found.append('precision.buffer needs fsdp.api = "fsdp1"; FSDP2 leaves buffers as they are')
    return found


def _needs_fsdp2(fsdp: Fsdp) -> list[str]:
    """Returns the keys in use that only sharding by FSDP2 supports."""
    in_use = {
        "reshard_after_forward": fsdp.reshard_after_forward is not None,
        "tensor_parallel": fsdp.tensor_parallel > 1,
        "forward_prefetch": fsdp.forward_prefetch > 0,
        "backward_prefetch": fsdp.backward_prefetch > 0,
        "unshard_ahead": fsdp.unshard_ahead,
    }
    return [f"fsdp.{key}" for key, is_used in in_use.items() if is_used]


def _changed(table: Any, but: Sequence[str]) -> list[str]:
    """Returns the keys of a table whose values are not the defaults."""
    default = type(table)()
    return [
        f.name
        for f in fields(table)
        if f.name not in but and getattr(table, f.name) != getattr(default, f.name)
    ]
