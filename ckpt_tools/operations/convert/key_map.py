"""Applies key maps: data files that describe how two frameworks name and lay out tensors.

A map is JSON with these rules. `rename` has pairs of regular expression and replacement, applied in
order. `rope` reorders rows of rotary heads between interleaved pairs and halves. `split` and `fuse`
cut a tensor by rows, or join several. `unstack` cuts a tensor of all layers. All rules apply to the
model and to its optimizer state. See "Key maps" in docs/convert.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import TensorEntry
from ckpt_tools.core.views import RowRange, stack_rows, take_layer, take_rows
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.training_state import TrainingState
from ckpt_tools.storage.small_files import parse_json, read_named

_OWN = Path(__file__).parents[2] / "maps"
_KEYS = {"about", "rename", "rope", "split", "fuse", "unstack"}


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A map as its file has it. `settings` has the named numbers that it needs."""

    path: str
    rename: Sequence[tuple[re.Pattern[str], str]]
    rope: Sequence[Mapping[str, Any]]
    split: Sequence[Mapping[str, Any]]
    fuse: Sequence[Mapping[str, Any]]
    unstack: Sequence[Mapping[str, Any]]
    settings: Mapping[str, int] = field(default_factory=dict)

    def number(self, value: object) -> int:
        """Returns a count, which a rule gives as a number or as the name of a setting.

        Raises:
            PlanError: the setting has no value.
        """
        found = self.settings.get(value) if isinstance(value, str) else value
        if type(found) is not int or found < 1:
            raise PlanError(
                f"the key map needs a number: {printable(str(value))} ({printable(self.path)})",
                hint=f"--set {value}=N; a model's config gives heads and kv_heads",
            )
        return found


def own_maps() -> list[str]:
    """Returns the names of the built-in maps."""
    return sorted(path.stem for path in _OWN.glob("*.json"))


def read_map(path: str | os.PathLike[str], settings: Mapping[str, int] | None = None) -> KeyMap:
    """Reads a map from a file, or a built-in one by its name.

    Raises:
        PlanError: there is none, or it is malformed.
    """
    where = os.fspath(path)
    file = _OWN / f"{where}.json" if where in own_maps() else Path(where)
    try:
        body = parse_json(read_named(file))
        if not isinstance(body, dict) or body.keys() - _KEYS:
            raise ValueError(f"expected a table with {', '.join(sorted(_KEYS))}")
        renames = [
            (re.compile(pattern), _template(pattern, new))
            for pattern, new in body.get("rename", [])
        ]
        rules = {key: [_rule(key, rule) for rule in body.get(key, [])] for key in _FIELDS}
    except (StorageError, ValueError, TypeError, KeyError, re.error) as error:
        hint = f"maps that come along: {', '.join(own_maps())}"
        raise PlanError(
            f"not a key map: {printable(str(error))} ({printable(where)})", hint=hint
        ) from error
    return KeyMap(where, renames, **rules, settings=settings or {})


_FIELDS = {
    "rope": {"match", "heads", "to"},
    "split": {"match", "into", "parts"},
    "fuse": {"match", "from", "into"},
    "unstack": {"match", "into"},
}


_LISTS = (("split", "into"), ("fuse", "from"))  # rules with several names


def _template(pattern: str, text: object) -> str:
    """Returns a replacement after a check: each of its groups is in the pattern.

    Raises:
        TypeError: it is not a string.
        ValueError: it refers to a missing group.
    """
    if not isinstance(text, str):
        raise TypeError(f"a replacement: expected a string, got {text!r}")
    found = re.compile(pattern)
    names = {number: name for name, number in found.groupindex.items()}
    groups = [f"(?P<{names[n]}>)" if n in names else "()" for n in range(1, found.groups + 1)]
    try:  # this pattern has the same groups, and matches the empty string
        re.sub("".join(groups), text, "", count=1)
    except (re.error, IndexError) as error:
        raise ValueError(f"the replacement {text!r} does not fit {pattern!r}: {error}") from None
    return text


def _rule(kind: str, rule: Mapping[str, Any]) -> Mapping[str, Any]:
    if set(rule) != _FIELDS[kind]:
        raise ValueError(f"{kind}: expected {', '.join(sorted(_FIELDS[kind]))}")
    for key in ("into", "from"):
        names = rule.get(key, "") if (kind, key) not in _LISTS else rule[key]
        if isinstance(names, list) != ((kind, key) in _LISTS) or names == []:
            raise ValueError(f"{kind}: `{key}` is not as expected: {names!r}")
        for name in names if isinstance(names, list) else [names]:
            _template(rule["match"], name)
    if not isinstance(rule.get("parts", []), list):
        raise TypeError(f"{kind}: `parts` is a list of numbers, or of names of settings")
    if kind == "rope" and rule["to"] not in ("halves", "pairs"):
        raise ValueError("rope: `to` is halves or pairs")
    return {**rule, "match": re.compile(rule["match"])}


