"""The configuration of a run: one TOML file, and `--set table.key=value` to override it.

Every key has a type, a range and a default. `resolve` reads the configuration; `training.checks`
finds what contradicts itself. This module does not import torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Dtype = Literal["", "float32", "bfloat16", "float16"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FLOAT32_MAX = 3.4e38  # about
_MAX_CHARS, _MAX_LINE_CHARS = 1 << 20, 4 << 10  # of a configuration in a checkpoint

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
# of a built-in decoder; larger ones are mistakes, and take hours to make
Size = Annotated[int, Field(ge=0, le=1 << 24)]
Float32 = Annotated[float, Field(ge=0, lt=FLOAT32_MAX)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[
    list[str],
    BeforeValidator(
        lambda v: [n.strip() for n in v.split(",") if n.strip()] if isinstance(v, str) else v
    ),
]


class ConfigError(Exception):
    """The configuration cannot be run; exit status 2.

    The text names the key, its value and the allowed values.
    """


class Table(BaseModel):
    """A table of the configuration file. It takes known keys only, and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def changed(self) -> dict[str, Any]:
        """Returns the keys whose values are not the defaults, with their values."""
        return self.model_dump(exclude_defaults=True)


class Run(Table):
    """The run as a whole."""

    # checkpoints, metrics.jsonl, config.toml, export/, profile/
    dir: Annotated[str, Field(min_length=1)] = "run"
    steps: Positive = 100  # last step, counted from the start of training
    epochs: Count = 0  # instead of `steps`: how often the data is seen; 0: `steps` counts
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    resume_from: str = ""  # A checkpoint to start from, instead of the newest in `dir`.
    export: bool = False  # At the end, merge to dir/export: safetensors and the model's config.
    # Exit with status 3 if a loss is not finite, and do not save that step.
    stop_at_nan: bool = True


class Model(Table):
    """A built-in decoder by name, a transformers model by path, or any module by a factory."""

    name: Literal["tiny", "small", "medium", "1b", "8b"] = "tiny"
    # instead of `name`: a directory with config.json, and with safetensors if `weights` is true
    path: str = ""
    weights: bool = True
    # instead of `name`: "package.module:function", which returns an nn.Module
    factory: str = ""
    loss: str = ""  # with `factory`: of outputs and targets; "": cross-entropy
    dtype: Literal["float32", "bfloat16"] = "float32"  # in which parameters are kept
    dim: Size = 0  # 0 here and below: the size that belongs to `name`
    num_layers: Annotated[int, Field(ge=0, le=10_000)] = 0
    num_heads: Size = 0
    num_kv_heads: Size = 0  # heads of keys and values; each serves a group of query heads
    hidden_dim: Size = 0
    vocab_size: Size = 0
    max_seq_len: Size = 0
    tied_embeddings: bool = False
    # allow another config.json in `path` than the checkpoint's when a run resumes
    may_change: bool = False


class Lora(Table):
    """Adapters of PEFT on the model in `model.path`: only they are trained and saved."""

    rank: Count = 0  # 0: no adapters, the whole model is trained
    alpha: Positive = 16  # an adapter is scaled by alpha / rank
    dropout: Fraction = 0.0
    # names of linear modules, such as q_proj; empty: PEFT's choice for the kind of model
    targets: Names = []


class Data(Table):
    """Token files, and the tokens of one step."""

    # made by `python -m training.data prepare`; if empty, the sources of the standard library
    train: str = ""
    validation: str = ""  # used every `metrics.validate_every` steps
    seq_len: Positive = 128
    batch_size: Positive = 16  # sequences of one step, over all ranks and micro-batches
    accumulation: Positive = 1  # micro-batches of a step
    shuffle: bool = True
    # examples of prompts and answers: as many to a row as fit, instead of one and padding
    packing: bool = False
    drop_last: bool = True  # False: the last batch of an epoch continues in the next one.
    may_change: bool = False  # Allow other data than the checkpoint's when a run resumes.
    # Refuse tokens of another tokenizer than the one beside `model.path`.
    check_tokenizer: bool = True


