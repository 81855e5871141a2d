"""Any module: `model.factory = "package.module:function"`, with a loss, and rows as data.

    model.factory = "mine:make_mlp"                             # called without arguments
    model.loss = "torch.nn.functional:mse_loss"                 # of outputs and targets; a mean
    data.train = "rows.safetensors"                             # `inputs` and `targets`, [N, ...]

`python -m training` finds modules in the current directory. Each rank calls the function on a CPU,
with the same random generator, and keeps its shards of the result.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.config import Config, ConfigError
from training.examples import Batch, fingerprint

Loss = Callable[[Any, Tensor], Tensor]
CROSS_ENTROPY = "torch.nn.functional:cross_entropy"


def call(config: Config) -> nn.Module:
    """Returns the module of the factory, on the CPU. It is equal on all ranks.

    Raises:
        ConfigError: there is no such function, it fails, or it returns a module that cannot be
            trained so.
    """
    make = _find(config.model.factory, "model.factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        try:
            model = make()
        except Exception as error:  # whatever the function raises
            said = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model.factory: {config.model.factory} failed: {type(error).__name__}: {said}"
            ) from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise ConfigError(
            f"model.factory: {config.model.factory} returned {type(model).__name__}: expected an"
            " nn.Module with parameters"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"model.factory: {name} is a {type(module).__name__}, whose statistics differ"
                " between ranks: use nn.GroupNorm or nn.LayerNorm"
            )
    return model


def loss_of(config: Config) -> Loss:
    """Returns the loss function: a mean over the rows of a micro-batch.

    Raises:
        ConfigError: there is no such function.
    """
    return _find(config.model.loss or CROSS_ENTROPY, "model.loss")


def _find(name: str, key: str) -> Any:
    module, colon, function = name.partition(":")
    try:
        if not (module and colon and function):
            raise ValueError("expected package.module:function")
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"it is a {type(found).__name__}, and no function")
    except Exception as error:  # a module may raise anything when it is imported
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    return found


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Mapped inputs and targets, `[N, ...]` each."""

    inputs: Tensor
    targets: Tensor
    name: str

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The identity of these rows: name, number and fingerprint."""
        parts = [
            f"{tensor.dtype} {list(tensor.shape)} "
            + fingerprint(tensor.flatten().view(torch.uint8).numpy())
            for tensor in (self.inputs, self.targets)
        ]
        return {
            "name": self.name,
            "tokens": len(self.inputs),
            "fingerprint": "; ".join(parts),
            "tokenizer": "rows",
        }

    def windows(self, seq_len: int) -> int:
        """Returns the number of rows."""
        del seq_len
        return len(self.inputs)

    def batch(self, numbers: Sequence[int], seq_len: int, mine: slice) -> Batch:
        """Returns this rank's rows of a batch."""
        del seq_len
        chosen = torch.tensor(numbers[mine])
        return Batch(self.inputs[chosen], self.targets[chosen], None, len(numbers))


def open_rows(path: str, key: str, batch_size: int) -> Rows:
    """Maps a file of rows.

    Raises:
        ConfigError: it is no safetensors file, lacks a tensor, or has fewer rows than a batch.
    """
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises its own error
        raise ConfigError(f"{key}: {path} is no safetensors file: {error}") from error
    if set(tensors) != {"inputs", "targets"}:
        raise ConfigError(
            f"{key}: {path} has {', '.join(sorted(tensors)) or 'no tensors'}: expected `inputs` and"
            " `targets`"
        )
    inputs, targets = tensors["inputs"], tensors["targets"]
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise ConfigError(
            f"{key}: `inputs` {list(inputs.shape)} and `targets` {list(targets.shape)} of {path}"
            " have different numbers of rows"
        )
    if len(inputs) < batch_size:
        raise ConfigError(
            f"{key}: {path} has {len(inputs):,} rows, and one batch takes {batch_size:,}"
        )
    return Rows(inputs, targets, path)
