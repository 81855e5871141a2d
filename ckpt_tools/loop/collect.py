"""Collects what a save writes: this rank's shards and objects, and the layout of all ranks.

Between two saves of a loop, only values change. Then nothing is exchanged here: each rank proves it
of its own state, and one exchange of the manager tells the others.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt_tools.core.laps import Laps
from ckpt_tools.loop.pack_objects import checksums, pack_objects, refuse_conflicts
from ckpt_tools.loop.save import SaveExtras, SaveLayout, agree_layout, extras_of
from ckpt_tools.loop.state_cache import KnownShards, StateCache
from ckpt_tools.loop.state_dict import ExportedState, check_container, export, holders_of
from ckpt_tools.ranks.gloo import GlooGroup

Files = Mapping[str, bytes] | Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a caller of `CheckpointManager.save` wants; see there.

    Attributes:
        what: name of the step's directory.
        check: raises if the step cannot be saved. Rank 0 calls it.
    """

    what: str
    state: Mapping[str, Any]
    only: str | Callable[[str], bool]
    files: Files | None
    metrics: Mapping[str, float] | None
    statistics: bool
    names_differ: bool
    check: Callable[[], None]


class Collected(NamedTuple):
    """What this rank has for a save.

    Attributes:
        extras: files, metrics and the like.
        known: its shards, and what it offers to write.
        objects: packed, by name.
        layout: as agreed by all ranks.
    """

    extras: SaveExtras
    known: KnownShards
    objects: Mapping[str, bytes]
    layout: SaveLayout

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that this rank writes, in the order of its task."""
        return [self.known.shards[number].tensor for number in self.layout.task.offers]


class Collector:
    """Collects the states of one loop, and remembers what stays the same."""

    def __init__(self, group: GlooGroup) -> None:
        """Stores the group of all ranks."""
        self._group, self._cache = group, StateCache()
        self._layout: SaveLayout | None = None

    def unchanged(self, request: SaveRequest) -> Collected | None:
        """Returns this rank's part of a save whose layout is that of the last one; else None.

        It exchanges nothing. An error also gives None: `collect` meets it again, and tells it to
        all ranks.
        """
        layout = self._layout
        if layout is None or request.only or request.names_differ:
            return None
        try:
            check_container(request.state)
            if not self._cache.holds(holders_of(request.state)):
                return None
            extras = self._extras(request)
            exported = export(request.state, cache=self._cache)
            known = self._cache.shards(exported.tensors)
            objects, _ = pack_objects(exported, self._group.rank)
        except Exception:  # noqa: BLE001  raised again by collect, which all ranks call then
            return None
        names = (known.offers, tuple(objects), _values(exported))
        if names != (layout.offers, layout.objects, layout.values):
            return None
        return Collected(extras, known, objects, layout)

    def collect(self, request: SaveRequest, laps: Laps) -> Collected:
        """Returns this rank's part of a save. All ranks call it.

        Raises:
            CheckpointError: a rank cannot save its state, or ranks disagree about it.
        """
        what = request.what
        with self._group.phase(f"collect the state for {what}"):
            extras = self._extras(request)
            check_container(request.state)
            if not request.only:
                self._cache.begin(holders_of(request.state))
            exported = export(
                request.state, only=request.only, cache=None if request.only else self._cache
            )
            known = self._cache.shards(exported.tensors)
        laps.lap("collect")
        below = None
        named: list[dict[str, int]] = []
        if request.names_differ:
            with self._group.phase(f"collect the values for {what}"):
                mine = checksums(exported)
            named = self._group.all_gather(mine, "share the names of values")
            below = {n for names in named[: self._group.rank] for n in names}
        with self._group.phase(f"collect the values for {what}"):
            refuse_conflicts(named)
            objects, paths = pack_objects(exported, self._group.rank, below)
        values = _values(exported, request.names_differ)
        self._layout = agree_layout(
            self._group, self._layout, known.offers, tuple(objects), values, paths
        )
        laps.lap("agree")
        return Collected(extras, known, objects, self._layout)

    def _extras(self, request: SaveRequest) -> SaveExtras:
        if self._group.rank == 0:
            request.check()
        files = request.files
        if callable(files):
            files = files() if self._group.rank == 0 else None
        return extras_of(request.only, files, request.metrics, request.statistics)

    def forget(self) -> None:
        """Forgets the state, and frees its tensors."""
        self._cache.forget()


def _values(exported: ExportedState, names_differ: bool = False) -> tuple[str, ...]:
    """Returns the names of a rank's values, as the ranks compare them."""
    own = tuple(f"{name} (PerRank)" for name in exported.per_rank)
    return own if names_differ else (*exported.objects, *own)
