"""Any module: `model.factory = "package.module:function"`, with a loss, and rows as data.

    model.factory = "mine:make_mlp"                             # called without arguments
    model.loss = "torch.nn.functional:mse_loss"                 # of outputs and targets; a mean
    data.train = "rows.safetensors"                             # `inputs` and `targets`, [N, ...]

`python -m training` finds modules in the current directory. Each rank calls the function on a CPU,
with the same random generators: for the plan and a trial with two rows, and for the training. Ranks
compare the values that they have made, and each keeps its shards of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from ckpt_tools.core.checksum import crc64nvme
from training.batch import IGNORED, Batch, fingerprint
from training.config import Config, ConfigError

Loss = Callable[[Any, Tensor], Tensor]
CROSS_ENTROPY = "torch.nn.functional:cross_entropy"


def call(config: Config) -> nn.Module:
    """Returns the module of the factory, on the CPU. It is equal on all ranks.

    Raises:
        ConfigError: there is no such function, it fails, or it returns a module that cannot be
            trained so.
    """
    make = _find(config.model.factory, "model.factory")
    with _seeded(config.run.seed):
        try:
            model = make()
        except (Exception, SystemExit) as error:  # whatever the function raises
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
        _check_module(name, module)
    _check_parameters(model, config)
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds all generators that a function may draw from, and restores them afterwards."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _check_module(name: str, module: nn.Module) -> None:
    """Refuses a module that would differ between ranks, and makes its tensors contiguous."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or (
        isinstance(module, _NormBase) and module.track_running_stats
    ):
        raise ConfigError(
            f"model.factory: {name} is a {type(module).__name__}, whose statistics differ"
            " between ranks: use nn.GroupNorm or nn.LayerNorm"
        )
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no other ones
    for key, tensor in module._buffers.items():
        if tensor is not None and not tensor.is_contiguous():
            module._buffers[key] = tensor.contiguous()  # an expanded one cannot be saved


def _check_parameters(model: nn.Module, config: Config) -> None:
    """Refuses parameters that cannot be sharded or trained."""
    named, what = list(model.named_parameters()), f"model.factory: {config.model.factory}"
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"{what}: {name} has no shape yet: call the module once")
        if parameter.is_meta:
            raise ConfigError(
                f"{what}: {name} has no values: make a new module, with values, at each call"
            )
        if parameter.is_complex():
            raise ConfigError(f"{what}: {name} is complex, which FSDP and AdamW here do not train")
        if not parameter.ndim and config.fsdp.strategy != "NO_SHARD":
            raise ConfigError(f"{what}: {name} has no dimension to shard: give it the shape [1]")
    trained = {parameter.requires_grad for _, parameter in named}
    if True not in trained:
        raise ConfigError(f"{what}: no parameter takes a gradient")
    if len(trained) > 1 and config.fsdp.api == "fsdp1" and not config.fsdp1.use_orig_params:
        raise ConfigError(f"{what}: some parameters are frozen: set fsdp1.use_orig_params = true")


def source_digest(config: Config) -> str:
    """Returns 16 hex digits of the file of the factory; "" if there is none."""
    if not config.model.factory:
        return ""
    try:
        file = inspect.getsourcefile(inspect.unwrap(_find(config.model.factory, "model.factory")))
    except TypeError:  # an object that can be called, and is no function
        file = None
    if file is None:
        return ""
    with open(file, "rb") as stream:
        return hashlib.blake2b(stream.read(), digest_size=8).hexdigest()


def check_equal(named: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Refuses tensors that differ between ranks. All ranks call it.

    Args:
        named: parameters or buffers by name. Plain tensors are compared; shards are not.
        what: the event, for the message.
        remedy: what the user can do.

    Raises:
        ConfigError: on all ranks, with the name of the first such tensor.
    """
    plain = {n: t.detach() for n, t in named.items() if type(t) in (Tensor, nn.Parameter)}
    mine = {name: (tuple(t.shape), crc64nvme(_bytes_of(t))) for name, t in plain.items()}
    found: list[dict[str, tuple[tuple[int, ...], int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for name in sorted({name for one in found for name in one}):
        if len({one.get(name) for one in found}) > 1:
            raise ConfigError(f"model.factory: {name} differs between ranks {what}: {remedy}")


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def call_on_rows(model: nn.Module, config: Config, inputs: Tensor, dtype: str) -> Any:
    """Returns a module's outputs; floating-point inputs are cast first, and the outputs then."""
    outputs = model(inputs.to(getattr(torch, dtype)) if inputs.is_floating_point() else inputs)
    if isinstance(outputs, Tensor):
        return outputs.to(getattr(torch, config.precision.output or "float32"))
    return outputs


def loss_of(config: Config) -> Loss:
    """Returns the loss function: a mean over the rows of a micro-batch.

    Raises:
        ConfigError: there is no such function.
    """
    return _find(config.model.loss or CROSS_ENTROPY, "model.loss")


def checked_loss(loss: Any, name: str) -> Tensor:
    """Returns what a loss function has returned, as a 0-d tensor.

    Raises:
        ConfigError: it is not one number, or no gradient can flow from it.
    """
    what = f"model.loss = {name!r}"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{what}: it returned {shown}: expected a tensor of one number")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(f"{what}: its result does not depend on the outputs: no gradient flows")
    return loss.reshape(())


@torch.no_grad()
def note_on_mean(loss: Loss, outputs: Any, targets: Tensor) -> str:
    """Returns a warning if a loss is no mean over rows of equal weight; "" if it is, or unknown."""
    half = len(targets) // 2
    if not isinstance(outputs, Tensor) or len(outputs) != len(targets) or not half:
        return ""
    outputs = outputs.detach()
    try:
        parts = [loss(outputs[i * half :][:half], targets[i * half :][:half]) for i in (0, 1)]
        whole = loss(outputs[: 2 * half], targets[: 2 * half])
    except Exception:  # noqa: BLE001  # a function of the user, for other numbers of rows
        return ""
    if torch.allclose(torch.stack(parts).mean(), whole, rtol=1e-3, atol=1e-6):
        return ""
    return (
        "model.loss is no plain mean over rows of equal weight, so the training depends on the"
        " number of ranks and on data.accumulation"
    )


def _find(name: str, key: str) -> Any:
    module, colon, function = name.partition(":")
    try:
        if not (module and colon and function):
            raise ValueError("expected package.module:function")
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"it is a {type(found).__name__}, and no function")
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    return found


