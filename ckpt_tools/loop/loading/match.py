"""Pairs names of a checkpoint with names of a live state, and lists all misfits in one table.

Imports torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from ckpt_tools.core.catalog import (
    Catalog,
    TensorEntry,
    check_globs,
    find_model,
    matcher,
    refuse_unread,
    strip_wrappers,
)
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.loading.load_request import LoadRequest, OnMismatch
from ckpt_tools.loop.loading.misfits import Misfits, misfit_hint, misfit_table, shown_names
from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.optimizers import StoredState
from ckpt_tools.loop.state.shards import alias_key, local_shards
from ckpt_tools.loop.state.state_dict import ExportedState, flat_name


class Match(NamedTuple):
    """The pairs of names of a state and a checkpoint.

    Attributes:
        tensors, objects: names of the state to stored names.
        new: stored names below values of the state that may take any stored form.
        gone: names of the state that are left out for that reason, or because the checkpoint has no
            optimizer state of that parameter.
        notes: remarks for the report.
        alike: stored names that must hold the same value as one of `objects`. A flattened optimizer
            keeps each option for every parameter of a group.
        resized: how to load tensors whose shape in the checkpoint differs.
        extra: stored names under the state's keys that this rank's state lacks. They are an error
            if no other rank has them either.
        extra_error: that error.
    """

    tensors: dict[str, str]
    objects: dict[str, str]
    new: list[str]
    gone: set[str]
    notes: list[str]
    alike: dict[str, list[str]]
    resized: dict[str, OnMismatch]
    extra: list[str]
    extra_error: PlanError | None


def root_of(name: str, paths: Mapping[str, Key]) -> str:
    """Returns the top-level key of the state for an entry."""
    path = paths.get(name)
    return str(path[0]) if path else name.partition(".")[0]


def stored_state(catalog: Catalog) -> dict[str, dict[str, dict[str, StoredState]]]:
    """Returns a checkpoint's optimizer state, by optimizer, parameter and key.

    Optimizers have their stored names, parameters their plain ones. Two models may have parameters
    of one name and of different shapes. The name "" has the state of all optimizers, for a
    checkpoint that names them in another way than the state.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, entry in catalog.tensors.items():
        if ".state." not in f".{name}":
            for plain in (strip_wrappers(name), strip_wrappers(name.partition(".")[2])):
                shapes.setdefault(plain, set()).add(entry.shape)
    found: dict[str, dict[str, dict[str, StoredState]]] = {"": {}}
    for name, entry in catalog.tensors.items():
        optimizer, is_state, rest = f".{name}".partition(".state.")
        if is_state:
            fqn, key = strip_wrappers(rest.rpartition(".")[0]), rest.rpartition(".")[2]
            is_like = entry.shape in shapes[fqn] if fqn in shapes else bool(entry.shape)
            state = StoredState(entry.shape, getattr(torch, entry.dtype.name), is_like)
            for group in ("", optimizer[1:]):
                found.setdefault(group, {}).setdefault(fqn, {})[key] = state
    return found


