"""Collects what a save writes: this rank's shards and objects, and the layout of all ranks.

Between two saves of a loop, only values change. Then the ranks exchange two numbers here: how many
have failed, and for how many something else has changed.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ckpt_tools.core.laps import Laps
from ckpt_tools.errors import printable
from ckpt_tools.loop.saving.description import RankNames
from ckpt_tools.loop.saving.replicas import Proof
from ckpt_tools.loop.saving.save import SaveExtras, SaveLayout, agree_layout, extras_of
from ckpt_tools.loop.saving.staying import StayingShards
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.pack_objects import checksums, pack_objects, refuse_conflicts
from ckpt_tools.loop.state.shard_info import FileKind, shard_infos
from ckpt_tools.loop.state.shards import local_shards
from ckpt_tools.loop.state.state_cache import RankShards, StateCache
from ckpt_tools.loop.state.state_dict import ExportedState, export
from ckpt_tools.ranks.gloo import GlooGroup

Files = Mapping[str, bytes] | Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a caller of `CheckpointManager.save` or `ckpt_tools.save` wants; see there.

    Attributes:
        what: name of the step's directory, for messages.
        is_numbered: whether that is the name of a step, and not one of its own.
        check: raises if the step cannot be saved. Rank 0 calls it.
    """

    what: str
    is_numbered: bool
    state: Mapping[str, Any]
    only: str | Callable[[str], bool] | None
    files: Files | None
    metrics: Mapping[str, float] | None
    statistics: bool
    names_differ: bool = False
    check: Callable[[], None] | None = None


class Collected(NamedTuple):
    """What this rank has for a save.

    Attributes:
        extras: files, metrics and the like.
        tensors: that this rank writes, in the order of its task.
        objects: packed, by name.
        layout: as agreed by all ranks.
        owners: the modules, tensors and optimizers of the state.
        frozen_checksums: a checksum of each frozen shard that this rank writes, in order.
    """

    extras: SaveExtras
    tensors: list[torch.Tensor]
    objects: Mapping[str, bytes]
    layout: SaveLayout
    owners: StateOwners
    frozen_checksums: tuple[int, ...]


class Collector:
    """Collects the states of one loop, and remembers what stays the same."""

    def __init__(
        self, group: GlooGroup, proof: Proof, staying: StayingShards | None = None
    ) -> None:
        """Stores the group of all ranks, and how often their replicas are compared.

        With `staying`, the shards that stay the same go into files of their own.
        """
        self._group, self._proof, self._cache = group, proof, StateCache()
        self._staying = staying
        self._layout: SaveLayout | None = None

    def collect(self, request: SaveRequest, laps: Laps) -> Collected:
        """Returns this rank's part of a save. All ranks call it.

        Raises:
            CheckpointError: a rank cannot save its state, or ranks disagree about it.
        """
        rank, named, below = self._group.rank, list[dict[str, int]](), None
        with self._group.phase(f"collect the state for {request.what}") as votes:
            extras = self._extras(request)
            exported, found = self._export(request)
            if self._staying is not None and not request.only:
                marked = self._staying.mark(found.infos, found.tensors, exported.owners)
                found = found._replace(infos=marked)
            if not request.names_differ:
                objects, paths = pack_objects(exported, rank)
                values = _values(exported)
                names = RankNames(found.infos, tuple(objects), values, paths, exported.kinds)
                votes.mine = self._layout is None or names != self._layout.names
        laps.lap("collect")
        if request.names_differ:
            with self._group.phase(f"collect the values for {request.what}"):
                mine = checksums(exported)
            named = self._group.all_gather(mine, "share the names of values")
            below = {n for names in named[:rank] for n in names}
            with self._group.phase(f"collect the values for {request.what}"):
                refuse_conflicts(named)
                objects, paths = pack_objects(exported, rank, below)
                values = _values(exported, names_differ=True)
                names = RankNames(found.infos, tuple(objects), values, paths, exported.kinds)
        if votes.num_yes or request.names_differ:
            self._layout = None  # an interrupted agreement leaves none
            self._layout = agree_layout(self._group, names, self._proof, request.names_differ)
        assert self._layout is not None
        laps.lap("agree")
        notes = self._layout.replicas.prove(self._group, found.tensors)
        extras = replace(extras, notes=notes, remark=_widened(exported))
        laps.lap("compare")
        tensors = [found.tensors[number] for number in self._layout.task.shards]
        shards, of_frozen = self._layout.shards_in(FileKind.FROZEN), tuple[int, ...]()
        if self._staying is not None and shards:
            frozen = [tensors[n] for n in self._layout.numbers_in(FileKind.FROZEN)]
            of_frozen = self._staying.checksums(shards, frozen)
        laps.lap("compare")
        return Collected(extras, tensors, objects, self._layout, exported.owners, of_frozen)

    def _export(self, request: SaveRequest) -> tuple[ExportedState, RankShards]:
        if request.only:
            exported = export(request.state, only=request.only)
            shards = local_shards(exported.tensors)
            return exported, RankShards([shard.tensor for shard in shards], shard_infos(shards))
        try:
            exported = export(request.state, cache=self._cache)
            return exported, self._cache.shards(exported.tensors)
        finally:
            self._cache.end()

    def _extras(self, request: SaveRequest) -> SaveExtras:
        if self._group.rank == 0 and request.check is not None:
            request.check()
        files = request.files
        if callable(files):
            files = files() if self._group.rank == 0 else None
        return extras_of(request.only, files, request.metrics, request.statistics)


def _widened(exported: ExportedState) -> str:
    """Returns a remark on moments of few bits that this rank stores as float32; "" for none."""
    if not (names := exported.widened):
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    some = ", ".join(map(printable, names[:3]))
    why = "some rank's part does not end with a block, or is too short"
    return f"{len(names)} moments of few bits are stored as float32, since {why}: {some}{more}"


def _values(exported: ExportedState, names_differ: bool = False) -> tuple[tuple[str, bool], ...]:
    """Returns the names of a rank's values, and which are its own, as the ranks compare them."""
    own = tuple((name, True) for name in exported.per_rank)
    return own if names_differ else (*((name, False) for name in exported.objects), *own)
