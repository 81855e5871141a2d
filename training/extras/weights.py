"""Loads the weights of `model.path` into a sharded model, and exports what a run has trained.

transformers keeps the experts of a layer in one tensor, and files hold them one by one. Its own
conversions translate between both.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import ckpt_tools
from ckpt_tools.core.naming import strip_wrappers
from training.config import Config, ConfigError
from training.extras.pretrained import is_adapted, is_of_adapter, make
from training.files import replace_file
from training.initialize import keep_shard
from training.model import sizes_of

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_BESIDE = (".json", ".txt", ".jinja", ".md", ".model", ".npy")  # no weights
_PEFT_PREFIX, _BELOW = "base_model.model.", ".base_layer."


def fingerprint(path: str) -> str:
    """Returns 16 hex digits that distinguish the weights of one directory from others.

    Only sizes and 64 samples of 4 KiB of each file are read, because the files may be large.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(path).iterdir()):
        if not file.is_file() or file.suffix in _BESIDE:
            continue
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with file.open("rb") as stream:
            for i in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_weights(model: nn.Module, config: Config) -> bool:
    """Refuses weights whose names do not fit the model, before any rank waits for another.

    Returns whether transformers converts them, such as experts that a file has one by one.

    Args:
        model: before anything wraps its modules.
        config: of the run.

    Raises:
        ConfigError: names or shapes do not fit; the message has some of them.
    """
    path, stored = config.model.path, _stored(config.model.path)
    for name, tensor in _named(model).items():
        if name in stored and stored[name] != tensor.shape:
            raise ConfigError(
                f"model.path: {name} has the shape {list(stored[name])} in {path}, and"
                f" {list(tensor.shape)} in the model of its config.json"
            )
    missing, extra = _misfits(model, stored)
    if not missing or _has_other_prefix(model, missing):
        return False
    _, converted = _conversions(model, stored)
    if not converted.keys() >= missing:
        raise ConfigError(
            f"model.path: {len(missing)} weights of the model are not in {path}, such as"
            f" {min(missing)}, and {len(extra)} there are not in the"
            f" model{f', such as {min(extra)}' if extra else ''}"
        )
    if config.fsdp.api == "fsdp1":
        raise ConfigError(
            f"model.path: transformers converts the weights of {path}, such as {min(missing)}: set"
            ' fsdp.api = "fsdp2"'
        )
    return True


def load_weights(model: nn.Module, path: str, converts: bool) -> list[str]:
    """Fills a sharded model, without its adapters, from a directory. Returns remarks.

    Args:
        model: sharded.
        path: the directory.
        converts: as `check_weights` said.

    Raises:
        CheckpointError: the directory does not fit the model.
    """
    if converts:
        return _load_converted(model, path, _stored(path))
    if is_adapted(_unwrapped(model)):
        stored = _stored(path)
        there = {name: tensor for name, tensor in _named(model).items() if name in stored}
        ckpt_tools.load(path, {"model": there}, cast=True)
    else:
        ckpt_tools.load(path, {"model": model}, cast=True)
    return []


