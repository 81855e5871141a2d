"""Applies key maps: data files that describe how two frameworks name and lay out tensors.

A map is JSON with these rules, applied in this order. `drop` leaves tensors out. `unstack` cuts a
tensor of all layers. `split` cuts a tensor by rows. `rope` reorders rows of rotary heads between
interleaved pairs and halves. `fuse` joins tensors by rows. `rename` has pairs of regular expression
and replacement. `keep` names tensors that stay as they are.

All rules apply to the model and to its optimizer state. Each rule must match, unless it is
optional, and each tensor must be matched. See "Key maps" in docs/convert.md.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import ChunkList, TensorEntry
from ckpt_tools.core.views import RowRange, stack_rows, take_layer, take_rows
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.training_state import OptimizerState, TrainingState
from ckpt_tools.storage import read
from ckpt_tools.storage.small_files import parse_json, read_named

_OWN = Path(__file__).parents[2] / "maps"
_KEYS = {"about", "drop", "keep", "rename", "rope", "split", "fuse", "unstack"}
_SHOWN = 8
_MAX_SCALAR_BYTES = 64  # of a value that a parameter has beside its moments, such as its step


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A map as its file has it. `settings` has the named numbers that it needs."""

    path: str
    drop: Sequence[re.Pattern[str]]
    keep: Sequence[re.Pattern[str]]
    rename: Sequence[tuple[re.Pattern[str], str, bool]]  # and whether it is optional
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
        if not isinstance(value, str) and (type(found) is not int or found < 1):
            raise PlanError(
                f"the key map has {printable(repr(value))} in the place of a count"
                f" ({printable(self.path)})",
                hint="a count is a whole number of at least 1, or the name of a setting",
            )
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
        renames = [_rename(*rule) for rule in body.get("rename", [])]
        drop, keep = (_patterns_of(body, key) for key in ("drop", "keep"))
        rules = {key: [_rule(key, rule) for rule in body.get(key, [])] for key in _FIELDS}
    except (StorageError, ValueError, TypeError, KeyError, re.error) as error:
        hint = f"maps that come along: {', '.join(own_maps())}"
        raise PlanError(
            f"not a key map: {printable(str(error))} ({printable(where)})", hint=hint
        ) from error
    return KeyMap(where, drop, keep, renames, **rules, settings=settings or {})


_FIELDS = {
    "rope": {"match", "heads", "to"},
    "split": {"match", "into", "parts"},
    "fuse": {"match", "from", "into"},
    "unstack": {"match", "into"},
}


_OPTIONAL_FIELDS = {"split": {"groups"}, "fuse": {"groups", "of"}}
_LISTS = (("split", "into"), ("fuse", "from"))  # rules with several names
_OF_OPTIMIZER = "optimizer"  # a rule that leaves the model as it is


def _patterns_of(body: Mapping[str, Any], key: str) -> list[re.Pattern[str]]:
    patterns = body.get(key, [])
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"{key}: expected a list of regular expressions, got {patterns!r:.80}")
    return [re.compile(pattern) for pattern in patterns]


def _rename(
    pattern: str, new: object = None, mark: object = ""
) -> tuple[re.Pattern[str], str, bool]:
    if mark not in ("", "optional"):
        raise ValueError(f'rename: the third item is "optional", got {mark!r}')
    return re.compile(pattern), _template(pattern, new), bool(mark)


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
    others = _OPTIONAL_FIELDS.get(kind, set()) | {"optional"}
    extra = sorted(set(rule) - _FIELDS[kind] - others)
    if extra or not _FIELDS[kind] <= set(rule):
        raise ValueError(
            f"{kind}: expected {', '.join(sorted(_FIELDS[kind]))}, and perhaps"
            f" {', '.join(sorted(others))}{f'; got {extra[0]}' if extra else ''}"
        )
    if rule.get("of", _OF_OPTIMIZER) != _OF_OPTIMIZER:
        raise ValueError(f"{kind}: `of` is {_OF_OPTIMIZER}, got {rule['of']!r}")
    if type(rule.get("optional", True)) is not bool:
        raise ValueError(f"{kind}: `optional` is true or false")
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


def apply_map(
    parts: TrainingState, keys: KeyMap, source: Source, is_partial: bool = False
) -> TrainingState:
    """Returns the training state renamed, split, fused and reordered as a map says.

    Args:
        parts: the training state.
        keys: the map.
        source: where the tensors lie.
        is_partial: rules may match nothing, and tensors that no rule matches keep their names.

    Raises:
        PlanError: a rule does not fit a tensor. Or a rule matches nothing, or no rule matches a
            tensor, and not `is_partial`.
    """
    parts = _dropped(parts, keys)
    _refuse_quantized(parts, keys)
    return _Mapping(parts, keys, source).apply(is_partial)


