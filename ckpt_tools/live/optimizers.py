"""Optimizers by the names of their parameters, and back.

torch's state-dict functions know one module with all parameters of an optimizer. Here parameters may also belong to several
modules, or be tensors in dicts and lists of the state. Imports torch. May import errors and objects.

Source: torch 2.13 `torch/distributed/checkpoint/state_dict.py`, `torch/optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.live.objects import Key, place

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_OWN = ("state", "param_groups")


class Holders(NamedTuple):
    """What a state holds that an optimizer's parameters may belong to, each with its place."""

    modules: Sequence[tuple[Key, nn.Module]]
    tensors: Sequence[tuple[Key, torch.Tensor]]


def is_container(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer has a state dict of its own form, as torchtitan's OptimizersContainer: it loads that itself."""
    return type(optimizer).state_dict is not Optimizer.state_dict and not set(_OWN) <= optimizer.state_dict().keys()


def export_optimizer(optimizer: Optimizer, holders: Holders, path: Key, for_loading: bool) -> dict[str, Any]:
    """Returns an optimizer's state by parameter name, and the keys that its class adds.

    torch gives an optimizer that has taken no step a state by taking a step of length 0, which would count from then on.
    So the state is removed again, unless a checkpoint is loaded into it next.

    Raises:
        PlanError: a parameter belongs to nothing in the state.
    """
    is_fresh = not optimizer.state
    owner = _owner(optimizer, holders.modules)
    if owner is not None:
        exported: dict[str, Any] = dict(get_optimizer_state_dict(owner, optimizer))
    else:
        exported = _export_by_name(optimizer, _names(optimizer, holders, path), for_loading)
    if is_fresh and not for_loading:
        optimizer.state.clear()
    if not exported["state"] or (is_fresh and not for_loading):
        del exported["state"]
    return exported | extra_of(optimizer)


def extra_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what an optimizer's class, or a hook, adds to its state dict."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if type(optimizer).state_dict is Optimizer.state_dict and not hooks:
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in _OWN}


def load_optimizer(optimizer: Optimizer, given: Mapping[str, Any], holders: Holders, path: Key) -> None:
    """Loads what `export_optimizer` returned. A parameter whose state is left out is left without any."""
    extra = {key: value for key, value in given.items() if key not in _OWN}
    state = {"state": {}} | {key: value for key, value in given.items() if key in _OWN}
    owner = _owner(optimizer, holders.modules)
    with _adding(optimizer, extra):
        if owner is not None:
            set_optimizer_state_dict(owner, optimizer, state, options=StateDictOptions(strict=False))
        else:
            _load_by_name(optimizer, state, _names(optimizer, holders, path))


@contextmanager
def _adding(optimizer: Optimizer, extra: Mapping[str, Any]) -> Iterator[None]:
    """Has an optimizer load keys of its own class together with those that torch hands to it."""
    if not extra:
        yield
        return
    load = optimizer.load_state_dict
    optimizer.load_state_dict = lambda state_dict: load({**state_dict, **extra})  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.load_state_dict


def _owner(optimizer: Optimizer, modules: Sequence[tuple[Key, nn.Module]]) -> nn.Module | None:
    """Returns the module that has all parameters of an optimizer, None where there is none."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return next((module for _, module in modules if wanted <= {id(p) for p in module.parameters()}), None)


def _names(optimizer: Optimizer, holders: Holders, path: Key) -> list[str]:
    """Returns the names of an optimizer's parameters, in its own order: their places in the state."""
    known: dict[int, str] = {}
    for at, module in holders.modules:
        while isinstance(module, DistributedDataParallel):
            module = module.module
        if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
            continue  # its optimizer is translated by torch, which wants one module with all parameters
        for name, parameter in module.named_parameters():
            plain = [part for part in name.split(".") if part not in WRAPPERS]
            known.setdefault(id(parameter), ".".join(map(str, (*at, *plain))))
    for at, tensor in holders.tensors:
        known.setdefault(id(tensor), ".".join(map(str, at)))
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    missing = next((number for number, p in enumerate(parameters) if id(p) not in known), None)
    if missing is not None:
        raise PlanError(
            f"the optimizer at {place(path)} has parameters that are nowhere in the state: its parameter {missing}"
            f" of {len(parameters)}, {list(parameters[missing].shape)}",
            hint="put the module that holds them into the state, or a dict with the tensors themselves; FSDP1 wants one module with all",
        )
    return [known[id(p)] for p in parameters]


def _export_by_name(optimizer: Optimizer, names: Sequence[str], for_loading: bool) -> dict[str, Any]:
    if for_loading:
        _init_optim_state(optimizer)
    stored = optimizer.state_dict()
    numbers = list(chain.from_iterable(group["params"] for group in stored["param_groups"]))
    name_of = dict(zip(numbers, names, strict=True))
    groups = [{**group, "params": [name_of[n] for n in group["params"]]} for group in stored["param_groups"]]
    return {"state": {name_of[n]: state for n, state in stored["state"].items()}, "param_groups": groups}


def _load_by_name(optimizer: Optimizer, given: Mapping[str, Any], names: Sequence[str]) -> None:
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: values for name, values in given["state"].items() if name in numbers}
    now = optimizer.state_dict()["param_groups"]
    groups = given.get("param_groups", now)
    if len(groups) != len(now):
        raise PlanError(f"an optimizer has {len(now)} groups of parameters, the checkpoint {len(groups)}")
    joined = [{**old, **new, "params": old["params"]} for old, new in zip(now, groups, strict=True)]
    for number, (old, new) in enumerate(zip(now, groups, strict=True)):
        stored = set(new.get("params", ()))
        if stored and stored != {names[n] for n in old["params"]}:
            raise PlanError(
                f"group {number} of an optimizer has other parameters than in the checkpoint:"
                f" {printable(', '.join(sorted(stored ^ {names[n] for n in old['params']})[:3]))}",
                hint="group the parameters as they were when they were saved",
            )
    optimizer.load_state_dict({"state": state, "param_groups": joined})
