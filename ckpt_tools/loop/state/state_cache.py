"""Keeps the names of a state's tensors, and this rank's shards of them, for the next save.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shard_info import ReplicaKind, ShardInfo, shard_infos
from ckpt_tools.loop.state.shards import local_part, local_shards
from ckpt_tools.loop.state.unchanged import Guard


class KnownExport(NamedTuple):
    """The tensors of a module or an optimizer under their flat names, and the paths of these.

    `kinds` has those whose copies on several ranks are not simply equal.
    """

    guard: Guard
    tensors: Mapping[str, torch.Tensor]
    paths: Mapping[str, Key]
    kinds: Mapping[str, ReplicaKind]


class RankShards(NamedTuple):
    """This rank's part of each tensor, and the description of each, in the same order."""

    tensors: Sequence[torch.Tensor]
    infos: tuple[ShardInfo, ...]


class _KeptShards(NamedTuple):
    """The shards of the kept exports; `aliases` tells which memory has which name."""

    infos: tuple[ShardInfo, ...]
    aliases: Mapping[object, str]


class _KeptNames(NamedTuple):
    guard: Guard
    names: tuple[str, ...]
    paths: Mapping[str, Key]
    kinds: Mapping[str, ReplicaKind]


class StateCache:
    """The names in a state at its last save.

    The names in an optimizer come from the modules. So the names of all of them are known, or none
    are. Nothing here keeps a tensor alive after `end`.
    """

    def __init__(self) -> None:
        self._owners: list[tuple[Key, int]] = []
        self._kept: dict[Key, _KeptNames] = {}
        self._known: dict[Key, KnownExport] = {}
        self._shards: _KeptShards | None = None

    def begin(self, owners: StateOwners) -> None:
        """Starts an export: forgets everything, unless only values have changed since the last."""
        mine = [
            (path, id(value))
            for path, value in chain(owners.modules, owners.tensors, owners.optimizers)
        ]
        self._known = {}
        is_known = mine == self._owners and len(self._kept) == len(owners.modules) + len(
            owners.optimizers
        )
        for path, kept in self._kept.items() if is_known else ():
            tensors = kept.guard.exported()
            if tensors is None:
                is_known = False
                break
            named = dict(zip(kept.names, tensors, strict=True))
            self._known[path] = KnownExport(kept.guard, named, kept.paths, kept.kinds)
        if not is_known:
            self._owners, self._kept, self._known, self._shards = mine, {}, {}, None

    def find(self, path: Key) -> KnownExport | None:
        """Returns what is known of the module or optimizer at a path."""
        return self._known.get(path)

    def keep(
        self,
        path: Key,
        guard: Guard | None,
        names: Sequence[str],
        paths: Mapping[str, Key],
        kinds: Mapping[str, ReplicaKind],
    ) -> None:
        """Keeps the names of an export, if there is a guard for it."""
        if guard is not None:
            self._kept[path] = _KeptNames(
                guard,
                tuple(names),
                {name: paths[name] for name in names},
                {name: kinds[name] for name in names if name in kinds},
            )

    def shards(self, tensors: Mapping[str, torch.Tensor]) -> RankShards:
        """Returns this rank's shards of the exported tensors: first those of kept exports.

        Raises:
            PlanError: a tensor cannot be stored.
        """
        names = list(chain.from_iterable(kept.names for kept in self._kept.values()))
        own = set(names)
        if self._known and self._shards is not None:
            mine = [local_part(tensors[info.fqn]) for info in self._shards.infos]
        else:
            shards = local_shards({name: tensors[name] for name in names})
            aliases: dict[object, str] = {}
            self._shards = _KeptShards(shard_infos(shards, aliases), aliases)
            mine = [shard.tensor for shard in shards]
        others = local_shards({name: t for name, t in tensors.items() if name not in own})
        more = shard_infos(others, dict(self._shards.aliases)) if others else ()
        return RankShards(
            [*mine, *(shard.tensor for shard in others)], (*self._shards.infos, *more)
        )

    def end(self) -> None:
        """Ends an export: lets go of its tensors."""
        self._known = {}