class Optim(Table):
    """AdamW with warm-up and cosine schedule."""

    lr: Annotated[float, Field(gt=0, lt=FLOAT32_MAX)] = 3e-3
    # the cosine ends at this fraction of `lr`
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Count = 0
    weight_decay: Float32 = 0.01
    # "matrices": not norms, biases and embeddings; "": that, or all if FSDP1 keeps flat parameters
    decay: Literal["", "matrices", "all"] = ""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Float32 = 1e-8
    max_grad_norm: Float32 = 0.0  # 0: gradients are not clipped
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"


class Fsdp(Table):
    """Sharding of the model."""

    api: Literal["fsdp2", "fsdp1"] = "fsdp2"
    strategy: Strategy = "FULL_SHARD"
    # overrides the strategy; a number: FSDP2 reshards to that number of ranks
    reshard_after_forward: Annotated[
        bool | int | None, BeforeValidator(lambda v: None if v == "default" else v)
    ] = None
    shard_size: Count = 0  # HYBRID_*: ranks that share one copy; 0: the ranks of a node
    tensor_parallel: Positive = 1
    # with tensor_parallel: norms and residuals also split the sequence over the tensor ranks
    sequence_parallel: bool = False
    # with tensor_parallel: the loss of a vocabulary that stays split; no rank has all logits
    loss_parallel: bool = False
    wrap: Literal["layers", "classes", "size", "none"] = "layers"
    wrap_classes: Names = []
    min_num_params: Count = 100_000_000  # wrap = "size"
    # make embedding and head separate units, instead of parts of the root
    wrap_embeddings: bool = False
    cpu_offload: bool = False
    pin_memory: bool = True
    # FSDP2: number of units gathered ahead of the running one; 0: PyTorch's default
    forward_prefetch: Count = 0
    backward_prefetch: Count = 0
    unshard_ahead: bool = False  # FSDP2: gather the root unit before the forward begins
    # reduce gradients at every micro-batch, instead of the last one only: less memory, more traffic
    reduce_every: bool = False


class Fsdp1(Table):
    """Options of FullyShardedDataParallel only."""

    use_orig_params: bool = True
    sync_module_states: bool = False
    limit_all_gathers: bool = True
    forward_prefetch: bool = False
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"


class Precision(Table):
    """Types for computing and reducing; "" means the type of the parameters, `model.dtype`.

    FSDP reduces in `param` by default.
    """

    param: Dtype = ""
    reduce: Dtype = ""
    output: Dtype = ""
    buffer: Dtype = ""  # FSDP1
    cast_forward_inputs: bool = True
    # glob of module names -> compute type
    overrides: dict[str, Literal["float32", "bfloat16"]] = {}


class Compute(Table):
    """Options that trade memory for time, or time for memory."""

    checkpoint_every: Count = 0  # activation checkpointing of every k-th block; 1: all, 0: none
    compile: bool = False  # each block
    compile_backend: str = "inductor"
    # tokens whose logits are in float32 at one time; 0: all of a micro-batch
    loss_chunk: Count = 0


class Checkpoint(Table):
    """Schedule and retention of checkpoints."""

    every: Count = 0  # steps; the last step is always saved
    keep_last: Positive = 3
    keep_every: Count = 0
    # the saved step with the lowest validation loss is never removed
    keep_best: bool = False
    asynchronous: bool = True
    statistics: bool = False  # measure each tensor of a save; see `ckpt stats`
    dir: str = ""  # path or URL of the steps, such as s3://bucket/run; `run.dir` if empty
    mirror: str = ""  # URL for background copies of steps, to survive the loss of this machine
    mirror_every: Count = 0  # steps; 0: each saved step. After a signal, each is copied


class Metrics(Table):
    """Metrics, validation and progress."""

    every: Positive = 1  # steps between lines of metrics.jsonl
    validate_every: Count = 0  # steps; needs data.validation
    validate_batches: Positive = 8
    # a bar if standard error is a terminal, else a line at each tenth step of `every`
    progress: bool = True
    tensorboard: bool = False  # also to run.dir/tensorboard
    # a project of Weights & Biases: also to run.dir/wandb, offline unless WANDB_MODE is set
    wandb: str = ""


