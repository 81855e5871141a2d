"""The files of shards that stay the same: a save takes one over from the step before.

The first save of a job takes over those of the step that it has resumed from.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt_tools.core.checksum import hex64
from ckpt_tools.core.logs import log
from ckpt_tools.engine.statistics import Moments
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.formats.dcp.format import data_file_number
from ckpt_tools.loop.saving.write import FilePlan, RankFile, rehearsed_part
from ckpt_tools.loop.state.checksums import checksums_of
from ckpt_tools.loop.state.shard_info import FileKind, ShardInfo
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.publish.base import Attempt, Destination, NoLinksError
from ckpt_tools.publish.find_manifest import find_manifest, hash_file
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import open_sealed

IMPOSSIBLE = "impossible"  # how a file was taken over: this store can neither link nor copy
_MAX_SOURCES = 8  # steps that are remembered as a source of a file


class LinkSource(NamedTuple):
    """A step that holds a known file: its name, its destination and attempt, and the file's
    identity.
    """

    step: str
    target: Destination
    attempt: str
    identity: tuple[int | str, ...]


class KnownFile(NamedTuple):
    """A file of shards that stay the same, which a save of this job has written or linked.

    Attributes:
        shards: that it holds, in order.
        checksums: a checksum of each shard's values.
        sources: the steps that hold it, the newest one first.
        part: its description.
        is_resumed: it is one of the step that was loaded. Nothing is known of changes since then,
            since other ranks may write what they have.
    """

    shards: tuple[ShardInfo, ...]
    checksums: tuple[int, ...]
    sources: tuple[LinkSource, ...]
    part: RankFile
    is_resumed: bool = False

    def and_in(self, source: LinkSource) -> KnownFile:
        """Returns the file with one more step that holds it."""
        return self._replace(sources=(source, *self.sources)[:_MAX_SOURCES])


@dataclass
class ResumedStep:
    """The step that this job has resumed from.

    Attributes:
        name, target: of the step.
        path: of it, or its URL.
        storage_options: for fsspec.
    """

    name: str
    target: Destination
    path: Path | str
    storage_options: Mapping[str, Any] | None

    @cached_property
    def manifest(self) -> Manifest | None:
        """Its manifest. Read once: in a large job it is long, and every rank reads it."""
        origin, _ = self.target.existing_result()
        with closing(origin):
            return find_manifest(origin)

    def settled(self) -> list[str]:
        """Returns the tensors that lie in files of settled ones; none if it cannot be read."""
        source = None
        try:
            if self.manifest is None or not any(map(_is_settled, self.manifest.files)):
                return []
            source, _ = open_sealed(self.path, self.storage_options)
            return sorted(
                fqn
                for fqn, entry in source.catalog.tensors.items()
                if entry.chunks and all(map(_is_settled, entry.chunks.file_names()))
            )
        except (CheckpointError, OSError) as error:
            log.info("no tensor counts as settled at first: %s", error)
            return []
        finally:
            if source is not None:
                source.store.close()

    def find(
        self,
        plan: FilePlan,
        shards: tuple[ShardInfo, ...],
        checksums: tuple[int, ...],
        memory: Sequence[memoryview],
        jobs: int,
        measures: bool,
    ) -> KnownFile | None:
        """Returns the file of this step that a file would be a copy of; None if there is none.

        The file that would be written is computed, and that of the step is read.

        Args:
            plan: of the file.
            shards, checksums: that it holds, and a checksum of each.
            memory: their bytes.
            jobs: threads.
            measures: the save has statistics.
        """
        (name, nbytes), *_ = plan.target.file_sizes.items()
        try:
            if (manifest := self.manifest) is None:
                return None
            file = self.target.name(name, manifest.attempt)
            sealed = manifest.files.get(file)
            if sealed is None or sealed.nbytes != nbytes:
                return None
            origin, _ = self.target.existing_result()
            with closing(origin):
                identity, is_remote = self.target.identity(file), origin.capabilities.is_remote
                if is_remote:
                    kept = origin.stored_crcs([file]).get(file)
                    if kept is None or hex64(kept) != sealed.crc64nvme:
                        log.info("%s is written anew: the store keeps no checksum of it", name)
                        return None
                part = rehearsed_part(plan, memory, jobs, measures)
                if hex64(part.crc64) != sealed.crc64nvme:
                    return None
                if not is_remote and hash_file(origin, file) != sealed.crc64nvme:
                    return None  # damaged: a link would carry that into the new step
        except (CheckpointError, OSError) as error:
            log.info("%s of the step before is not linked: %s", name, error)
            return None
        source = LinkSource(self.name, self.target, manifest.attempt, identity)
        return KnownFile(shards, checksums, (source,), part, is_resumed=True)


def _is_settled(file: str) -> bool:
    return data_file_number(file) == FileKind.SETTLED


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The shards of a save whose values are those of a file that is there already.

    Attributes:
        known: the file.
        tensors: the shards. They are not copied, so they may change after `save` has returned.
        copies: or their bytes in host memory.
    """

    known: KnownFile
    tensors: Sequence[torch.Tensor] = ()
    copies: Sequence[memoryview] | None = None

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
                is_frozen = self.known.shards[0].file == FileKind.FROZEN
                what = "frozen parameters are" if is_frozen else "what stayed the same is"
                problem = problem or f"{what} written again: {error}"
                continue
            return part._replace(
                linked=source.step,
                how=how,
                identity=staged.identity(name),
                seconds={},
                moments=part.moments
                if self.known.is_resumed
                else {fqn: _unmoved(found) for fqn, found in part.moments.items()},
            )
        return part._replace(how=instead, remark=problem)

    def live(self, jobs: int) -> Sequence[memoryview]:
        """Returns the bytes of the shards as they are now; copies of those not on the host.

        Raises:
            CheckpointError: they have changed since the save began.
        """
        if self.copies is not None:
            return self.copies
        now = checksums_of(self.tensors, jobs)
        pairs = zip(self.known.shards, self.known.checksums, now, strict=True)
        if wrong := [info.fqn for info, old, new in pairs if old != new]:
            raise CheckpointError(
                "frozen parameters changed after the save had begun, and no earlier step has a file"
                f" with their values any more: {printable(wrong[0])!r}",
                hint="the next save writes the new values; Writing(incremental=False) copies all",
            )
        return Stager().live(self.tensors).wait()


def _unmoved(found: Moments) -> Moments:
    """Returns the statistics of values that have not changed."""
    return replace(found, num_compared=found.numel - found.num_nan - found.num_inf, sum_change=0.0)