def _stored(path: str) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight in a directory."""
    report = ckpt_tools.inspect(path)
    shapes = {name: entry.shape for name, entry in report.catalog.tensors.items()}
    if report.format == "accelerate":  # a job's directory, in which the model is one part
        return {n.removeprefix("model."): s for n, s in shapes.items() if n.startswith("model.")}
    return shapes


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by the names that files have; no adapters."""
    held = (
        {strip_wrappers(name) for name in model.state_dict()}
        if not isinstance(model, FullyShardedDataParallel)
        else None
    )
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    named = {strip_wrappers(name): tensor for name, tensor in both}
    return {
        name.removeprefix(_PEFT_PREFIX).replace(_BELOW, "."): tensor
        for name, tensor in named.items()
        if (held is None or name in held) and not is_of_adapter(name)
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model below DDP or FSDP1."""
    return getattr(model, "module", model)


def _misfits(model: nn.Module, stored: Collection[str]) -> tuple[set[str], set[str]]:
    """Returns the names of the model that are not stored, and stored ones that it does not have.

    A tied weight is there if one of its names is.
    """
    names = {name: id(tensor) for name, tensor in _named(model).items()}
    there = {key for name, key in names.items() if name in stored}
    return {name for name, key in names.items() if key not in there}, set(stored) - names.keys()


def _has_other_prefix(model: nn.Module, missing: set[str]) -> bool:
    """Tells whether most names are missing: then they have another prefix, which a load handles."""
    return len(missing) * 2 >= len(_named(model)) and not _uses_experts(missing)


def _uses_experts(names: Iterable[str]) -> bool:
    return any(".experts." in name for name in names)


Sources = dict[str, list[tuple[str, str | None]]]  # by the model's name: stored names and patterns


def _conversions(model: nn.Module, stored: Iterable[str]) -> tuple[dict[str, Any], Sources]:
    """Returns transformers' converters by pattern, and what each weight of the model is made of."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    whole = _unwrapped(model)
    base = whole.get_base_model() if is_adapted(whole) else whole
    transforms = get_model_conversion_mapping(base)
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    sources: Sources = {}
    for name in sorted(stored, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters)
        sources.setdefault(target, []).append((name, pattern))
    return {pattern: one for one in converters for pattern in one.source_patterns}, sources


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a key that sorts expert 10 behind expert 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


@torch.no_grad()
def _load_converted(model: nn.Module, path: str, stored: Iterable[str]) -> list[str]:
    """Fills a model from weights that transformers converts, one of its tensors at a time.

    Every rank reads all weights, and keeps its shards.
    """
    converters, sources = _conversions(model, stored)
    names, filled = _named(model), set[int]()
    with ckpt_tools.open(path) as files:
        for target, parts in sources.items():
            if target in names:
                whole = _converted(model, target, parts, converters, files)[target]
                if whole.shape != names[target].shape:
                    raise ckpt_tools.PlanError(
                        f"{path} does not fit the model: {target} has {list(whole.shape)} there,"
                        f" and {list(names[target].shape)} in the model; an expert may be missing"
                    )
                keep_shard(names[target], whole)
                filled.add(id(names[target]))
    empty = [name for name, tensor in names.items() if id(tensor) not in filled]
    if empty:
        raise ckpt_tools.PlanError(f"{path} has no values of {empty[0]}")
    return ["transformers converts these weights: each rank reads all of them, tensor by tensor"]


def _converted(
    model: nn.Module,
    target: str,
    parts: list[tuple[str, str | None]],
    converters: Mapping[str, Any],
    files: Any,
) -> dict[str, Tensor]:
    """Returns what transformers makes of some stored tensors, by the names of the model."""
    if parts[0][1] is None:
        return {target: files[parts[0][0]].torch()}
    converter = copy.deepcopy(converters[parts[0][1]])
    for name, pattern in parts:
        converter.add_tensor(target, name, pattern, files[name].torch())
    made = converter.convert(target, model=model, config=_unwrapped(model).config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


# ---- export --------------------------------------------------------------------------------------


def export(step: str, directory: Path, config: Config, model: nn.Module) -> None:
    """Writes a step, with the files that are needed to load it elsewhere.

    They are `model.json`, or the files of `model.path`, or a directory of PEFT. Only one rank calls
    it.

    Args:
        step: path or URL of the checkpoint.
        directory: what an earlier export has left there is replaced.
        config: the run's configuration.
        model: on any device; only names and settings are used.
    """
    if config.lora.rank:
        _export_adapter(step, directory, model)
        return
    directory.mkdir(exist_ok=True)
    file = directory / "model.safetensors"
    ckpt_tools.merge(step, file, overwrite=True)
    if not config.model.path:
        name = config.model.factory
        about = {"factory": name} if name else asdict(sizes_of(config))
        replace_file(directory / "model.json", json.dumps(about, indent=1) + "\n")
        return
    if _uses_experts(_stored(str(file))) and _conversions(model, set())[0]:
        # experts one by one, as the files of the hub have them, in files of at most 5 GB
        whole = load_file(file)
        for merged in directory.glob(f"{file.name}*"):
            merged.unlink()  # with its manifest; the tensors stay mapped
        with torch.device("meta"):
            shell: Any = make(config.model.path)
        shell.save_pretrained(directory, state_dict=whole, max_shard_size="5GB")
    _copy_files(Path(config.model.path), directory, config.model.dtype)


def _copy_files(path: Path, directory: Path, dtype: str) -> None:
    """Copies configuration and tokenizer of a model, with the type of the trained weights."""
    for file in sorted(path.iterdir()):
        is_index = file.name.endswith(".index.json")
        if file.suffix in (".json", ".model", ".txt", ".jinja") and not is_index:
            replace_file(directory / file.name, file.read_bytes())
    about = json.loads((directory / "config.json").read_text())
    about |= {key: dtype for key in ("dtype", "torch_dtype") if key in about}
    replace_file(directory / "config.json", json.dumps(about, indent=2) + "\n")


def _export_adapter(step: str, directory: Path, model: nn.Module) -> None:
    """Writes a directory of PEFT."""
    settings = copy.copy(_unwrapped(model).peft_config["default"])
    settings.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        settings.save_pretrained(folder)
        ckpt_tools.convert(step, directory, to="peft", base=folder, overwrite=directory.exists())