class Config(Table):
    """All tables of the configuration file."""

    run: Run = Run()
    model: Model = Model()
    lora: Lora = Lora()
    data: Data = Data()
    optim: Optim = Optim()
    fsdp: Fsdp = Fsdp()
    fsdp1: Fsdp1 = Fsdp1()
    precision: Precision = Precision()
    compute: Compute = Compute()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()

    def having(self, table: str, **changed: Any) -> Config:
        """Returns a copy with other values in one table, which are not checked."""
        return self.model_copy(update={table: getattr(self, table).model_copy(update=changed)})


# ---- reading -------------------------------------------------------------------------------------


def resolve(
    file: str | Path | None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """Returns the configuration: a TOML file, then `table.key=value` overrides.

    They apply on top of a base from a configuration file of Accelerate.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is not allowed.
    """
    given: dict[str, Any] = _over({}, base or {})
    if file is not None:
        try:
            given = _over(given, _toml(Path(file).read_text(encoding="utf-8"), str(file)))
            _validated(given, f" ({file})")
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
        given = _over(given, nested)
    return _validated(given)


def parse(text: str, where: str) -> Config:
    """Returns the configuration from a TOML text.

    Raises:
        ConfigError: the text is not TOML, a key is unknown, or a value is not allowed.
    """
    return _validated(_toml(text, where), f" ({where})")


def to_toml(config: Config) -> str:
    """Returns the resolved configuration as a TOML file, which is itself a valid input.

    Raises:
        ConfigError: it is too long to be read back from a checkpoint.
    """
    import tomli_w

    text = tomli_w.dumps(config.model_dump(exclude_none=True))
    check_length(text, "the configuration, which checkpoints hold")
    return text


def check_length(text: str, where: str) -> None:
    """Refuses a stored configuration that the parser would take minutes for.

    It takes quadratic time for a name of very many parts.

    Raises:
        ConfigError: the text, or a line of it, is too long.
    """
    longest = max(map(len, text.splitlines()), default=0)
    if len(text) > _MAX_CHARS or longest > _MAX_LINE_CHARS:
        raise ConfigError(
            f"expected at most {_MAX_CHARS} characters, and {_MAX_LINE_CHARS} in a line; got"
            f" {len(text)} and {longest} ({where})"
        )


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not a TOML file: {error} ({where})") from error


def _value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text  # a string that was typed without quotes


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two nested tables as one, in which the values of the second win."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        is_table = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _over(old, value) if is_table else value
    return merged


def _validated(given: Mapping[str, Any], where: str = "") -> Config:
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"{_problem(error, given)}{where}") from None


def _problem(error: ValidationError, given: Any) -> str:
    """Returns a line for the first mistake: the key, its value, and what is allowed."""
    first, table, path = error.errors()[0], Config, []
    for key in first["loc"]:  # a union adds the names of its types to the path of a key
        if not isinstance(given, Mapping) or key not in given:
            break
        given = given[key]
        path.append(str(key))
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        for key in path[:-1]:
            table = type(getattr(table(), key))
        known = list(table.model_fields)
        near = get_close_matches(path[-1], known, 1)
        meant = f"did you mean {'.'.join([*path[:-1], *near])}? " if near else ""
        return f"unknown key {name}: {meant}known are {', '.join(known)}"
    if first["type"] == "model_type":
        return f"{name} = {given!r}: expected a table"
    depth = len(path)
    allowed = [
        re.sub("^(Input should be|String should have) ", "", one["msg"])
        for one in error.errors()
        if one["loc"][:depth] == first["loc"][:depth]
    ]
    text = " or ".join(dict.fromkeys(allowed)).replace("34" + "0" * 37, "3.4e38")
    text = text.replace("a valid string", "a text, in quotes where it looks like a number")
    return f"{name} = {given!r}: expected {text}"