def match(
    exported: ExportedState,
    catalog: Catalog,
    request: LoadRequest,
    where: str,
    lacks_frozen: bool = False,
) -> Match:
    """Pairs a state's names with a checkpoint's.

    Args:
        exported: the state.
        catalog: of the checkpoint.
        request: what to load, and how.
        where: the checkpoint, for messages.
        lacks_frozen: the save has left out parameters that take no gradient.

    Raises:
        PlanError: names or shapes do not fit (the message is a table), or a glob matches nothing.
    """
    notes: list[str] = []
    wanted = request.wants
    names = _mapping(exported, catalog, notes)
    alike, settled = _groups_by_parameter(exported, catalog)
    free = {flat_name(path) for path in exported.free}
    # a dict whose tensors are stored under another name takes these, and nothing else
    free -= {place for n in names for place in places_above(n, free)}
    names |= {n: stored[0] for n, stored in alike.items()}
    ours = [*exported.tensors, *exported.objects, *exported.per_rank]
    below = _stored_below(catalog, free)
    stored_below = list(dict.fromkeys(chain.from_iterable(below.values())))
    check_globs(request.select, [*ours, *stored_below], "select")
    check_globs(request.on_mismatch, [*exported.tensors], "on_mismatch")
    tensors = {n: names.get(n, n) for n in exported.tensors if wanted(n)}
    objects = {n: names.get(n, n) for n in exported.objects if wanted(n)}
    kinds = _kinds(catalog, tensors, objects, free)
    missing = [
        n for n, stored in tensors.items() if stored not in catalog.tensors and n not in kinds
    ]
    missing_objects = [
        n for n, stored in objects.items() if stored not in catalog.objects and n not in kinds
    ]
    tied = _tied(exported, missing, tensors, catalog)
    stateless = set(_stateless(missing, catalog, names, exported))
    below = {f: [n for n in names_below if wanted(n)] for f, names_below in below.items()}
    gone = {
        n for n in (*missing, *missing_objects) if any(below[f] for f in places_above(n, free))
    } | stateless
    # DCP stores no empty values
    empty = {
        n
        for n in missing_objects
        if isinstance(exported.objects[n], Mapping) and not exported.objects[n]
    }
    absent = [
        n for n in (*missing, *missing_objects) if n not in tied | settled | empty and n not in gone
    ]
    if lacks_frozen:
        absent = _without_frozen(absent, exported.frozen, notes)
    fitting = {n: s for n, s in tensors.items() if s in catalog.tensors and n not in kinds}
    fitting_objects = {n: s for n, s in objects.items() if s in catalog.objects and n not in kinds}
    used = {*fitting.values(), *fitting_objects.values(), *(names.get(n, n) for n in kinds)}
    used |= {s for stored in alike.values() for s in stored}
    new = [n for names_below in below.values() for n in names_below if n not in used]
    extra = _extra(exported, catalog, {*used, *new}, wanted) if request.strict else []
    resized = _resized(exported, catalog, fitting, request)
    skipped = {
        path[:-1]
        for n, how in resized.items()
        if how == "skip" and "state" in (path := exported.paths[n])
    }
    fitting = {
        n: s
        for n, s in fitting.items()
        if resized.get(n) != "skip" and exported.paths[n][:-1] not in skipped
    }
    new = [n for n in new if not places_above(n, {flat_name(path) for path in skipped})]
    shapes = [
        n
        for n, s in fitting.items()
        if n not in resized and tuple(exported.tensors[n].shape) != catalog.tensors[s].shape
    ]
    types = [
        n
        for n, s in fitting.items()
        if not _fits_type(exported.tensors[n], catalog.tensors[s], request.cast)
    ]
    misfits = Misfits(absent, extra, shapes, types, kinds)
    error = None
    if shapes or types or (request.strict and (absent or extra or kinds)):
        error = PlanError(
            misfit_table(exported, catalog, names, misfits, where),
            hint=misfit_hint(misfits, request.strict),
        )
        if shapes or types or absent or kinds:
            raise error
    if stateless:
        notes.append(
            f"{len(stateless)} entries of optimizer state are not in the checkpoint: those"
            " parameters start with empty state"
        )
    if absent or kinds:
        notes.append(
            f"{len(absent) + len(kinds)} entries are not in the checkpoint and keep their values:"
            f" {shown_names([*absent, *kinds])}"
        )
    notes += _turned(exported, catalog, new, gone, free)
    notes += [
        _describe_change(n, how, exported, catalog.tensors[tensors[n]])
        for n, how in resized.items()
    ]
    stored_roots = {root_of(n, catalog.paths) for n in (*catalog.tensors, *catalog.objects)}
    left = sorted(
        stored_roots
        - exported.roots
        - {root_of(s, catalog.paths) for s in names.values()}
        - {root_of(s, {}) for s in used}
    )
    if left and not any(names):
        notes.append(f"the state has no such keys; left out: {shown_names(left)}")
    notes += _tied_apart(exported, catalog, fitting)
    return Match(fitting, fitting_objects, new, gone, notes, alike, resized, extra, error)


def _without_frozen(absent: Sequence[str], frozen: set[str], notes: list[str]) -> list[str]:
    """Returns the absent names but for frozen parameters, which a note names."""
    kept = [n for n in absent if n in frozen]
    if kept:
        notes.append(
            f"the step has only what trains: {len(kept)} frozen parameters keep their values:"
            f" {shown_names(kept)}"
        )
    return [n for n in absent if n not in frozen]


def check_unread(catalog: Catalog, state: Mapping[str, Any], request: LoadRequest) -> None:
    """Refuses to skip a tensor under one of the state's keys because its kind is not read.

    Raises:
        PlanError: there is such a tensor; the message has its name and kind.
    """
    roots = set(map(str, state))
    mine = {
        n: kind
        for n, kind in catalog.unread.items()
        if root_of(n, catalog.paths) in roots and request.wants(n)
    }
    if request.strict:
        refuse_unread(
            replace(catalog, unread=mine),
            "pass select=[…] for the rest, or strict=False to go on without them",
        )


def _stored_below(catalog: Catalog, free: set[str]) -> dict[str, list[str]]:
    """Returns the stored names at or below each place."""
    below: dict[str, list[str]] = {place: [] for place in free}
    for name in (*catalog.tensors, *catalog.objects):
        for place in places_above(name, free):
            below[place].append(name)
    return below


