"""Applies key maps: data files that describe how two frameworks name and lay out tensors.

A map is JSON with these rules, applied in this order. `drop` leaves tensors out. `unstack` cuts a
tensor of all layers. `split` cuts a tensor along a dim. `rope` reorders rows of rotary heads
between interleaved pairs and halves. `transpose` swaps two dims. `fuse` joins tensors along a dim.
`stack` joins tensors along a new first dim. `rename` has pairs of regular expression and
replacement. `keep` names tensors that stay as they are.

All rules apply to the model and to its optimizer state. Each rule must match, unless it is
optional, and each tensor must be matched. See "Key maps" in docs/convert.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt_tools.core.box import row_major_strides
from ckpt_tools.core.grid import GridPlace, Relation
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.map_file import KeyMap
from ckpt_tools.operations.convert.relate import located, names_of, relate, shape_of
from ckpt_tools.operations.convert.training_state import TrainingState

_SHOWN = 8


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
    return _Mapping(parts, keys, source).apply(is_partial)


def _dropped(parts: TrainingState, keys: KeyMap) -> TrainingState:
    """Returns the training state without the tensors that a map leaves out, and notes them."""
    gone = {n for n in names_of(parts) if any(pattern.fullmatch(n) for pattern in keys.drop)}
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
        self.raw = located(parts, _cut(parts, keys), source)
        self.known: set[str] = set()
        self.unused: list[str] = []  # patterns of rules that matched nothing
        self.names: frozenset[str] = frozenset()  # before the rule
        self.changes: dict[str, Sequence[Relation]] = {}  # of the rule
        self.left: dict[str, tuple[int, ...]] = {}
        self.right: dict[str, tuple[int, ...]] = {}

    def apply(self, is_partial: bool) -> TrainingState:
        whole = self.parts
        for kind, rules in (
            ("unstack", self.keys.unstack),
            ("split", self.keys.split),
            ("rope", self.keys.rope),
            ("transpose", self.keys.transpose),
            ("fuse", self.keys.fuse),
            ("stack", self.keys.stack),
        ):
            for rule in rules:
                self._apply(kind, rule)
        self._rename()
        rest = [
            name
            for name in names_of(self.parts)
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

    def _apply(self, kind: str, rule: Mapping[str, Any]) -> None:
        """Applies a rule to all that it matches: for one that joins, to the first of each set."""
        with_model = not rule.get("of")
        names = names_of(self.parts if with_model else replace(self.parts, model={}))
        self.names = frozenset(names)
        found = [name for name in names if rule["match"].fullmatch(name)]
        if not found and not rule.get("optional"):
            self.unused.append(rule["match"].pattern)
        self.changes, self.left, self.right = {}, {}, {}
        if kind == "stack":
            self._stack(found, rule)
        else:
            for name in found:
                self._transform(kind, name, rule)
        if self.changes:
            self.parts = relate(
                self.parts,
                self.changes,
                self.left,
                self.right,
                self.source,
                self.raw,
                with_model,
            )
            self.known |= self.changes.keys()

    def _add(
        self,
        relations: Mapping[str, Sequence[Relation]],
        left: Mapping[str, tuple[int, ...]],
        right: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Adds the results of some tensors to those of the rule."""
        taken = next((name for name in relations if name in self.changes), None)
        if taken is not None:
            raise PlanError(
                f"two tensors would get one name: the key map makes {printable(taken)!r} of"
                f" {printable(next(iter(left)))!r}, and of another"
            )
        self.changes |= relations
        self.left |= left
        self.right |= right

    def _add_names(self, parts: Sequence[str], new: str) -> None:
        """Adds a parameter that optimizers list, without weight and moments: its shape is unknown.

        The relations of its parts have no elements.
        """
        found = [Relation((0,), GridPlace(p, 0, (1,)), GridPlace(new, 0, (1,))) for p in parts]
        self._add({new: found}, dict.fromkeys(parts, ()), {new: ()})

    def _rename(self) -> None:
        for pattern, new, is_optional in self.keys.rename:
            found = {name for name in names_of(self.parts) if pattern.search(name)}
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
        """Applies a rule to a tensor, in the model and in optimizers."""
        if kind == "fuse":
            if name not in self.left:  # else it has been joined as the second of another set
                self._fuse(name, rule)
            return
        shape = shape_of(self.parts, name)
        if not shape and (kind == "unstack" or name in self.parts.model):
            raise PlanError(f"a scalar has no rows for the key map: {printable(name)!r}")
        if not shape:  # an optimizer lists the parameter, and has no moments of it
            names = [rule["match"].sub(new, name) for new in rule.get("into", ())] or [name]
            for new in names:
                self._add_names([name], new)
        elif kind == "unstack":
            self._unstack(name, shape, rule)
        elif kind == "split":
            self._split(name, shape, rule)
        elif kind == "transpose":
            self._transpose(name, shape, rule["dims"])
        else:
            heads = self.keys.number(rule["heads"])
            found = {name: [_rope(name, shape, heads, rule["to"])]}
            self._add(found, {name: shape}, {name: shape})

    def _unstack(self, name: str, shape: tuple[int, ...], rule: Mapping[str, Any]) -> None:
        """Cuts a tensor of all layers."""
        strides, relations = row_major_strides(shape), dict[str, list[Relation]]()
        for layer in range(shape[0]):
            new = rule["match"].sub(rule["into"], name).replace("{layer}", str(layer))
            if new in relations:
                raise PlanError(f"two layers would get one name: {printable(new)!r}")
            place = GridPlace(name, layer * strides[0], strides[1:])
            relations[new] = [Relation(shape[1:], place, GridPlace(new, 0, strides[1:]))]
        self._add(relations, {name: shape}, dict.fromkeys(relations, shape[1:]))

    def _stack(self, names: Sequence[str], rule: Mapping[str, Any]) -> None:
        """Joins tensors along a new first dim, in the order of a number in their names."""
        sets: dict[str, dict[int, str]] = {}
        for name in names:
            new = rule["match"].sub(rule["into"], name)
            number = _index(rule["match"], rule["by"], name)
            other = sets.setdefault(new, {}).setdefault(number, name)
            if other != name:
                raise PlanError(
                    f"two tensors are number {number} of {printable(new)!r}:"
                    f" {printable(other)!r}, {printable(name)!r}"
                )
        for new, parts in sets.items():
            if sorted(parts) != list(range(len(parts))):
                missing = min({*range(max(parts) + 1)} - parts.keys())
                raise PlanError(f"number {missing} of {printable(new)!r} is missing")
            shapes = {parts[n]: shape_of(self.parts, parts[n]) for n in range(len(parts))}
            shape = shapes[parts[0]]
            for name, other_shape in shapes.items():
                if other_shape != shape:
                    raise PlanError(
                        f"tensors of different shapes cannot be stacked: {printable(parts[0])!r}"
                        f" {list(shape)}, {printable(name)!r} {list(other_shape)}"
                    )
            if not shape:
                if name := next((n for n in shapes if n in self.parts.model), ""):
                    raise PlanError(f"a scalar cannot be stacked: {printable(name)!r}")
                self._add_names(list(shapes), new)
                continue
            strides, numel = row_major_strides(shape), math.prod(shape)
            found = [
                Relation(shape, GridPlace(name, 0, strides), GridPlace(new, n * numel, strides))
                for n, name in enumerate(shapes)
            ]
            self._add({new: found}, shapes, {new: (len(parts), *shape)})

    def _transpose(self, name: str, shape: tuple[int, ...], dims: Sequence[int]) -> None:
        """Swaps two dims of a tensor."""
        try:
            order = list(range(len(shape)))
            first, second = (order[dim] for dim in dims)
            if first == second:
                raise IndexError
        except IndexError:
            raise PlanError(
                f"no two dims {list(dims)} in the shape {list(shape)}: {printable(name)!r}"
            ) from None
        order[first], order[second] = second, first
        after = tuple(shape[dim] for dim in order)
        strides = row_major_strides(after)
        moved = tuple(strides[order.index(dim)] for dim in range(len(shape)))
        relation = Relation(
            shape, GridPlace(name, 0, row_major_strides(shape)), GridPlace(name, 0, moved)
        )
        self._add({name: [relation]}, {name: shape}, {name: after})

    def _split(self, name: str, shape: tuple[int, ...], rule: Mapping[str, Any]) -> None:
        """Cuts a tensor along a dim. `parts` in the rule has the relative sizes of the results.

        With `groups`, the tensor has so many groups of indices, and each has some of every result.
        """
        dim = self._dim(name, shape, rule)
        shares = [self.keys.number(share) for share in rule["parts"]]
        unit, rest = divmod(shape[dim], sum(shares))
        groups = unit if rule.get("interleaved") else self.keys.number(rule.get("groups", 1))
        if (
            len(shares) != len(rule["into"])
            or rest
            or any(share * unit % max(groups, 1) for share in shares)
        ):
            raise PlanError(
                f"{shape[dim]} {'rows' if not dim else f'indices of dim {dim}'} cannot be split as"
                f" {shares}{f' in {groups} groups' if groups > 1 else ''}: {printable(name)!r}"
            )
        names = [rule["match"].sub(new, name) for new in rule["into"]]
        if len(set(names)) != len(shares):
            raise PlanError(
                f"two parts would get one name: {', '.join(map(printable, names))}, of"
                f" {printable(name)!r}"
            )
        right = {
            new: (*shape[:dim], share * unit, *shape[dim + 1 :])
            for new, share in zip(names, shares, strict=True)
        }
        found = _side_by_side(name, right, dim, groups)
        self._add({new: [r] for new, r in found.items()}, {name: shape}, right)

    def _dim(self, name: str, shape: Sequence[int], rule: Mapping[str, Any]) -> int:
        """Returns the dim of a rule that cuts or joins.

        Raises:
            PlanError: the tensor has no such dim.
        """
        dim: int = rule.get("dim", 0)
        if dim >= len(shape):
            raise PlanError(f"no dim {dim} in the shape {list(shape)}: {printable(name)!r}")
        return dim

    def _fuse(self, first: str, rule: Mapping[str, Any]) -> None:
        """Joins tensors along a dim.

        `first` is the first tensor. The rule derives the names of the others from it. With
        `groups`, the indices of each are so many groups, and the groups alternate.
        """
        names = [rule["match"].sub(name, first) for name in rule["from"]]
        if len(set(names)) != len(names):
            raise PlanError(f"the key map joins a tensor with itself: {printable(names[0])!r}")
        new = rule["match"].sub(rule["into"], first)
        shapes = {name: shape_of(self.parts, name) for name in names}
        if not any(shapes.values()) and not any(name in self.parts.model for name in names):
            self._add_names(names, new)
            return
        for name, shape in shapes.items():
            if name not in self.names or not shape:
                what = "one is missing" if name not in self.names else "one has no dims"
                raise PlanError(
                    f"the key map joins tensors, but {what}: {printable(name)!r}, for"
                    f" {printable(new)!r}"
                )
        dim = self._dim(first, shapes[first], rule)
        if len({shape[:dim] + shape[dim + 1 :] for shape in shapes.values()}) > 1:
            raise PlanError(
                "tensors of different widths cannot become one:"
                f" {', '.join(f'{printable(n)} {list(s)}' for n, s in shapes.items())}"
            )
        sizes = [shape[dim] for shape in shapes.values()]
        is_interleaved = rule.get("interleaved", False)
        groups = sizes[0] if is_interleaved else self.keys.number(rule.get("groups", 1))
        wrong = next((n for n, s in shapes.items() if s[dim] % max(groups, 1)), None)
        if wrong is not None:
            raise PlanError(
                f"the {'rows' if not dim else f'indices of dim {dim}'} cannot form {groups} groups:"
                f" {printable(wrong)!r}, shape {list(shapes[wrong])}"
            )
        joined = (*shapes[first][:dim], sum(sizes), *shapes[first][dim + 1 :])
        found = [r.inverse() for r in _side_by_side(new, shapes, dim, groups).values()]
        self._add({new: found}, shapes, {new: joined})


