"""What of a checkpoint goes where in a live state: names paired, and everything that does not fit told in one table.

Imports torch. May import levels 0 to 4, shards and state.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ckpt_tools.catalog import Catalog, TensorEntry, find_model, strip_wrappers
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.live.shards import alias_key, local_shards
from ckpt_tools.live.state import Exported, Key

_SHOWN = 8


class Match(NamedTuple):
    """How the names of a state and of a checkpoint meet: ours to stored.

    `new` has stored names below free values, which become whatever was stored; `gone` ours that are left out for that reason,
    or because the checkpoint has no optimizer state of that parameter. `alike` has stored names that must hold the same as one of
    `objects`: an option that a flattened optimizer keeps for every parameter of a group.
    """

    tensors: dict[str, str]
    objects: dict[str, str]
    new: list[str]
    gone: set[str]
    notes: list[str]
    alike: dict[str, list[str]]


def root_of(name: str) -> str:
    """Returns the state's own key for an entry."""
    return name.partition(".")[0]


def match(exported: Exported, catalog: Catalog, wanted: Callable[[str], bool], strict: bool, cast: bool, where: str) -> Match:
    """Pairs a state's names with a checkpoint's.

    Raises:
        PlanError: with a table of all that does not fit.
    """
    notes: list[str] = []
    names = _mapping(exported, catalog, notes)
    alike, settled = _groups_by_parameter(exported, catalog)
    names |= {n: stored[0] for n, stored in alike.items()}
    tensors = {n: names.get(n, n) for n in exported.tensors if wanted(n)}
    objects = {n: names.get(n, n) for n in exported.objects if wanted(n)}
    missing = [n for n, stored in tensors.items() if stored not in catalog.tensors]
    missing_objects = [n for n, stored in objects.items() if stored not in catalog.objects]
    tied = _tied(exported, missing, tensors, catalog)
    stateless = set(_stateless(missing, catalog, names, exported))
    free = [".".join(map(str, path)) for path in exported.free]
    below = {f: [n for n in (*catalog.tensors, *catalog.objects) if _is_below(n, f) and wanted(n)] for f in free}
    gone = {n for n in (*missing, *missing_objects) for f in free if _is_below(n, f) and below[f]} | stateless
    absent = [n for n in (*missing, *missing_objects) if n not in tied | settled and n not in gone]
    used = {*tensors.values(), *objects.values(), *(s for stored in alike.values() for s in stored)}
    new = [n for names_below in below.values() for n in names_below if n not in used]
    extra = _extra(exported, catalog, {*used, *new}, wanted) if strict else []
    fitting = {n: s for n, s in tensors.items() if s in catalog.tensors}
    shapes = [n for n, s in fitting.items() if tuple(exported.tensors[n].shape) != catalog.tensors[s].shape]
    types = [n for n, s in fitting.items() if not _fits_type(exported.tensors[n], catalog.tensors[s], cast)]
    if shapes or types or (strict and (absent or extra)):
        raise PlanError(_table(exported, catalog, names, absent, extra, shapes, types, where), hint=_hint(absent, extra, types))
    if stateless:
        notes.append(f"{len(stateless)} entries of optimizer state are not in the checkpoint: those parameters start without")
    if absent:
        notes.append(f"{len(absent)} entries are not in the checkpoint and keep what they have: {_some(absent)}")
    left = sorted(
        {root_of(n) for n in (*catalog.tensors, *catalog.objects)}
        - {root_of(names.get(n, n)) for n in exported.paths}
        - set(exported.per_rank)
    )
    if left and not any(names):
        notes.append(f"not asked for and left out: {_some(left)}")
    return Match(fitting, {n: s for n, s in objects.items() if s in catalog.objects}, new, gone, notes, alike)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _mapping(exported: Exported, catalog: Catalog, notes: list[str]) -> dict[str, str]:
    """Returns stored names for those of the state's keys of which nothing is there under its own name."""
    plain: dict[str, str] = {}
    for stored in catalog.tensors:
        plain.setdefault(strip_wrappers(stored), stored)
    result: dict[str, str] = {}
    model = ".".join(find_model(catalog))
    for root in {root_of(n) for n in exported.tensors}:
        ours = [n for n in exported.tensors if root_of(n) == root]
        if any(n in catalog.tensors for n in ours):
            continue
        for prefix in dict.fromkeys((f"{root}.", f"{model}." if model else "", "")):
            candidate = {n: plain.get(prefix + n[len(root) + 1 :], "") for n in ours}
            if sum(map(bool, candidate.values())) * 2 > len(ours):
                result |= {n: s for n, s in candidate.items() if s}
                notes.append(
                    f"{root}.* was stored as {prefix}*" if prefix != f"{root}." else f"{root}.* was stored with the prefixes of wrappers"
                )
                break
    return result


