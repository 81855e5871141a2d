"""Finds the shards that stay the same from save to save, so that a save links the file with them.

There are two kinds. A *frozen* parameter takes no gradient: the base model below an adapter. A
*settled* tensor has not changed for some saves: an expert or a layer that gets no gradient, its
optimizer state, or a buffer. The shards of each kind lie in a file of their own. While none of them
changes, a save makes this file of the step before a file of the new step, and does not write it.

Before it returns, each save compares a checksum of every frozen shard that this rank writes with
that of the file. Then frozen shards are not even copied to host memory. Settled ones are copied as
others are, since they may change right afterwards, and are compared in the background. torch's
version counters are no help: a change of a DTensor, or one through `.data`, is not counted.

Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.loop.state.checksums import checksums_of
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shard_info import FileKind, ShardInfo
from ckpt_tools.loop.state.shards import local_part, tensors_in
from ckpt_tools.loop.state.unchanged import memory_of, plainly

LEAST_BYTES = 1 << 20  # of such shards on a rank: below, a file of their own does not pay
_MAX_CHANGES = 2  # a parameter that changes more often is not frozen, such as an average

_Numbers = tuple[list[int], list[int]]  # of frozen and of settled shards


class SettledTensors:
    """Chooses the settled tensors by the fingerprints of whole tensors. They cost nothing: each
    save has them.

    All ranks have the same choice. A new one changes the layout of the files, on which all ranks
    agree. So rank 0 chooses after the save number 2, 4, 8 and so on, and takes the tensors that
    have not changed since the choice before. Tensors that change become ordinary ones again: at
    once, then after 2 saves, 4 saves and so on, those of this time together.

    Attributes:
        names: of the settled tensors, for the next save.
        chosen: on rank 0, what `names` will be.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.chosen: frozenset[str] = frozenset()
        self._fingerprints: dict[str, str] = {}
        self._changed = set[str]()  # since the last choice
        self._num_saves = self._num_events = self._next_event = 0

    def begin(self, names: Sequence[str]) -> None:
        """Takes the settled tensors of the step that was resumed from, for the next save."""
        self.names = self.chosen = frozenset(names)

    def note(self, fingerprints: Mapping[str, str]) -> None:
        """Takes the fingerprint of each tensor of a save that is committed. Rank 0 calls it."""
        changed = {n for n, value in fingerprints.items() if self._fingerprints.get(n) != value}
        self._fingerprints.update(fingerprints)
        self._num_saves += 1
        if self._num_saves == 1:
            return
        self._changed |= changed
        if self._num_saves.bit_count() == 1:
            # a save of a part of the state has not all of them
            self.chosen = frozenset(self._fingerprints.keys() - self._changed)
            self._changed, self._num_events, self._next_event = set(), 0, 0
        elif self.chosen & self._changed and self._num_saves >= self._next_event:
            self.chosen -= self._changed
            self._num_events += 1
            self._next_event = self._num_saves + (1 << self._num_events)


class StayingShards:
    """Marks the shards of one rank that are expected to stay, from save to save."""

    def __init__(self, jobs: int, settled: SettledTensors) -> None:
        """Takes the number of threads that compute checksums, and the choice of settled tensors."""
        self._jobs, self._settled, self._changes = jobs, settled, Counter[str]()
        self._last: tuple[tuple[ShardInfo, ...], _Numbers] = ((), ([], []))
        self._marked: tuple[ShardInfo, ...] = ()
        self._checksums: dict[str, int] = {}

    def mark(
        self, infos: tuple[ShardInfo, ...], tensors: Sequence[torch.Tensor], owners: StateOwners
    ) -> tuple[ShardInfo, ...]:
        """Returns the shards of this rank, each with the file that it goes to.

        Args:
            infos: the shards.
            tensors: their values.
            owners: the modules whose parameters may be frozen.
        """
        frozen = self._find_frozen(infos, tensors, owners)
        numbers = frozen, self._find_settled(infos, tensors, set(frozen))
        if self._last != (infos, numbers):
            marked = list(infos)
            for kind, mine in zip((FileKind.FROZEN, FileKind.SETTLED), numbers, strict=True):
                for n in mine:
                    marked[n] = marked[n]._replace(file=kind)
            self._last, self._marked = (infos, numbers), tuple(marked)
        return self._marked

    def _find_frozen(
        self, infos: tuple[ShardInfo, ...], tensors: Sequence[torch.Tensor], owners: StateOwners
    ) -> list[int]:
        with plainly():
            frozen = {
                memory_of(part)
                for _, root in owners.modules
                for module in root.modules()
                for parameter in module._parameters.values()
                if parameter is not None and not parameter.requires_grad
                for part in tensors_in(local_part(parameter))
            }
            if not frozen:
                return []
            numbers = [
                n
                for n, (info, tensor) in enumerate(zip(infos, tensors, strict=True))
                if self._changes[info.fqn] < _MAX_CHANGES
                and tensor.numel()
                and memory_of(tensor) in frozen
            ]
        return _if_worth_it(numbers, tensors)

    def _find_settled(
        self,
        infos: tuple[ShardInfo, ...],
        tensors: Sequence[torch.Tensor],
        frozen: set[int],
    ) -> list[int]:
        names = self._settled.names
        if not names:
            return []
        with plainly():
            numbers = [
                n
                for n, (info, tensor) in enumerate(zip(infos, tensors, strict=True))
                if info.fqn in names and n not in frozen and tensor.numel()
            ]
        return _if_worth_it(numbers, tensors)

    def checksums(
        self, infos: Sequence[ShardInfo], tensors: Sequence[torch.Tensor]
    ) -> tuple[int, ...]:
        """Returns a checksum of each frozen shard, and notes which have changed since the last one.

        Returns none if they cannot be computed: then the shards are written. No error of one rank
        may leave the others waiting.

        Args:
            infos: the frozen shards that this rank writes.
            tensors: their values.
        """
        try:
            found = checksums_of(tensors, self._jobs)
        except Exception:  # noqa: BLE001  such as no memory on the accelerator
            log.warning("frozen parameters are written: no checksum of them", exc_info=True)
            return ()
        for info, checksum in zip(infos, found, strict=True):
            name = f"{info.fqn} {info.box.offsets}"
            if self._checksums.get(name, checksum) != checksum:
                self._changes[info.fqn] += 1
                if self._changes[info.fqn] == _MAX_CHANGES:
                    log.info(
                        "%s takes no gradient but changes: it is written at every save",
                        printable(info.fqn),
                    )
            self._checksums[name] = checksum
        return tuple(found)


def _if_worth_it(numbers: list[int], tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the numbers of shards, or none if they are too short for a file of their own."""
    return numbers if sum(tensors[n].nbytes for n in numbers) >= LEAST_BYTES else []
