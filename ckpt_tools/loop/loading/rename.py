"""Renames entries of a catalog by the regular expressions of `resume(rename=…)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ckpt_tools.core.catalog import BytesEntry, Catalog, TensorEntry
from ckpt_tools.core.selection import substitution
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.state_dict import flat_name

SWAP = (
    "rules apply one after the other; to swap two names, go by a third: a to TMP, b to a, TMP to b"
)
E = TypeVar("E", TensorEntry, BytesEntry)


def renamed(catalog: Catalog, rules: Mapping[str, str]) -> Catalog:
    """Returns the catalog under other names.

    Args:
        catalog: of the checkpoint.
        rules: regular expressions and their replacements, applied in order wherever they match in a
            name. In an optimizer, they apply to names of parameters, not of options.

    Raises:
        PlanError: a rule matches nothing, or two entries would get the same name.
    """
    if not rules:
        return catalog
    names = [*catalog.tensors, *catalog.objects]
    _check(rules, names)
    substitute = substituter(rules)

    def new_path(name: str) -> Key:
        path = catalog.paths.get(name) or (name,)
        if "param_groups" in path:
            return path  # options keep their names; `params` lists the parameters
        new = substitute(name)
        if len(path) > 3 and path[-3] == "state":
            prefix, suffix = f"{flat_name(path[:-2])}.", f".{path[-1]}"
            if new != name and new.startswith(prefix) and new.endswith(suffix):
                return (*path[:-2], new[len(prefix) : -len(suffix)], path[-1])
            return (*path[:-2], parameter_renamer(catalog, substitute)(str(path[-2])), path[-1])
        return path if new == name else _resplit(path, new)

    return moved(catalog, {name: new_path(name) for name in names})


def _resplit(path: Key, new: str) -> Key:
    """Splits a new name into a path at the same places as the old one.

    For example, the key `a.w` stays one key, and the keys `a` and `w` stay two.
    """
    head, tail = 0, 0
    while head < len(path) - 1 and new.startswith(f"{flat_name(path[: head + 1])}."):
        head += 1
    while tail < len(path) - head - 1 and new.endswith(
        f".{flat_name(path[len(path) - tail - 1 :])}"
    ):
        tail += 1
    start, end = (
        len(flat_name(path[:head])) + bool(head),
        len(new) - (len(flat_name(path[len(path) - tail :])) + 1 if tail else 0),
    )
    if start > end:  # the rule removed text that both ends share
        return tuple(new.split("."))
    middle = new[start:end]
    is_one = any("." in str(key) for key in path[head : len(path) - tail])
    return (*path[:head], *([middle] if is_one else middle.split(".")), *path[len(path) - tail :])


def moved(catalog: Catalog, places: Mapping[str, Key]) -> Catalog:
    """Returns the catalog with each entry at a new path.

    Raises:
        PlanError: two entries would get the same name.
    """
    taken: dict[str, str] = {}
    for name, path in places.items():
        if (other := taken.setdefault(flat_name(path), name)) != name:
            raise PlanError(
                f"rename gives two entries one name: {printable(other)!r} and {printable(name)!r}",
                hint=SWAP,
            )
        if "" in path:
            raise PlanError(
                f"rename leaves nothing of a part of a name: {printable(name)!r} becomes"
                f" {printable(flat_name(path))!r}"
            )
    paths = {flat_name(path): path for name, path in places.items() if name in catalog.paths}
    new_names = {name: flat_name(path) for name, path in places.items()}
    return replace(
        catalog,
        tensors=_moved(catalog.tensors, new_names),
        objects=_moved(catalog.objects, new_names),
        paths=paths,
    )


def _check(rules: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuses a rule that matches none of the names, after the rules before it."""
    now = list(names)
    for pattern, new in rules.items():
        substitute = _substitution(pattern, new)
        if not any(map(re.compile(pattern).search, now)):
            raise PlanError(
                f"rename matches none of {len(names)} names: {printable(pattern)!r}",
                hint=f"names look like: {', '.join(map(printable, now[:3]))}",
            )
        now = list(map(substitute, now))


def _substitution(pattern: str, new: str) -> Callable[[str], str]:
    return substitution(pattern, new, f"rename {{{printable(pattern)!r}: {printable(new)!r}}}")


def parameter_renamer(catalog: Catalog, substitute: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a function that renames a parameter as an optimizer names it.

    A rule may match that name, or the name in the checkpoint.
    """
    roots = sorted({name.partition(".")[0] for name in catalog.tensors})

    def new_name(fqn: str) -> str:
        if (new := substitute(fqn)) != fqn:
            return new
        for root in (r for r in roots if f"{r}.{fqn}" in catalog.tensors):
            full = substitute(f"{root}.{fqn}")
            if full.startswith(f"{root}."):
                return full[len(root) + 1 :]
        return fqn

    return new_name


def substituter(rules: Mapping[str, str]) -> Callable[[str], str]:
    """Returns a function that applies rules to a name, in order."""
    rename_by = [_substitution(pattern, new) for pattern, new in rules.items()]

    def substitute(name: str) -> str:
        for by_rule in rename_by:
            name = by_rule(name)
        return name

    return substitute


def _moved(entries: Mapping[str, E], new_names: Mapping[str, str]) -> dict[str, E]:
    return {new_names[name]: entry.named(new_names[name]) for name, entry in entries.items()}
