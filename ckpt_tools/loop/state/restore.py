"""Restores loaded values into a live state: the reverse of `state_dict.export`.

Imports torch.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.modules import load_module
from ckpt_tools.loop.state.objects import (
    Key,
    Structure,
    decode_object,
    generator_state,
    is_generator,
    set_generator_state,
    shown,
)
from ckpt_tools.loop.state.optimizers import StateOwners, is_container, load_optimizer
from ckpt_tools.loop.state.state_dict import (
    STRUCTURE,
    PerRank,
    RngState,
    calling,
    flat_name,
    has_state,
    holders_of,
    is_plain,
    loads_itself,
)

# ---- values of one rank --------------------------------------------------------------------------


def state_of_rank(value: Any, path: Key) -> Any:
    """Returns the state of a `PerRank`'s value on this rank, as plain values."""
    if is_generator(value):
        return generator_state(value)
    if loads_itself(value):
        with calling("state_dict", value, path):
            return value.state_dict()
    if is_plain(value):
        return value
    if isinstance(value, Mapping):
        return {key: state_of_rank(item, (*path, str(key))) for key, item in value.items()}
    return [state_of_rank(item, (*path, number)) for number, item in enumerate(value)]


def set_state_of_rank(value: Any, state: Any, path: Key) -> Any:
    """Sets the state of a `PerRank`'s value, and returns the value.

    A plain value is replaced by the state.

    Raises:
        PlanError: its containers differ from the saved ones.
    """
    if is_generator(value):
        set_generator_state(value, state, path)
        return value
    if loads_itself(value):
        with calling("load_state_dict", value, path):
            value.load_state_dict(state)
        return value
    if is_plain(value):
        return state
    given = (
        state
        if isinstance(value, Mapping)
        else dict(enumerate(state))
        if isinstance(state, list)
        else {}
    )
    keys = list(value) if isinstance(value, Mapping) else list(range(len(value)))
    if not isinstance(given, Mapping) or list(given) != keys:
        raise PlanError(
            f"{shown(path)} holds {len(keys)} values, and the checkpoint has others",
            hint="keep the containers as they were saved",
        )
    made = {
        key: set_state_of_rank(
            value[key], given[key], (*path, key if isinstance(key, int) else str(key))
        )
        for key in keys
    }
    if isinstance(value, (MutableMapping, list)):
        for key, item in made.items():
            value[key] = item
    return value


# ---- restore -------------------------------------------------------------------------------------


def restore(
    state: MutableMapping[str, Any], values: Mapping[str, Any], paths: Mapping[str, Key]
) -> tuple[list[str], list[str]]:
    """Restores values: objects with their own state load in place, plain values are replaced.

    Args:
        state: as given to `export`.
        values: values by flat name. An optimizer's parameter without values here gets no state. Any
            other object must be given completely, or not at all.
        paths: from `export`.

    Returns:
        The names of values that a module has exported and does not take back; and notes on plain
        values that have lost entries, as the checkpoint has fewer.
    """
    whole, at = _join_structures(values, {name: paths[name] for name in values})
    restorer = _Restorer(holders_of(state))
    restorer.visit(state, unflatten_state_dict(whole, at), ())
    return restorer.left, restorer.notes


def _join_structures(
    values: Mapping[str, Any], paths: Mapping[str, Key]
) -> tuple[dict[str, Any], dict[str, Key]]:
    """Returns values and paths in which each `Structure` and its tensors are one value."""
    places = {path[:-1]: name for name, path in paths.items() if path[-1] == STRUCTURE}
    if not places:
        return dict(values), dict(paths)
    whole: dict[str, Any] = {}
    at: dict[str, Key] = {}
    for name, path in paths.items():
        if path[:-1] in places and path[-1] == STRUCTURE:
            found = values[name]
            whole[name] = (
                decode_object(found.encoded, values.__getitem__)
                if isinstance(found, Structure)
                else found
            )
            at[name] = path[:-1]
        elif not any(path[: len(p)] == p for p in places):
            whole[name], at[name] = values[name], path
    return whole, at


