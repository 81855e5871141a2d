"""Models of `transformers` from a local directory, with or without adapters of PEFT.

They have no values yet: `training.extras.weights` loads and exports these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.config import ConfigError, Lora
from training.extras.local_models import model_of, open_local

_ALL = "all-linear"  # PEFT's word for all linear layers but the head
_NOT_OF_THE_MODEL = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def make(path: str) -> nn.Module:
    """Returns the causal LM of a directory, without values.

    Raises:
        ConfigError: transformers is not installed, or makes no causal LM of the directory.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError("model.path needs transformers: pip install 'ckpt-tools[hf]'") from error
    if not Path(path).is_dir():
        raise ConfigError(f"model.path: there is no directory {path}")
    try:
        config = open_local(AutoConfig, path)
        model: nn.Module = model_of(config, dtype=torch.float32)
    except Exception as error:  # a model's own code may raise anything
        raise ConfigError(
            f"model.path: {path} holds no causal LM that transformers can make here:"
            f" {_first_line(error)}"
        ) from error
    model.config.use_cache = False
    return model


def adapt(model: nn.Module, lora: Lora) -> nn.Module:
    """Returns the model with adapters. The base takes no gradient.

    Raises:
        ConfigError: PEFT is not installed, or cannot place the adapters.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("lora.rank needs PEFT: pip install peft") from error
    if _ALL in lora.targets and len(lora.targets) > 1:
        raise ConfigError(f"lora.targets: {_ALL!r} stands alone, without names beside it")
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_ALL if lora.targets == [_ALL] else lora.targets or None,
        task_type="CAUSAL_LM",
    )
    try:
        # in the type of the base: the parameters of an FSDP unit have one type
        adapted: nn.Module = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {_first_line(error)}") from error
    if idle := [t for t in lora.targets if t != _ALL and not _has_adapter(adapted, t)]:
        raise ConfigError(f"lora.targets: no linear layer is called {idle[0]!r}")
    for name, _ in adapted.named_parameters():
        if "lora_embedding" in name:
            raise ConfigError(
                f"lora.targets: {name.split('.lora_embedding')[0]} is an embedding, which gets no"
                " adapter here: name linear layers"
            )
    return adapted


def _has_adapter(model: nn.Module, target: str) -> bool:
    """Tells whether a module of that name, or with a path that ends in it, has an adapter."""
    paths = {
        name.partition(".lora_A.")[0] for name, _ in model.named_modules() if ".lora_A." in name
    }
    return any(path.endswith(f".{target}") for path in paths)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_adapted(model: nn.Module) -> bool:
    """Tells whether a model has adapters of PEFT."""
    return hasattr(model, "peft_config")


def is_of_adapter(name: str) -> bool:
    """Tells whether a module or a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def initializer(model: nn.Module) -> Callable[[str, nn.Module], None]:
    """Returns the function that sets the first values of one module, by name.

    An adapter begins as PEFT's does: A by `nn.Linear`'s own values, B as zeros.
    """
    base = model.get_base_model() if is_adapted(model) else model

    def fill(name: str, module: nn.Module) -> None:
        if ".lora_A." in name:
            module.reset_parameters()
        elif ".lora_B." in name:
            nn.init.zeros_(module.weight)
        else:
            base._init_weights(module)

    return fill


def description(model: nn.Module) -> dict[str, Any]:
    """Returns the configuration of a model as JSON values, without what does not change it."""
    known: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {key: value for key, value in known.items() if key not in _NOT_OF_THE_MODEL}
