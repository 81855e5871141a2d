"""Packs the values of a state that are not tensors, before a save.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Container

from ckpt_tools.loop.archives import check_value, pack
from ckpt_tools.loop.restore import state_of_rank
from ckpt_tools.loop.state_dict import ExportedState, name_of_rank


def pack_objects(
    exported: ExportedState, rank: int, written_below: Container[str] | None = None
) -> tuple[dict[str, bytes], dict[str, tuple[str | int, ...]]]:
    """Returns the objects that this rank writes, as archives, and the keys of each of its entries.

    Rank 0 writes the values that all ranks have. Each rank writes its own `PerRank` values.

    Args:
        exported: the state of this rank.
        rank: its number.
        written_below: if the names of values differ between ranks, those that lower ranks have.

    Raises:
        PlanError: a value has a type that cannot be saved. Every rank finds this in its own state.
    """
    found = {name: (value, exported.paths[name]) for name, value in exported.objects.items()}
    if rank:
        for value, path in found.values():
            check_value(value, path)
        found = (
            {}
            if written_below is None
            else {name: item for name, item in found.items() if name not in written_below}
        )
    for name, (wrapper, path) in exported.per_rank.items():
        value = state_of_rank(wrapper.value, path)
        found[name_of_rank(name, rank)] = (value, (*path, f"rank_{rank}"))
    paths = {name: exported.paths[name] for name in exported.tensors}
    paths |= {name: path for name, (_, path) in found.items()}
    return {name: pack(value, path) for name, (value, path) in found.items()}, paths
