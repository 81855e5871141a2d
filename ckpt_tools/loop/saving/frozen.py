"""Finds the shards of frozen parameters, and lets a save link the file that has them already.

A frozen parameter takes no gradient: the base model below an adapter. Its shards lie in a file of
their own, the *frozen file*. While none of them changes, a save makes this file of the step before
a file of the new step. The bytes are neither copied to host memory nor written.

Each save compares a checksum of every frozen shard with that of the shards in the file, before it
returns. torch's version counters are no help: a change of a DTensor, or one through `.data`, is not
counted.

Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckpt_tools.core.checksum import crc64nvme, join_crc64
from ckpt_tools.engine.statistics import Moments
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.loop.saving.replicas import digests
from ckpt_tools.loop.saving.write import RankFile
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shard_info import ShardInfo
from ckpt_tools.loop.state.shards import as_bytes, local_part
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.loop.state.unchanged import memory_of, plainly
from ckpt_tools.publish.base import Attempt, Destination

LEAST_BYTES = 1 << 20  # of frozen shards on a rank: below, a file of their own does not pay
_MAX_CHANGES = 2  # a parameter that changes more often is not frozen, such as an average
MAX_SOURCES = 8  # steps that are remembered as a source of the file
_PIECE_BYTES = 32 << 20  # of a shard, for one thread


class FrozenShards:
    """Marks the frozen shards of one rank, from save to save.

    Attributes:
        digests: a checksum of each marked shard's values at this save, by its tensor.
    """

    def __init__(self, jobs: int) -> None:
        """Takes the number of threads that compute checksums."""
        self.digests: Mapping[str, int] = {}
        self._jobs = jobs
        self._given: tuple[ShardInfo, ...] = ()
        self._marked: tuple[ShardInfo, ...] = ()
        self._numbers: list[int] = []
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
        if infos != self._given:
            self._given = infos
            self._find(tensors, owners)
        before, self.digests = self.digests, self._digests(tensors)
        changed = [n for n, digest in self.digests.items() if before.get(n, digest) != digest]
        self._changes.update(changed)
        if any(self._changes[name] >= _MAX_CHANGES for name in changed):
            self._find(tensors, owners)
            self.digests = {
                self._given[n].fqn: self.digests[self._given[n].fqn] for n in self._numbers
            }
        return self._marked

    def _find(self, tensors: Sequence[torch.Tensor], owners: StateOwners) -> None:
        """Finds the shards of parameters without a gradient, but for those that change anyway."""
        with plainly():
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
            ]
        once = Counter(info.fqn for info in self._given)
        numbers = [n for n in numbers if once[self._given[n].fqn] == 1]
        if sum(tensors[n].nbytes for n in numbers) < LEAST_BYTES:
            numbers = []
        marked = list(self._given)
        for n in numbers:
            marked[n] = marked[n]._replace(is_frozen=True)
        self._marked, self._numbers = tuple(marked), numbers

    def _digests(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        found = digests_of([tensors[n] for n in self._numbers], self._jobs)
        return dict(zip((self._given[n].fqn for n in self._numbers), found, strict=True))


def digests_of(tensors: Sequence[torch.Tensor], jobs: int) -> list[int]:
    """Returns a checksum of each tensor: its CRC-64 on the host, and on an accelerator its own."""
    pieces: list[tuple[int, memoryview]] = []
    away: list[int] = []
    for number, tensor in enumerate(tensors):
        data = as_bytes(tensor) if tensor.device.type == "cpu" else None
        if data is None:
            away.append(number)
        else:
            starts = range(0, len(data), _PIECE_BYTES)
            pieces += [(number, data[start : start + _PIECE_BYTES]) for start in starts]
    found: list[list[tuple[int, int]]] = [[] for _ in tensors]
    if pieces:
        with ThreadPoolExecutor(jobs, "ckpt-prove") as pool:
            crcs = pool.map(crc64nvme, (piece for _, piece in pieces))
            for (number, piece), crc in zip(pieces, crcs, strict=True):
                found[number].append((crc, len(piece)))
    values = list(map(join_crc64, found))
    for number, value in zip(away, digests([tensors[n] for n in away]), strict=True):
        values[number] = value
    return values


class LinkSource(NamedTuple):
    """A step that holds a frozen file: its name, its destination, and its attempt."""

    step: str
    target: Destination
    attempt: str


class FrozenFile(NamedTuple):
    """A frozen file that a save of this job has written or linked.

    Attributes:
        shards: that it holds, in order.
        digests: a checksum of each shard's values.
        sources: the steps that hold it, the newest one first.
        part: its description.
    """

    shards: tuple[ShardInfo, ...]
    digests: tuple[int, ...]
    sources: tuple[LinkSource, ...]
    part: RankFile


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The frozen shards of a save, whose values are those of a file that is there already.

    Attributes:
        known: the file.
        tensors: the shards. They are not copied, so they may change after `save` has returned.
    """

    known: FrozenFile
    tensors: Sequence[torch.Tensor]

    def take_over(self, target: Destination, staged: Attempt) -> RankFile | str:
        """Makes the known file a file of this step, and returns its description.

        If it is not possible, it returns why: then write the bytes of `live`.
        """
        part, problem = self.known.part, ""
        name = target.name(part.name, staged.attempt)
        for source in self.known.sources:
            file = source.target.name(part.name, source.attempt)
            try:
                origin, _ = source.target.existing_result()
                with closing(origin):
                    how = staged.take_over(origin, file, name, part.nbytes, part.identity)
            except StorageError as error:
                problem = problem or f"frozen parameters are written again: {error}"
                continue
            return part._replace(
                linked=source.step,
                how=how,
                identity=staged.identity(name),
                remark="",
                seconds={},
                moments={fqn: _still(found) for fqn, found in part.moments.items()},
            )
        return problem

    def live(self, jobs: int) -> Sequence[memoryview]:
        """Returns the bytes of the shards as they are now; copies of those not on the host.

        Raises:
            CheckpointError: they have changed since the save began.
        """
        found = zip(
            self.known.shards, self.known.digests, digests_of(self.tensors, jobs), strict=True
        )
        if wrong := [info.fqn for info, old, new in found if old != new]:
            raise CheckpointError(
                "frozen parameters changed after the save had begun, and the step before, which has"
                f" their values, cannot be used: {printable(wrong[0])!r}",
                hint="leave the newest steps where they are; the next save writes the new values",
            )
        return Stager().live(self.tensors).wait()


def _still(found: Moments) -> Moments:
    """Returns the statistics of values that have not changed."""
    return replace(found, num_compared=found.numel - found.num_nan - found.num_inf, sum_change=0.0)