def are_labels(targets: Tensor) -> bool:
    """Tells whether targets are numbers of classes, of which -100 stands for no label."""
    return targets.dtype == torch.int64


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Mapped inputs and targets, `[N, ...]` each."""

    inputs: Tensor
    targets: Tensor
    name: str

    @cached_property
    def identity(self) -> dict[str, Any]:
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

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, numbers: Sequence[int], mine: slice) -> Batch:
        chosen, num_targets = torch.tensor(numbers[mine]), len(numbers)
        if are_labels(self.targets):
            num_targets = int((self.targets[torch.tensor(numbers)] != IGNORED).sum())
        return Batch(self.inputs[chosen], self.targets[chosen], None, num_targets)


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


# ---- a trial before ranks wait -------------------------------------------------------------------


@torch.no_grad()
def try_rows(model: nn.Module, config: Config, rows: Rows, key: str) -> None:
    """Calls the module and the loss with two rows, and checks the range of class labels.

    Args:
        model: with values, which the trial may change.
        config: the module computes in `model.dtype`, because only FSDP casts its units. With
            overrides of precision, nothing is tried: types are mixed then.
        rows: the data of `key`.
        key: of the configuration, for messages.

    Raises:
        ConfigError: the module cannot take the inputs, the loss cannot take outputs and targets, or
            a label is no class.
    """
    if config.precision.overrides:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, computing = model.to(device), contextlib.nullcontext()
    if config.precision.param and config.fsdp.strategy == "NO_SHARD":
        computing = torch.autocast(device.type, getattr(torch, config.precision.param))
    inputs, targets = rows.inputs[:2].to(device), rows.targets[:2].to(device)
    what = f"model.factory = {config.model.factory!r}: {key}: it failed on"
    with _seeded(config.run.seed), _explaining(what, inputs), computing:
        outputs = call_on_rows(model, config, inputs, config.model.dtype)
    name, function = config.model.loss or CROSS_ENTROPY, loss_of(config)
    with _explaining(f"model.loss = {name!r}: {key}: it failed on", outputs, targets):
        loss = function(outputs, targets)
    checked_loss(loss, name)
    if not config.model.loss and isinstance(outputs, Tensor) and outputs.ndim > 1:
        _check_labels(rows.targets, outputs.shape[1], key)


@contextlib.contextmanager
def _explaining(what: str, *arguments: Any) -> Iterator[None]:
    """Names the arguments of a user's function in its error, and the line that raised it."""
    try:
        yield
    except Exception as error:  # a function of the user may raise anything
        shown = " and ".join(
            f"{a.dtype} {list(a.shape)}" if isinstance(a, Tensor) else type(a).__name__
            for a in arguments
        ).replace("torch.", "")
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [f for f in frames if not f.filename.startswith(os.path.dirname(torch.__file__))]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{what} {shown}: {type(error).__name__}: {said}{where}") from error


def _check_labels(targets: Tensor, num_classes: int, key: str) -> None:
    """Refuses labels that are no class. -100 stands for no label."""
    if targets.is_floating_point():  # probabilities
        return
    flat = targets.flatten(1).long() if targets.ndim > 1 else targets[:, None].long()
    is_bad = ((flat < 0) & (flat != IGNORED)) | (flat >= num_classes)
    if is_bad.any():
        row = int(is_bad.any(1).nonzero()[0])
        label = int(flat[row][is_bad[row]][0])
        raise ConfigError(
            f"{key}: row {row} has the label {label}, and the outputs have {num_classes} classes:"
            f" expected 0 to {num_classes - 1}, or {IGNORED} for no label"
        )
