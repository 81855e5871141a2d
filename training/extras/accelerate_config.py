"""Converts Accelerate's FSDP configuration file, versions 1 and 2, to our tables.

Every key is converted, ignored for a reason, or refused. The table `KEYS` has all of them;
`docs/training.md` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from training.config import ConfigError, Strategy, resolve

_STRATEGIES = get_args(Strategy)
_WRAPS = {"TRANSFORMER_BASED_WRAP": "layers", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_TYPES = {"no": "", "fp32": "", "bf16": "bfloat16"}


@dataclass(slots=True)
class Mapped:
    """A converted file: our tables, and a note for each key that has no effect here."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # by our key: the key of the file


@dataclass(frozen=True, slots=True)
class Key:
    """The treatment of one key.

    Attributes:
        to: our key, `table.key`; empty if nothing is set.
        convert: converts their value to ours.
        reason: why it is not needed here. A reason that begins with "refused" makes any value
            outside of `fine` an error. With `to`, a key that only `_settle` reads, it is what the
            key does.
        fine: values that match what this program does anyway.
    """

    to: str = ""
    convert: Callable[[Any], Any] | None = None
    reason: str = ""
    fine: tuple[Any, ...] = ()


def _strategy(value: Any) -> str:
    text = str(value).upper()
    if text.isdigit() and 1 <= int(text) <= len(_STRATEGIES):
        return _STRATEGIES[int(text) - 1]
    return text


def _truth(value: Any) -> bool:
    if isinstance(value, bool) or str(value).lower() in ("true", "false", "0", "1", "yes", "no"):
        return str(value).lower() in ("true", "1", "yes")
    raise ConfigError(f"expected true or false, got {value!r}")


def _prefetch(value: Any) -> str:
    return {"1": "BACKWARD_PRE", "2": "BACKWARD_POST"}.get(str(value), str(value).upper())


def _wrap(value: Any) -> str:
    if str(value).upper() not in _WRAPS:
        raise ConfigError(f"{value!r}: allowed are {', '.join(_WRAPS)}")
    return _WRAPS[str(value).upper()]


def _precision(value: Any) -> str:
    if value is False:  # YAML reads an unquoted no so
        return ""
    if str(value).lower() not in _TYPES:
        raise ConfigError(
            f"{value!r} is refused: fp16 needs a scaled loss and fp8 its own kernels; bf16 and no"
            " are done here"
        )
    return _TYPES[str(value).lower()]


def _whole(value: Any) -> int:
    if not str(value).isdecimal() or isinstance(value, bool):
        raise ConfigError(f"expected a whole number, got {value!r}")
    return int(value)