def apply_map(parts: TrainingState, keys: KeyMap, source: Source) -> TrainingState:
    """Returns the training state renamed, split, fused and reordered as a map says.

    Raises:
        PlanError: a rule does not fit a tensor, or nothing in the map or the settings is used.
    """
    _check_used(parts, keys)
    raw = _raw(parts, keys, source)
    for rule in keys.unstack:
        for fqn in [f for f in parts.model if rule["match"].fullmatch(f)]:
            parts = _unstack(parts, fqn, rule, raw)
    for rule in keys.split:
        for fqn in [f for f in parts.model if rule["match"].fullmatch(f)]:
            parts = _split(parts, fqn, rule, keys, raw)
    for rule in keys.fuse:
        for fqn in [f for f in parts.model if rule["match"].fullmatch(f)]:
            parts = _fuse(parts, fqn, rule)
    for rule in keys.rope:
        for fqn in [f for f in parts.model if rule["match"].fullmatch(f)]:
            rows = _rope_rows(parts.model[fqn], keys.number(rule["heads"]), rule["to"])
            parts = _replaced(
                parts, fqn, {fqn: partial(_rows, raw, rows, parts.model[fqn].shape[0])}
            )
    for pattern, new in keys.rename:
        parts = parts.renamed(partial(pattern.sub, new))
    return parts


def _check_used(parts: TrainingState, keys: KeyMap) -> None:
    """Refuses a map that matches no tensor."""
    rules = [*keys.unstack, *keys.split, *keys.fuse, *keys.rope]
    patterns = [rule["match"].fullmatch for rule in rules]
    patterns += [pattern.search for pattern, _ in keys.rename]
    if not any(match(fqn) for match in patterns for fqn in parts.model):
        raise PlanError(
            f"the key map matches none of {len(parts.model)} tensors ({printable(keys.path)})",
            hint=f"the first is {printable(next(iter(parts.model), ''))!r}",
        )


def check_settings(keys: KeyMap, given: Iterable[str]) -> None:
    """Refuses a setting of the user that no rule of a map names."""
    numbers = [n for rule in keys.split for n in rule["parts"]]
    numbers += [rule["heads"] for rule in keys.rope]
    names = sorted({n for n in numbers if isinstance(n, str)})
    for name in given:
        if name not in names:
            raise PlanError(
                f"--set {printable(name)}: the key map has no such number ({printable(keys.path)})",
                hint=f"it has: {', '.join(map(printable, names)) or 'none'}",
            )


Change = Callable[[TensorEntry], TensorEntry]


def _raw(parts: TrainingState, keys: KeyMap, source: Source) -> Change:
    """Returns a function that returns a tensor with located payloads, so that it can be cut.

    All payloads are located in one call.
    """
    rules = [rule["match"] for rule in (*keys.unstack, *keys.split, *keys.rope)]
    names = {
        fqn for fqn in parts.model if keys.fuse or any(match.fullmatch(fqn) for match in rules)
    }
    states = [o.state[fqn] for o in parts.optimizers for fqn in names if fqn in o.state]
    kept = [value for state in states for value in state.values() if isinstance(value, TensorEntry)]
    found = source.format.locate(source.store, [*(parts.model[fqn] for fqn in names), *kept])
    return lambda entry: replace(
        entry, chunks=tuple(c._replace(extent=found.get(c.extent, c.extent)) for c in entry.chunks)
    )


def _rows(raw: Change, rows: Sequence[RowRange], num_rows: int, entry: TensorEntry) -> TensorEntry:
    return take_rows(raw(entry), rows, num_rows)


def _layer(raw: Change, index: int, entry: TensorEntry) -> TensorEntry:
    return take_layer(raw(entry), index)


def _rope_rows(entry: TensorEntry, heads: int, to: str) -> list[RowRange]:
    """Returns the source rows of rotary heads, to convert pairs to halves or back.

    Pairs are Meta's interleaved order, halves are Hugging Face's order.
    """
    num_rows = entry.shape[0] if entry.shape else 0
    if num_rows % (2 * heads):
        raise PlanError(
            f"{heads} heads do not fit a tensor of {num_rows} rows: {printable(entry.fqn)!r}"
        )
    size = num_rows // heads
    half = size // 2
    if to == "halves":
        return [
            RowRange(h * size + k * half, h * size + k, half, 2)
            for h in range(heads)
            for k in range(2)
        ]
    return [
        RowRange(h * size + 2 * j + k, h * size + k * half + j, 1)
        for h in range(heads)
        for j in range(half)
        for k in range(2)
    ]


