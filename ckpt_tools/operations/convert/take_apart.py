"""Splits a checkpoint into model, optimizers and the rest.

Optimizer state comes in three namings: see `training_state`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.naming import find_model, find_optimizers, is_other_state, key_path
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.pickle.state import Path, is_number
from ckpt_tools.operations.convert.object_reader import ObjectReader
from ckpt_tools.operations.convert.param_order import (
    NumberedOptimizer,
    Order,
    is_by_shape,
    name_parameters,
)
from ckpt_tools.operations.convert.training_state import OptimizerState, TrainingState
from ckpt_tools.storage import Store, read

_OPTIMIZER = re.compile(r"((?:.*?\.)?optim\w*(?:\.[0-9]{1,9})?)\.(state|param_groups)\.(.+)")


_OF_ONE_RANK = re.compile(r"\.rank_[0-9]+$")  # files of ranks had different values


_SHOWN = 4
_MAX_COMPARED_BYTES = 4096


_BARE = re.compile(r"()(state|param_groups)\.(.+)")


def take_apart(
    catalog: Catalog,
    store: Store,
    order: Order | None = None,
    keeps_order: bool = False,
    only_model: bool = False,
) -> TrainingState:
    """Returns the parts of a checkpoint. It reads the options of optimizers: small objects.

    Args:
        catalog: of the checkpoint.
        store: where its objects lie.
        order: the parameters that an optimizer's numbers mean; see `read_order`.
        keeps_order: the format keeps entries in the order of the job.
        only_model: return the model alone, and read no object.

    Raises:
        FormatError: an optimizer's options cannot be read.
        PlanError: `order` does not fit, or no optimizer needs it.
    """
    found = _find(catalog, None if only_model else store)
    mine = {fqn for names in found.values() for fqn in names}
    prefix = find_model(catalog)
    model: dict[str, TensorEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    places: dict[str, Path] = {}
    for fqn, entry in catalog.tensors.items():
        path = key_path(catalog, fqn)
        if fqn in mine:
            continue
        if path[: len(prefix)] == prefix if prefix else not is_other_state(path[0]):
            name = fqn[len(".".join(prefix)) + 1 :] if prefix else fqn
            model[name] = entry.named(name)
            place = catalog.paths.get(fqn, ())[len(prefix) :]
            if len(place) > 1:
                places[name] = place
        else:
            tensors[fqn] = entry
    if only_model:
        return TrainingState(prefix, model, [], {}, {}, {}, [], places)
    objects = {fqn: item for fqn, item in catalog.objects.items() if fqn not in mine}
    paths = {fqn: path for fqn, path in catalog.paths.items() if fqn in tensors or fqn in objects}
    parts = TrainingState(prefix, model, [], tensors, objects, paths, [], places)
    for name, names in found.items():
        optimizer = _optimizer(name, names, parts, order, store)
        if optimizer is not None:
            optimizer.has_order |= keeps_order
            parts.optimizers.append(optimizer)
            continue
        parts.untouched.append(name)
        parts.tensors |= {fqn: catalog.tensors[fqn] for fqn in names if fqn in catalog.tensors}
        parts.objects |= {fqn: catalog.objects[fqn] for fqn in names if fqn in catalog.objects}
        parts.paths |= {fqn: catalog.paths[fqn] for fqn in names if fqn in catalog.paths}
    return parts


def check_used(order: Order | None, numbered: Sequence[str]) -> None:
    """Refuses an order of parameters that none of these optimizers needs."""
    if order is not None and not numbered:
        raise PlanError("--param-order: no optimizer here numbers its parameters")
    if isinstance(order, Mapping) and (unknown := [name for name in order if name not in numbered]):
        raise PlanError(
            f"--param-order names {printable(unknown[0])!r}, which is no optimizer that numbers its"
            " parameters",
            hint=(
                "there are:"
                f" {', '.join(printable(name) or '(without a name)' for name in numbered)}"
            ),
        )


Entry = tuple[str, str, Any]  # kind ("state" or "param_groups"), rest of the name, value


def _find(catalog: Catalog, store: Store | None) -> dict[str, dict[str, Entry]]:
    """Returns the entries of each optimizer by name, with the objects read.

    Without a store, these are the tensors only.
    """
    is_bare = any(fqn.startswith("param_groups.") for fqn in catalog.objects)
    others = sorted((".".join(path) for path in find_optimizers(catalog)), key=len, reverse=True)
    by_key = (
        re.compile(rf"({'|'.join(map(re.escape, others))})\.(state|param_groups)\.(.+)", re.DOTALL)
        if others
        else None
    )
    found: dict[str, dict[str, Entry]] = {}
    wanted: list[tuple[str, re.Match[str]]] = []

    def match_of(fqn: str) -> re.Match[str] | None:
        match = _OPTIMIZER.fullmatch(fqn) or (by_key.fullmatch(fqn) if by_key else None)
        return match or (_BARE.fullmatch(fqn) if is_bare else None)

    for fqn in catalog.tensors:
        if match := match_of(fqn):
            found.setdefault(match[1], {})[fqn] = (match[2], match[3], catalog.tensors[fqn])
    if store is None:
        return found
    for fqn in catalog.objects:
        if match := match_of(fqn):
            wanted.append((fqn, match))
    values = ObjectReader(store)
    values.will_read(catalog.objects[fqn] for fqn, _ in wanted)
    for fqn, match in wanted:
        found.setdefault(match[1], {})[fqn] = (
            match[2],
            match[3],
            values.plain(catalog.objects[fqn]),
        )
    return found


def _optimizer(
    prefix: str,
    entries: Mapping[str, Entry],
    parts: TrainingState,
    order: Order | None,
    store: Store,
) -> OptimizerState | None:
    """Returns an optimizer from its entries; None if they do not form one.

    If the parameters of its numbers are unknown, it adds a note.
    """
    _refuse_differing(entries)
    state: dict[str, dict[str, Any]] = {}
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for kind, rest, value in entries.values():
        name, _, key = rest.rpartition(".")
        first, _, last = rest.partition(".")
        # Megatron-Core: the key comes first
        if kind == "state" and last in parts.model and rest.rpartition(".")[0] not in parts.model:
            state.setdefault(last, {})[first] = value
        elif kind == "state":
            state.setdefault(name, {})[key] = value
        elif is_number(name):
            numbered.setdefault(int(name), {})[key] = value
        elif is_number(first) and last.partition(".")[0] == "params":  # a flattened list
            numbered.setdefault(int(first), {}).setdefault("params", []).append(value)
        else:
            by_name.setdefault(name, {})[key] = value
    if not any("params" in group for group in numbered.values()):
        # no groups, but the options of each parameter: its name may be a number
        by_name |= {str(number): options for number, options in numbered.items()}
        numbered = {}
    groups = [numbered[n] for n in sorted(numbered)] or _grouped(by_name, store)
    params = _params_of(groups)
    if params is None or _has_parts(params, state):
        return None
    optimizer = OptimizerState(prefix, state, groups, has_order=bool(numbered))
    if _has_names(params, state):
        return optimizer
    if not all(map(is_number, state)):
        return None
    return _with_names(optimizer, parts, order)


def _refuse_differing(entries: Mapping[str, Entry]) -> None:
    """Refuses an optimizer with a value of each rank."""
    if differing := [fqn for fqn, (_, rest, _) in entries.items() if _OF_ONE_RANK.search(rest)]:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise PlanError(
            "values of an optimizer differ between ranks:"
            f" {printable(', '.join(differing[:_SHOWN]))}{more}",
            hint="--model-only leaves the optimizer out; ckpt reshard keeps the value of each rank",
        )


def _has_parts(params: Sequence[str | int], state: Mapping[str, Any]) -> bool:
    """Tells whether a state is below a key of a parameter: a list or a dict, such as LBFGS's."""
    known = {str(p) for p in params}
    return any(
        name not in known and any(name[: dot.start()] in known for dot in re.finditer(r"\.", name))
        for name in state
    )


