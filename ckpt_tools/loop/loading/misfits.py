"""Shows what of a checkpoint does not fit a state, in one table with a hint.

Imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core.catalog import (
    Catalog,
)
from ckpt_tools.errors import printable
from ckpt_tools.loop.state.composite import part_front
from ckpt_tools.loop.state.state_dict import ExportedState, value_of_ranks

_SHOWN = 8


class Misfits(NamedTuple):
    """Names of a state, and of a checkpoint, that do not fit."""

    absent: list[str]
    extra: list[str]
    shapes: list[str]
    types: list[str]
    kinds: list[str]


def misfit_table(
    exported: ExportedState,
    catalog: Catalog,
    names: Mapping[str, str],
    misfits: Misfits,
    where: str,
) -> str:
    def ours(name: str) -> str:
        value = exported.tensors.get(name)
        return (
            ""
            if value is None
            else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        )

    def theirs(name: str) -> str:
        entry = catalog.tensors.get(names.get(name, name))
        return "" if entry is None else f"{entry.dtype.name} {list(entry.shape)}"

    def both(name: str) -> str:
        return (
            f"state {ours(name) or 'a plain value'}, checkpoint {theirs(name) or 'a plain value'}"
        )

    lines = [f"the checkpoint does not fit the state ({printable(where)})"]
    for title, group, describe in (
        (
            "missing from the checkpoint",
            misfits.absent,
            lambda n: ours(n) + _nearest(n, misfits.extra),
        ),
        ("in the checkpoint, but not in the state", misfits.extra, theirs),
        ("shapes differ", misfits.shapes, both),
        ("types differ", [n for n in misfits.types if n not in set(misfits.shapes)], both),
        ("kinds differ", misfits.kinds, both),
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


def misfit_hint(misfits: Misfits, exported: ExportedState, catalog: Catalog, strict: bool) -> str:
    absent, extra = misfits.absent, misfits.extra
    of_ranks = [place for n in extra if (place := value_of_ranks(n)) in absent]
    if of_ranks:
        return f"{printable(of_ranks[0])} was saved as a PerRank: give it as PerRank(value)"
    if absent and len(absent) == len(extra):
        ours, theirs = _difference(absent[0], extra[0])
        if {ours + n.removeprefix(theirs) for n in extra} == set(absent):
            return (
                f"the names differ by a prefix only: {printable(theirs)!r} in the checkpoint,"
                f" {printable(ours)!r} in the state"
            )
    for name in misfits.kinds:
        if name in exported.composites:
            return (
                f"{printable(name)} is quantized in the state alone: load it, and then quantize it"
            )
        if any(n.startswith(part_front(name)) for n in catalog.tensors):
            return f"{printable(name)} is quantized in the checkpoint: quantize the model as before"
    if misfits.shapes:
        return (
            f"choose how to load other shapes: on_mismatch={{{misfits.shapes[0]!r}: 'grow' or"
            " 'skip'}, or a function"
        )
    if misfits.types and (not strict or not (absent or extra or misfits.kinds)):
        return "pass cast=True to convert on the way"
    return "pass strict=False to load what fits and keep the rest, or select=[…] to load a part"


def _difference(ours: str, theirs: str) -> tuple[str, str]:
    """Returns the parts of two names before their longest common suffix."""
    same = next(
        (
            i
            for i, (a, b) in enumerate(zip(reversed(ours), reversed(theirs), strict=False))
            if a != b
        ),
        min(len(ours), len(theirs)),
    )
    return ours[: len(ours) - same], theirs[: len(theirs) - same]


def shown_names(names: Sequence[str]) -> str:
    return ", ".join(printable(n) for n in names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
