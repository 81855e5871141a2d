"""Finds the shards of frozen parameters, and lets a save link the file that has them already.

A frozen parameter takes no gradient: the base model below an adapter. Its shards lie in a file of
their own, the *frozen file*. While none of them changes, a save makes this file of the step before
a file of the new step. The bytes are neither copied to host memory nor written.

Three things must hold for that. torch has counted no change of the shards since the file was
written, and they lie where they lay. The file has not changed either. And the values have the
checksum of those in the file. This finds changes that torch does not count, such as those through
`.data`. An accelerator computes it at each save. On the host, it is the CRC-64 of the live memory,
computed in the background.

Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.engine.statistics import Moments
from ckpt_tools.errors import CheckpointError, PlanError, StorageError, printable
from ckpt_tools.loop.saving.replicas import digests
from ckpt_tools.loop.saving.write import RankFile
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shard_info import ShardInfo
from ckpt_tools.loop.state.shards import as_bytes, has_own_memory, local_part
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.loop.state.unchanged import memory_of, plainly
from ckpt_tools.publish.base import Attempt, Destination

LEAST_BYTES = 1 << 20  # of frozen shards on a rank: below, a file of their own does not pay
_MAX_CHANGES = 2  # a parameter that changes more often is not frozen, such as an average


class _Memory(NamedTuple):
    """Where a shard lies, and how often torch has changed it. It keeps the memory not alive."""

    storage: StorageWeakRef
    start: int
    num_changes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, tensor.data_ptr(), tensor._version)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies there, and torch has not changed it since."""
        return (
            not self.storage.expired()  # type: ignore[no-untyped-call]
            and tensor.data_ptr() == self.start
            and tensor._version == self.num_changes
        )


class FrozenShards:
    """Marks the frozen shards of one rank, from save to save.

    Attributes:
        generation: it grows whenever a marked shard may have changed. A frozen file fits the shards
            of its own generation only.
    """

    generation = 0

    def __init__(self) -> None:
        self._given: tuple[ShardInfo, ...] = ()
        self._marked: tuple[ShardInfo, ...] = ()
        self._numbers: list[int] = []
        self._memory: list[_Memory] = []
        self._digests: list[int] = []
        self._changes = Counter[str]()

    def mark(
        self, infos: tuple[ShardInfo, ...], tensors: Sequence[torch.Tensor], owners: StateOwners
    ) -> tuple[ShardInfo, ...]:
        """Returns the shards of this rank with those marked that are expected to stay.

        Args:
            infos: the shards.
            tensors: their values.
            owners: the modules whose parameters may be frozen.
        """
        with plainly():
            if infos != self._given:
                self._given = infos
                self._find(tensors, owners)
            else:
                mine = [tensors[n] for n in self._numbers]
                is_same = [m.is_of(t) for m, t in zip(self._memory, mine, strict=True)]
                found = _digests_away(mine)
                pairs = zip(is_same, self._digests, found, strict=True)
                self._add_changed(
                    [
                        infos[n].fqn
                        for n, (same, old, new) in zip(self._numbers, pairs, strict=True)
                        if not same or old != new
                    ]
                )
                if any(self._changes[infos[n].fqn] >= _MAX_CHANGES for n in self._numbers):
                    self._find(tensors, owners)
                else:
                    self._memory, self._digests = list(map(_Memory.of, mine)), found
        return self._marked

    def add_uncounted(self, names: Sequence[str]) -> None:
        """Notes that tensors have changed and torch has not counted it: they are not frozen."""
        self._add_changed(names, _MAX_CHANGES)

    def _add_changed(self, names: Sequence[str], times: int = 1) -> None:
        if names:
            self.generation += 1
            self._changes.update(dict.fromkeys(names, times))

    def _find(self, tensors: Sequence[torch.Tensor], owners: StateOwners) -> None:
        self.generation += 1
        frozen = {
            memory_of(local_part(parameter))
            for _, root in owners.modules
            for parameter in root.parameters()
            if not parameter.requires_grad
        }
        numbers = [
            n
            for n, (info, tensor) in enumerate(zip(self._given, tensors, strict=True))
            if frozen
            and self._changes[info.fqn] < _MAX_CHANGES
            and memory_of(tensor) in frozen
            and tensor.numel()
            and has_own_memory(tensor)
            and not tensor.is_inference()  # torch does not count its changes
        ]
        if sum(tensors[n].nbytes for n in numbers) < LEAST_BYTES:
            numbers = []
        marked = list(self._given)
        for n in numbers:
            marked[n] = marked[n]._replace(is_frozen=True)
        mine = [tensors[n] for n in numbers]
        self._marked, self._numbers = tuple(marked), numbers
        self._memory, self._digests = list(map(_Memory.of, mine)), _digests_away(mine)