class _Restorer:
    """Walks a state and its loaded values side by side."""

    def __init__(self, holders: StateOwners) -> None:
        self.holders = holders
        self.left: list[str] = []  # names that a module has exported and does not take back
        self.notes: list[str] = []

    def visit(self, owner: Any, given: Any, path: Key) -> None:
        """Restores the entries of a container."""
        there = dict(enumerate(given)) if isinstance(given, list) else given
        for key, value in list(owner.items() if isinstance(owner, Mapping) else enumerate(owner)):
            known = key if isinstance(given, list) else str(key)
            if known in there and not isinstance(value, (PerRank, RngState)):
                self._restore(owner, key, value, there[known], (*path, known))

    def _restore(self, owner: Any, key: Any, value: Any, new: Any, path: Key) -> None:
        if isinstance(value, nn.Module):
            with calling("load_state_dict", value, path):
                left = load_module(value, new)
            self.left += [f"{flat_name(path)}.{name}" for name in left]
        elif isinstance(value, Optimizer) and not is_container(value):
            with calling("load_state_dict", value, path):
                self.notes += load_optimizer(value, new, self.holders, path)
        elif is_generator(value):
            set_generator_state(value, new, path)
        elif has_state(value):
            if isinstance(new, int | float | str | bytes | list | None):
                raise PlanError(
                    f"{shown(path)} is a {type(value).__name__}, and the checkpoint has a"
                    f" {type(new).__name__} there",
                    hint="it was saved under another key, or the state was another one",
                )
            if isinstance(value, LRScheduler):
                self.notes += _changed_scheduler(value, new, path)
            with calling("load_state_dict", value, path):
                value.load_state_dict(new)
        elif not is_plain(value):
            self.visit(value, new, path)
        else:
            if num_lost := _num_lost(value, new):
                self.notes.append(
                    f"{shown(path)}: {num_lost} entries of the state are not in the checkpoint, and"
                    " are gone"
                )
            if (made := _into(value, new)) is not value:
                owner[key] = made


def _changed_scheduler(scheduler: LRScheduler, new: Any, path: Key) -> list[str]:
    """Returns notes on a scheduler whose class or arguments are not those of the checkpoint.

    `load_state_dict` takes every attribute from the checkpoint, as torch does.
    """
    with calling("state_dict", scheduler, path):
        mine = scheduler.state_dict()
    if not isinstance(new, Mapping) or not isinstance(mine, Mapping):
        return []
    notes = []
    # the private keys differ between releases of torch, and old ones had `verbose`
    differing = (mine.keys() ^ new.keys()) - {"verbose"}
    if other := sorted(str(key) for key in differing if not str(key).startswith("_")):
        notes.append(
            f"{shown(path)}: another scheduler was saved; only one of the two has"
            f" {printable(', '.join(other))}"
        )
    given = inspect.signature(type(scheduler).__init__).parameters.keys() - {"last_epoch"}
    for key in sorted(given & mine.keys() & new.keys()):
        ours, theirs = mine[key], new[key]
        if repr(ours) != repr(theirs) and (torch.is_tensor(ours) or ours != theirs):
            notes.append(
                f"{shown(path)}: {key} = {printable(repr(theirs))} is loaded, in place of"
                f" {printable(repr(ours))}, which this job gave"
            )
    return notes


def _num_lost(old: Any, new: Any) -> int:
    """Returns how many entries of plain dicts and lists the loaded value lacks, on all levels."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return sum(_num_lost(old[key], new[key]) if key in new else 1 for key in old)
    if isinstance(old, list) and isinstance(new, list):
        lost = sum(_num_lost(o, n) for o, n in zip(old, new, strict=False))
        return lost + max(0, len(old) - len(new))
    return 0


def _into(old: Any, new: Any) -> Any:
    """Returns a loaded plain value: the present dict or list, changed in place, or the new one."""
    if isinstance(old, MutableMapping) and (
        type(old) is type(new) or {type(old), type(new)} <= {dict, OrderedDict}
    ):
        made = {k: _into(old[k], item) if k in old else item for k, item in new.items()}
        old.clear()
        old.update(made)
        return old
    if type(old) is list and type(new) is list:
        old[:] = [_into(o, n) for o, n in zip(old, new, strict=False)] + new[len(old) :]
        return old
    return new