def _unstack(parts: TrainingState, fqn: str, rule: Mapping[str, Any], raw: Change) -> TrainingState:
    """Cuts a tensor of all layers into one tensor per layer."""
    if not parts.model[fqn].shape:
        raise PlanError(f"a scalar has no layers to unstack: {printable(fqn)!r}")
    names = [
        rule["match"].sub(rule["into"].replace("{layer}", str(n)), fqn)
        for n in range(parts.model[fqn].shape[0])
    ]
    return _replaced(parts, fqn, {name: partial(_layer, raw, n) for n, name in enumerate(names)})


def _split(
    parts: TrainingState, fqn: str, rule: Mapping[str, Any], keys: KeyMap, raw: Change
) -> TrainingState:
    """Cuts a tensor by rows into tensors. `parts` in the rule has their relative sizes."""
    shares = [keys.number(share) for share in rule["parts"]]
    entry = parts.model[fqn]
    num_rows = entry.shape[0] if entry.shape else 0
    if len(shares) != len(rule["into"]) or num_rows % sum(shares):
        raise PlanError(f"{num_rows} rows cannot be split as {shares}: {printable(fqn)!r}")
    changes: dict[str, Change] = {}
    start, unit = 0, num_rows // sum(shares)
    for name, share in zip(rule["into"], shares, strict=True):
        rows = RowRange(0, start, share * unit)
        changes[rule["match"].sub(name, fqn)] = partial(_rows, raw, [rows], rows.number)
        start += share * unit
    if len(changes) != len(shares):
        raise PlanError(
            f"two parts would get one name: {', '.join(map(printable, changes))}, of"
            f" {printable(fqn)!r}"
        )
    return _replaced(parts, fqn, changes)


def _replaced(parts: TrainingState, fqn: str, changes: Mapping[str, Change]) -> TrainingState:
    """Replaces a tensor with one or several tensors, in the model and in optimizer state."""
    old = parts.model[fqn]
    _check_new(changes, parts, {fqn})

    def each(values: Mapping[str, Any], change: Change) -> dict[str, Any]:
        return {
            k: change(v) if isinstance(v, TensorEntry) and v.shape == old.shape else v
            for k, v in values.items()
        }

    model: dict[str, TensorEntry] = {}
    for name, entry in parts.model.items():
        model |= (
            {new: replace(change(entry), fqn=new) for new, change in changes.items()}
            if name == fqn
            else {name: entry}
        )
    optimizers = []
    for optimizer in parts.optimizers:
        state: dict[str, dict[str, Any]] = {}
        for name, values in optimizer.state.items():
            state |= (
                {new: each(values, change) for new, change in changes.items()}
                if name == fqn
                else {name: values}
            )
        groups = [
            {**g, "params": [n for p in g["params"] for n in (changes if p == fqn else [p])]}
            for g in optimizer.groups
        ]
        optimizers.append(replace(optimizer, state=state, groups=groups))
    return replace(parts, model=model, optimizers=optimizers)


def _check_new(names: Iterable[str], parts: TrainingState, gone: set[str]) -> None:
    taken = next((name for name in names if name in parts.model and name not in gone), None)
    if taken is not None:
        raise PlanError(
            f"two tensors would get one name: {printable(taken)!r} is there already, and the key"
            " map makes another"
        )


def _fuse(parts: TrainingState, fqn: str, rule: Mapping[str, Any]) -> TrainingState:
    """Joins tensors by rows.

    `fqn` is the first tensor. The rule derives the names of the others from it.
    """
    names = [rule["match"].sub(name, fqn) for name in rule["from"]]
    missing = [name for name in names if name not in parts.model]
    if missing:
        raise PlanError(
            f"the key map joins tensors, but one is missing: {printable(missing[0])!r}"
            f" beside {printable(fqn)!r}"
        )
    new = rule["match"].sub(rule["into"], fqn)
    _check_new([new], parts, set(names))
    model = {n: t for n, t in parts.model.items() if n not in names[1:]}
    model = {
        new if n == fqn else n: stack_rows(new, [parts.model[m] for m in names]) if n == fqn else t
        for n, t in model.items()
    }
    optimizers = []
    for optimizer in parts.optimizers:
        state = {n: values for n, values in optimizer.state.items() if n not in names}
        if all(name in optimizer.state for name in names):
            first = optimizer.state[names[0]]
            state[new] = {
                key: (
                    stack_rows(f"{new}.{key}", [optimizer.state[n][key] for n in names])
                    if isinstance(value, TensorEntry)
                    and value.shape == parts.model[names[0]].shape
                    and value.shape
                    else value
                )
                for key, value in first.items()
            }
        groups = [
            {**g, "params": [new if p == fqn else p for p in g["params"] if p not in names[1:]]}
            for g in optimizer.groups
        ]
        optimizers.append(replace(optimizer, state=state, groups=groups))
    return replace(parts, model=model, optimizers=optimizers)
