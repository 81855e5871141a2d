"""Exports optimizers by the names of their parameters, and loads them back.

torch's state-dict functions know one module with all parameters of an optimizer. Here parameters
may also belong to several modules, or be tensors in dicts and lists of the state. Imports torch.

Source: torch 2.13 `torch/distributed/checkpoint/state_dict.py`, `torch/optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ckpt_tools.core.naming import strip_wrappers
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.few_bits import (
    are_parts,
    is_cut,
    is_moment,
    is_torchao,
    keep_float32,
    moment_of_parts,
    notes_on,
    notes_on_cut,
    parts_of_moment,
    rooms_for,
)
from ckpt_tools.loop.state.objects import Key, shown

_OWN = ("state", "param_groups")


class StoredState(NamedTuple):
    """A tensor of a parameter's state in a checkpoint.

    `is_like` means that it has the shape that the parameter had.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_like: bool


Stored = Mapping[str, Mapping[str, StoredState]]  # by parameter and key
StoredStates = Mapping[str, Stored]  # by optimizer; "": of all


class ExportedOptimizer(NamedTuple):
    """The exported state of an optimizer.

    Attributes:
        values: the state by name.
        fresh: parameters whose state is new memory without values.
        free: parameters whose state may have any form.
        local: parameter and key of plain tensors in the state of a sharded parameter.
        widened: parameter and key of moments of few bits that became float32.
    """

    values: dict[str, Any]
    fresh: list[str]
    free: list[str]
    local: list[tuple[str, str]]
    widened: list[tuple[str, str]]


class StateOwners(NamedTuple):
    """The modules and tensors that may own an optimizer's parameters, and the optimizers.

    Each has its path of keys.
    """

    modules: Sequence[tuple[Key, nn.Module]]
    tensors: Sequence[tuple[Key, torch.Tensor]]
    optimizers: Sequence[tuple[Key, Optimizer]]