def _digests_away(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a checksum of each tensor on an accelerator, and 0 for those on the host."""
    away = [n for n, t in enumerate(tensors) if t.device.type != "cpu"]
    found = [0] * len(tensors)
    for n, value in zip(away, digests([tensors[n] for n in away]) if away else (), strict=True):
        found[n] = value
    return found


class FrozenNote(NamedTuple):
    """What a save knows of the frozen shards that this rank writes.

    `generation` is that of `FrozenShards`. `is_on_host` tells for each of them where it lies.
    """

    generation: int
    is_on_host: tuple[bool, ...]

    def crcs(self, memory: Sequence[memoryview]) -> tuple[int | None, ...]:
        """Returns the CRC-64/NVME of each shard's bytes; None for those on an accelerator."""
        pairs = zip(self.is_on_host, memory, strict=True)
        return tuple(crc64nvme(view) if is_on_host else None for is_on_host, view in pairs)


class FrozenFile(NamedTuple):
    """A frozen file that a save of this job has written or linked.

    Attributes:
        shards: that it holds, in order.
        generation: of `FrozenShards`, when they were written.
        step: the checkpoint with the file; its name, its place, and its attempt.
        crcs: CRC-64/NVME of each shard; None for those on an accelerator.
        part: its description.
    """

    shards: tuple[ShardInfo, ...]
    generation: int
    step: str
    target: Destination
    attempt: str
    crcs: tuple[int | None, ...]
    part: RankFile


class FrozenShardsChangedError(CheckpointError):
    """Frozen shards have changed and torch has not counted it; `names` has their tensors."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        super().__init__(
            f"a frozen parameter changed without torch's knowledge: {printable(names[0])!r}{more}",
            hint="this save is given up, since its values are not known; the next one writes them",
        )


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The frozen shards of a save, none of which is known to have changed.

    Attributes:
        known: the file of the step before that has them.
        tensors: the shards. They are not copied.
        is_held: nothing changes them until the save is complete.
    """

    known: FrozenFile
    tensors: Sequence[torch.Tensor]
    is_held: bool

    def take_over(self, target: Destination, staged: Attempt, jobs: int) -> RankFile | str:
        """Makes the file of the step before a file of this one, and returns its description.

        If it is not possible, it returns why: then write the bytes of `live`.

        Raises:
            FrozenShardsChangedError: a shard has changed, and nobody knows when.
        """
        if wrong := self._changed(jobs):
            if not self.is_held:
                raise FrozenShardsChangedError(wrong)
            return f"{printable(wrong[0])!r} has changed"
        known, part = self.known, self.known.part
        origin, _ = known.target.existing_result()
        try:
            how = staged.take_over(
                origin,
                known.target.name(part.name, known.attempt),
                target.name(part.name, staged.attempt),
                part.nbytes,
                part.identity,
            )
        except StorageError as error:
            return f"frozen shards are written again: {error}"
        finally:
            origin.close()
        return part._replace(
            linked=known.step,
            how=how,
            identity=staged.identity(target.name(part.name, staged.attempt)),
            seconds={},
            moments={fqn: _still(found) for fqn, found in part.moments.items()},
        )

    def live(self) -> Sequence[memoryview]:
        """Returns the bytes of the shards; copies of those that are not on the host."""
        return Stager().live(self.tensors).wait()

    def check(self, written: RankFile) -> None:
        """Makes sure that the live bytes, as they were written, are those of the known file.

        Raises:
            FrozenShardsChangedError: they are not.
        """
        if not self.is_held and written.crc64 != self.known.part.crc64:
            raise FrozenShardsChangedError([self.known.shards[0].fqn])

    def _changed(self, jobs: int) -> list[str]:
        """Returns the tensors on the host with other bytes than those of the known file."""
        with ThreadPoolExecutor(jobs, "ckpt-prove") as pool:
            found = list(pool.map(crc_of, self.tensors))
        pairs = zip(self.known.shards, self.known.crcs, found, strict=True)
        return [info.fqn for info, old, new in pairs if old != new]


def crc_of(tensor: torch.Tensor) -> int | None:
    """Returns the CRC-64/NVME of a tensor on the host, None for any other."""
    if tensor.device.type != "cpu":
        return None
    data = as_bytes(tensor)
    if data is None:
        data = as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
    if data is None:
        raise PlanError("a tensor's bytes cannot be read")
    return crc64nvme(data)


def _still(found: Moments) -> Moments:
    """Returns the statistics of values that have not changed."""
    return replace(found, num_compared=found.numel - found.num_nan - found.num_inf, sum_change=0.0)
