"""Keeps the exported tensors of a state, and this rank's shards of them, for the next save.

Imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ckpt_tools.loop.objects import Key
from ckpt_tools.loop.offers import offers_of
from ckpt_tools.loop.optimizers import StateOwners
from ckpt_tools.loop.shards import Shard, local_shards
from ckpt_tools.loop.unchanged import ModuleGuard, OptimizerGuard, TensorGuard
from ckpt_tools.loop.write import ShardInfo


class KnownExport(NamedTuple):
    """The tensors of a module or an optimizer under their flat names, and the paths of these."""

    guard: ModuleGuard | OptimizerGuard
    tensors: Mapping[str, torch.Tensor]
    paths: Mapping[str, Key]


class KnownShards(NamedTuple):
    """This rank's shards of some tensors, and what it offers to write."""

    names: Sequence[str]
    guard: TensorGuard
    shards: Sequence[Shard]
    offers: tuple[ShardInfo, ...]


class StateCache:
    """The exports and shards of a state at its last save.

    The names in an optimizer come from the modules. So the exports of all of them are known, or
    none is. If one of them dies, everything is forgotten, and its memory is free.
    """

    def __init__(self) -> None:
        self._owners: list[tuple[Key, weakref.ref[Any]]] = []
        self._exports: dict[Key, KnownExport] = {}
        self._shards: KnownShards | None = None

    def begin(self, owners: StateOwners) -> None:
        """Starts an export: forgets everything, unless nothing has changed since the last one."""
        if not self.holds(owners):
            self.forget()
            mine = chain(owners.modules, owners.tensors, owners.optimizers)
            self._owners = [(path, weakref.ref(value, self._died)) for path, value in mine]

    def holds(self, owners: StateOwners) -> bool:
        """Tells whether nothing has changed since the last export, apart from values."""
        mine = list(chain(owners.modules, owners.tensors, owners.optimizers))
        return (
            len(self._exports) == len(owners.modules) + len(owners.optimizers)
            and len(mine) == len(self._owners)
            and all(
                path == before and value is known()
                for (path, value), (before, known) in zip(mine, self._owners, strict=True)
            )
            and all(known.guard.holds() for known in self._exports.values())
        )

    def find(self, path: Key) -> KnownExport | None:
        """Returns what is known of the module or optimizer at a path."""
        return self._exports.get(path)

    def keep(
        self,
        path: Key,
        guard: ModuleGuard | OptimizerGuard | None,
        tensors: Mapping[str, torch.Tensor],
        paths: Mapping[str, Key],
    ) -> None:
        """Keeps an export, if there is a guard for it."""
        if guard is not None:
            mine = {name: paths[name] for name in tensors}
            self._exports[path] = KnownExport(guard, tensors, mine)

    def shards(self, tensors: Mapping[str, torch.Tensor]) -> KnownShards:
        """Returns this rank's shards of all tensors, and what it offers to write.

        Raises:
            PlanError: a tensor cannot be stored.
        """
        names, values = list(tensors), list(tensors.values())
        known = self._shards
        if known is None or known.names != names or not known.guard.is_of(values):
            self._shards = None
            shards = local_shards(tensors)
            known = KnownShards(names, TensorGuard(values), shards, offers_of(shards))
            # without a guard for the modules, nothing would tell when the tensors are free
            self._shards = known if self._exports else None
        return known

    def _died(self, _: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets everything."""
        self._owners, self._exports, self._shards = [], {}, None