def _index(match: re.Pattern[str], by: int, name: str) -> int:
    """Returns the number that a group of a pattern finds in a name."""
    found = match.fullmatch(name)
    text = found.group(by) if found is not None else None
    if text is None or not text.isdecimal() or len(text) > 6:
        raise PlanError(
            f"stack: group {by} of {match.pattern!r} is no number in {printable(name)!r}"
        )
    return int(text)


def _side_by_side(
    whole: str, shapes: Mapping[str, tuple[int, ...]], dim: int, groups: int
) -> dict[str, Relation]:
    """Returns the relations of a tensor with those that lie in it side by side, along a dim.

    Args:
        whole: the tensor.
        shapes: its parts, in order; their shapes differ in the dim alone.
        dim: where they follow each other.
        groups: the indices of the whole are so many groups, and each has some of every part.
    """
    sizes = [shape[dim] for shape in shapes.values()]
    found, start, total = {}, 0, sum(sizes)
    for (name, shape), number in zip(shapes.items(), sizes, strict=True):
        before, behind = shape[:dim], shape[dim + 1 :]
        size, each = number // max(groups, 1), total // max(groups, 1)
        inner = row_major_strides((1, *behind))
        width, rest = inner[0], inner[1:]
        outer = row_major_strides((*before, 1))[:-1]
        found[name] = Relation(
            (*before, groups, size, *behind),
            GridPlace(
                whole,
                start * width,
                (*(s * total * width for s in outer), each * width, width, *rest),
            ),
            GridPlace(name, 0, (*(s * number * width for s in outer), size * width, width, *rest)),
        )
        start += size
    return found


def _cut(parts: TrainingState, keys: KeyMap) -> list[str]:
    """Returns the names of the tensors that a rule may cut or join."""
    rules = [rule["match"] for rule in keys.transforms]
    return [n for n in names_of(parts) if keys.fuse or any(m.fullmatch(n) for m in rules)]


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


def _rope(name: str, shape: tuple[int, ...], heads: int, to: str) -> Relation:
    """Returns the relation that reorders the rows of rotary heads: pairs to halves, or back.

    Pairs are Meta's interleaved order, halves are Hugging Face's order.
    """
    if shape[0] % (2 * heads):
        raise PlanError(
            f"{heads} heads do not fit a tensor of {shape[0]} rows: {printable(name)!r}"
        )
    half = shape[0] // heads // 2
    width, *rest = row_major_strides(shape)
    grid = (heads, 2, half, *shape[1:])
    pairs = GridPlace(name, 0, (2 * half * width, width, 2 * width, *rest))
    halves = GridPlace(name, 0, (2 * half * width, half * width, width, *rest))
    return Relation(grid, *((pairs, halves) if to == "halves" else (halves, pairs)))
