"""Pairs names of a checkpoint with names of a live state, and lists all misfits in one table.

Imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.naming import strip_wrappers
from ckpt_tools.core.selection import matcher, refuse_unread
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.loading.load_request import LoadRequest, OnMismatch
from ckpt_tools.loop.loading.misfits import Misfits, misfit_hint, misfit_table, shown_names
from ckpt_tools.loop.loading.names import PairedNames, places_above, root_of
from ckpt_tools.loop.state.composite import check_parts
from ckpt_tools.loop.state.few_bits import CODES, PARTS, SCALE
from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.optimizers import StoredState
from ckpt_tools.loop.state.shards import BoxTensor, alias_key, local_shards
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
        left_out: top-level keys of the checkpoint that this rank's state lacks.
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
    left_out: list[str]


def stored_state(catalog: Catalog) -> dict[str, dict[str, dict[str, StoredState]]]:
    """Returns a checkpoint's optimizer state, by optimizer, parameter and key.

    Optimizers have their stored names, parameters their plain ones. Two models may have parameters
    of one name and of different shapes. The name "" has the state of all optimizers, for a
    checkpoint that names them in another way than the state.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, entry in catalog.tensors.items():
        for plain in (strip_wrappers(name), strip_wrappers(name.partition(".")[2])):
            shapes.setdefault(plain, set()).add(entry.shape)
    found: dict[str, dict[str, dict[str, StoredState]]] = {"": {}}
    for name, entry in catalog.tensors.items():
        optimizer, is_state, rest = f".{name}".partition(".state.")
        if is_state:
            above, _, key = rest.rpartition(".")
            moment = name.rpartition(".")[0]
            if key in PARTS and all(f"{moment}.{p}" in catalog.tensors for p in (CODES, SCALE)):
                above, _, of = above.rpartition(".")
                key = f"{of}.{key}"  # a part of a moment of few bits
            fqn = strip_wrappers(above)
            is_like = entry.shape in shapes[fqn] if fqn in shapes else bool(entry.shape)
            state = StoredState(entry.shape, getattr(torch, entry.dtype.name), is_like)
            for group in ("", optimizer[1:]):
                found.setdefault(group, {}).setdefault(fqn, {})[key] = state
    for name in catalog.objects:
        optimizer, is_state, key = f".{name}".partition(".state.")
        if is_state and "." not in key:  # of no parameter
            state = StoredState((), torch.int64, False)
            for group in ("", optimizer[1:]):
                found.setdefault(group, {}).setdefault("", {})[key] = state
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
    pairs = PairedNames(exported, catalog, request, notes)
    tensors, objects = pairs.paired()
    used = pairs.used()
    absent, gone = pairs.absent(lacks_frozen)
    new = [n for names_below in pairs.below.values() for n in names_below if n not in used]
    extra = _extra(exported, catalog, {*used, *new}, request.wants)
    resized = _resized(exported, catalog, tensors, request)
    skipped = {
        path[:-1]
        for n, how in resized.items()
        if how == "skip" and "state" in (path := exported.paths[n])
    }
    tensors = {
        n: s
        for n, s in tensors.items()
        if resized.get(n) != "skip" and exported.paths[n][:-1] not in skipped
    }
    new = [n for n in new if not places_above(n, {flat_name(path) for path in skipped})]
    check_parts(exported.composites, tensors, "would not be loaded", objects)
    shapes, types = _unfit(exported, catalog, tensors, resized, request.cast)
    misfits = Misfits(absent, extra, shapes, types, pairs.kinds)
    error = _error_of(misfits, request.strict, exported, catalog, pairs.names, where)
    if absent or pairs.kinds:
        notes.append(
            f"{len(absent) + len(pairs.kinds)} entries are not in the checkpoint and keep their"
            f" values: {shown_names([*absent, *pairs.kinds])}"
        )
    notes += _turned(exported, catalog, new, gone, pairs.free)
    notes += [
        _describe_change(n, how, exported, catalog.tensors[pairs.tensors[n]])
        for n, how in resized.items()
    ]
    notes += _tied_apart(exported, catalog, tensors)
    left = pairs.left_out(used)
    return Match(tensors, objects, new, gone, notes, pairs.alike, resized, extra, error, left)


def _unfit(
    exported: ExportedState,
    catalog: Catalog,
    tensors: Mapping[str, str],
    resized: Mapping[str, OnMismatch],
    cast: bool,
) -> tuple[list[str], list[str]]:
    """Returns two lists of tensors: those of other shapes, and those of types that do not fit."""
    parts = {part for found in exported.composites.values() for part in found.parts}
    shapes = [
        n
        for n, s in tensors.items()
        if n not in resized and tuple(exported.tensors[n].shape) != catalog.tensors[s].shape
    ]
    types = [
        n
        for n, s in tensors.items()
        if not _fits_type(exported.tensors[n], catalog.tensors[s], cast and n not in parts)
    ]
    return shapes, types


def _error_of(
    misfits: Misfits,
    strict: bool,
    exported: ExportedState,
    catalog: Catalog,
    names: Mapping[str, str],
    where: str,
) -> PlanError | None:
    """Returns the error for stored names that this rank's state lacks; None if there are none.

    Other ranks may have these names.

    Raises:
        PlanError: there are other misfits, or the state has names that the checkpoint lacks.
    """
    is_refused = bool(misfits.shapes or misfits.types)
    if strict:
        is_refused = is_refused or bool(misfits.absent or misfits.kinds)
    if not is_refused and not (strict and misfits.extra):
        return None
    table = misfit_table(exported, catalog, names, misfits, where)
    error = PlanError(table, hint=misfit_hint(misfits, exported, catalog, strict))
    if is_refused:
        raise error
    return error


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
        how = next((how for fits, how in rules if fits(name)), None)
        if how == "refuse" and isinstance(exported.tensors[name], BoxTensor):
            moment = flat_name(exported.paths[name][:-1])
            raise PlanError(
                "the ranks of this job cut the blocks of a moment of few bits:"
                f" {printable(moment)!r}, and on_mismatch refuses that",
                hint="choose ranks that leave its blocks whole; else it becomes float32",
            )
        how = None if mine == theirs or how == "refuse" else how
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
        if how is None:
            continue
        path = exported.paths[name]
        above = flat_name(path[:-1])
        is_part = {f"{above}.{part}" for part in (CODES, SCALE)} <= exported.tensors.keys()
        is_part = is_part and path[-1] in PARTS
        is_part = is_part or any(name in one.parts for one in exported.composites.values())
        if is_part:
            raise PlanError(
                f"on_mismatch takes no parts of quantized weights or moments: {printable(name)!r}"
                f" has {list(theirs)} in the checkpoint, the state {list(mine)}",
                hint="leave it out with select, with all of its parts",
            )
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