def _groups_by_parameter(exported: Exported, catalog: Catalog) -> tuple[dict[str, list[str]], set[str]]:
    """Pairs the options of param_groups with those of a flattened optimizer, which keeps them per parameter (torchtitan).

    Returns:
        For each of our options all stored names; and the names of our groups' lists of parameters, which have nothing stored.
    """
    alike: dict[str, list[str]] = {}
    settled: set[str] = set()
    for name, path in exported.paths.items():
        if len(path) < 4 or path[-3] != "param_groups" or name in catalog.objects or name in catalog.tensors:
            continue
        *root, _, option = map(str, path)
        members = exported.objects.get(".".join((*map(str, path[:-1]), "params")), ())
        stored = [s for fqn in members if (s := ".".join((*root, fqn, option))) in catalog.objects]
        if stored:
            alike[name] = stored
            settled.add(".".join((*map(str, path[:-1]), "params")))
    return alike, settled


def _tied(exported: Exported, missing: Sequence[str], tensors: Mapping[str, str], catalog: Catalog) -> set[str]:
    """Returns the missing names that are the same memory as a name that is there."""
    if not missing:
        return set()
    keys = {s.fqn: alias_key(s) for s in local_shards({n: exported.tensors[n] for n in tensors})}
    there = {keys.get(n) for n, stored in tensors.items() if stored in catalog.tensors} - {None}
    return {n for n in missing if keys.get(n) in there}


def _stateless(missing: Sequence[str], catalog: Catalog, names: Mapping[str, str], exported: Exported) -> list[str]:
    """Returns the missing names that are state of a parameter for which the checkpoint has no optimizer state at all."""
    with_state = {name.rpartition(".")[0] for name in catalog.tensors}
    optimizers = {path[: path.index("param_groups")] for path in exported.paths.values() if "param_groups" in path}

    def is_state(path: Key) -> bool:
        return len(path) > 3 and path[-3] == "state" and path[:-3] in optimizers

    return [n for n in missing if is_state(exported.paths[n]) and names.get(n, n).rpartition(".")[0] not in with_state]


def _extra(exported: Exported, catalog: Catalog, used: set[str], wanted: Callable[[str], bool]) -> list[str]:
    roots = {root_of(n) for n in exported.paths}
    known = tuple(f"{name}." for name in exported.per_rank)
    return [
        n
        for n in (*catalog.tensors, *catalog.objects)
        if root_of(n) in roots and n not in used and wanted(n) and not n.startswith(known or ("\0",))
    ]


def _fits_type(tensor: torch.Tensor, entry: TensorEntry, cast: bool) -> bool:
    name = str(tensor.dtype).removeprefix("torch.")
    return name == entry.dtype.name or (cast and tensor.dtype.is_floating_point and entry.dtype.is_castable)


def _table(
    exported: Exported, catalog: Catalog, names: Mapping[str, str],
    absent: Sequence[str], extra: Sequence[str], shapes: Sequence[str], types: Sequence[str], where: str,
) -> str:  # fmt: skip
    def ours(name: str) -> str:
        value = exported.tensors.get(name)
        return "" if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"

    def theirs(name: str) -> str:
        entry = catalog.tensors.get(names.get(name, name))
        return "" if entry is None else f"{entry.dtype.name} {list(entry.shape)}"

    lines = [f"the checkpoint does not fit the state ({printable(where)})"]
    for title, group, describe in (
        ("missing from the checkpoint", absent, lambda n: ours(n) + _nearest(n, extra)),
        ("in the checkpoint, but not in the state", extra, theirs),
        ("shapes differ", shapes, lambda n: f"state {ours(n)}, checkpoint {theirs(n)}"),
        ("types differ", [n for n in types if n not in set(shapes)], lambda n: f"state {ours(n)}, checkpoint {theirs(n)}"),
    ):
        if group:
            width = min(60, max(len(printable(n)) for n in group[:_SHOWN]))
            lines.append(f"  {title}: {len(group)}")
            lines += [f"    {printable(n):{width}}  {describe(n)}".rstrip() for n in group[:_SHOWN]]
            lines += [f"    … and {len(group) - _SHOWN} more"] if len(group) > _SHOWN else []
    return "\n".join(lines)


def _nearest(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others[:2000], 1, 0.8)
    return f"  nearest: {printable(close[0])}" if close else ""


def _hint(absent: Sequence[str], extra: Sequence[str], types: Sequence[str]) -> str:
    if absent and len(absent) == len(extra):
        ours, theirs = _difference(absent[0], extra[0])
        if {ours + n.removeprefix(theirs) for n in extra} == set(absent):
            return f"the names differ by a prefix only: {printable(theirs)!r} in the checkpoint, {printable(ours)!r} in the state"
    if types and not absent and not extra:
        return "pass cast=True to convert on the way"
    return "pass strict=False to load what fits and keep the rest, or select=[…] to load a part"


def _difference(ours: str, theirs: str) -> tuple[str, str]:
    """Returns what stands before the longest common end of two names."""
    same = next((i for i, (a, b) in enumerate(zip(reversed(ours), reversed(theirs), strict=False)) if a != b), min(len(ours), len(theirs)))
    return ours[: len(ours) - same], theirs[: len(theirs) - same]


def _some(names: Sequence[str]) -> str:
    return ", ".join(printable(n) for n in names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
