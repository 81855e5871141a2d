"""Maps the parameter numbers of a stored optimizer to the live optimizer's names.

`Optimizer.state_dict()` numbers its parameters, and `load_state_dict` pairs them by position. A
load does the same, and checks the shapes. If the checkpoint has `param_names`, it pairs by them
instead.

Imports torch.

Source: torch 2.13 `torch/optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.naming import strip_wrappers
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.pickle.state import is_number
from ckpt_tools.loop.loading.rename import moved
from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.optimizers import StateOwners, parameter_names
from ckpt_tools.loop.state.state_dict import flat_name
from ckpt_tools.operations.convert.param_order import LIKE_PARAMETER


@dataclass(slots=True)
class NamedCatalog:
    """A catalog whose optimizers have parameter names instead of numbers.

    Attributes:
        catalog: the catalog with names.
        params: the names for each stored list of a group's parameters.
        notes: one for each optimizer that had numbers.
    """

    catalog: Catalog
    params: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def name_numbers(
    catalog: Catalog,
    holders: StateOwners,
    read_value: Callable[[str], Any],
    wants: Callable[[str], bool],
) -> NamedCatalog:
    """Returns the catalog with names in place of optimizers' numbers.

    Args:
        catalog: of the checkpoint.
        holders: the modules and optimizers of the live state.
        read_value: reads a stored object by its name.
        wants: tells whether to load a name. An optimizer without wanted names keeps its numbers.

    Raises:
        PlanError: the stored optimizer and the live one differ in the number of parameters, or in
            shapes.
    """
    result = NamedCatalog(catalog)
    for path, optimizer in holders.optimizers:
        prefix = f"{flat_name(path)}."
        state, is_by_name = _state(catalog, f"{prefix}state.")
        has_groups = f"{prefix}param_groups.0.params" in catalog.objects  # plain SGD has no state
        names = (
            parameter_names(optimizer, holders, path)
            if (state or has_groups) and not is_by_name
            else None
        )
        if names is None or not _is_wanted(catalog, prefix, state, names, wants):
            continue
        # a ParameterList has numbers for names: then only the lists of the groups tell which
        is_unclear = not state or all(map(is_number, names))
        if is_unclear and not _groups(result.catalog, prefix, read_value)[0]:
            if state and f"{prefix}param_groups" in catalog.objects:
                raise PlanError(
                    f"the optimizer at {flat_name(path)!r} has the form of torch before 2.4, and"
                    " numbers that may be names of parameters",
                    hint="ckpt convert --to dcp gives it groups",
                )
            continue
        _name_one(result, prefix, state, optimizer, path, names, read_value)
    return result


def _state(catalog: Catalog, above: str) -> tuple[dict[str, tuple[int, str]], bool]:
    """Returns the number and key of each entry of an optimizer's state.

    Returns nothing and True if an entry has a name instead of a number.
    """
    found: dict[str, tuple[int, str]] = {}
    for name in (*catalog.tensors, *catalog.objects):
        if name.startswith(above):
            number, _, key = name[len(above) :].partition(".")
            # `0.weight.exp_avg` has the name 0.weight
            if not is_number(number) or not key or "." in key:
                return {}, True
            found[name] = int(number), key
    return found, False


def _is_wanted(
    catalog: Catalog,
    prefix: str,
    state: Mapping[str, tuple[int, str]],
    names: Sequence[str],
    wants: Callable[[str], bool],
) -> bool:
    """Tells whether any state or option is wanted, by its number or by a name for that number."""
    keys = {key for _, key in state.values()}
    options = (name for name in catalog.objects if name.startswith(f"{prefix}param_groups."))
    return any(map(wants, (*state, *options))) or any(
        wants(f"{prefix}state.{name}.{key}") for name in names for key in keys
    )


def _name_one(
    result: NamedCatalog,
    prefix: str,
    state: Mapping[str, tuple[int, str]],
    optimizer: Optimizer,
    path: Key,
    names: Sequence[str],
    read_value: Callable[[str], Any],
) -> None:
    stored, own = _groups(result.catalog, prefix, read_value)
    numbers = [number for group in stored.values() for number in group] or sorted(
        {number for number, _ in state.values()}
    )
    if len(numbers) != len(names) or not {number for number, _ in state.values()} <= set(numbers):
        raise PlanError(
            f"the optimizer at {flat_name(path)!r} has {len(names)} parameters, and the one in the"
            f" checkpoint numbers {len(numbers)}",
            hint=(
                "make the optimizer as it was made for the save, or load the model alone:"
                " select=['model*']"
            ),
        )
    by_name = _as_named(own, names)
    name_of = dict(zip(numbers, by_name or names, strict=True))
    _check_shapes(
        result.catalog, state, name_of, dict(zip(names, _parameters(optimizer), strict=True))
    )
    above = prefix.split(".")[:-1]
    new = {name: (*above, "state", name_of[number], key) for name, (number, key) in state.items()}
    result.catalog = moved(
        result.catalog,
        {
            n: new.get(n) or result.catalog.paths.get(n) or (n,)
            for n in (*result.catalog.tensors, *result.catalog.objects)
        },
    )
    result.params |= {name: [name_of[number] for number in group] for name, group in stored.items()}
    how = (
        "its param_names name them"
        if by_name
        else "they are taken in the order of this job's optimizer"
    )
    how += ", since its param_names are not those of this job" if own and not by_name else ""
    result.notes.append(f"{printable(prefix)}state was stored by numbers of parameters: {how}")


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(
    catalog: Catalog, prefix: str, read_value: Callable[[str], Any]
) -> tuple[dict[str, list[int]], list[str]]:
    """Returns each group's numbers by the list's name, and the stored `param_names`, if any."""
    stored: dict[str, list[int]] = {}
    own: list[str] = []
    while (name := f"{prefix}param_groups.{len(stored)}.params") in catalog.objects:
        value = read_value(name)
        if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
            return {}, []
        given = f"{prefix}param_groups.{len(stored)}.param_names"
        own += read_value(given) if given in catalog.objects else ()
        stored[name] = list(value)
    return stored, own


def _as_named(own: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the live optimizer's names for the stored names; nothing if they differ."""
    bare = {strip_wrappers(name): name for name in names}
    found = [bare.get(strip_wrappers(str(name)), "") for name in own]
    return found if len(set(found)) == len(names) and all(found) else []


def _check_shapes(
    catalog: Catalog,
    state: Mapping[str, tuple[int, str]],
    name_of: Mapping[int, str],
    parameters: Mapping[str, Tensor],
) -> None:
    for stored, (number, key) in state.items():
        parameter, entry = parameters[name_of[number]], catalog.tensors.get(stored)
        if key in LIKE_PARAMETER and entry is not None and entry.shape != tuple(parameter.shape):
            raise PlanError(
                f"parameter {number} of the stored optimizer is not {printable(name_of[number])!r}:"
                f" {key} has {list(entry.shape)}, the parameter {list(parameter.shape)}",
                hint="make the optimizer with its parameters in the order of the save",
            )