def _names(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else str(value).split(",")
    return [text for part in parts if (text := str(part).strip())]


_LAUNCH = "the launcher's business: give it to torchrun"
_TPU = "refused: for TPUs"
_PARALLEL = "parallelism_config.parallelism_config"

KEYS: dict[str, Key] = {
    "compute_environment": Key(
        reason="refused: only LOCAL_MACHINE; SageMaker starts jobs in its own way",
        fine=("LOCAL_MACHINE",),
    ),
    "distributed_type": Key(
        reason="refused: the file is for another kind of job than FSDP", fine=("FSDP",)
    ),
    "debug": Key(reason="refused: set TORCH_DISTRIBUTED_DEBUG=DETAIL instead", fine=(False,)),
    "mixed_precision": Key("precision.param", _precision),
    "downcast_bf16": Key(reason=_TPU, fine=(False, "no")),
    "use_cpu": Key(
        reason="the device is CUDA where there is one; hide it with CUDA_VISIBLE_DEVICES="
    ),
    "enable_cpu_affinity": Key(reason="refused: use torchrun with numactl", fine=(False,)),
    "gradient_accumulation_steps": Key("data.accumulation", _whole),
    "num_processes": Key(reason=f"{_LAUNCH} as --nproc-per-node"),
    "num_machines": Key(reason=f"{_LAUNCH} as --nnodes"),
    "machine_rank": Key(reason=f"{_LAUNCH} as --node-rank"),
    "main_process_ip": Key(reason=f"{_LAUNCH} as --rdzv-endpoint"),
    "main_process_port": Key(reason=f"{_LAUNCH} as --rdzv-endpoint"),
    "rdzv_backend": Key(reason=f"{_LAUNCH} as --rdzv-backend"),
    "same_network": Key(reason=_LAUNCH),
    "gpu_ids": Key(reason="set CUDA_VISIBLE_DEVICES instead"),
    "main_training_function": Key(reason="for notebooks and TPUs", fine=("main",)),
    **{
        f"tpu_{name}": Key(reason=_TPU, fine=(False, [], None))
        for name in ("name", "zone", "env", "use_cluster", "use_sudo", "vm")
    },
    "command_file": Key(reason=_TPU, fine=(None,)),
    "commands": Key(reason=_TPU, fine=(None, [])),
    "deepspeed_config": Key(reason="refused: this is FSDP", fine=({}, None)),
    "megatron_lm_config": Key(reason="refused: this is FSDP", fine=({}, None)),
    "fp8_config": Key(reason="refused: fp8 needs its own kernels", fine=({}, None)),
    "mpirun_config": Key(reason=_LAUNCH, fine=({}, None)),
    "dynamo_config.dynamo_backend": Key(
        # YAML reads an unquoted no as false
        "compute.compile_backend",
        lambda value: "no" if value is False else str(value).lower(),
    ),
    "dynamo_config.dynamo_mode": Key(
        reason="refused: blocks are compiled in torch's default mode", fine=("default", None)
    ),
    "dynamo_config.dynamo_use_fullgraph": Key(
        reason="refused: hooks of FSDP break the graph", fine=(False,)
    ),
    "dynamo_config.dynamo_use_dynamic": Key(
        reason="refused: sequences are of one length", fine=(False,)
    ),
    "dynamo_config.dynamo_use_regional_compilation": Key(
        reason="blocks are always compiled one by one"
    ),
    f"{_PARALLEL}_dp_replicate_size": Key(
        "fsdp.num_replicas", _whole, "above 1: `fsdp.strategy` is HYBRID_SHARD*, or NO_SHARD"
    ),
    f"{_PARALLEL}_dp_shard_size": Key("fsdp.shard_size", _whole),
    f"{_PARALLEL}_tp_size": Key("fsdp.tensor_parallel", _whole),
    **{
        f"{_PARALLEL}_{what[0]}p_size": Key(
            reason=f"refused: no {what} parallelism here", fine=(1, None)
        )
        for what in ("context", "sequence", "pipeline", "expert")
    },
    **{
        f"{_PARALLEL}_{name}": Key(reason="belongs to what is refused above")
        for name in (
            *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
            *("sp_seq_length_is_variable", "sp_attn_implementation"),
        )
    },
    "fsdp_config.fsdp_version": Key("fsdp.api", lambda value: f"fsdp{_whole(value)}"),
    "fsdp_config.fsdp_sharding_strategy": Key("fsdp.strategy", _strategy),
    "fsdp_config.fsdp_reshard_after_forward": Key("fsdp.strategy", _strategy),
    "fsdp_config.fsdp_auto_wrap_policy": Key("fsdp.wrap", _wrap),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Key("fsdp.wrap_classes", _names),
    "fsdp_config.fsdp_min_num_params": Key("fsdp.min_num_params", _whole),
    "fsdp_config.fsdp_offload_params": Key("fsdp.cpu_offload", _truth),
    "fsdp_config.fsdp_backward_prefetch": Key("fsdp1.backward_prefetch", _prefetch),
    "fsdp_config.fsdp_backward_prefetch_policy": Key("fsdp1.backward_prefetch", _prefetch),
    "fsdp_config.fsdp_forward_prefetch": Key("fsdp1.forward_prefetch", _truth),
    "fsdp_config.fsdp_use_orig_params": Key("fsdp1.use_orig_params", _truth),
    "fsdp_config.fsdp_sync_module_states": Key("fsdp1.sync_module_states", _truth),
    "fsdp_config.fsdp_limit_all_gathers": Key("fsdp1.limit_all_gathers", _truth),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": Key(
        reason="each rank reads its shards of model.path from the files"
    ),
    "fsdp_config.fsdp_state_dict_type": Key(
        reason="checkpoints are always sharded; `ckpt merge` makes the full one"
    ),
    "fsdp_config.fsdp_activation_checkpointing": Key(
        "compute.checkpoint_every", lambda value: int(_truth(value))
    ),
    "fsdp_config.fsdp_activation_checkpointing_offload": Key(
        reason="refused: activations are not offloaded here", fine=(False,)
    ),
    "fsdp_config.fsdp_ignored_modules": Key(
        reason="refused: every parameter is sharded", fine=(None, "")
    ),
}