def _kinds(
    catalog: Catalog, tensors: Mapping[str, str], objects: Mapping[str, str], free: set[str]
) -> list[str]:
    """Returns the state's names whose stored entry is of the other kind.

    These are tensors stored as values, and values of modules and optimizers stored as tensors.

    A plain value of the state takes any stored form, also a tensor. A tensor of the state stays
    one, because other objects may refer to it.
    """
    found = [n for n, stored in tensors.items() if stored in catalog.objects]
    return found + [
        n
        for n, stored in objects.items()
        if stored in catalog.tensors and not places_above(n, free)
    ]


def _turned(
    exported: ExportedState, catalog: Catalog, new: Sequence[str], gone: set[str], free: set[str]
) -> list[str]:
    """Returns notes on plain values whose kind changes."""
    turned = [
        n
        for n in new
        if n in exported.objects and n in catalog.tensors and not n.endswith("._extra_state")
    ]
    notes = [
        f"{printable(n)}: a tensor was stored, and replaces a value that is not a tensor"
        for n in turned
    ]
    lost: dict[str, list[str]] = {}
    for name in sorted(gone & exported.tensors.keys()):
        for place in places_above(name, free):
            lost.setdefault(place, []).append(name)
    for place, names in lost.items():
        notes.append(
            f"{printable(place)}: {len(names)} tensors of the state are replaced by what was"
            f" stored: {shown_names(names)}"
        )
    return notes


def _tied_apart(exported: ExportedState, catalog: Catalog, fitting: Mapping[str, str]) -> list[str]:
    """Returns notes on tied parameters for which the checkpoint has several values."""
    names: dict[Any, str] = {}
    notes = []
    for shard in local_shards({n: exported.tensors[n] for n in fitting}):
        first = (
            names.setdefault(key, shard.fqn) if (key := alias_key(shard)) is not None else shard.fqn
        )
        if (
            first != shard.fqn
            and catalog.tensors[fitting[first]].chunks != catalog.tensors[fitting[shard.fqn]].chunks
        ):
            what = (
                f"{printable(first)} and {printable(shard.fqn)} are one tensor here, and two in the"
                " checkpoint"
            )
            notes.append(f"{what}: the value of the first is loaded, that of the second is not")
    return notes


def _resized(
    exported: ExportedState, catalog: Catalog, fitting: Mapping[str, str], request: LoadRequest
) -> dict[str, OnMismatch]:
    """Returns the rule of the request for each tensor whose shape differs."""
    found: dict[str, OnMismatch] = {}
    rules = [(matcher([glob]), how) for glob, how in request.on_mismatch.items()]
    for name, stored in fitting.items():
        mine, theirs = tuple(exported.tensors[name].shape), catalog.tensors[stored].shape
        how = next((how for fits, how in rules if fits(name)), None) if mine != theirs else None
        if how == "grow" and (
            len(mine) != len(theirs) or any(a < b for a, b in zip(mine, theirs, strict=True))
        ):
            raise PlanError(
                f"on_mismatch cannot grow {printable(name)!r}: the checkpoint has {list(theirs)},"
                f" the state {list(mine)}",
                hint=(
                    "every dim of the state must be at least that of the checkpoint; pass 'skip',"
                    " or a function"
                ),
            )
        if how is not None:
            found[name] = how
    return found


def _describe_change(
    name: str, how: OnMismatch, exported: ExportedState, entry: TensorEntry
) -> str:
    what = {
        "grow": "its elements are loaded, the others keep their values",
        "skip": "it keeps its values",
    }
    done = (
        what[how]
        if isinstance(how, str)
        else "made from the stored one by the function of on_mismatch"
    )
    return (
        f"{printable(name)}: the checkpoint has {list(entry.shape)}, the state"
        f" {list(exported.tensors[name].shape)}: {done}"
    )


def int_keys(
    exported: ExportedState, values: dict[str, Any], paths: Mapping[str, Key], notes: list[str]
) -> None:
    """Restores integer keys of dicts, if the writer (such as stock DCP) stored them as strings."""
    for name, value in exported.objects.items():
        if (
            not isinstance(value, Mapping)
            or not value
            or not all(type(key) is int for key in value)
            or name in values
        ):
            continue
        depth = len(exported.paths[name])
        below = {n: paths[n] for n in values if paths[n][:depth] == exported.paths[name]}
        if below and all(
            len(path) == depth + 1 and re.fullmatch(r"-?\d{1,18}", str(path[-1]))
            for path in below.values()
        ):
            made: Any = {int(path[-1]): values.pop(n) for n, path in below.items()}
            kind: Any = type(value)
            values[name] = kind(made)
            notes.append(
                f"{printable(name)}: its keys were stored as strings, and are integers again"
            )


def places_above(name: str, places: set[str]) -> list[str]:
    """Returns those of `places` that equal a flat name or contain it."""
    ends = [i for i, c in enumerate(name) if c == "."]
    return [place for end in (*ends, len(name)) if (place := name[:end]) in places]


