"""Lets a result store a tensor with several names once, as its source does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckpt_tools.core.catalog import Catalog, other_names
from ckpt_tools.formats.base import Request


def join_aliases(layout: Request, catalog: Catalog, altered: Collection[str]) -> Request:
    """Returns a layout in which each tensor is written once, and its other names are `aliases`.

    Args:
        layout: of the result. Aliases have the same type and boxes there.
        catalog: of the source.
        altered: names whose values change during the copy.
    """
    targets = {target.fqn: target for target in layout.tensors}
    aliases = {}
    for fqn, other in other_names(catalog).items():
        mine, first = targets.get(fqn), targets.get(other)
        if mine is None or first is None or {fqn, other} & set(altered):
            continue
        if mine.dtype is first.dtype and mine.boxes == first.boxes:
            aliases[fqn] = other
    if not aliases:
        return layout
    kept = [target for target in layout.tensors if target.fqn not in aliases]
    return replace(layout, tensors=kept, aliases=aliases)
