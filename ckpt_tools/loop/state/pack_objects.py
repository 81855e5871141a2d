"""Packs the values of a state that are not tensors, before a save.

Imports torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.archives import check_value, pack
from ckpt_tools.loop.state.restore import state_of_rank
from ckpt_tools.loop.state.state_dict import ExportedState, name_of_rank


def checksums(exported: ExportedState) -> dict[str, int]:
    """Returns a checksum of each value of this rank; 0 for a tensor.

    Ranks whose names differ compare them: of a name that several ranks have, one value is stored.
    """
    values = {
        name: zlib.crc32(pack(value, exported.paths[name])) or 1
        for name, value in exported.objects.items()
    }
    return values | dict.fromkeys(exported.tensors, 0)


def refuse_conflicts(ranks: Sequence[Mapping[str, int]]) -> None:
    """Refuses values that differ between ranks, and names that mean two things.

    Args:
        ranks: the checksums of each rank's values, as `checksums` returns them.

    Raises:
        PlanError: with the first such name.
    """
    first: dict[str, tuple[int, int]] = {}
    for rank, found in enumerate(ranks):
        for name, code in found.items():
            holder, other = first.setdefault(name, (rank, code))
            if other != code:
                kinds = "a tensor on one and a value on the other" if not (other and code) else ""
                raise PlanError(
                    f"{printable(name)!r} differs between rank {holder} and rank {rank}"
                    + (f": {kinds}" if kinds else ""),
                    hint=(
                        "a name that several ranks have must have one value: give each stage a key"
                        " of its own, or put the value into a PerRank"
                    ),
                )
    for name in first:
        above = name.rpartition(".")[0]
        while above:
            if above in first:
                raise PlanError(
                    f"{printable(above)!r} is a value on rank {first[above][0]}, and holds"
                    f" {printable(name)!r} on rank {first[name][0]}",
                    hint="give every rank the same containers",
                )
            above = above.rpartition(".")[0]


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