def _mapping(exported: ExportedState, catalog: Catalog, notes: list[str]) -> dict[str, str]:
    """Returns stored names for top-level keys of the state that the checkpoint lacks."""
    plain: dict[str, str] = {}
    for stored in catalog.tensors:
        plain.setdefault(strip_wrappers(stored), stored)
    result: dict[str, str] = {}
    model = ".".join(find_model(catalog))
    by_root: dict[str, list[str]] = {}
    plain_values = {flat_name(path) for path in exported.plain}
    # a plain dict takes whatever a job has stored below its key; weights alone have no such keys
    free = plain_values if catalog.paths else set()
    for name in (n for n in exported.tensors if not places_above(n, free)):
        by_root.setdefault(root_of(name, exported.paths), []).append(name)
    direct = exported.tensors.keys() & catalog.tensors.keys()
    found: dict[str, tuple[str, dict[str, str]]] = {}  # prefix and stored names, by root
    for root, ours in by_root.items():
        if direct.isdisjoint(ours) and (fit := _prefix_that_fits(root, ours, model, plain)):
            found[root] = fit
    takers = Counter(s for _, names in found.values() for s in names.values())
    for root, (prefix, names) in found.items():
        # another part of the state has these values: this one was not saved
        if any(s in direct or takers[s] > 1 for s in names.values()):
            continue
        result |= names
        notes.append(
            f"{root}.* was stored as {prefix}*"
            if prefix != f"{root}."
            else f"{root}.* was stored with the prefixes of wrappers"
        )
    return result


def _prefix_that_fits(
    root: str, ours: Sequence[str], model: str, plain: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    """Returns a prefix with which most names of a key are stored, and the stored names."""
    for prefix in dict.fromkeys((f"{root}.", f"{model}." if model else "", "")):
        names = {n: s for n in ours if (s := plain.get(prefix + n[len(root) + 1 :]))}
        if len(names) * 2 > len(ours):
            return prefix, names
    return None


def _groups_by_parameter(
    exported: ExportedState, catalog: Catalog
) -> tuple[dict[str, list[str]], set[str]]:
    """Pairs the options of param_groups with those of a flattened optimizer.

    A flattened optimizer (torchtitan) keeps the options per parameter.

    Returns:
        All stored names for each option of the state; and the names of the groups' parameter lists,
        for which nothing is stored.
    """
    alike: dict[str, list[str]] = {}
    settled: set[str] = set()
    for name, path in exported.paths.items():
        if (
            len(path) < 4
            or path[-3] != "param_groups"
            or name in catalog.objects
            or name in catalog.tensors
        ):
            continue
        *root, _, option = map(str, path)
        members = exported.objects.get(".".join((*map(str, path[:-1]), "params")), ())
        stored = [s for fqn in members if (s := ".".join((*root, fqn, option))) in catalog.objects]
        if stored:
            alike[name] = stored
            settled.add(".".join((*map(str, path[:-1]), "params")))
    return alike, settled


def _tied(
    exported: ExportedState, missing: Sequence[str], tensors: Mapping[str, str], catalog: Catalog
) -> set[str]:
    """Returns the missing names that share memory with a name that is present."""
    if not missing:
        return set()
    keys = {s.fqn: alias_key(s) for s in local_shards({n: exported.tensors[n] for n in tensors})}
    there = {keys.get(n) for n, stored in tensors.items() if stored in catalog.tensors} - {None}
    return {n for n in missing if keys.get(n) in there}


def _stateless(
    missing: Sequence[str], catalog: Catalog, names: Mapping[str, str], exported: ExportedState
) -> list[str]:
    """Returns the missing names whose parameter has no optimizer state in the checkpoint."""
    with_state = {name.rpartition(".")[0] for name in catalog.tensors}
    optimizers = {
        path[: path.index("param_groups")]
        for path in exported.paths.values()
        if "param_groups" in path
    }

    def is_state(path: Key) -> bool:
        return len(path) > 3 and path[-3] == "state" and path[:-3] in optimizers

    return [
        n
        for n in missing
        if is_state(exported.paths[n]) and names.get(n, n).rpartition(".")[0] not in with_state
    ]


def _extra(
    exported: ExportedState, catalog: Catalog, used: set[str], wanted: Callable[[str], bool]
) -> list[str]:
    roots = exported.roots
    known = tuple(f"{name}." for name in exported.per_rank)
    return [
        n
        for n in (*catalog.tensors, *catalog.objects)
        if root_of(n, catalog.paths) in roots
        and n not in used
        and wanted(n)
        and not n.startswith(known or ("\0",))
    ]


def _fits_type(tensor: torch.Tensor, entry: TensorEntry, cast: bool) -> bool:
    name = str(tensor.dtype).removeprefix("torch.")
    return name == entry.dtype.name or (
        cast and tensor.dtype.is_floating_point and entry.dtype.is_castable
    )
