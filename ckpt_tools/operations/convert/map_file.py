"""Reads key maps: JSON files that describe how two frameworks name and lay out tensors.

`key_map` has the rules, and applies them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.storage.small_files import parse_json, read_named

_OWN = Path(__file__).parents[2] / "maps"
_MALFORMED = (
    StorageError,
    ValueError,
    TypeError,
    KeyError,
    re.error,
    RecursionError,
    OverflowError,
)
_KEYS = {"about", "drop", "keep", "rename"}


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
    transpose: Sequence[Mapping[str, Any]]
    stack: Sequence[Mapping[str, Any]]
    settings: Mapping[str, int] = field(default_factory=dict)
    crc64: int = 0

    @property
    def title(self) -> str:
        """Returns what tells the map apart: the name of a built-in one; else file and CRC-64."""
        if self.path in own_maps():
            return f"the key map {self.path}"
        return f"the key map {os.path.basename(self.path)} (CRC-64 {hex64(self.crc64)})"

    @property
    def transforms(self) -> tuple[Mapping[str, Any], ...]:
        """Returns the rules that change more than names."""
        return (*self.unstack, *self.split, *self.rope, *self.transpose, *self.fuse, *self.stack)

    def share_of(self, names: Sequence[str]) -> float:
        """Returns the share of names that a rule changes, as a source has them.

        Names that the map keeps or leaves out tell nothing, and do not count.
        """
        silent, whole = (*self.drop, *self.keep), [rule["match"] for rule in self.transforms]
        told = [n for n in names if not any(pattern.fullmatch(n) for pattern in silent)]
        changed = sum(
            any(pattern.search(n) for pattern, *_ in self.rename)
            or any(pattern.fullmatch(n) for pattern in whole)
            for n in told
        )
        return changed / max(1, len(told))

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
        data = read_named(file)
        body = parse_json(data)
        if not isinstance(body, dict) or body.keys() - _KEYS - _FIELDS.keys():
            raise ValueError(f"expected a table with {', '.join(sorted(_KEYS | _FIELDS.keys()))}")
        renames = [_rename(*rule) for rule in body.get("rename", [])]
        drop, keep = (_patterns_of(body, key) for key in ("drop", "keep"))
        rules = {key: [_rule(key, rule) for rule in body.get(key, [])] for key in _FIELDS}
    except _MALFORMED as error:
        hint = f"maps that come along: {', '.join(own_maps())}"
        raise PlanError(
            f"not a key map: {printable(str(error))} ({printable(where)})", hint=hint
        ) from error
    return KeyMap(
        where, drop, keep, renames, **rules, settings=settings or {}, crc64=crc64nvme(data)
    )


_FIELDS = {
    "rope": {"match", "heads", "to"},
    "split": {"match", "into", "parts"},
    "fuse": {"match", "from", "into"},
    "unstack": {"match", "into"},
    "transpose": {"match", "dims"},
    "stack": {"match", "into", "by"},
}


_OPTIONAL_FIELDS = {
    "split": {"groups", "dim", "interleaved"},
    "fuse": {"groups", "of", "dim", "interleaved"},
}
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
    _check_values(kind, rule)
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


def _check_values(kind: str, rule: Mapping[str, Any]) -> None:
    """Refuses values of a rule that have no meaning.

    Raises:
        ValueError: with the key.
    """
    for flag in ("optional", "interleaved"):
        if type(rule.get(flag, True)) is not bool:
            raise ValueError(f"{kind}: `{flag}` is true or false")
    if rule.get("interleaved") and "groups" in rule:
        raise ValueError(f"{kind}: `interleaved` is a number of groups of its own")
    for key in ("dim", "by"):
        if type(rule.get(key, 0)) is not int or rule.get(key, 0) < 0:
            raise ValueError(f"{kind}: `{key}` is a whole number of at least 0")
    dims = rule.get("dims", [0, 1])
    if not isinstance(dims, list) or len(dims) != 2 or {type(dim) for dim in dims} != {int}:
        raise ValueError(f"{kind}: `dims` is a list of two numbers")
    if kind == "stack" and not 1 <= rule["by"] <= re.compile(rule["match"]).groups:
        raise ValueError(f"{kind}: `by` is the number of a group of `match`")
