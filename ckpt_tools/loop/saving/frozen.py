"""Finds the shards of frozen parameters, and lets a save link the file that has them already.

A frozen parameter takes no gradient: the base model below an adapter. Its shards lie in a file of
their own, the *frozen file*. While none of them changes, a save makes this file of the step before
a file of the new step. The bytes are neither copied to host memory nor written.

Each save compares a checksum of every frozen shard that this rank writes with that of the shards in
the file, before it returns. torch's version counters are no help: a change of a DTensor, or one
through `.data`, is not counted.

Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckpt_tools.core.logs import log
from ckpt_tools.engine.statistics import Moments
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.loop.saving.write import RankFile
from ckpt_tools.loop.state.checksums import checksums_of
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shard_info import ShardInfo
from ckpt_tools.loop.state.shards import local_part
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.loop.state.unchanged import memory_of, plainly
from ckpt_tools.publish.base import Attempt, Destination, NoLinksError

LEAST_BYTES = 1 << 20  # of frozen shards on a rank: below, a file of their own does not pay
IMPOSSIBLE = "impossible"  # how a file was taken over: this store can neither link nor copy
_MAX_CHANGES = 2  # a parameter that changes more often is not frozen, such as an average
_MAX_SOURCES = 8  # steps that are remembered as a source of the file


class FrozenShards:
    """Marks the frozen shards of one rank, from save to save."""

    def __init__(self, jobs: int) -> None:
        """Takes the number of threads that compute checksums."""
        self._jobs, self._changes = jobs, Counter[str]()
        self._last: tuple[tuple[ShardInfo, ...], list[int]] = ((), [])
        self._marked: tuple[ShardInfo, ...] = ()
        self._checksums: dict[str, int] = {}

    def mark(
        self, infos: tuple[ShardInfo, ...], tensors: Sequence[torch.Tensor], owners: StateOwners
    ) -> tuple[ShardInfo, ...]:
        """Returns the shards of this rank with those marked that are expected to stay.

        Args:
            infos: the shards.
            tensors: their values.
            owners: the modules whose parameters may be frozen.
        """
        numbers = self._find(infos, tensors, owners)
        if self._last != (infos, numbers):
            marked = list(infos)
            for n in numbers:
                marked[n] = marked[n]._replace(is_frozen=True)
            self._last, self._marked = (infos, numbers), tuple(marked)
        return self._marked

    def _find(
        self, infos: tuple[ShardInfo, ...], tensors: Sequence[torch.Tensor], owners: StateOwners
    ) -> list[int]:
        with plainly():
            frozen = {
                memory_of(local_part(parameter))
                for _, root in owners.modules
                for module in root.modules()
                for parameter in module._parameters.values()
                if parameter is not None and not parameter.requires_grad
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
        return numbers if sum(tensors[n].nbytes for n in numbers) >= LEAST_BYTES else []

    def checksums(
        self, infos: Sequence[ShardInfo], tensors: Sequence[torch.Tensor]
    ) -> tuple[int, ...]:
        """Returns a checksum of each marked shard, and notes which have changed since the last one.

        Returns none if they cannot be computed: then the shards are written. No error of one rank
        may leave the others waiting.

        Args:
            infos: the marked shards that this rank writes.
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


class LinkSource(NamedTuple):
    """A step that holds a frozen file: its name, its destination and attempt, and the file's
    identity.
    """

    step: str
    target: Destination
    attempt: str
    identity: tuple[int | str, ...]


class FrozenFile(NamedTuple):
    """A frozen file that a save of this job has written or linked.

    Attributes:
        shards: that it holds, in order.
        checksums: a checksum of each shard's values.
        sources: the steps that hold it, the newest one first.
        part: its description.
    """

    shards: tuple[ShardInfo, ...]
    checksums: tuple[int, ...]
    sources: tuple[LinkSource, ...]
    part: RankFile

    def and_in(self, source: LinkSource) -> FrozenFile:
        """Returns the file with one more step that holds it."""
        return self._replace(sources=(source, *self.sources)[:_MAX_SOURCES])


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The frozen shards of a save, whose values are those of a file that is there already.

    Attributes:
        known: the file.
        tensors: the shards. They are not copied, so they may change after `save` has returned.
    """

    known: FrozenFile
    tensors: Sequence[torch.Tensor]

    def take_over(self, target: Destination, staged: Attempt) -> RankFile:
        """Makes the known file a file of this step, and returns its description.

        If it is not possible, `how` is "" and `remark` tells why: then write the bytes of `live`.

        Raises:
            StorageError: the store cannot be reached.
        """
        part, problem, instead = self.known.part, "", ""
        name = target.name(part.name, staged.attempt)
        for source in self.known.sources:
            file = source.target.name(part.name, source.attempt)
            try:
                origin, _ = source.target.existing_result()
                with closing(origin):
                    how = staged.take_over(origin, file, name, part.nbytes, source.identity)
            except StorageError as error:
                if error.is_transient:
                    raise
                instead = IMPOSSIBLE if isinstance(error, NoLinksError) else ""
                problem = problem or f"frozen parameters are written again: {error}"
                continue
            return part._replace(
                linked=source.step,
                how=how,
                identity=staged.identity(name),
                seconds={},
                moments={fqn: _still(found) for fqn, found in part.moments.items()},
            )
        return part._replace(how=instead, remark=problem)

    def live(self, jobs: int) -> Sequence[memoryview]:
        """Returns the bytes of the shards as they are now; copies of those not on the host.

        Raises:
            CheckpointError: they have changed since the save began.
        """
        now = checksums_of(self.tensors, jobs)
        pairs = zip(self.known.shards, self.known.checksums, now, strict=True)
        if wrong := [info.fqn for info, old, new in pairs if old != new]:
            raise CheckpointError(
                "frozen parameters changed after the save had begun, and no earlier step has a file"
                f" with their values any more: {printable(wrong[0])!r}",
                hint="the next save writes the new values; Writing(incremental=False) copies all",
            )
        return Stager().live(self.tensors).wait()


def _still(found: Moments) -> Moments:
    """Returns the statistics of values that have not changed."""
    return replace(found, num_compared=found.numel - found.num_nan - found.num_inf, sum_change=0.0)