def is_container(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer has a state dict of its own form, which it loads itself.

    For example torchtitan's OptimizersContainer.
    """
    return (
        type(optimizer).state_dict is not Optimizer.state_dict
        and not set(_OWN) <= optimizer.state_dict().keys()
    )


def export_optimizer(
    optimizer: Optimizer,
    holders: StateOwners,
    path: Key,
    stored: Stored | None,
    wants: Callable[[str, str], bool] = lambda *_: True,
) -> ExportedOptimizer:
    """Returns an optimizer's state by parameter name, and the keys that its class adds.

    Before a load, each parameter without state gets tensors like those in the checkpoint. No
    optimizer step makes them: a step would call hooks, and could change parameters. Only for FSDP1,
    torch takes such a step.

    Args:
        optimizer: whose state it is.
        holders: what else the state has.
        path: of the optimizer.
        stored: its state in the checkpoint to load; None for a save.
        wants: tells by the names of a parameter and of its state what is loaded.

    Raises:
        PlanError: a parameter belongs to nothing in the state, or its state is this rank's alone.
    """
    owner = _owner(optimizer, holders.modules)
    if owner is not None and _is_fsdp1(owner):
        return _export_fsdp1(optimizer, owner, stored is not None)
    names, state = _names(optimizer, holders, owner, path), optimizer.state_dict()
    numbers = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
    name_of = dict(zip(numbers, names, strict=True))
    groups = [
        {**group, "params": [name_of[n] for n in group["params"]]}
        for group in state["param_groups"]
    ]
    values: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for n, found in state["state"].items():
        if n not in name_of:  # of no parameter, such as a counter of all steps
            own[_own_key(n, found, names, path)] = found
        elif found:
            values[name_of[n]] = found
    free = [
        name
        for name, found in values.items()
        if any(isinstance(v, (list, tuple, dict)) for v in found.values())
    ]
    parameters = dict(
        zip(
            names,
            chain.from_iterable(group["params"] for group in optimizer.param_groups),
            strict=True,
        )
    )
    local = [
        (name, str(key))
        for name, found in values.items()
        for key, value in found.items()
        if _is_local(value, parameters[name], f"{name}.{key}")
    ]
    moments = [(n, k) for n, found in values.items() for k, v in found.items() if is_moment(v)]
    if moments or is_torchao(optimizer):
        values = {
            n: {
                k: parts_of_moment(v, optimizer, str(k), stored is not None)
                for k, v in found.items()
            }
            for n, found in values.items()
        }
    widened = [(n, k) for n, k in moments if isinstance(values[n][k], torch.Tensor)]
    # `stored` has plain names, and a module may itself be called `module`
    there = stored or {}
    states = {
        name: _wanted(there.get(name) or there.get(strip_wrappers(name), {}), name, wants)
        for name in parameters
    }
    fresh = [name for name in parameters if stored is not None and name not in values]
    changed = [name for name in values if _has_other_moments(values[name], states.get(name, {}))]
    for name in fresh:
        like = _rooms(parameters[name], states[name])
        values |= {name: like} if like else {}
    for name in changed:
        live, like = values[name], _rooms(parameters[name], states[name])
        other = {k: v for k, v in like.items() if are_parts(v) or are_parts(live.get(k))}
        values[name] = {**live, **other}
    free_own = [*own, *(stored or {}).get("", ())]
    return ExportedOptimizer(
        {
            **({"state": values | own} if values or own else {}),
            "param_groups": groups,
            **extra_of(optimizer),
        },
        fresh,
        [*free, *fresh, *changed, *free_own],
        local,
        widened,
    )


def _wanted(
    stored: Mapping[str, StoredState], name: str, wants: Callable[[str, str], bool]
) -> dict[str, StoredState]:
    """Returns what is loaded of a parameter's stored state.

    Raises:
        PlanError: it would be some parts of a moment of few bits, and not all.
    """
    found = {key: state for key, state in stored.items() if wants(name, key)}
    lost = [key for key in stored if "." in key and key not in found]
    taken = {key.rpartition(".")[0] for key in found if "." in key}
    torn = [key for key in lost if key.rpartition(".")[0] in taken]
    if torn:
        raise PlanError(
            f"a part of a moment of few bits would be left out: {printable(f'{name}.{torn[0]}')!r}",
            hint="select all of its parts, or none",
        )
    return found


def _own_key(key: Any, value: Any, names: Sequence[str], path: Key) -> str:
    """Returns the key of a state that belongs to no parameter.

    Raises:
        PlanError: it could not be told from the state of a parameter.
    """
    if type(key) is not str or "." in key or key in names or isinstance(value, Mapping | list):
        raise PlanError(
            f"the optimizer at {shown(path)} has a state of no parameter, under {key!r}",
            hint=(
                "give it a key that is a word, and no parameter's name; and a tensor or a plain"
                " value, no container"
            ),
        )
    return key


def _is_local(value: Any, parameter: torch.Tensor, name: str) -> bool:
    """Tells whether a plain tensor belongs to a parameter that is split between ranks.

    Raises:
        PlanError: it has the shape of this rank's part. Its name would mean another part on each
            rank, and one of them would be stored.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or not value.dim():
        return False
    is_split = any(isinstance(placed, Shard) for placed in parameter.placements)
    if isinstance(value, DTensor) or not is_split:
        return False
    if value.shape == parameter._local_tensor.shape != parameter.shape and value.numel() != 1:
        raise PlanError(
            f"the optimizer keeps plain state for a part of a parameter: {list(value.shape)} of"
            f" {list(parameter.shape)} ({printable(name)!r})",
            hint=("keep the state as a DTensor: torch.zeros_like(p), not zeros_like(p.to_local())"),
        )
    return True


def _has_other_moments(own: Mapping[str, Any], stored: Mapping[str, StoredState]) -> bool:
    """Tells whether a parameter's moments of few bits have another form than those to load.

    So have moments of which only one of the two has few bits. They get new memory for a load.
    """
    loaded = {key.partition(".")[0] for key in stored}
    mine = {
        f"{key}.{part}": tuple(tensor.shape)
        for key, parts in own.items()
        if are_parts(parts) and key in loaded
        for part, tensor in parts.items()
    }
    theirs = {key: tensor.shape for key, tensor in stored.items() if "." in key}
    return mine != theirs


def _rooms(parameter: torch.Tensor, stored: Mapping[str, StoredState]) -> dict[str, Any]:
    """Returns memory for the state of a parameter, by key; parts of a moment of few bits below."""
    found: dict[str, Any] = {}
    moments: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, tensor in stored.items():
        moment, _, part = key.rpartition(".")
        if moment:
            moments.setdefault(moment, {})[part] = tensor.shape, tensor.dtype
        else:
            found[key] = _room(parameter, tensor)
    return found | {key: rooms_for(parameter, parts) for key, parts in moments.items()}


def _room(parameter: torch.Tensor, stored: StoredState) -> torch.Tensor:
    """Returns memory for a tensor of a parameter's state, sharded like a parameter of its shape."""
    if stored.is_like or stored.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=stored.dtype, requires_grad=False)
    return torch.zeros(stored.shape, dtype=stored.dtype, device="cpu")


def _export_fsdp1(optimizer: Optimizer, owner: nn.Module, for_loading: bool) -> ExportedOptimizer:
    """Returns the state of an FSDP1 optimizer with flat parameters, as torch translates it.

    If the optimizer has no state yet, torch takes a step of length 0 to create it. That step would
    be counted. So the state is removed again, unless a load follows.
    """
    is_fresh = not optimizer.state
    exported: dict[str, Any] = dict(get_optimizer_state_dict(owner, optimizer))
    if is_fresh and not for_loading:
        optimizer.state.clear()
    if not exported["state"] or (is_fresh and not for_loading):
        del exported["state"]
    return ExportedOptimizer(exported | extra_of(optimizer), [], [], [], [])


def extra_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the entries that an optimizer's class or a hook adds to its state dict."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if type(optimizer).state_dict is Optimizer.state_dict and not hooks:
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in _OWN}