def _names(parts: TrainingState) -> list[str]:
    """Returns the names of all parameters: those of the model, then those of optimizers alone."""
    names = dict.fromkeys(parts.model)
    for optimizer in parts.optimizers:
        names |= dict.fromkeys(optimizer.state)
        names |= dict.fromkeys(name for group in optimizer.groups for name in group["params"])
    return list(names)


def _dropped(parts: TrainingState, keys: KeyMap) -> TrainingState:
    """Returns the training state without the tensors that a map leaves out, and notes them."""
    gone = {n for n in _names(parts) if any(pattern.fullmatch(n) for pattern in keys.drop)}
    if not gone:
        return parts
    parts.notes.append(
        f"left out by the key map: {len(gone)} ({printable(', '.join(sorted(gone)[:3]))}"
        f"{', …' if len(gone) > 3 else ''})"
    )
    optimizers = [
        replace(
            o,
            state={n: state for n, state in o.state.items() if n not in gone},
            groups=[{**g, "params": [n for n in g["params"] if n not in gone]} for g in o.groups],
        )
        for o in parts.optimizers
    ]
    model = {n: entry for n, entry in parts.model.items() if n not in gone}
    return replace(parts, model=model, optimizers=optimizers)


class _Mapping:
    """One application of a map. It notes the names that a rule has matched."""

    def __init__(self, parts: TrainingState, keys: KeyMap, source: Source) -> None:
        self.parts, self.keys, self.source = parts, keys, source
        self.raw = _raw(parts, keys, source)
        self.known: set[str] = set()
        self.unused: list[str] = []  # patterns of rules that matched nothing

    def apply(self, is_partial: bool) -> TrainingState:
        whole = self.parts
        for kind, rules in (
            ("unstack", self.keys.unstack),
            ("split", self.keys.split),
            ("rope", self.keys.rope),
            ("fuse", self.keys.fuse),
        ):
            for rule in rules:
                found = self._matched(rule)
                if not found and not rule.get("optional"):
                    self.unused.append(rule["match"].pattern)
                for name in found:
                    self._transform(kind, name, rule)
        self._rename()
        rest = [
            name
            for name in _names(self.parts)
            if name not in self.known and not any(p.fullmatch(name) for p in self.keys.keep)
        ]
        if not self.known:
            raise PlanError(
                f"the key map matches none of {len(whole.model)} tensors"
                f" ({printable(self.keys.path)})",
                hint=f"the first is {printable(next(iter(whole.model), ''))!r}",
            )
        self._report(rest, is_partial)
        return self.parts

    def _matched(self, rule: Mapping[str, Any]) -> list[str]:
        """Returns the names that a rule matches: for one that joins, the first of each set."""
        names = _names(replace(self.parts, model={}) if rule.get("of") else self.parts)
        return [name for name in names if rule["match"].fullmatch(name)]

    def _rename(self) -> None:
        for pattern, new, is_optional in self.keys.rename:
            found = {name for name in _names(self.parts) if pattern.search(name)}
            if not found and not is_optional:
                self.unused.append(pattern.pattern)
            self.parts = self.parts.renamed(partial(pattern.sub, new))
            self.known = {pattern.sub(new, name) for name in self.known | found}

    def _report(self, rest: Sequence[str], is_partial: bool) -> None:
        """Refuses, or notes, tensors that no rule explains and rules that match nothing."""
        shown = printable(", ".join(rest[:_SHOWN])) + (", …" if len(rest) > _SHOWN else "")
        where = printable(self.keys.path)
        if self.unused and not is_partial:
            raise PlanError(
                f"a rule of the key map matches nothing: {printable(self.unused[0])!r} ({where})",
                hint="is it the map of this model? --partial is for a part of a model",
            )
        if rest and not is_partial:
            raise PlanError(
                f"no rule of the key map matches {len(rest)} names: {shown} ({where})",
                hint="is it the map of this model? --partial keeps the names that no rule matches",
            )
        if rest:
            self.parts.notes.append(f"no rule of the key map matches {len(rest)} names: {shown}")
        for pattern in self.unused:
            self.parts.notes.append(f"a rule of the key map matches nothing: {printable(pattern)}")

    def _transform(self, kind: str, name: str, rule: Mapping[str, Any]) -> None:
        if kind == "fuse":
            if name in _names(self.parts):  # else it has been joined as the second of another set
                self._fuse(name, rule)
            return
        shape = _shape_of(self.parts, name)
        changes: dict[str, Change] = {}
        if not shape and (kind == "unstack" or name in self.parts.model):
            raise PlanError(f"a scalar has no rows for the key map: {printable(name)!r}")
        if not shape:  # an optimizer lists the parameter, and has no moments of it
            names = [rule["match"].sub(new, name) for new in rule.get("into", ())] or [name]
            changes = dict.fromkeys(names, lambda entry: entry)
        elif kind == "unstack":
            names = [
                rule["match"].sub(rule["into"].replace("{layer}", str(n)), name)
                for n in range(shape[0])
            ]
            changes = {new: partial(_layer, self.raw, n) for n, new in enumerate(names)}
        elif kind == "split":
            changes = self._split(name, shape[0], rule)
        else:
            rows = _rope_rows(name, shape[0], self.keys.number(rule["heads"]), rule["to"])
            changes = {name: partial(_rows, self.raw, rows, shape[0])}
        self.parts = _replaced(self.parts, name, shape, changes)
        self.known |= changes.keys()

    def _split(self, name: str, num_rows: int, rule: Mapping[str, Any]) -> dict[str, Change]:
        """Cuts a tensor by rows. `parts` in the rule has the relative sizes of the results.

        With `groups`, the tensor has so many groups of rows, and each has rows of every result.
        """
        shares = [self.keys.number(share) for share in rule["parts"]]
        groups = self.keys.number(rule.get("groups", 1))
        if (
            len(shares) != len(rule["into"])
            or num_rows % sum(shares)
            or any(share * (num_rows // sum(shares)) % groups for share in shares)
        ):
            raise PlanError(
                f"{num_rows} rows cannot be split as {shares}"
                f"{f' in {groups} groups' if groups > 1 else ''}: {printable(name)!r}"
            )
        sizes = [share * (num_rows // sum(shares)) // groups for share in shares]
        changes: dict[str, Change] = {}
        for number, (new, size) in enumerate(zip(rule["into"], sizes, strict=True)):
            start, each = sum(sizes[:number]), sum(sizes)
            rows = [RowRange(g * size, start + g * each, size) for g in range(groups)]
            changes[rule["match"].sub(new, name)] = partial(_rows, self.raw, rows, size * groups)
        if len(changes) != len(shares):
            raise PlanError(
                f"two parts would get one name: {', '.join(map(printable, changes))}, of"
                f" {printable(name)!r}"
            )
        return changes

    def _fuse(self, first: str, rule: Mapping[str, Any]) -> None:
        """Joins tensors by rows, in the model and in optimizers.

        `first` is the first tensor. The rule derives the names of the others from it. With
        `groups`, the rows of each tensor are so many groups, and the groups alternate.
        """
        names = [rule["match"].sub(name, first) for name in rule["from"]]
        if len(set(names)) != len(names):
            raise PlanError(f"the key map joins a tensor with itself: {printable(names[0])!r}")
        new, parts = rule["match"].sub(rule["into"], first), self.parts
        join = partial(self._joined, groups=self.keys.number(rule.get("groups", 1)))
        model = parts.model
        if not rule.get("of") and first in model:
            _check_all(names, model, first)
            _check_new([new], model, set(names))
            joined = join(new, [model[name] for name in names])
            model = {
                new if n == first else n: joined if n == first else entry
                for n, entry in model.items()
                if n == first or n not in names
            }
        used = {model_entry.stored_name for n in names if (model_entry := parts.model.get(n))}
        self.parts = replace(
            parts,
            model=model,
            optimizers=[self._fused_state(o, names, new, join) for o in parts.optimizers],
            used=parts.used | used,
        )
        self.known |= {new}

    def _fused_state(
        self, optimizer: OptimizerState, names: Sequence[str], new: str, join: Join
    ) -> OptimizerState:
        """Returns an optimizer with one parameter in the place of several."""
        groups = optimizer.groups
        holders = [n for n, group in enumerate(groups) if any(p in names for p in group["params"])]
        if len(holders) > 1:
            raise PlanError(
                f"the key map joins parameters with different options in"
                f" {printable(optimizer.prefix) or 'the optimizer'}:"
                f" {printable(', '.join(names))}",
                hint="--model-only leaves the optimizer out",
            )
        state = {n: values for n, values in optimizer.state.items() if n not in names}
        if len(state) != len(optimizer.state):
            _check_all(names, optimizer.state, names[0], "the state of a tensor is")
            _check_new([new], optimizer.state, set(names))
            state[new] = self._joined_values(new, [optimizer.state[n] for n in names], names, join)
        return replace(
            optimizer,
            state=state,
            groups=[
                {
                    **group,
                    "params": list(
                        dict.fromkeys(new if p in names else p for p in group["params"])
                    ),
                }
                for group in groups
            ],
        )

    def _joined_values(
        self, new: str, states: Sequence[Mapping[str, Any]], names: Sequence[str], join: Join
    ) -> dict[str, Any]:
        """Returns the state of one parameter in the place of several.

        Raises:
            PlanError: a value that cannot be joined, such as the step, differs.
        """
        shapes = [_state_shape(self.parts, name) for name in names]
        joined: dict[str, Any] = {}
        for key, value in states[0].items():
            values = [state.get(key) for state in states]
            entries = [v for v in values if isinstance(v, TensorEntry)]
            if len(entries) == len(values) and [e.shape for e in entries] == shapes:
                joined[key] = join(f"{new}.{key}", entries)
                continue
            if any(self._value(v) != self._value(value) for v in values):
                raise PlanError(
                    f"the key map joins parameters whose {printable(key)!r} differs, or cannot be"
                    f" joined: {printable(', '.join(names))}",
                    hint="--model-only leaves the optimizer out",
                )
            joined[key] = value
        return joined

    def _value(self, value: Any) -> Any:
        """Returns a value that can be compared: of a small tensor, its bytes."""
        if not isinstance(value, TensorEntry) or value.nbytes > _MAX_SCALAR_BYTES:
            return value
        chunks = self.raw(value).chunks
        return value.dtype, value.shape, [read(self.source.store, *c.extent[:3]) for c in chunks]

    def _joined(self, new: str, entries: Sequence[TensorEntry], groups: int) -> TensorEntry:
        if groups == 1:
            return stack_rows(new, entries)
        for entry in entries:
            if not entry.shape or entry.shape[0] % groups:
                raise PlanError(
                    f"the rows cannot form {groups} groups: {printable(entry.fqn)!r}, shape"
                    f" {list(entry.shape)}"
                )
        sizes = [entry.shape[0] // groups for entry in entries]
        return stack_rows(
            new,
            [
                _rows(self.raw, [RowRange(0, g * size, size)], size, entry)
                for g in range(groups)
                for entry, size in zip(entries, sizes, strict=True)
            ],
        )


def _refuse_quantized(parts: TrainingState, keys: KeyMap) -> None:
    """Refuses a map that cuts, joins or reorders a part of a quantized weight.

    Scales are of blocks of rows and columns, so they would belong to other codes.

    Raises:
        PlanError: a rule does.
    """
    for rule in (*keys.unstack, *keys.split, *keys.fuse, *keys.rope):
        for fqn, entry in parts.model.items() if not rule.get("of") else ():
            if entry.quantized is not None and rule["match"].fullmatch(fqn):
                raise PlanError(
                    f"a part of a quantized weight ({entry.quantized.scheme}) cannot be cut, joined"
                    f" or reordered: {printable(fqn)!r} ({printable(keys.path)})",
                    hint="convert the model before you quantize it",
                )


def check_settings(keys: KeyMap, given: Iterable[str]) -> None:
    """Refuses a setting of the user that no rule of a map names."""
    numbers = [n for rule in keys.split for n in rule["parts"]]
    numbers += [rule["groups"] for rule in (*keys.split, *keys.fuse) if "groups" in rule]
    numbers += [rule["heads"] for rule in keys.rope]
    names = sorted({n for n in numbers if isinstance(n, str)})
    for name in given:
        if name not in names:
            raise PlanError(
                f"--set {printable(name)}: the key map has no such number ({printable(keys.path)})",
                hint=f"it has: {', '.join(map(printable, names)) or 'none'}",
            )


Change = Callable[[TensorEntry], TensorEntry]
Join = Callable[[str, Sequence[TensorEntry]], TensorEntry]


def _raw(parts: TrainingState, keys: KeyMap, source: Source) -> Change:
    """Returns a function that returns a tensor with located payloads, so that it can be cut.

    All payloads are located in one call.
    """
    rules = [rule["match"] for rule in (*keys.unstack, *keys.split, *keys.rope)]
    names = {n for n in _names(parts) if keys.fuse or any(match.fullmatch(n) for match in rules)}
    states = [o.state[fqn] for o in parts.optimizers for fqn in names if fqn in o.state]
    kept = [value for state in states for value in state.values() if isinstance(value, TensorEntry)]
    entries = [parts.model[fqn] for fqn in names if fqn in parts.model]
    found = source.format.locate(source.store, [*entries, *kept])
    return lambda entry: replace(
        entry,
        chunks=ChunkList(c._replace(extent=found.get(c.extent, c.extent)) for c in entry.chunks),
    )


def _rows(raw: Change, rows: Sequence[RowRange], num_rows: int, entry: TensorEntry) -> TensorEntry:
    return take_rows(raw(entry), rows, num_rows)


def _layer(raw: Change, index: int, entry: TensorEntry) -> TensorEntry:
    return take_layer(raw(entry), index)


def _rope_rows(name: str, num_rows: int, heads: int, to: str) -> list[RowRange]:
    """Returns the source rows of rotary heads, to convert pairs to halves or back.

    Pairs are Meta's interleaved order, halves are Hugging Face's order.
    """
    if num_rows % (2 * heads):
        raise PlanError(
            f"{heads} heads do not fit a tensor of {num_rows} rows: {printable(name)!r}"
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


def _shape_of(parts: TrainingState, name: str) -> tuple[int, ...]:
    """Returns the shape of a parameter: of its weight, or of its moments if there is no weight."""
    entry = parts.model.get(name)
    return entry.shape if entry is not None else _state_shape(parts, name)


def _state_shape(parts: TrainingState, name: str) -> tuple[int, ...]:
    """Returns the shape of a parameter's moments: the largest of its state."""
    shapes = [
        value.shape
        for optimizer in parts.optimizers
        for value in optimizer.state.get(name, {}).values()
        if isinstance(value, TensorEntry)
    ]
    return max(shapes, key=lambda shape: (math.prod(shape), len(shape)), default=())


def _replaced(
    parts: TrainingState, name: str, shape: tuple[int, ...], changes: Mapping[str, Change]
) -> TrainingState:
    """Replaces a parameter with one or several, in the model and in optimizer state.

    Args:
        parts: the training state.
        name: of the parameter. It may be in optimizers alone.
        shape: of the parameter.
        changes: the part of it that each new parameter takes, by name.
    """

    def each(key: str, value: Any, change: Change) -> Any:
        if not isinstance(value, TensorEntry) or value.shape == shape:
            return change(value) if isinstance(value, TensorEntry) else value
        if math.prod(value.shape) != 1:
            raise PlanError(
                f"the key map changes the rows of {printable(name)!r}, shape {list(shape)}, and its"
                f" state {printable(key)!r} has the shape {list(value.shape)}",
                hint="--model-only leaves the optimizer out",
            )
        return value

    model: dict[str, TensorEntry] = {}
    if name in parts.model:
        _check_new(changes, parts.model, {name})
    for old, entry in parts.model.items():
        model |= (
            {new: change(entry).named(new) for new, change in changes.items()}
            if old == name
            else {old: entry}
        )
    optimizers = []
    for optimizer in parts.optimizers:
        state: dict[str, dict[str, Any]] = {}
        if name in optimizer.state:
            _check_new(changes, optimizer.state, {name})
        for old, values in optimizer.state.items():
            state |= (
                {
                    new: {key: each(key, value, change) for key, value in values.items()}
                    for new, change in changes.items()
                }
                if old == name
                else {old: values}
            )
        groups = [
            {**g, "params": [n for p in g["params"] for n in (changes if p == name else [p])]}
            for g in optimizer.groups
        ]
        optimizers.append(replace(optimizer, state=state, groups=groups))
    used = {parts.model[name].stored_name} if name in parts.model else set()
    return replace(parts, model=model, optimizers=optimizers, used=parts.used | used)


def _check_new(names: Iterable[str], there: Container[str], gone: Container[str]) -> None:
    taken = next((name for name in names if name in there and name not in gone), None)
    if taken is not None:
        raise PlanError(
            f"two tensors would get one name: {printable(taken)!r} is there already, and the key"
            " map makes another"
        )


def _check_all(
    names: Iterable[str], there: Container[str], first: str, what: str = "one is"
) -> None:
    missing = next((name for name in names if name not in there), None)
    if missing is not None:
        raise PlanError(
            f"the key map joins tensors, but {what} missing: {printable(missing)!r}"
            f" beside {printable(first)!r}"
        )