def _has_names(params: Sequence[str | int], state: Mapping[str, Any]) -> bool:
    """Tells whether an optimizer has names of parameters, not numbers.

    The names of a `ParameterList` are numbers, too, but strings.
    """
    if params and all(isinstance(p, str) for p in params) and set(params) >= state.keys():
        return True
    has_numbers = any(isinstance(p, int) for p in params)
    return not has_numbers and not (state and all(map(is_number, state)))


def _with_names(
    optimizer: OptimizerState, parts: TrainingState, order: Order | None
) -> OptimizerState:
    """Returns an optimizer with names for its numbers, if anything proves them; adds a note."""
    prefix, state, groups = optimizer.prefix, optimizer.state, optimizer.groups
    what = printable(prefix) or "the optimizer"
    numbers = NumberedOptimizer(prefix, groups, state)
    names = name_parameters(numbers, parts.model, order)
    if names is None:
        parts.notes.append(
            f"{what} numbers its parameters, and their shapes alone do not tell which is which: the"
            " numbers are kept; --param-order FILE or --param-order model says what they mean"
        )
        return replace(optimizer, is_numbered=True, is_unnamed=True)
    if is_by_shape(numbers, order):
        parts.notes.append(
            f"{what} numbers its parameters: each number became the only parameter of its shape;"
            " --param-order FILE says it if the optimizer has others"
        )
    return OptimizerState(
        prefix,
        {names[int(number)]: values for number, values in state.items()},
        [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
        is_numbered=True,
        has_order=True,
    )


def _params_of(groups: Sequence[Mapping[str, Any]]) -> list[str | int] | None:
    """Returns the parameters of all groups; None if a group does not list names or numbers."""
    lists = [group.get("params") for group in groups]
    if not all(
        isinstance(found, (list, tuple)) and all(type(item) in (str, int) for item in found)
        for found in lists
    ):
        return None
    return [item for found in lists for item in found or ()]


def _grouped(by_name: Mapping[str, Mapping[str, Any]], store: Store) -> list[dict[str, Any]]:
    """Returns groups of the parameters that have the same options."""
    groups: dict[str, dict[str, Any]] = {}
    for name, options in by_name.items():
        shown = repr(sorted((key, _comparable(value, store)) for key, value in options.items()))
        groups.setdefault(shown, {**options, "params": []})["params"].append(name)
    return list(groups.values())


def _comparable(option: Any, store: Store) -> Any:
    """Returns an option that can be compared: of a small tensor, its bytes."""
    if not isinstance(option, TensorEntry) or option.nbytes > _MAX_COMPARED_BYTES:
        return option
    chunks = [(c.box, read(store, *c.extent[:3])) for c in option.chunks]
    return option.dtype.name, option.shape, chunks
