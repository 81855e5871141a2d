"""The state dict of a module under plain names, and back.

torch's own functions for checkpoints know every wrapper, and walk through the name of each
parameter several times: 0.1 ms per tensor. A module without wrappers, and without code of others in
its state dict, needs only `state_dict` and `load_state_dict`. Imports torch.

Source: torch 2.13 `torch/distributed/checkpoint/state_dict.py`, `_get_fqns`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckpt_tools.core.naming import WRAPPERS
from ckpt_tools.loop.state.unchanged import is_ordinary


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns the live tensors of a module, and its extra states, by name without wrappers."""
    if not _has_plain_names(module):
        return get_model_state_dict(module)
    with torch.no_grad():
        return module.state_dict()


def load_module(module: nn.Module, values: Mapping[str, Any]) -> list[str]:
    """Loads a result of `module_state`. What `values` lacks stays as it is.

    Returns:
        The names in `values` that the module does not take.
    """
    given: OrderedDict[str, Any] = OrderedDict(values)
    # modules read older versions in another way; a checkpoint is taken for one of the present
    given._metadata = OrderedDict(  # type: ignore[attr-defined]
        (name, {"version": found._version})
        for name, found in module.named_modules(remove_duplicate=False)
    )
    if not _has_plain_names(module):
        done = set_model_state_dict(module, given, options=StateDictOptions(strict=False))
    else:
        with torch.no_grad():
            done = module.load_state_dict(given, strict=False)
    return list(getattr(done, "unexpected_keys", ()))  # an overridden method may return None


def plain_parameter_names(module: nn.Module, exported: Iterable[str]) -> set[str]:
    """Returns the names of a module's parameters without wrappers, each name of a tied one.

    The flat parameters of FSDP1 hide the names. There, it is all that the module has exported but
    its buffers.
    """
    if any(isinstance(found, FullyShardedDataParallel) for found in module.modules()):
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        return {*exported} - {_without_wrappers(name) for name in buffers}
    replicated = [
        f"{name}." if name else ""
        for name, found in module.named_modules()
        if isinstance(found, DistributedDataParallel)
    ]
    names = set()
    for name, _ in module.named_parameters(remove_duplicate=False):
        for prefix in reversed(replicated):  # inner ones first
            if name.startswith(f"{prefix}module."):
                name = prefix + name.removeprefix(f"{prefix}module.")
        names.add(_without_wrappers(name))
    return names


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _has_plain_names(module: nn.Module) -> bool:
    """Tells whether torch would translate no name of a module's state dict."""
    return all(
        is_ordinary(found)
        and not isinstance(found, DistributedDataParallel)
        and not hasattr(found, "_fqn_modifiers")
        and WRAPPERS.isdisjoint(found._modules)
        for found in module.modules()
    )