def load_optimizer(
    optimizer: Optimizer, given: Mapping[str, Any], holders: StateOwners, path: Key
) -> list[str]:
    """Loads a result of `export_optimizer`. A parameter without state there gets none.

    Returns notes on moments of few bits.
    """
    cut: list[str] = []
    extra = {key: value for key, value in given.items() if key not in _OWN}
    state = {"state": {}} | {key: value for key, value in given.items() if key in _OWN}
    owner = _owner(optimizer, holders.modules)
    with _adding(optimizer, extra):
        if owner is not None and _is_fsdp1(owner):
            set_optimizer_state_dict(
                owner, optimizer, state, options=StateDictOptions(strict=False)
            )
        else:
            names = _names(optimizer, holders, owner, path)
            parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            of = dict(zip(names, parameters, strict=True))
            every = ((n, values) for n, values in state["state"].items() if n in of)
            of_parameters = ((n, values) for n, values in every if isinstance(values, Mapping))
            cut = [
                f"{n}.{k}" for n, values in of_parameters for k, v in values.items() if is_cut(v)
            ]
            state["state"] = {
                name: (
                    {
                        k: moment_of_parts(v, of[name], optimizer, f"{name}.{k}")
                        for k, v in values.items()
                    }
                    if name in of and isinstance(values, Mapping)
                    else values
                )
                for name, values in state["state"].items()
            }
            _load_by_name(optimizer, state, names)
            by_parameter = {of[n]: v for n, v in state["state"].items() if n in of}
            keep_float32(optimizer, by_parameter)
    return [*notes_on_cut(cut, shown(path)), *notes_on(optimizer, shown(path))]


@contextmanager
def _adding(optimizer: Optimizer, extra: Mapping[str, Any]) -> Iterator[None]:
    """Makes an optimizer load the keys of its own class together with those from torch."""
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
    """Returns the module that has all parameters of an optimizer; None if no module has."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return next(
        (module for _, module in modules if wanted <= {id(p) for p in module.parameters()}), None
    )


def _is_fsdp1(module: nn.Module) -> bool:
    return any(isinstance(m, FullyShardedDataParallel) for m in module.modules())


def _names(
    optimizer: Optimizer, holders: StateOwners, owner: nn.Module | None, path: Key
) -> list[str]:
    """Returns the names of an optimizer's parameters, in its own order.

    Names are relative to the module that has all of them, else to the state.
    """
    known: dict[int, str] = {}
    for at, module in holders.modules if owner is None else [((), owner)]:
        if owner is None and _is_fsdp1(module):
            # torch translates its optimizer, and needs one module with all parameters
            continue
        for name, parameter in module.named_parameters():
            (plain,) = _get_fqns(module, name)
            known.setdefault(id(parameter), ".".join((*map(str, at), plain)))
    for at, tensor in holders.tensors:
        known.setdefault(id(tensor), ".".join(map(str, at)))
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    missing = next((number for number, p in enumerate(parameters) if id(p) not in known), None)
    if missing is not None:
        raise PlanError(
            f"the optimizer at {shown(path)} has parameters that are nowhere in the state: its"
            f" parameter {missing} of {len(parameters)}, {list(parameters[missing].shape)}",
            hint=(
                "put the module that holds them into the state, or a dict with the tensors"
                " themselves; FSDP1 needs one module with all"
            ),
        )
    return [known[id(p)] for p in parameters]


def parameter_names(optimizer: Optimizer, holders: StateOwners, path: Key) -> list[str] | None:
    """Returns the names of an optimizer's parameters in its own order.

    Returns None if torch translates its state (FSDP1).

    Raises:
        PlanError: a parameter belongs to nothing in the state.
    """
    owner = _owner(optimizer, holders.modules)
    return (
        None if owner is not None and _is_fsdp1(owner) else _names(optimizer, holders, owner, path)
    )


def _load_by_name(optimizer: Optimizer, given: Mapping[str, Any], names: Sequence[str]) -> None:
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = {
        numbers.get(name, name): values
        for name, values in given["state"].items()
        if name in numbers or not isinstance(values, Mapping)
    }
    groups = [
        _options(group, number, given.get("param_groups", ()), names)
        for number, group in enumerate(optimizer.state_dict()["param_groups"])
    ]
    stored = {name for group in given.get("param_groups", ()) for name in group.get("params", ())}
    if stored and not stored & set(names):
        raise PlanError(
            "the groups of the stored optimizer have none of this optimizer's parameters, but"
            f" {printable(str(sorted(map(str, stored))[:3]))}",
            hint="make the optimizer as it was made for the save",
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options(
    group: Mapping[str, Any],
    number: int,
    stored: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Returns a group with the saved options of its parameters.

    A group without parameters takes those of the group with its number, if that has none either.

    Raises:
        PlanError: they were saved in several groups.
    """
    mine = {names[number] for number in group["params"]}
    found = [other for other in stored if mine & set(other.get("params", ()))]
    if not mine and number < len(stored) and stored[number].get("params") in ([], ()):
        found = [stored[number]]
    if len(found) > 1:
        raise PlanError(
            f"parameters of one group were saved in {len(found)} groups, such as"
            f" {printable(min(mine))!r}",
            hint="group the parameters as they were when they were saved",
        )
    return {**group, **(found[0] if found else {}), "params": group["params"]}