def read(path: str) -> Mapped:
    """Reads an Accelerate configuration file, and returns its keys as ours.

    Raises:
        ConfigError: the file cannot be read, or asks for something that this program does not do.
            The text names the key and the reason.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "--accelerate-config needs PyYAML: pip install 'ckpt-tools[train]'"
        ) from error
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read Accelerate's configuration: {error.strerror} ({path})"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"not a YAML file: {said} ({path})") from error
    if not isinstance(given, Mapping) or "distributed_type" not in given:
        raise ConfigError(f"not a configuration of Accelerate: it has no distributed_type ({path})")
    mapped = Mapped()
    flat = dict(_flatten(given))
    version = flat.get("fsdp_config.fsdp_version", 1)
    if version not in (1, 2, "1", "2") or isinstance(version, bool):
        raise ConfigError(f"fsdp_config.fsdp_version: expected 1 or 2, got {version!r} ({path})")
    version = int(version)
    mapped.tables["fsdp"] = {"api": f"fsdp{version}"}  # Accelerate's default is 1
    for name, value in flat.items():
        try:
            _map(name, value, version, mapped)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error} ({path})") from error
    _settle(mapped)
    try:
        resolve(None, (), mapped.tables)
    except ConfigError as error:
        ours = str(error).partition(" = ")[0]
        raise ConfigError(f"{mapped.names.get(ours, ours)}: {error} ({path})") from error
    return mapped


def table() -> str:
    """Returns `KEYS` as a Markdown table."""
    rows = ["| key | here |", "|---|---|"]
    for name, key in KEYS.items():
        fine = (
            f" (but for {', '.join(repr(v) for v in key.fine)})"
            if key.fine and key.reason.startswith("refused")
            else ""
        )
        rows.append(f"| `{name}` | {key.reason + fine if key.reason else f'`{key.to}`'} |")
    return "\n".join(rows)


def _flatten(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of the file, with keys of inner tables as `table.key`."""
    for key, value in given.items():
        if key in ("fsdp_config", "dynamo_config", "parallelism_config"):
            if not isinstance(value, Mapping | None):
                raise ConfigError(f"{key}: expected a table, got {value!r}")
            yield from ((f"{key}.{inner}", v) for inner, v in (value or {}).items())
        elif value != {}:
            yield str(key), value


def _map(name: str, value: Any, version: int, mapped: Mapped) -> None:
    key = KEYS.get(name)
    if key is None:
        raise ConfigError(_answer(name.rpartition(".")[2]))
    if not key.to:
        if key.reason.startswith("refused") and value not in key.fine:
            raise ConfigError(f"{value!r} is {key.reason}")
        if value not in key.fine:
            mapped.notes.append(f"{name} = {value!r} changes nothing: {key.reason}")
        return
    table, _, ours = key.to.partition(".")
    if table == "fsdp1" and version == 2:
        mapped.notes.append(f"{name} = {value!r} changes nothing: FSDP2 does not have it")
        return
    if value is None:
        return
    if ours == "strategy" and name.endswith("reshard_after_forward") and version == 2:
        value = "FULL_SHARD" if _truth(value) else "SHARD_GRAD_OP"
    mapped.names[key.to] = name
    converted = key.convert(value) if key.convert else value
    known = mapped.tables.setdefault(table, {}).setdefault(ours, converted)
    if known != converted:
        raise ConfigError(
            f"{value!r} contradicts an earlier key of the file: leave one of them out"
        )


def _answer(name: str) -> str:
    """Returns what to say of an unknown key: guides and older releases have other spellings."""
    if name.startswith("xla"):
        return _TPU
    known = {key.rpartition(".")[2]: key for key in KEYS}
    for spelling in (name, f"fsdp_{name.removeprefix('fsdp_')}"):
        if near := get_close_matches(spelling, known, 1, 0.85):
            return f"Accelerate calls it {known[near[0]]} now"
    return "unknown key: neither Accelerate 1.15 nor this program knows it"


def _settle(mapped: Mapped) -> None:
    """Combines keys whose meaning depends on each other."""
    fsdp = mapped.tables["fsdp"]
    if fsdp.get("wrap") == "layers" and fsdp.get("wrap_classes"):
        fsdp["wrap"] = "classes"
    for ours, wrap, theirs in (
        ("wrap_classes", "classes", "fsdp_transformer_layer_cls_to_wrap"),
        ("min_num_params", "size", "fsdp_min_num_params"),
    ):
        if fsdp.get("wrap") != wrap and (value := fsdp.pop(ours, None)):
            mapped.notes.append(
                f"{theirs} = {value!r} changes nothing: fsdp_auto_wrap_policy does not use it"
            )
    if precision := mapped.tables.get("precision", {}).get("param"):
        mapped.tables["precision"] |= {
            "reduce": precision,
            "buffer" if fsdp["api"] == "fsdp1" else "output": precision,
        }
    dynamo = mapped.tables.get("compute", {})
    if "compile_backend" in dynamo:
        dynamo["compile"] = dynamo["compile_backend"] != "no"
        dynamo["compile_backend"] = (
            "inductor" if dynamo["compile_backend"] == "no" else dynamo["compile_backend"]
        )
    if (replicas := fsdp.pop("num_replicas", 1)) > 1:
        is_full = fsdp.get("strategy", "FULL_SHARD") == "FULL_SHARD"
        both = "HYBRID_SHARD" if is_full else "HYBRID_SHARD_ZERO2"
        fsdp["strategy"] = both if fsdp.get("shard_size", 1) > 1 else "NO_SHARD"
        mapped.notes.append(
            f"parallelism_config_dp_replicate_size = {replicas} makes fsdp.strategy ="
            f" {fsdp['strategy']}: there are as many copies as ranks divided by fsdp.shard_size"
        )
    if not str(fsdp.get("strategy", "")).startswith("HYBRID") and (
        size := fsdp.pop("shard_size", None)
    ):
        mapped.notes.append(
            f"parallelism_config_dp_shard_size = {size} changes nothing: all ranks share the"
            " parameters, unless parallelism_config_dp_replicate_size is above 1"
        )
